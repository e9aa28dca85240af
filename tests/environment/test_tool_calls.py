"""Tools and tool calls: schemas from Python functions, and each model family's format, parsed strictly."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from gspo.environment.tool_calls import FORMATS, ToolCall, detect, parse, write
from gspo.environment.tools import ToolError, call, schema
from gspo.errors import ConfigError


def book(
    city: str, nights: int = 1, room: Literal["single", "double"] = "single", tags: list[str] | None = None
) -> Any:
    """Book a room.

    Args:
        city: Where,
            by name.
        nights (int): How many.

    Returns:
        A number.
    """
    return {"city": city, "nights": nights, "room": room, "tags": tags}


def test_a_schema_has_the_types_and_texts_of_the_function() -> None:
    assert schema(book) == {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a room.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, by name."},
                    "nights": {"type": "integer", "description": "How many."},
                    "room": {"type": "string", "enum": ["single", "double"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
                },
                "required": ["city"],
            },
        },
    }


def test_a_tool_needs_a_docstring_and_types() -> None:
    def silent(text: str) -> str:
        return text

    def untyped(text) -> str:  # type: ignore[no-untyped-def]
        """Has no type."""
        return str(text)

    def complex_type(text: complex) -> str:
        """Has a type without a schema."""
        return str(text)

    for function, message in (
        (silent, "no docstring"),
        (untyped, "text has no type"),
        (complex_type, "no JSON schema"),
    ):
        with pytest.raises(ConfigError, match=message):
            schema(function)


def test_a_result_is_text_or_json() -> None:
    made = call({"book": book}, "book", {"city": "Ulm", "nights": 2, "tags": None})
    assert made == '{"city": "Ulm", "nights": 2, "room": "single", "tags": null}'


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cancel", {}, "there is no tool 'cancel'; there are: book"),
        ("book", {}, "parameter 'city' is missing"),
        ("book", {"city": "Ulm", "stars": 5}, "no parameter 'stars'"),
        ("book", {"city": 3}, "city must be of type string, not 3"),
        ("book", {"city": "Ulm", "nights": True}, "nights must be of type integer, not true"),
        ("book", {"city": "Ulm", "nights": "2"}, "nights must be of type integer"),
        ("book", {"city": "Ulm", "room": "suite"}, "room must be one of 'single', 'double'"),
        ("book", {"city": "Ulm", "tags": [1]}, r"tags\[0\] must be of type string"),
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_tool(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        call({"book": book}, name, arguments)


def test_values_of_an_object_have_the_annotated_type() -> None:
    def count(words: dict[str, int]) -> int:
        """Count words."""
        return sum(words.values())

    assert call({"count": count}, "count", {"words": {"a": 1, "b": 2}}) == "3"
    with pytest.raises(ToolError, match=r"words\['b'\] must be of type integer"):
        call({"count": count}, "count", {"words": {"a": 1, "b": "2"}})


CALL = ToolCall(name="book", arguments={"city": 'a "b" </c>\n', "nights": 2})
TEXT = ToolCall(name="book", arguments={"city": "Ulm (old) town"})


@pytest.mark.parametrize("style", list(FORMATS))
def test_what_is_written_is_read(style: str) -> None:
    wanted = TEXT if style in ("call", "code_block") else CALL
    parsed = parse(style, write(style, wanted), ["book"])
    assert not parsed.error
    assert parsed.content == ""
    (found,) = parsed.calls
    assert found.name == "book"
    arguments = {key: str(value).rstrip("\n") for key, value in found.arguments.items()}
    assert list((arguments if style == "code_block" else found.arguments).values()) == list(wanted.arguments.values())


HERMES = '<tool_call>\n{"name": "book", "arguments": {"city": "Ulm"}}\n</tool_call>'
LLAMA = '{"name": "book", "parameters": {"city": "Ulm"}}'
BLOCK = '```json\n{\n  "name": "book",\n  "arguments": {"city": "Ulm"}\n}\n```'
ULM = ToolCall(name="book", arguments={"city": "Ulm"})


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("hermes", f"I will.\n{HERMES}\n{HERMES}", "I will.", 2),
        ("hermes", f"<think>\n<tool_call> is a tag\n</think>\n{HERMES}", "<think>\n<tool_call> is a tag\n</think>", 1),
        ("hermes", "no call", "no call", 0),
        ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        ("llama", " no call", "no call", 0),
        ("llama", '{"city": "Ulm"}', '{"city": "Ulm"}', 0),
        ("json_block", f"I will.\n{BLOCK}\nAnd:\n{BLOCK}\n", "I will.\nAnd:", 2),
        ("json_block", LLAMA.replace("parameters", "arguments"), "", 1),
        ("json_block", BLOCK.replace("json", ""), "", 1),
        ("json_block", f"<think>\n{BLOCK}\n</think>\n{BLOCK}", f"<think>\n{BLOCK}\n</think>", 1),
        ("json_block", BLOCK.replace("json", "python"), BLOCK.replace("json", "python"), 0),
        ("json_block", '```json\n{"city": "Ulm"}\n```', '```json\n{"city": "Ulm"}\n```', 0),
        ("json_block", "```python\nprint(1)\n```\nso 1", "```python\nprint(1)\n```\nso 1", 0),
        ("json_block", "a ```json block that never\n```python\nends", "a ```json block that never\n```python\nends", 0),
        ("code_block", "So:\n```json\n{}\n```\nbook", "So:\n```json\n{}\n```\nbook", 0),
        ("code_block", "<think>\n```book\nBonn\n```\n</think>\nUlm", "<think>\n```book\nBonn\n```\n</think>\nUlm", 0),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.book "
            '<|constrain|>json<|message|>{"city": "Ulm"}',
            "",
            1,
        ),
        ("gpt_oss", ' to=functions.book<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>', "", 1),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42", "42", 0),
        ("call", "half of it", "half of it", 0),
    ],
)
def test_calls_and_text_are_told_apart(style: str, text: str, content: str, calls: int) -> None:
    parsed = parse(style, text, ["book", "half"])
    assert (parsed.error, parsed.content, parsed.calls) == ("", content, (ULM,) * calls)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", HERMES.replace("</tool_call>", "")),
        ("hermes", HERMES + "</tool_call>"),
        ("hermes", HERMES.replace("arguments", "parameters")),
        ("hermes", HERMES.replace('"city"', "'city'")),
        ("hermes", HERMES.replace('{"city": "Ulm"}', '"{}"')),
        ("hermes", HERMES.replace('"Ulm"', '"Ulm", "city": "Bonn"')),
        ("hermes", HERMES.replace('"Ulm"', "NaN")),
        ("hermes", HERMES.replace('"Ulm"', "[" * 100_000)),
        ("hermes", HERMES * 17),
        ("llama", LLAMA + " and more"),
        ("llama", LLAMA.replace('"Ulm"', "NaN")),
        ("llama", "<|python_tag|>print(1)"),
        ("llama", LLAMA.replace("}}", "}")),
        ("json_block", BLOCK.removesuffix("```")),
        ("json_block", BLOCK.replace('"Ulm"', '"""Ulm"""')),
        ("json_block", BLOCK.replace("arguments", 'input_arguments": 1, "arguments')),
        ("json_block", LLAMA.replace("parameters", "arguments") + " and more"),
        ("code_block", "```book\nUlm"),
        ("gpt_oss", "<|channel|>commentary to=functions.book<|message|>[1]"),
        ("gpt_oss", "<|channel|>commentary to=browser.open<|message|>{}"),
        ("gpt_oss", "no channel"),
        ("call", "book(Ulm"),
    ],
)
def test_a_malformed_call_is_an_error_and_no_call(style: str, text: str) -> None:
    parsed = parse(style, text, ["book"])
    assert parsed.error
    assert not parsed.calls


def test_a_block_of_code_is_the_only_argument_of_its_tool() -> None:
    parsed = parse("code_block", "First:\n```book\nUlm\n  old\n```\nthen\n```book\n```", ["book"])
    assert [call.arguments for call in parsed.calls] == [{"": "Ulm\n  old\n"}, {"": ""}]
    assert parsed.content == "First:\nthen"


@pytest.mark.parametrize(
    ("style", "text", "other"),
    [
        ("hermes", BLOCK, "json_block"),
        ("json_block", HERMES, "hermes"),
        ("hermes", LLAMA, "llama"),
        ("hermes", "book(Ulm)", "call"),
        ("hermes", HERMES, ""),
        ("hermes", BLOCK.replace("book", "read"), ""),
        ("hermes", "The book (Ulm) is read.", ""),
        ("hermes", BLOCK.replace('"Ulm"', "Ulm"), ""),
    ],
)
def test_a_call_in_another_format_is_named(style: str, text: str, other: str) -> None:
    assert parse(style, text, ["book"]).other_format == other


def test_the_format_is_detected_from_the_template() -> None:
    assert detect('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>') == "hermes"
    assert detect('Respond in the format {"name": function name, "parameters": dictionary}. <|python_tag|>') == "llama"
    assert detect("<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>") == "gpt_oss"
    assert detect("<tool_call><function=example>") is None
    assert detect("<|user|>") is None

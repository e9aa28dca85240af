"""Tool calls as models write them: the formats of `environment.tool_format`, parsed strictly.

In: the text of a turn, with special tokens by their names and without its end token. Out: the calls, and the text
without them, or the reason why a call is malformed. Invariant: a text that is not exactly a call is never taken for
one, and nothing is guessed or repaired: the model sees the reason instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

MOST_CALLS = 16
"""Maximum number of calls in a turn."""
_HARMONY = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?P<to>(?: to=[^\s<]+)?)<\|channel\|>(?P<channel>\w+)"
    r"(?P<late>(?: to=[^\s<]+)?)(?: ?<\|constrain\|>\w+| \w+)?<\|message\|>(?P<body>.*?)"
    r"(?=<\|(?:end|call|return|start)\|>|$)(?:<\|(?:end|call|return)\|>)?",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A turn of the model."""

    content: str
    """Its text without calls."""
    calls: tuple[ToolCall, ...] = ()
    error: str = ""
    """Why a call is malformed; empty if none is. Then no call is made."""
    other_format: str = ""
    """The format in which a turn without calls would be one; empty if there is none."""


class Malformed(Exception):
    """A call that cannot be read. The message is for the model."""


def parse(style: str, text: str, names: Sequence[str] = ()) -> Parsed:
    """The calls in a turn, in one of `FORMATS`. `names` are the tools that there are."""
    try:
        parsed = FORMATS[style](text, names)
        if len(parsed.calls) > MOST_CALLS:
            raise Malformed(f"{len(parsed.calls)} calls in one turn; make at most {MOST_CALLS}")
    except Malformed as error:
        return Parsed(content=text, error=str(error))
    return parsed if parsed.calls else replace(parsed, other_format=_other_format(style, text, names))


def _other_format(style: str, text: str, names: Sequence[str]) -> str:
    """The format in which a turn that is no call would be one, to tools that there are; empty if there is none. Some
    models do not write calls as their chat template asks them to."""
    for other, read in FORMATS.items():
        calls: tuple[ToolCall, ...] = ()
        if other != style:
            with suppress(Malformed):
                calls = read(text, names).calls
        if calls and all(call.name in names for call in calls):
            return other
    return ""


def detect(template: str) -> str | None:
    """The format that a chat template teaches; None if it is none of these."""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "<|channel|>" in template and "<|constrain|>" in template:
        return "gpt_oss"
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return "llama"
    return None


def _hermes(text: str, names: Sequence[str]) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times."""
    # Thinking may mention the tags.
    thinking, end, rest = text.rpartition("</think>")
    parts = re.split(r"(</?tool_call>)", rest)
    calls = []
    content = [thinking + end, parts[0]]
    if parts[1::2] != ["<tool_call>", "</tool_call>"] * (len(parts[1::2]) // 2):
        raise Malformed("every opening tool_call tag needs a closing one after it")
    for body, after in zip(parts[2::4], parts[4::4], strict=True):
        calls.append(_object_call(_json(body), "arguments"))
        content.append(after)
    return Parsed(content="".join(content).strip(), calls=tuple(calls))


def _llama(text: str, names: Sequence[str]) -> Parsed:
    """`{"name": ..., "parameters": {...}}` as the whole turn, several separated by semicolons."""
    body = text.strip()
    tagged = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not tagged and not (body.startswith("{") and '"name"' in body):
        return Parsed(content=text.strip())
    calls = []
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            raise Malformed(_not_json(error)) from None
        calls.append(_object_call(value, "parameters"))
        body = body[end:].strip()
        if body and not body.startswith(";"):
            raise Malformed("text after a call; separate several calls by semicolons")
        body = body[1:].strip()
    return Parsed(content="", calls=tuple(calls))


def _json_block(text: str, names: Sequence[str]) -> Parsed:
    """`{"name": ..., "arguments": {...}}` in a block of ```json, any number of times, or as the whole turn."""
    thinking, end, rest = text.rpartition("</think>")
    if _names_call(rest):
        return Parsed(content=f"{thinking}{end}".strip(), calls=(_object_call(_json(rest), "arguments"),))
    return _block_calls(text, lambda kind, body: kind in ("json", "") and _names_call(body), _json_block_call)


def _json_block_call(kind: str, body: str) -> ToolCall:
    return _object_call(_json(body), "arguments")


def _code_block(text: str, names: Sequence[str]) -> Parsed:
    """A block of ```NAME, any number of times, whose body is the only argument of the tool NAME."""
    return _block_calls(text, lambda kind, _: kind in names, _only_argument_call)


def _block_calls(text: str, is_call: Callable[[str, str], bool], read: Callable[[str, str], ToolCall]) -> Parsed:
    """The blocks that are calls, by their kind (what follows ```) and body, and the text without them."""
    # Thinking may contain blocks.
    thinking, end, rest = text.rpartition("</think>")
    calls = []
    content = [thinking + end]
    block: list[str] | None = None
    # By lines, not by a pattern: a turn of many openings would take a pattern quadratic time.
    for line in rest.splitlines(keepends=True):
        if block is None:
            (content if not line.startswith("```") else (block := [])).append(line)
            continue
        block.append(line)
        if line.strip() == "```":
            kind, body = block[0].strip().removeprefix("```"), "".join(block[1:-1])
            if is_call(kind, body):
                calls.append(read(kind, body))
            else:
                content += block
            block = None
    if block is not None and is_call(block[0].strip().removeprefix("```"), "".join(block[1:])):
        raise Malformed(f"a block that begins with {block[0].strip()} needs ``` at its end")
    return Parsed(content="".join([*content, *(block or ())]).strip(), calls=tuple(calls))


def _names_call(text: str) -> bool:
    """Whether a text is meant as a call, be it well-formed or not."""
    return text.lstrip().startswith("{") and '"name"' in text and '"arguments"' in text


def _gpt_oss(text: str, names: Sequence[str]) -> Parsed:
    """Harmony messages. One in channel `commentary` to `functions.NAME` is a call; channel `final` is the text."""
    calls: list[ToolCall] = []
    content = ""
    at = 0
    for found in _HARMONY.finditer(text):
        if text[at : found.start()].strip():
            raise Malformed("text outside of a channel")
        at = found.end()
        recipient = (found["to"] or found["late"]).strip().removeprefix("to=")
        if recipient:
            if not recipient.startswith("functions."):
                raise Malformed(f"there is no recipient {recipient[:100]!r}; tools are functions.NAME")
            arguments = _json(found["body"])
            if not isinstance(arguments, dict):
                raise Malformed("the arguments must be a JSON object")
            calls.append(ToolCall(name=recipient.removeprefix("functions."), arguments=arguments))
        elif found["channel"] == "final":
            content = found["body"]
    if text[at:].strip():
        raise Malformed("text outside of a channel")
    return Parsed(content=content.strip(), calls=tuple(calls))


def _call(text: str, names: Sequence[str]) -> Parsed:
    """`name(text)` as the whole turn, for tools with one text parameter."""
    body = text.strip()
    name = next((name for name in names if body.startswith(f"{name}(")), None)
    if name is None:
        return Parsed(content=body)
    if not body.endswith(")"):
        raise Malformed(f"a call ends with a parenthesis: {name}(...)")
    return Parsed(content="", calls=(_only_argument_call(name, body[len(name) + 1 : -1]),))


def _only_argument_call(name: str, text: str) -> ToolCall:
    """A call whose argument has no name in the text: the environment fills it in."""
    return ToolCall(name=name, arguments={"": text})


FORMATS: dict[str, Callable[[str, Sequence[str]], Parsed]] = {
    "hermes": _hermes,
    "llama": _llama,
    "json_block": _json_block,
    "code_block": _code_block,
    "gpt_oss": _gpt_oss,
    "call": _call,
}


def write(style: str, call: ToolCall) -> str:
    """A turn that makes a call, as a model writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    if style == "hermes":
        return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'
    if style == "llama":
        return f'{{"name": {json.dumps(call.name)}, "parameters": {arguments}}}'
    if style == "json_block":
        return f'```json\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n```'
    if style == "gpt_oss":
        return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{arguments}"
    only = next(iter(call.arguments.values()), "")
    return f"```{call.name}\n{only}\n```" if style == "code_block" else f"{call.name}({only})"


def _object_call(value: Any, key: str) -> ToolCall:
    if not isinstance(value, dict) or set(value) != {"name", key}:
        raise Malformed(f'a call is a JSON object with exactly "name" and "{key}"')
    if not isinstance(value["name"], str) or not isinstance(value[key], dict):
        raise Malformed(f'"name" must be text, and "{key}" an object')
    return ToolCall(name=value["name"], arguments=value[key])


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(_not_json(error)) from None


def _not_json(error: Exception) -> str:
    return f"a call is not valid JSON: {str(error)[:200] or type(error).__name__}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict. A key that occurs twice has no certain meaning."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

"""What an environment is, and how to find one by its name.

In: a row of the data, then one message of the model after the other. Out: the first messages, then observations and
rewards. Invariant: this module runs in the environment's own process (`worker.py`), except for `find`, which imports
nothing.

Derive from `Environment`, give it tools, and score its last message. Override `step` for anything else, such as a game.
A class in TRL's form works, too (`trl.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import pkgutil
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.environment import environments
from gspo.environment.tool_calls import Parsed, ToolCall
from gspo.environment.tools import (
    LONGEST_RESULT,
    ToolError,
    ToolUnavailable,
    call,
    cut_text,
    marked_names,
    marked_tools,
    only_argument,
    schema,
)
from gspo.errors import ConfigError, GspoError
from gspo.reward.function import describe, import_text, one_line
from gspo.types import Messages

Reply = tuple[str | Messages, float | None, bool]
"""Observations, the reward of the turn (None: no reward), and whether the conversation is over."""


class Environment:
    """A conversation. Every conversation has an object of its own, in a process of its own."""

    rng: random.Random
    """Randomness that is the same when the run is repeated. In `reset` it depends on the row alone."""

    def reset(self, row: Mapping[str, Any]) -> str | Messages | None:
        """Begin with a row of the data: its prompt as `prompt`, and its other fields. Returns the first messages, or a
        text for one message of the user; None for the row's own prompt. All conversations of a row begin the same."""
        return None

    def step(self, message: Mapping[str, Any]) -> Reply:
        """Answer a message of the model: `content`, `tool_calls` (a list of `name` and `arguments`), and `error`, why
        a tool call is malformed, or "". Returns observations, a reward or None, and whether the conversation is over.

        By default, tool calls are made, and a message without any is the last one, which `score` judges."""
        if message["tool_calls"] or message["error"]:
            return self.answer_calls(message), None, False
        return [], self.score(message), True

    def score(self, message: Mapping[str, Any]) -> float | None:
        """The reward of the last message. None leaves it to `reward.functions`."""
        return None

    @property
    def gives_rewards(self) -> bool:
        """Whether it can give a reward. If not, a run needs reward functions."""
        return type(self).score is not Environment.score or type(self).step is not Environment.step

    def demonstrate(self, row: Mapping[str, Any]) -> Sequence[str | ToolCall]:
        """What a model could do in each turn, for the cold start: write a text, or call a tool. Empty if there is no
        demonstration."""
        return ()

    # ---- tools

    @property
    def tools(self) -> Mapping[str, Callable[..., Any]]:
        """What the model may call, by name: the methods with `@tool`."""
        return marked_tools(self)

    failed_calls = 0
    """Calls of this conversation so far that failed."""

    def answer_calls(self, message: Mapping[str, Any]) -> Messages:
        """Make the tool calls of a message. What the model did wrong is part of the answer."""
        if message["error"]:
            self.failed_calls += 1
            return [{"role": "tool", "content": f"error: {message['error']}"}]
        return [{"role": "tool", "name": c["name"], "content": self._call(c)} for c in message["tool_calls"]]

    def _call(self, wanted: Mapping[str, Any]) -> str:
        arguments = wanted["arguments"]
        try:
            if "" in arguments and wanted["name"] in self.tools:
                arguments = only_argument(self.tools[wanted["name"]], arguments[""])
            return call(self.tools, wanted["name"], arguments)
        except (ToolUnavailable, GspoError):
            raise
        except (Exception, SystemExit) as error:
            # The model chooses the arguments, and must not be able to choose its status. Parsers of arguments exit.
            self.failed_calls += 1
            kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
            return f"error: {kind}{one_line(error)}"


# ------------------------------------------------------------------------------------------------- by name


@dataclass(frozen=True, kw_only=True)
class EnvironmentSource:
    """Where an environment's class is. A file is read once, when the run starts."""

    spec: str
    """As written in `environment.name`. Errors use it."""
    file: str
    """The user's file; empty for a built-in."""
    text: str
    cls: str
    options: Mapping[str, Any]


def built_in_names() -> list[str]:
    """Names of the files in `gspo/environment/environments`."""
    return sorted(module.name for module in pkgutil.iter_modules(environments.__path__))


def find(spec: str, options: Mapping[str, Any]) -> EnvironmentSource:
    """Locate an environment without importing it."""
    file, colon, cls = spec.rpartition(":")
    if not colon:
        if spec not in built_in_names():
            raise ConfigError(
                f"environment.name: no environment {spec!r}; there are: {', '.join(built_in_names())}, or write "
                "file.py:Class"
            )
        return EnvironmentSource(spec=spec, file="", text="", cls="ENVIRONMENT", options=options)
    path = Path(file).expanduser().absolute()
    names = cls.split(",")
    if not file.endswith(".py") or not all(name.isidentifier() for name in names) or not path.is_file():
        raise ConfigError(
            f"environment.name: {spec!r}: no file {path}; write a built-in name, file.py:Class, or file.py:tool,tool"
        )
    try:
        text = importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"environment.name: {spec}: cannot read {path}: {one_line(error)}") from None
    return EnvironmentSource(spec=spec, file=str(path), text=text, cls=cls, options=options)


def load(source: EnvironmentSource) -> Callable[[], Environment]:
    """Import an environment; what builds one with its options. Only a worker process calls this."""
    from gspo.environment.trl import ToolFunctions, adapted, is_tool, is_trl

    try:
        module = (
            import_text(source.file, source.text)
            if source.file
            else importlib.import_module(f"{environments.__name__}.{source.spec}")
        )
    except BaseException as error:  # a module may call sys.exit at import
        raise ConfigError(
            f"environment.name: {source.spec}: cannot import it: {describe(error, source.file)}"
        ) from None
    found = [_attribute(source, module, name) for name in source.cls.split(",")]
    listed = found[0] if len(found) == 1 and isinstance(found[0], list | tuple) else found
    cls = listed[0]
    if len(listed) > 1 or listed is not found or is_tool(cls, source.options):
        if source.options:
            raise ConfigError(f"environment.options: {source.spec}: tool functions have no options; remove them")
        for function in listed:
            schema(function)
        return lambda: ToolFunctions(listed)
    _check_options(source, cls)
    for name in protocol_tools(cls):
        raise ConfigError(
            f"environment.name: {source.spec}: a tool cannot be named {name}, which is part of an environment; give it "
            "another name"
        )

    def build() -> Environment:
        built = cls(**source.options)
        if isinstance(built, Environment):
            return built
        if is_trl(built):
            return adapted(built)
        if callable(getattr(built, "reset", None)):
            # In TRL's form, every public method is a tool.
            raise ConfigError(
                f"environment.name: {source.spec}: {source.cls} has a method step, so it is not clear whether that is "
                "a tool or answers the model; give the tool another name, or derive the class from "
                "gspo.environment.Environment"
            )
        raise ConfigError(
            f"environment.name: {source.spec}: {source.cls} is no environment; derive it from "
            "gspo.environment.Environment, give it a method reset, or write a list of functions for tools"
        )

    try:
        build()
    except ConfigError:
        raise
    except BaseException as error:
        raise ConfigError(f"environment.options: {source.spec}: {describe(error, source.file)}") from None
    return build


def protocol_tools(cls: Any) -> list[str]:
    """The methods with `@tool` that would replace a method of `Environment`."""
    if not (inspect.isclass(cls) and issubclass(cls, Environment)):
        return []
    return [name for name in marked_names(cls) if hasattr(Environment, name)]


def _attribute(source: EnvironmentSource, module: Any, name: str) -> Any:
    """A class or function of the module, or a list of tool functions."""
    found = getattr(module, name, None)
    listed = isinstance(found, list | tuple) and len(found) > 0 and all(map(callable, found))
    if not callable(found) and not listed:
        raise ConfigError(f"environment.name: {source.spec}: {source.file} has no class {name}")
    return found


def _check_options(source: EnvironmentSource, cls: Callable[..., Any]) -> None:
    parameters = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for option in source.options:
        if option not in parameters:
            raise ConfigError(
                f"environment.options.{option}: {source.spec} has no such option; it has: "
                f"{', '.join(parameters) or 'none'}"
            )


# ------------------------------------------------------------------------------------------------- one conversation


def schemas(environment: Environment) -> list[dict[str, Any]]:
    """The schemas of its tools, for the chat template."""
    return [schema(function) for function in environment.tools.values()]


def first_messages(environment: Environment, row: Mapping[str, Any]) -> str | Messages:
    """The beginning of the conversation about a row."""
    content = environment.reset(row)
    content = row["prompt"] if content is None else content
    return content if isinstance(content, str) else _messages(content, "reset")


def take_step(environment: Environment, parsed: Parsed) -> dict[str, Any]:
    """Its answer to a message of the model, checked."""
    failed = environment.failed_calls
    message = {
        "role": "assistant",
        "content": parsed.content,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in parsed.calls],
        "error": parsed.error,
    }
    answer = environment.step(message)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise TypeError("step must return (observations, reward, done)")
    observations, reward, done = answer[0], _scalar(answer[1]), _scalar(answer[2])
    if isinstance(observations, str):
        observations = [{"role": "user", "content": observations}]
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise TypeError(f"step: the reward must be a finite number or None, not {one_line(repr(reward))}")
    if not isinstance(done, bool):
        raise TypeError(f"step: done must be True or False, not {one_line(repr(done))}")
    messages = _cut(_messages(observations, "step"))
    if not done and not messages:
        raise ValueError(
            "step: the conversation continues without an observation, so the model would have nothing to answer"
        )
    return {
        "messages": messages,
        "reward": None if reward is None else float(reward),
        "done": done,
        "calls": [c.name for c in parsed.calls],
        "failed": environment.failed_calls - failed,
        "other_format": parsed.other_format,
    }


def _scalar(value: Any) -> Any:
    """A scalar of numpy or torch as a number. By attributes, so that neither is imported for it."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _cut(messages: Messages) -> Messages:
    """The messages, with `LONGEST_RESULT` characters together: tokenizing megabytes takes seconds."""
    left = LONGEST_RESULT
    cut = []
    for message in messages:
        # A template may write any field.
        texts = {k: cut_text(v, LONGEST_RESULT) for k, v in message.items() if isinstance(v, str)}
        texts["content"] = cut_text(message["content"], max(0, left))
        left -= len(texts["content"])
        cut.append({**message, **texts})
    return cut


def _messages(value: Any, where: str) -> Messages:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{where}: messages must be a list, not {one_line(repr(value))}")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TypeError(f"{where}: a message needs a role and a content, as text, not {one_line(repr(message))}")
        if message["role"] == "assistant":
            raise ValueError(f"{where}: only the model writes messages of role assistant")
    return [dict(message) for message in value]

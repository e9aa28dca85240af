"""Tools: typed Python functions that the model may call.

In: a function with annotations and a docstring; later the arguments that a model wrote. Out: its JSON schema, as chat
templates expect it; later its result as text. Invariant: arguments that do not match the annotations never reach the
function. They are a `ToolError`, whose message the model sees.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

from gspo.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
LONGEST_RESULT = 100_000
"""Maximum length of a result, and of all messages of an observation together, in characters. The rest of a longer one
is dropped, with a mark."""
_KINDS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}
_MARK = "__gspo_tool__"


class ToolError(Exception):
    """A call that cannot be answered, for a reason that the model may see and correct. Tools may raise it, too."""


class ToolUnavailable(Exception):
    """A tool failed for a reason that the model has no part in, such as a server that is down. The completion is
    unscored. Any other exception of a tool is shown to the model."""


def tool(function: Function) -> Function:
    """Make a method of an `Environment` a tool of the model."""
    setattr(function, _MARK, True)
    return function


def marked_tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """The methods with `@tool`, by name, in the order of their definition."""
    return {name: getattr(environment, name) for name in marked_names(type(environment))}


def marked_names(cls: type) -> list[str]:
    """The names of the methods of a class with `@tool`, in the order of their definition."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    return [name for name in names if getattr(getattr(cls, name, None), _MARK, False)]


# ------------------------------------------------------------------------------------------------- schemas


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool: its name, docstring, and the types of its parameters."""
    name = function.__name__
    summary, about = _documentation(inspect.getdoc(function) or "")
    if not summary:
        raise ConfigError(f"tool {name}: has no docstring, which tells the model what it does; write one")
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in _parameters(function):
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: parameter {parameter.name} has no type; annotate it, for example with str")
        properties[parameter.name] = _type_schema(hints[parameter.name], f"tool {name}: parameter {parameter.name}")
        if parameter.name in about:
            text, choices = _choices(about[parameter.name], f"tool {name}: parameter {parameter.name}")
            properties[parameter.name]["description"] = text
            if choices:
                properties[parameter.name]["enum"] = choices
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    for parameter in found:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {function.__name__}: parameter {parameter.name} has no name for the model to use")
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:  # an annotation may name anything
        raise ConfigError(f"tool {function.__name__}: its annotations cannot be read: {error}") from None


def _documentation(text: str) -> tuple[str, dict[str, str]]:
    """The text before `Args:`, and the descriptions of the parameters after it."""
    summary, _, rest = text.partition("\nArgs:")
    about: dict[str, str] = {}
    name = ""
    for line in rest.split("\nReturns:")[0].splitlines():
        if found := re.match(r"\s+(\w+)(?: ?\([^)]*\))?:\s*(.*)", line):
            name = found[1]
            about[name] = found[2].strip()
        elif name and line.strip():
            about[name] += f" {line.strip()}"
    return " ".join(summary.split("\nReturns:")[0].split()), about


def _choices(text: str, where: str) -> tuple[str, list[Any]]:
    """A description without `(choices: ["a", "b"])` at its end, as transformers writes enumerations, and these."""
    found = re.search(r"\(choices:\s*(\[.*\])\s*\)\s*$", text)
    if not found:
        return text, []
    try:
        return text[: found.start()].strip(), list(json.loads(found[1]))
    except ValueError:
        raise ConfigError(f"{where}: its choices are not a JSON list: {found[1]}") from None


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _KINDS:
        return {"type": _KINDS[hint]}
    kinds = {type(choice) for choice in arguments} if origin is Literal else set()
    if len(kinds) == 1 and kinds <= {str, int, bool, float}:
        return {"type": _KINDS[kinds.pop()], "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0], where)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], where)}
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not types.NoneType]
        nullable = {"nullable": True} if len(options) < len(arguments) else {}
        found = [_type_schema(option, where) for option in options]
        if len(found) == 1:
            return {**found[0], **nullable}
        if all(set(one) == {"type"} for one in found):
            return {"type": [one["type"] for one in found], **nullable}
    raise ConfigError(f"{where}: type {hint} has no JSON schema; use str, int, float, bool, list, dict or Literal")


# ------------------------------------------------------------------------------------------------- calls


def call(tools: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any]) -> str:
    """The result of a tool as text. A `ToolError` if there is no such tool, or if the arguments do not fit it."""
    if name not in tools:
        raise ToolError(f"there is no tool {name[:100]!r}; there are: {', '.join(tools) or 'none'}")
    function = tools[name]
    parameters = {parameter.name: parameter for parameter in _parameters(function)}
    hints = _hints(function)
    for key in arguments:
        if key not in parameters:
            raise ToolError(f"{name} has no parameter {key[:100]!r}; it has: {', '.join(parameters) or 'none'}")
    values = {}
    for key, parameter in parameters.items():
        if key in arguments:
            values[key] = _checked(arguments[key], hints[key], f"{name}: {key}")
            _check_choice(function, key, values[key])
        elif parameter.default is parameter.empty:
            raise ToolError(f"{name}: parameter {key!r} is missing")
    result = function(**values)
    return result_text(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)


async def _awaited(result: Any) -> Any:
    return await result


def _check_choice(function: Callable[..., Any], key: str, value: Any) -> None:
    about = _documentation(inspect.getdoc(function) or "")[1]
    choices = _choices(about.get(key, ""), key)[1]
    if choices and value not in choices:
        raise ToolError(f"{function.__name__}: {key} must be one of {', '.join(map(repr, choices))}")


def only_argument(function: Callable[..., Any], text: str) -> dict[str, Any]:
    """The arguments of a call in format `call` or `code_block`, which has one, as text and without its name."""
    parameters = _parameters(function)
    if not parameters:
        return {} if not text else {"": text}
    name = parameters[0].name
    if _hints(function).get(name) is str:
        return {name: text}
    try:
        return {name: json.loads(text)}
    except (ValueError, RecursionError):
        return {name: text}  # not of the annotated type, which the model is told


def result_text(value: Any) -> str:
    """A result as the model reads it: text as it is, anything else as JSON if that is possible."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            value = str(value)
    return cut_text(value, LONGEST_RESULT)


def cut_text(text: str, characters: int) -> str:
    """The beginning of a text, with a mark if it is longer."""
    return text if len(text) <= characters else text[:characters] + " … (truncated)"


def _checked(value: Any, hint: Any, where: str) -> Any:
    """The argument, if it has the annotated type. JSON writes whole numbers of type float without a decimal point."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not types.NoneType]
        if value is None and len(options) < len(arguments):
            return None
        # JSON writes 2.0 and 2 alike, so an exact type comes first.
        exact = [option for option in options if type(value) is option]
        for option in [*exact, *options[:-1]]:
            with suppress(ToolError):
                return _checked(value, option, where)
        return _checked(value, options[-1], where)
    if origin is Literal:
        if value not in arguments or type(value) is not type(arguments[arguments.index(value)]):
            raise ToolError(f"{where} must be one of {', '.join(map(repr, arguments))}")
        return value
    if hint is float and type(value) is int:
        return float(value)
    kind = origin or hint
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ToolError(f"{where} must be of type {_KINDS[kind]}, not {json.dumps(value)[:100]}")
    if origin is list:
        return [_checked(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        return {key: _checked(item, arguments[1], f"{where}[{key[:100]!r}]") for key, item in value.items()}
    return value

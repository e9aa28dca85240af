"""Environments and tools in TRL's form (`environment_factory`, `tools`), unchanged.

In: an object with `reset(**row) -> str | None`, public methods that are tools, and optionally `get_reward()`; or plain
functions that are tools. Out: an `Environment`. Invariant: as in TRL, the text that `reset` returns is appended to the
last message of the user. With plain functions, `reward.functions` score the last message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo.environment.environment import Environment
from gspo.types import Messages

_RESERVED = ("reset", "get_reward", "close")


def is_trl(built: Any) -> bool:
    """Whether an object is an environment in TRL's form."""
    return callable(getattr(built, "reset", None)) and not hasattr(built, "step")


def is_tool(found: Any, options: Mapping[str, Any]) -> bool:
    """Whether a name of a file is a tool: a function that cannot be called with the options alone, so that it does not
    build an environment."""
    if not inspect.isfunction(found):
        return False
    try:
        inspect.signature(found).bind(**options)
    except TypeError:
        return bool(inspect.getdoc(found)) and not options
    return False


class ToolFunctions(Environment):
    """Plain functions as tools. A message without calls is the answer, which `reward.functions` score."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = {function.__name__: function for function in functions}

    @property
    def tools(self) -> Mapping[str, Callable[..., Any]]:
        return self._functions


def adapted(built: Any) -> Environment:
    """It as an `Environment`."""
    return _TrlEnvironment(built)


class _TrlEnvironment(Environment):
    def __init__(self, built: Any) -> None:
        self._built = built

    def reset(self, row: Mapping[str, Any]) -> str | Messages | None:
        added = self._built.reset(**row)
        if added is None:
            return None
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return prompt + added
        last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
        if last is None:
            return [*prompt, {"role": "user", "content": added}]
        message = {**prompt[last], "content": prompt[last]["content"] + added}
        return [*prompt[:last], message, *prompt[last + 1 :]]

    def score(self, message: Mapping[str, Any]) -> float | None:
        return self._built.get_reward() if hasattr(self._built, "get_reward") else None

    @property
    def gives_rewards(self) -> bool:
        return hasattr(self._built, "get_reward")

    @property
    def tools(self) -> Mapping[str, Callable[..., Any]]:
        members = inspect.getmembers(self._built, inspect.ismethod)
        return {name: method for name, method in members if not name.startswith("_") and name not in _RESERVED}

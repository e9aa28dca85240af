"""Environments in TRL's form (`environment_factory`), unchanged.

In: an object with `reset(**row) -> str | None`, public methods that are tools, and optionally `get_reward()`. Out: an
`Environment`. Invariant: as in TRL, the text that `reset` returns is appended to the last message of the user.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gspo.environment.environment import Environment
from gspo.types import Messages

_RESERVED = ("reset", "get_reward", "close")


def is_trl(built: Any) -> bool:
    """Whether an object is an environment in TRL's form."""
    return callable(getattr(built, "reset", None)) and not hasattr(built, "step")


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
    def tools(self) -> Mapping[str, Callable[..., Any]]:
        members = inspect.getmembers(self._built, inspect.ismethod)
        return {name: method for name, method in members if not name.startswith("_") and name not in _RESERVED}

"""Reward functions that only this process has: defined in a notebook, in a script, or inside another function.

In: Python functions that the Python API was given. Out: the function of a setting such as `<score>`. Invariant: the
settings of a run name each of them, so a run that is resumed without one says which is missing. They are called in the
trainer's process, so nothing can end one that hangs: `reward.timeout_s` and `reward.memory_mb` do not hold for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""By name."""
_SPEC = re.compile(r"<([A-Za-z_][A-Za-z0-9_]*)>")


def spec_of(name: str) -> str:
    """How `reward.functions` names such a function: as Python names code that is in no file."""
    return f"<{name}>"


def name_of(spec: str) -> str | None:
    """The name in a spec; None if it names another kind of function."""
    found = _SPEC.fullmatch(spec)
    return found[1] if found else None


def function(name: str) -> Callable[..., Any] | None:
    """The function of this name; None if this process was not given it."""
    return _FUNCTIONS.get(name)


@contextmanager
def given(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """The functions that settings can name in this process, for now."""
    before = dict(_FUNCTIONS)
    _FUNCTIONS.update(functions)
    try:
        yield
    finally:
        _FUNCTIONS.clear()
        _FUNCTIONS.update(before)

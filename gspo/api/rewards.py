"""Where the reward functions of the Python API run.

In: Python functions, names of built-in rewards, `file.py:function`. Out: what `reward.functions` names, and the
functions that only this process has. Invariant: a function runs in worker processes if a worker can import it, because
one that hangs, dies or needs too much memory then cannot harm the run. Where each one runs is said.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.reward.in_process import spec_of


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Reward functions, located."""

    specs: tuple[str, ...]
    """For `reward.functions`."""
    own: dict[str, Callable[..., Any]]
    """The functions of this process, by name."""
    notes: tuple[str, ...]
    """Where the Python functions run, one sentence each."""


def locate(given: Any, *, where: str) -> Rewards:
    """Locate the reward functions of an argument: one, or a list of them."""
    items = [given] if isinstance(given, str) or callable(given) else given
    if not isinstance(items, Iterable):
        raise ConfigError(f"{where}: rewards must be functions or names of rewards, not {given!r:.80}")
    specs: list[str] = []
    own: dict[str, Callable[..., Any]] = {}
    notes: list[str] = []
    for item in items:
        if isinstance(item, str):
            specs.append(item)
            continue
        if not callable(item):
            raise ConfigError(
                f"{where}: rewards: {item!r:.80} is neither a function nor a name; write rewards=[my_function], "
                'rewards=["math_answer"] or rewards=["file.py:function"]'
            )
        name = _name(item, own)
        why = why_here(item)
        if why:
            own[name] = item
            specs.append(spec_of(name))
            notes.append(
                f"reward {name} runs in this process, because {why}; in a file of its own it would run in worker "
                "processes, with time and memory limits"
            )
        else:
            file = inspect.getsourcefile(item)
            specs.append(f"{file}:{item.__name__}")
            notes.append(f"reward {item.__name__} runs in worker processes, imported from {file}")
    return Rewards(specs=tuple(specs), own=own, notes=tuple(notes))


def why_here(function: Callable[..., Any]) -> str:
    """Why a worker cannot import a function; empty if it can."""
    if not inspect.isfunction(function):
        return "it is not a plain function"
    module = sys.modules.get(function.__module__)
    if function.__module__ == "__main__":
        return "it is defined in the script or notebook that started the run"
    file = inspect.getsourcefile(function) or ""
    if not file.endswith(".py") or not Path(file).is_file():
        return "it has no source file"
    if getattr(module, function.__name__, None) is not function:
        return "it is not a function of its module"
    # A worker imports the file on its own, not as part of its package.
    if _imports_relatively(Path(file)):
        return f"{file} has relative imports"
    return ""


def _imports_relatively(file: Path) -> bool:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return True
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def _name(function: Callable[..., Any], taken: Iterable[str]) -> str:
    """A name for a function: its own, or that of its class, with a number if another one has it."""
    found = getattr(function, "__name__", None) or type(function).__name__
    name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "" for c in found)
    name = name if name.isidentifier() and not keyword.iskeyword(name) else f"reward_{name}"
    names = [name, *(f"{name}_{number}" for number in range(2, 100))]
    return next(n for n in names if n not in taken)

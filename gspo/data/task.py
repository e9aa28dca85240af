"""What a generated task is, and how one is found by its name.

In: a task name and its options. Out: a `Task` that makes problems from a random stream and verifies replies.
Invariants: a problem depends on the random stream alone; a demonstration, where there is one, scores 1; problems that ask
the same in another order or in other words have the same key.

A task is one file in `tasks/` with a function `build(**options) -> Task`. A name may carry a variant after a colon
(`reasoning_gym:leg_counting`): then `build` takes it as its positional parameter `variant`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One generated problem with its answer."""

    prompt: str
    answer: str
    key: str
    """Equal for problems that ask the same in another order or in other words (`12+7` and `7+12`): what a model has learned
    of one it knows of the other, so they are never on both sides of training and evaluation."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What `score` needs besides the answer. JSON values only."""
    demonstration: str = ""
    """A reply that scores 1; empty if the task has none."""


class Task(Protocol):
    """Makes problems and verifies replies."""

    alphabet: str
    """Every character that prompts and demonstrations can hold, sorted; empty: any."""
    unique_problems: int | None
    """There are at most this many different problems; None: not known."""
    has_demonstrations: bool

    def generate(self, rng: random.Random) -> Problem:
        """A problem drawn from `rng`."""
        ...

    def score(self, reply: str, columns: Mapping[str, Any]) -> float:
        """1.0 if the reply solves the problem with these columns (`answer` among them), else 0.0."""
        ...


def build_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task in `tasks/NAME.py`; `NAME:VARIANT` for a file that holds many."""
    file, _, variant = name.partition(":")
    if file not in task_names():
        raise ConfigError(f"data.task: no task {name!r}; there are: {', '.join(task_names())}")
    build: Callable[..., Task] = importlib.import_module(f"gspo.data.tasks.{file}").build
    parameters = inspect.signature(build).parameters
    if variant and "variant" not in parameters:
        raise ConfigError(f"data.task: {file!r} has no variants; write data.task={file}, not {name}")
    _check_options(file, parameters, options)
    return build(variant, **options) if "variant" in parameters else build(**options)


def task_names() -> list[str]:
    """Every task there is, by file name."""
    from gspo.data import tasks

    return sorted(m.name for m in pkgutil.iter_modules(tasks.__path__))


def same_text(text: str) -> str:
    """Text as a key: without differences of case, white space and compatible characters."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def check_whole(option: str, value: Any, *, least: int, most: int) -> None:
    """Refuse an option that is not a whole number in range, by name."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"data.task_options.{option}: must be a whole number from {least} to {most}, not {value!r}")


def _check_options(file: str, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return  # the file passes options on and checks them itself
    known = [p for p in parameters if p != "variant"]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"data.task_options.{option}: task {file!r} has no such option; it has: {', '.join(known) or 'none'}"
            )

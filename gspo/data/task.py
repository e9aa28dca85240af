"""What a generated task is, and how to find one by its name.

In: a task name and its options. Out: a `Task` that generates problems from a random stream and verifies completions.
Invariants: a problem depends on the random stream alone. A demonstration, if the task has them, scores 1. Problems that
differ only in order or wording have the same key.

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
    """Equal for problems that differ only in order or wording (`12+7` and `7+12`). A model trained on one can solve the
    other, so such problems are never in both the training set and the held-out set."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What `score` needs in addition to the answer. JSON values only."""
    demonstration: str = ""
    """A completion that scores 1; empty if the task has none."""


class Task(Protocol):
    """Generates problems and verifies completions."""

    alphabet: str
    """All characters of prompts and demonstrations, sorted; empty if any character may occur."""
    unique_problems: int | None
    """Upper bound on the number of different problems; `None` if unknown."""
    has_demonstrations: bool

    def generate(self, rng: random.Random) -> Problem:
        """A problem sampled with `rng`."""
        ...

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        """1.0 if the completion solves the problem with these columns (including `answer`), else 0.0."""
        ...


def build_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task in `tasks/NAME.py`; `NAME:VARIANT` for a file with several tasks."""
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
    """The names of all tasks: their file names."""
    from gspo.data import tasks

    return sorted(m.name for m in pkgutil.iter_modules(tasks.__path__))


def same_text(text: str) -> str:
    """Text as a key: without differences in case, white space and compatibility characters."""
    # Such copies are the same problem: a model that was trained on one knows the other.
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def check_whole(option: str, value: Any, *, least: int, most: int) -> None:
    """Raise an error that names the option if it is not a whole number in range."""
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

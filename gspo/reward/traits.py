"""What is known of a built-in reward before it scores anything: `TRAITS` in its file.

In: the name of a reward. Out: its traits. Invariant: a user's file is never imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo.reward import rewards
from gspo.reward.function import built_in_names

if TYPE_CHECKING:
    from gspo.reward.sandbox.level import Level

Columns = Mapping[str, Any]
Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ForeignCode:
    """Code that an option of a reward makes it run outside of a sandbox."""

    what: str
    """Description for the user."""
    key: str
    """Identifies it in the user's approvals, so it must not change between versions."""
    file: str = ""
    """The file whose content is approved; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A model or an endpoint that a reward asks. It gets one worker process of its own, so that weights are loaded
    once, and is not limited by `reward.memory_mb`. Its failures are never the completion's fault."""

    at_once: int
    """Completions that it works on at a time. They share one `reward.timeout_s`."""
    merge: bool
    """Whether one call may cover several prompts. False if a score depends on the batch, as rounding does: how calls
    are merged depends on time."""


@dataclass(frozen=True, kw_only=True)
class RewardTraits:
    """The traits of one reward."""

    known_answers: Callable[[Columns, Options], list[str]] | None = None
    """Completions that state a row's own answer in the form that the reward reads; `None` if it has no such form."""
    reads_demonstrations: bool = False
    """Whether the demonstrations of a generated task are completions that it scores as correct."""
    sandbox: Callable[[Options], Level] | None = None
    """The sandbox for programs that the model writes; `None` if it runs none."""
    foreign_code: Callable[[Options], list[ForeignCode]] = lambda options: []
    may_change: tuple[str, ...] = ()
    """Options that may change on resume: how a model is reached, not what it is asked."""
    service: Callable[[Options], Service] | None = None
    """The model or endpoint that it asks; `None` if it computes the score itself."""

    @property
    def has_known_form(self) -> bool:
        """Whether a completion that the reward must score as correct can be made from the data."""
        return self.known_answers is not None or self.reads_demonstrations


def reward_traits(spec: str) -> RewardTraits:
    """The traits of a built-in reward; those of a user's file are unknown."""
    if spec not in built_in_names():
        return RewardTraits()
    traits: RewardTraits = importlib.import_module(f"{rewards.__name__}.{spec}").TRAITS
    return traits


def in_form(form: str) -> Callable[[Columns, Options], list[str]]:
    """Known answers of a reward that reads `ANSWER` in this form, or after its option `marker`."""

    def known_answers(columns: Columns, options: Options) -> list[str]:
        answer = columns.get("answer")
        answer = answer[0] if isinstance(answer, list) and answer else answer
        if answer is None or isinstance(answer, list | dict):
            return []
        marker = options.get("marker", "")
        return [f"{marker} {answer}" if marker else form.replace("ANSWER", str(answer))]

    return known_answers

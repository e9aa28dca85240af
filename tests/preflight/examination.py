"""Helpers of the pre-flight tests: findings by check, and rewards without processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding
from gspo.types import Completion, Prompt, Score, Status

SAMPLED = ("tokenizer", "model files", "data", "model", "sampling")
"""Checks that must run before those on sampled completions."""


class FixedRewards:
    """Rewards given by `value(group, sample)`, without processes."""

    names = ("fixed",)
    services: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, value: Callable[[int, int], float]) -> None:
        self.value = value

    def score(
        self, groups: Sequence[tuple[Prompt, Sequence[Completion]]], functions: Collection[str] | None = None
    ) -> list[list[Score]]:
        return [
            [
                Score(status=Status.SCORED, reward=(v := self.value(g, i)), correct=v > 0.5, parts={"fixed": v})
                for i in range(len(completions))
            ]
            for g, (_, completions) in enumerate(groups)
        ]


class Examination:
    """Findings by check, and the context."""

    def __init__(self, context: PreflightContext, findings: list[Finding]) -> None:
        self.context = context
        self.findings = findings

    def __getitem__(self, check: str) -> list[Finding]:
        return [f for f in self.findings if f.check == check]

    def only(self, check: str) -> Finding:
        (finding,) = self[check]
        return finding

    def levels(self, check: str) -> list[str]:
        return [f.level.value for f in self[check]]

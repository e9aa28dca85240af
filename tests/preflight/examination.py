"""What the doctor's tests share: the findings of some checks by name, and rewards without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo.preflight.case import Case
from gspo.preflight.findings import Finding
from gspo.types import Completion, Prompt, Score, Status

SAMPLED = ("tokenizer", "model files", "data", "model", "sampling")
"""What must have been checked before sampled replies can be looked at."""


class FixedRewards:
    """Rewards of the test's own choosing, without processes: `value(group, sample)`."""

    names = ("fixed",)

    def __init__(self, value: Callable[[int, int], float]) -> None:
        self.value = value

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[Score]]:
        return [
            [
                Score(status=Status.SCORED, reward=(v := self.value(g, i)), correct=v > 0.5, parts={"fixed": v})
                for i in range(len(completions))
            ]
            for g, (_, completions) in enumerate(groups)
        ]


class Examination:
    """Findings by check, and the case they are of."""

    def __init__(self, case: Case, findings: list[Finding]) -> None:
        self.case, self.findings = case, findings

    def __getitem__(self, check: str) -> list[Finding]:
        return [f for f in self.findings if f.check == check]

    def only(self, check: str) -> Finding:
        (finding,) = self[check]
        return finding

    def levels(self, check: str) -> list[str]:
        return [f.level.value for f in self[check]]

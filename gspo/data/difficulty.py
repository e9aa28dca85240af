"""Measured difficulty: the pass rate of every training problem, estimated from the run's own groups.

In: the scores of each batch. Out: an estimate per problem, and the chance that a visit samples it. Invariants: the
estimates depend on the batches so far alone. Every measurement counts, also that of a group that is discarded. No
chance is below the floor, so no problem is lost.

The chance is 4 p (1 - p), the variance of a completion's correctness relative to its maximum: the expected training
signal of a group vanishes with it. See "Online Difficulty Filtering" (arXiv 2504.03380), which selects problems of
intermediate pass rate after sampling them; here they are selected before, which costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo.types import Group

# At run time only where sampling by difficulty starts: tools that only load problems start without it.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DECAY = 0.5
"""Weight of a problem's earlier measurements when a new group is measured: the policy has changed since."""
PRIOR = 0.5
"""Completions of each kind, right and wrong, that a problem starts with (the Jeffreys prior). A problem that was never
measured has a pass rate of 1/2, so it is never skipped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Difficulty:
    """What sampling knows of the problems after a number of batches."""

    correct: NDArray[np.float64]
    """Correct completions of each problem, with the weight of older ones decayed."""
    judged: NDArray[np.float64]
    """Completions of each problem with a verdict, decayed alike."""
    skipped: tuple[int, ...]
    """Visits of each source that were skipped so far."""

    @classmethod
    def unknown(cls, *, problems: int, sources: int) -> Difficulty:
        """The state before the first batch."""
        import numpy as np

        return cls(correct=np.zeros(problems), judged=np.zeros(problems), skipped=(0,) * sources)

    def pass_rate(self, index: int) -> float:
        """The estimated pass rate of a problem."""
        return float((self.correct[index] + PRIOR) / (self.judged[index] + 2 * PRIOR))

    def chance(self, index: int, floor: float) -> float:
        """The probability that a visit samples the problem."""
        p = self.pass_rate(index)
        return max(floor, 4 * p * (1 - p))

    @property
    def measured_fraction(self) -> float:
        """Share of the problems that were measured at least once."""
        return float((self.judged > 0).mean())

    def measured(self, indices: Sequence[int], groups: Sequence[Group]) -> Difficulty:
        """The state after the groups of a batch, in the order in which they were sampled."""
        correct, judged = self.correct.copy(), self.judged.copy()
        for index, group in zip(indices, groups, strict=True):
            verdicts = [score.correct for score in group.scores if score.correct is not None]
            if verdicts:  # an unscored group says nothing about the problem
                correct[index] = DECAY * correct[index] + sum(verdicts)
                judged[index] = DECAY * judged[index] + len(verdicts)
        return dataclasses.replace(self, correct=correct, judged=judged)

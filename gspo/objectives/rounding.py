"""Rounding noise in the ratio that an objective clips.

In: log-probs of the same tokens under the same weights, computed in two ways (by the sampling engine token by token,
by the learner in one forward pass). Out: the size of their difference at the objective's own level, and how much of
it lies beyond the clip range. Invariant: a sequence-level ratio averages the noise of its tokens, so the same
rounding is measured per completion for objectives that clip sequences and per token for the others. `M` is the number
of these measurements.

Forward passes of weights that differ by a small update round as differently as two ways to compute one forward pass. So
this estimates the noise in a ratio and tends to underestimate it; docs/precision.md compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Rounding, expressed as a ratio."""

    log_ratio_M: Tensor
    """The log-ratio due to rounding, of each completion or token."""
    beyond_M: Tensor
    """Whether it alone takes the ratio out of the clip range."""

    @property
    def log_ratio(self) -> float:
        """Its root mean square."""
        return root_mean_square(self.log_ratio_M)

    @property
    def beyond_clip(self) -> float:
        """Fraction of completions (or tokens) whose ratio leaves the clip range due to rounding alone."""
        return float(self.beyond_M.double().mean())


def rounding_noise(objective: Objective, sequences: Sequences, rounding_N: Tensor) -> Noise | None:
    """`rounding_N` is the difference of the two log-probs of each token. `None` if the objective has no clip range."""
    log_range = objective.trust_region.log_range
    if log_range is None or not len(rounding_N):
        return None
    low, high = log_range
    log_ratio, length = rounding_N, sequences.expand(sequences.length_B)
    if objective.clips_sequences:
        # A sequence without tokens has a log-ratio of 0 and would count as one without noise.
        present_B = sequences.length_B > 0
        log_ratio = objective.ratio.combine(sequences, rounding_N)[present_B]
        length = sequences.length_B[present_B]
    log_ratio = objective.trust_region.bounded(log_ratio, length).double()
    return Noise(log_ratio_M=log_ratio, beyond_M=(log_ratio < low) | (log_ratio > high))


def root_mean_square(values: Tensor) -> float:
    """sqrt(mean(x^2))."""
    return float(values.square().mean().sqrt())

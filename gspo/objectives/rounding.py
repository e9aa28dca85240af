"""What rounding alone does to the ratio that an objective clips.

In: log-probabilities of the same tokens under the same weights, computed in two ways (by the sampling engine step by step,
by the learner in one forward). Out: the size of their difference at the objective's own level, and how much of it lies
beyond the clip range. Invariant: a reply-level ratio averages the noise of its tokens, so the same rounding is judged per
reply for objectives that clip replies and per token for the others.

Two forwards of weights that differ by a small update round as differently as two ways of computing one forward do. So this
is the noise in a ratio, if anything an underestimate: see docs/precision.md for how the two compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Rounding, seen as a ratio."""

    log_ratio: float
    """Root mean square of the log-ratio that rounding makes."""
    beyond_clip: float
    """Share of replies (or tokens) whose ratio rounding alone takes out of the clip range."""


def rounding_noise(objective: Objective, sequences: Sequences, rounding_N: Tensor) -> Noise | None:
    """`rounding_N`: the difference of the two log-probabilities of each token. None: the objective has no clip range."""
    region: Any = objective.trust_region
    if not hasattr(region, "clip_low") or not len(rounding_N):
        return None
    judged = sequences.mean(rounding_N)[sequences.length_B > 0] if objective.clips_sequences else rounding_N
    ratio = judged.double().exp()
    beyond = (ratio < 1 - region.clip_low) | (ratio > 1 + region.clip_high)
    return Noise(log_ratio=float(judged.double().square().mean().sqrt()), beyond_clip=float(beyond.double().mean()))

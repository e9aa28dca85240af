"""A mean with its 95 % confidence interval.

In: one value per seed. Out: a `Number`. Invariant: if the spread over seeds is unknown (a single seed) or zero (all
values are identical), there is no interval, rather than one of zero width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.student_t import t_point


@dataclass(frozen=True, kw_only=True)
class Number:
    """A mean over seeds; `low` and `high` bound its 95 % interval, `None` if there is none."""

    value: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1


def over_seeds(
    values: Sequence[float | None], *, lowest: float = -math.inf, highest: float = math.inf
) -> Number | None:
    """Mean and t-interval of the measured values, clipped to the quantity's range."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    # Of a sample, because the seeds stand for all seeds that could have been used.
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    if not spread:
        return Number(value=mean, seeds=len(known))
    # Student's t, because the variance is estimated from a few seeds: with three, 1.96 is less than half of it.
    half = t_point(len(known) - 1) * spread / math.sqrt(len(known))
    return Number(value=mean, low=max(lowest, mean - half), high=min(highest, mean + half), seeds=len(known))

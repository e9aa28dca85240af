"""A mean with its 95 % confidence interval.

In: one value per seed. Out: a `Number`. Invariant: if the spread over seeds is unknown (a single seed) or zero (all
values are identical), there is no interval, rather than one of zero width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# A table, so that a report does not need scipy.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1 to 20 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A mean over seeds; `low` and `high` bound its 95 % interval, `None` if there is none."""

    value: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1


def t_point(freedom: int) -> float:
    """The 97.5 % quantile of Student's t. Beyond the table: Cornish-Fisher expansion, accurate to four digits."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


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

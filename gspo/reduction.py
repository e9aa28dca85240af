"""Values that carry how the values of several ranks become one.

In: what one rank knows of a metric: a sum with its count, a maximum, or the values themselves. Out: the metric over all
ranks. Invariant: splitting the completions and tokens of a step over ranks changes a metric by rounding alone. A single
process is one rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import add
from typing import Any, Self

import torch
from torch import Tensor

_PLACE = re.compile("[A-Z]+(/[A-Z]+)*")
"""The part of a key that stands for the name of a member."""


class Reduced:
    """What one rank contributes to a metric."""

    @classmethod
    def combine(cls, ranks: Sequence[Self]) -> Any:
        """The metric over all ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class Same(Reduced):
    """A value that all ranks agree on."""

    value: float

    @classmethod
    def combine(cls, ranks: Sequence[Self]) -> float:
        return ranks[0].value


@dataclass(frozen=True)
class Sum(Reduced):
    """A part of the sum over ranks."""

    total: float

    @classmethod
    def combine(cls, ranks: Sequence[Self]) -> float:
        return sum(r.total for r in ranks)


@dataclass(frozen=True)
class Mean(Reduced):
    """A sum over what a rank has, and over how many. NaN if no rank has any."""

    total: Tensor | float
    count: int

    @classmethod
    def of(cls, values: Tensor | Sequence[float]) -> Self:
        """The mean of these values, in their own precision."""
        return cls(values.sum() if isinstance(values, Tensor) else sum(map(float, values)), len(values))

    @classmethod
    def combine(cls, ranks: Sequence[Self]) -> float:
        # No start value: 0 + -0.0 would lose the sign.
        total, count = reduce(add, [r.total for r in ranks]), sum(r.count for r in ranks)
        return float(total / count) if count else math.nan


@dataclass(frozen=True)
class Max(Reduced):
    """The largest value of a rank; -inf if it has none."""

    largest: float

    @classmethod
    def of(cls, values_N: Tensor) -> Self:
        return cls(float(values_N.max()) if len(values_N) else -math.inf)

    @classmethod
    def combine(cls, ranks: Sequence[Self]) -> float:
        # `max` would drop a NaN, which is what a diverged step must show, depending on the order of the ranks.
        if any(math.isnan(r.largest) for r in ranks):
            return math.nan
        largest = max(r.largest for r in ranks)
        return math.nan if largest == -math.inf else largest


@dataclass(frozen=True)
class Gather(Reduced):
    """Values of which the metric is a function that is neither a sum nor a maximum, such as a quantile."""

    values: Tensor | Sequence[Any]
    function: Callable[[Any], float]

    @classmethod
    def combine(cls, ranks: Sequence[Self]) -> float:
        tensors = [r.values for r in ranks if isinstance(r.values, Tensor)]
        return ranks[0].function(torch.cat(tensors) if tensors else list(chain.from_iterable(r.values for r in ranks)))


@dataclass(frozen=True)
class Family(Reduced):
    """Metrics whose names are known only after sampling, so that a rank may lack some that another one has."""

    members: Mapping[str, Reduced]
    absent: Reduced | None = field(default=None, kw_only=True)
    """What a rank contributes to a name that it lacks; nothing by default."""

    @classmethod
    def combine(cls, ranks: Sequence[Self]) -> dict[str, Any]:
        names = dict.fromkeys(chain.from_iterable(r.members for r in ranks))
        return {name: _combine([r.members.get(name, r.absent) for r in ranks]) for name in names}


Metrics = Mapping[str, Reduced]
"""By key of `record/metric_definitions.py`. A `Family` has the key with the upper-case part, `reward/part/NAME`."""


def combined(ranks: Sequence[Metrics]) -> dict[str, Any]:
    """The metrics of a step as numbers, from what each rank has of them."""
    numbers: dict[str, Any] = {}
    for key in dict.fromkeys(chain.from_iterable(ranks)):
        value = _combine([rank.get(key) for rank in ranks])
        if isinstance(value, dict):
            numbers |= {_PLACE.sub(name, key): member for name, member in value.items()}
        else:
            numbers[key] = value
    return numbers


def std(values: Tensor) -> float:
    """The population standard deviation; NaN without values."""
    return float(values.std(correction=0)) if len(values) else math.nan


def _combine(ranks: Sequence[Reduced | None]) -> Any:
    present = [r for r in ranks if r is not None]
    return type(present[0]).combine(present)

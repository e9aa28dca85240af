"""Calculations in the head and calculations for a calculator, for the environment `calculator`.

In: a random stream. Out: problems such as `523+4`, which needs no tool, or `523*47`, which does; the field `kind` says
which (`small` or `large`). Invariant: a completion is correct iff it is the answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from gspo.data.task import Problem
from gspo.errors import ConfigError


def build(large_share: float = 0.5) -> Calculation:
    """`large_share` is the share of large problems."""
    if not isinstance(large_share, int | float) or isinstance(large_share, bool) or not 0 <= large_share <= 1:
        raise ConfigError(f"data.task_options.large_share: must be a number from 0 to 1, not {large_share!r}")
    return Calculation(large_share)


class Calculation:
    # An environment adds messages with characters of its own.
    alphabet = ""
    has_demonstrations = True

    def __init__(self, large_share: float) -> None:
        self._large_share = large_share
        self.unique_problems: int | None = (900 * 55 // 10 if large_share < 1 else 0) + (81000 if large_share else 0)

    def generate(self, rng: random.Random) -> Problem:
        a = rng.randint(100, 999)
        if rng.random() < self._large_share:
            b = rng.randint(10, 99)
            return _problem(f"{a}*{b}", a * b, "large")
        b = rng.randint(0, 9 - a % 10)  # no carry
        return _problem(f"{a}+{b}", a + b, "small")

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        return float(completion.strip() == columns["answer"])


def _problem(expression: str, answer: int, kind: str) -> Problem:
    columns = {"kind": kind, "expression": expression}
    return Problem(prompt=expression, answer=str(answer), key=expression, columns=columns, demonstration=str(answer))

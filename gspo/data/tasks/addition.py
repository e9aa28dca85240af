"""Add two numbers, with the working shown column by column from the right.

In: a random stream. Out: problems such as prompt `437+385` with demonstration `7+5=12;3+8+1=12;4+3+1=8|822`. A carry
is written as `+1` only if there is one, and the answer follows `|`. Invariant: a completion is correct iff it
contains exactly one `|` and the text after it is the answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from gspo.data.task import Problem, check_whole


def build(digits: int = 3) -> Addition:
    """Both numbers have exactly `digits` digits."""
    check_whole("digits", digits, least=1, most=100)
    return Addition(digits)


class Addition:
    alphabet = "".join(sorted("0123456789+=;|"))
    has_demonstrations = True

    def __init__(self, digits: int) -> None:
        # With one digit, 0 is a number of that length.
        self.low = 10 ** (digits - 1) if digits > 1 else 0
        self.high = 10**digits - 1
        self.unique_problems: int | None = (self.high - self.low + 1) ** 2

    def generate(self, rng: random.Random) -> Problem:
        a = rng.randint(self.low, self.high)
        b = rng.randint(self.low, self.high)
        # a+b and b+a are duplicates: one of them must not be trained on if the other is held out.
        key = f"{min(a, b)}+{max(a, b)}"
        return Problem(prompt=f"{a}+{b}", answer=str(a + b), key=key, demonstration=f"{_working(a, b)}|{a + b}")

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        # A second `|` would be part of `answer`, so it is not equal to the expected one.
        _, mark, answer = completion.partition("|")
        return float(bool(mark) and answer.strip() == columns["answer"])


def _working(a: int, b: int) -> str:
    columns = []
    carry = 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ";".join(columns)

"""Secret numbers, for the environment `guess_number`.

In: a random stream. Out: problems such as `0417 1-31` with a number in that range as their answer. Invariant: a
completion is correct iff it is the number. The first number says nothing about it; it makes enough different problems.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from gspo.data.task import Problem, check_whole


def build(largest: int = 31) -> SecretNumber:
    """The number is between 1 and `largest`."""
    check_whole("largest", largest, least=2, most=10**6)
    return SecretNumber(largest)


class SecretNumber:
    alphabet = ""
    has_demonstrations = True

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.unique_problems: int | None = 10**4 * largest

    def generate(self, rng: random.Random) -> Problem:
        game, secret = rng.randrange(10**4), str(rng.randint(1, self._largest))
        prompt = f"{game:04} 1-{self._largest}"
        columns = {"largest": self._largest}
        return Problem(prompt=prompt, answer=secret, key=f"{prompt}: {secret}", columns=columns, demonstration=secret)

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        return float(completion.strip() == columns["answer"])

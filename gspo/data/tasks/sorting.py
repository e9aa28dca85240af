"""Sort digits in ascending order; repeated digits are kept.

In: a random stream. Out: problems such as prompt `sort 5 2 9 2` with demonstration `2 2 5 9`. Invariant: a completion
is correct iff it is exactly the sorted list.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from gspo.data.task import Problem, check_whole
from gspo.errors import ConfigError


def build(min_items: int = 6, max_items: int = 8) -> Sorting:
    """Lists of `min_items` to `max_items` digits."""
    check_whole("min_items", min_items, least=1, most=1000)
    check_whole("max_items", max_items, least=1, most=1000)
    if min_items > max_items:
        raise ConfigError(f"data.task_options.min_items: {min_items} is more than max_items={max_items}; lower it")
    return Sorting(min_items, max_items)


class Sorting:
    alphabet = "".join(sorted(set("sort 0123456789")))
    has_demonstrations = True

    def __init__(self, min_items: int, max_items: int) -> None:
        self.min_items = min_items
        self.max_items = max_items
        self.unique_problems: int | None = sum(10**n for n in range(min_items, max_items + 1))

    def generate(self, rng: random.Random) -> Problem:
        digits = rng.choices("0123456789", k=rng.randint(self.min_items, self.max_items))
        answer = " ".join(sorted(digits))
        # The sorted list is the key: another order of the same digits is the same problem.
        return Problem(prompt=f"sort {' '.join(digits)}", answer=answer, key=answer, demonstration=answer)

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        return float(completion.strip() == columns["answer"])

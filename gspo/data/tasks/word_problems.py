"""Word problems with small whole numbers, for pretrained models that read well and calculate badly.

In: a random stream. Out: problems such as prompt `Ann has 7 apples. She buys 5 more. How many apples does she have
now?` with demonstration `7 + 5 = 12`. Kinds: `add`, `subtract`, `multiply`, `divide` (without remainder), `chain`
(two steps) and `plain` (`What is 7 plus 5?`, also products and greatest common divisors). Invariant: a completion is
correct iff its last number is the answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.data.numbers import last_number
from gspo.data.task import Problem, check_whole
from gspo.errors import ConfigError

_NAMES = {
    "Ann": "She",
    "Ben": "He",
    "Clara": "She",
    "David": "He",
    "Emma": "She",
    "Frank": "He",
    "Grace": "She",
    "Henry": "He",
    "Ivy": "She",
    "Jack": "He",
    "Kate": "She",
    "Liam": "He",
    "Mia": "She",
    "Noah": "He",
    "Olivia": "She",
    "Paul": "He",
}
_THINGS = (
    "apples",
    "books",
    "coins",
    "stickers",
    "marbles",
    "pencils",
    "shells",
    "cards",
    "cookies",
    "flowers",
    "stamps",
    "toys",
    "candles",
    "buttons",
    "oranges",
    "stones",
)
_BOXES = ("boxes", "bags", "baskets", "shelves", "rows", "packs")


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """`numbers` samples (a, b, c) up to a limit; `working` is the calculation that the templates ask for."""

    numbers: Callable[[random.Random, int], tuple[int, int, int]]
    working: Callable[[int, int, int], str]
    value: Callable[[int, int, int], int]
    templates: Sequence[str]


def _pair(rng: random.Random, most: int) -> tuple[int, int, int]:
    return rng.randint(1, most), rng.randint(1, most), 0


def _falling(rng: random.Random, most: int) -> tuple[int, int, int]:
    # Differences are never negative: the stories are about things that one can count.
    low, high = sorted((rng.randint(1, most), rng.randint(1, most)))
    return high, low, 0


def _product(rng: random.Random, most: int) -> tuple[int, int, int]:
    return rng.randint(2, max(2, min(most, 12))), rng.randint(2, max(2, min(most, 9))), 0


def _quotient(rng: random.Random, most: int) -> tuple[int, int, int]:
    a, b, _ = _product(rng, most)
    # The dividend is a product, so the division has no remainder.
    return a * b, b, 0


def _three(rng: random.Random, most: int) -> tuple[int, int, int]:
    a, b = rng.randint(1, most), rng.randint(1, most)
    # At most what is there.
    return a, b, rng.randint(1, a + b)


_KINDS: Mapping[str, _Kind] = {
    "add": _Kind(
        numbers=_pair,
        working=lambda a, b, c: f"{a} + {b}",
        value=lambda a, b, c: a + b,
        templates=(
            "{name} has {a} {things}. {they} buys {b} more. How many {things} does {name} have now?",
            "{name} found {a} {things} in the morning and {b} {things} in the afternoon. How many {things} did {name} "
            "find in all?",
            "There are {a} {things} in a box. {name} puts {b} more {things} into it. How many {things} are in the box?",
            "{name} has {a} {things} and {other} has {b} {things}. How many {things} do they have together?",
            "After {name} gave away {b} {things}, {a} {things} were left. How many {things} were there at first?",
            "{other} has {a} {things}. {name} has {b} more than {other}. How many {things} does {name} have?",
        ),
    ),
    "subtract": _Kind(
        numbers=_falling,
        working=lambda a, b, c: f"{a} - {b}",
        value=lambda a, b, c: a - b,
        templates=(
            "{name} had {a} {things}. {they} gave {b} of them to {other}. How many {things} does {name} have left?",
            "There were {a} {things} on the table. {name} took {b} of them. How many {things} are still on the table?",
            "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have than {other}?",
            "{name} needs {a} {things} and has {b}. How many more {things} does {name} need?",
            "{name} had {b} {things}. {other} gave {name} some more, and now {name} has {a}. How many {things} did "
            "{other} give?",
            "Of {a} {things}, {b} are red and the others are blue. How many {things} are blue?",
        ),
    ),
    "multiply": _Kind(
        numbers=_product,
        working=lambda a, b, c: f"{a} * {b}",
        value=lambda a, b, c: a * b,
        templates=(
            "{name} has {a} {boxes}. There are {b} {things} in each. How many {things} are there in all?",
            "{name} buys {a} {things} every day. How many {things} does {name} buy in {b} days?",
            "Each child gets {a} {things}. How many {things} do {b} children need?",
            "One of the {things} costs {a} dollars. How many dollars do {b} {things} cost?",
        ),
    ),
    "divide": _Kind(
        numbers=_quotient,
        working=lambda a, b, c: f"{a} / {b}",
        value=lambda a, b, c: a // b,
        templates=(
            "{name} shares {a} {things} equally among {b} children. How many {things} does each child get?",
            "{name} puts {a} {things} into {b} {boxes}, the same number in each. How many {things} are in each?",
            "{b} {things} fit into one box. How many boxes does {name} need for {a} {things}?",
            "{b} {things} cost {a} dollars together. How many dollars does one cost?",
        ),
    ),
    "chain": _Kind(
        numbers=_three,
        working=lambda a, b, c: f"{a} + {b} = {a + b}, {a + b} - {c}",
        value=lambda a, b, c: a + b - c,
        templates=(
            "{name} has {a} {things}. {they} gets {b} more and then loses {c}. How many {things} does {name} have now?",
            "{name} had {a} {things} and {other} had {b}. Together they used {c}. How many {things} are left?",
            "A box holds {a} red and {b} blue {things}. {name} takes {c} {things} out. How many {things} are left in "
            "the box?",
        ),
    ),
    "plain": _Kind(
        numbers=lambda rng, most: (*_falling(rng, most)[:2], rng.randrange(6)),
        working=lambda a, b, c: _plain(a, b, c)[1],
        value=lambda a, b, c: _plain(a, b, c)[2],
        templates=("{plain}",),
    ),
}


def _plain(a: int, b: int, kind: int) -> tuple[str, str, int]:
    """Question, working and answer without a story; products and divisors only of small numbers."""
    x = 2 + a % 11
    y = 2 + b % 8
    questions = [
        (f"What is {a} plus {b}?", f"{a} + {b}", a + b),
        (f"What is {a} minus {b}?", f"{a} - {b}", a - b),
        (f"What is {x} times {y}?", f"{x} * {y}", x * y),
        (f"What is {x * y} divided by {y}?", f"{x * y} / {y}", x),
        (f"What is {a} plus {b} minus {y}?", f"{a} + {b} = {a + b}, {a + b} - {y}", a + b - y),
        (f"What is the greatest common divisor of {x * y} and {y}?", f"gcd({x * y}, {y})", math.gcd(x * y, y)),
    ]
    return questions[kind]


def _key(working: str) -> str:
    """The calculation without the story: `7 + 5` is `5 + 7`, and `7 + 5 = 12, 12 - 3` is `5 + 7 - 3`."""
    first, _, second = working.partition(" = ")
    for sign in (" + ", " * "):
        if sign in first:
            first = sign.join(sorted(first.split(sign), key=int))
    return f"{first} - {second.rpartition(' - ')[2]}" if second else first


def build(largest: int = 20, kinds: Sequence[str] = tuple(_KINDS)) -> WordProblems:
    """Sums and differences of numbers from 1 to `largest`, products up to 12 times 9; all `kinds` equally often."""
    check_whole("largest", largest, least=1, most=1_000_000)
    # A single kind may be given without brackets.
    wanted = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in wanted or [""]:
        if kind not in _KINDS:
            raise ConfigError(f"data.task_options.kinds: there is no kind {kind!r}; there are: {', '.join(_KINDS)}")
    return WordProblems(largest, wanted)


class WordProblems:
    alphabet = ""
    unique_problems: int | None = None
    has_demonstrations = True

    def __init__(self, largest: int, kinds: Sequence[str]) -> None:
        self.largest = largest
        self.kinds = kinds

    def generate(self, rng: random.Random) -> Problem:
        name = rng.choice(self.kinds)
        kind = _KINDS[name]
        a, b, c = kind.numbers(rng, self.largest)
        # Sampled for every kind, so that the random stream does not depend on whether a template has names.
        who, other = rng.sample(list(_NAMES), 2)
        prompt = rng.choice(kind.templates).format(
            a=a,
            b=b,
            c=c,
            name=who,
            they=_NAMES[who],
            other=other,
            things=rng.choice(_THINGS),
            boxes=rng.choice(_BOXES),
            # Formatted for every kind, and only shown for `plain`, where c is the number of a question. The c of other
            # kinds may be larger.
            plain=_plain(a, b, c % 6)[0],
        )
        answer = kind.value(a, b, c)
        working = kind.working(a, b, c)
        return Problem(
            prompt=prompt,
            answer=str(answer),
            key=_key(working),
            columns={"kind": name},
            demonstration=f"{working} = {answer}",
        )

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        return float(last_number(completion) == int(columns["answer"]))

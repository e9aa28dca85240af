"""Reach a target from given numbers with + - * / and parentheses, using each number exactly once.

In: a random stream. Out: problems such as prompt `3 5 7 -> 22` with demonstration `3*5+7`; every problem has a
solution. Invariant: a completion is correct iff it is such an expression and its exact rational value is the target.
Model text is tokenized and parsed here and never passed to Python's `eval`. Its length and nesting are limited, so no
completion is slow or raises.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from gspo.data.task import Problem, check_whole
from gspo.errors import ConfigError

MAX_LENGTH = 200
MAX_DEPTH = 20
_ATTEMPTS = 100_000
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3


def build(numbers: int = 3, max_number: int = 20, max_target: int = 100) -> Countdown:
    """`numbers` numbers from 1 to `max_number`, and a target from 1 to `max_target`."""
    check_whole("numbers", numbers, least=2, most=8)
    check_whole("max_number", max_number, least=1, most=1_000_000)
    check_whole("max_target", max_target, least=1, most=1_000_000)
    return Countdown(numbers, max_number, max_target)


class Countdown:
    alphabet = "".join(sorted("0123456789 >+-*/()"))
    has_demonstrations = True

    def __init__(self, numbers: int, max_number: int, max_target: int) -> None:
        self.numbers = numbers
        self.max_number = max_number
        self.max_target = max_target
        self.unique_problems: int | None = max_number**numbers * max_target

    def generate(self, rng: random.Random) -> Problem:
        for _ in range(_ATTEMPTS):
            numbers = [rng.randint(1, self.max_number) for _ in range(self.numbers)]
            target, solution = _random_expression(numbers, rng)
            if 1 <= target <= self.max_target:
                prompt = f"{' '.join(map(str, numbers))} -> {target}"
                columns = {"numbers": numbers, "target": target}
                # The order of the numbers does not matter, so problems that differ only in it are duplicates.
                key = f"{' '.join(map(str, sorted(numbers)))} -> {target}"
                return Problem(prompt=prompt, answer=solution, key=key, columns=columns, demonstration=solution)
        raise ConfigError(
            f"data.task_options.max_target: {self.max_target} is almost never reached from {self.numbers} numbers "
            f"up to {self.max_number}; raise max_target or lower max_number"
        )

    def score(self, completion: str, columns: Mapping[str, Any]) -> float:
        tokens = _tokens(completion.strip())
        used = sorted(t for t in tokens or () if isinstance(t, int))
        # Sorted lists, not sets: a number that is given twice must be used twice.
        if tokens is None or used != sorted(columns["numbers"]):
            return 0.0
        return float(_value(tokens) == columns["target"])


def evaluate(expression: str) -> Fraction | None:
    """Exact value of an arithmetic expression; `None` if it is malformed, too long, too deep, or divides by zero."""
    tokens = _tokens(expression)
    return None if tokens is None else _value(tokens)


# --------------------------------------------------------------------------------------------- generating problems


def _random_expression(numbers: list[int], rng: random.Random) -> tuple[int, str]:
    """Combine all numbers in random order; every intermediate value is a positive whole number."""
    parts = [(n, str(n), _ATOM) for n in numbers]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(_combine(left, right, rng))
    return parts[0][0], parts[0][1]


def _combine(left: tuple[int, str, int], right: tuple[int, str, int], rng: random.Random) -> tuple[int, str, int]:
    (a, a_text, a_level), (b, b_text, b_level) = left, right
    results = {"+": a + b, "*": a * b}
    # Keeps every value positive, so that a later division is possible.
    if a > b:
        results["-"] = a - b
    if a % b == 0:
        results["/"] = a // b
    sign = rng.choice(list(results))
    level = _PRECEDENCE[sign]
    if a_level < level:
        a_text = f"({a_text})"
    # 8-(5-2) and 8/(4/2) need their parentheses; 8+(5-2) does not.
    if b_level < level or (b_level == level and sign in "-/"):
        b_text = f"({b_text})"
    return results[sign], f"{a_text}{sign}{b_text}", level


# --------------------------------------------------------------------------------------------- parsing completions


class _Malformed(Exception):
    pass


def _tokens(text: str) -> list[int | str] | None:
    """Whole numbers and signs; `None` if there is anything else. ASCII digits only: `int` accepts many others."""
    # Before any conversion: `int` raises a ValueError on thousands of digits.
    if len(text) > MAX_LENGTH:
        return None
    tokens: list[int | str] = []
    position = 0
    while position < len(text):
        end = position
        while end < len(text) and text[end] in "0123456789":
            end += 1
        if end > position:
            tokens.append(int(text[position:end]))
            position = end
            continue
        if text[position] in "+-*/()":
            tokens.append(text[position])
        elif text[position] != " ":
            return None
        position += 1
    return tokens


def _value(tokens: list[int | str]) -> Fraction | None:
    try:
        value, end = _sum(tokens, 0, 0)
    except (_Malformed, ZeroDivisionError):
        return None
    return value if end == len(tokens) else None


def _sum(tokens: list[int | str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in ("+", "-"):
        right, after = _product(tokens, at + 1, depth)
        value = value + right if tokens[at] == "+" else value - right
        at = after
    return value, at


def _product(tokens: list[int | str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _atom(tokens, at, depth)
    while at < len(tokens) and tokens[at] in ("*", "/"):
        right, after = _atom(tokens, at + 1, depth)
        value = value * right if tokens[at] == "*" else value / right
        at = after
    return value, at


def _atom(tokens: list[int | str], at: int, depth: int) -> tuple[Fraction, int]:
    token = tokens[at] if at < len(tokens) else None
    if isinstance(token, int):
        return Fraction(token), at + 1
    # The parser is recursive, so nesting needs a limit of its own, below that of Python.
    if token != "(" or depth == MAX_DEPTH:
        raise _Malformed
    value, at = _sum(tokens, at + 1, depth + 1)
    if at >= len(tokens) or tokens[at] != ")":
        raise _Malformed
    return value, at + 1

"""1 if the completion's final answer is mathematically equal to the `answer` column, else 0.

`\\boxed{\\frac12}`, `0.5` and `1/2` are equal; so are `1,234` and `1234`, `1.2e4` and `12000`, `50%` and `0.5` or
`50`. `gspo/reward/final_answer.py` defines which part of a completion is its final answer; a completion without one, or
with several that differ, is wrong. With `marker` (`####`), only the text after its last occurrence is read, and a
completion without it is wrong. If the *expected* answer cannot be parsed as mathematics, this abstains. From words with
a single number (`72 clips`), the number is taken; for `Paris` use `exact_answer`. Numbers are compared exactly. A
decimal with at least 6 significant digits also equals any value that rounds or truncates to it (`0.333333` and `1/3`).
Formulas are compared by math-verify. An answer that takes more than `limit_s` seconds of CPU time to parse and compare
(`9^{9^{9^9}}`) is wrong.
"""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from types import FrameType
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import Expr, Float, Rational

from gspo.data.numbers import Number
from gspo.errors import ConfigError
from gspo.reward.answer import Answer, read_expected, read_stated
from gspo.reward.completion_text import completion_text
from gspo.reward.final_answer import FinalAnswer, final_answer
from gspo.reward.function import NotedScore
from gspo.reward.traits import RewardTraits, in_form

EXAMPLE: dict[str, Any] = {
    "completion": "So it is $\\boxed{\\frac{1}{2}}$.",
    "columns": {"answer": "0.5"},
    "options": {},
}
TRAITS = RewardTraits(known_answers=in_form("\\boxed{ANSWER}"))

PRECISE = 6
"""Minimum number of significant digits for a decimal to equal values that round to it."""
_TARGETS = (LatexExtractionConfig(boxed_match_priority=-1),)
# 400 digits, exponents of 6 digits, factorials of 5 digits, repeated factorials, towers of three powers. A single
# operation on such integers runs in C code, which the time limit cannot interrupt.
_HUGE = re.compile(r"[0-9]{400}|\^\s*\{?\s*[0-9]{6}|[0-9]{5}\s*[)}]*\s*!|!\s*!|\^[^+=,]{0,40}\^[^+=,]{0,40}\^")
_TOWER = re.compile(r"\^\s*\{?\s*([0-9]{1,3})\s*\^\s*\{?\s*([0-9]+)")
"""Powers and factorials that are too large to evaluate. No real answer needs them."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warnings contain whole completions


def score(
    prompts: list[Any],
    completions: list[Any],
    answer: list[Any],
    *,
    marker: str = "",
    limit_s: float = 2,
    **columns: Any,
) -> list[float | None]:
    # Once per different answer: all completions of a prompt share it.
    expected = {text: _expected(text, limit_s) for text in set(map(str, answer))}
    stated = [final_answer(completion_text(c), marker) for c in completions]
    return [_score(expected[str(a)], s, limit_s) for a, s in zip(answer, stated, strict=True)]


def check(marker: Any = "", limit_s: Any = 2) -> None:
    """Reject invalid options before the run starts."""
    if not isinstance(marker, str):
        raise ConfigError(f"reward.options.math_answer.marker: {marker!r}: must be text")
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s <= 3600:
        raise ConfigError(f"reward.options.math_answer.limit_s: {limit_s!r}: must be a number of seconds above 0")


def _expected(text: str, limit_s: float) -> Answer | None:
    """The expected answer; `None` if it cannot be parsed as mathematics."""
    try:
        with _processor_limit(limit_s):
            found = read_expected(text)
            return found if found and all(_usable(part) for part in _formulas(found)) else None
    except TimeoutException:
        return None


def _score(expected: Answer | None, stated: FinalAnswer | None, limit_s: float) -> float | None:
    if expected is None:
        return None
    try:
        with _processor_limit(limit_s):
            return float(stated is not None and _right(expected, stated))
    except TimeoutException:
        # A zero, not a failure: otherwise a model could avoid a wrong score with an answer that is slow to compare.
        return NotedScore(0.0, "timeout")


def _right(expected: Answer, stated: FinalAnswer) -> bool:
    """Whether every statement equals the expected answer, or all of them together form the expected list."""
    if all(_equal(expected, read_stated(text, stated, expected)) for text in stated.texts):
        return True
    together = len(stated.texts) > 1 and bool(expected.items)
    return together and _equal(expected, read_stated(", ".join(stated.texts), stated, expected))


# ------------------------------------------------------------------------------------------------- comparison


def _equal(expected: Answer, given: Answer | None) -> bool:
    if given is None or (expected.name and given.name and expected.name != given.name):
        return False
    if expected.choice or given.choice:
        return expected.choice == given.choice or (expected.text == given.text)
    if {expected.base, given.base} - {0, 10}:  # the digits may omit the expected base, but not name another one
        return expected.base not in (0, 10) and expected.text == given.text and given.base in (0, expected.base)
    if expected.items or given.items:
        return _equal_lists(expected, given)
    if expected.number and given.number:
        return _equal_numbers(expected.number, given.number)
    if expected.text == given.text:
        return True
    try:
        return _equal_formulas(expected, given)
    except Exception:  # what cannot be compared is not equal; a timeout is a BaseException and propagates
        return False


def _equal_lists(expected: Answer, given: Answer) -> bool:
    left, right = expected.items or (expected,), given.items or (given,)
    bare = "{}" in (expected.brackets or "{}", given.brackets or "{}")
    if len(left) != len(right) or not (bare or expected.brackets == given.brackets):
        return False
    # In order first, which is the common case. Only sets may be in another order.
    if all(map(_equal, left, right)):
        return not bare or "[" not in expected.brackets + given.brackets
    if {expected.brackets or "{}", given.brackets or "{}"} != {"{}"}:
        return False
    # A multiset comparison: {1, 1, 2} does not equal {1, 2, 2}.
    rest = list(right)
    for item in left:
        at = next((i for i, other in enumerate(rest) if _equal(item, other)), None)
        if at is None:
            return False
        del rest[at]
    return True


def _equal_numbers(expected: Number, given: Number) -> bool:
    if {expected.currency, given.currency} == {"$", "¢"}:
        expected, given = _in_dollars(expected), _in_dollars(given)
    elif expected.currency and given.currency and expected.currency != given.currency:
        return False
    if expected.value == given.value or _rounds(expected.value, given) or _rounds(given.value, expected):
        return True
    if expected.percent == given.percent:
        return False  # only if one side has a percent sign may 50% equal 50 or 0.5
    share, percentage = (given, expected) if expected.percent else (expected, given)
    return share.value * 100 == percentage.value or _rounds(share.value * 100, percentage)


def _in_dollars(amount: Number) -> Number:
    return replace(amount, value=amount.value / 100) if amount.currency == "¢" else amount


def _rounds(value: Fraction, decimal: Number) -> bool:
    """Whether a value rounds or truncates to this decimal at its written precision."""
    if not decimal.places or decimal.digits < PRECISE:
        return False
    scale = 10**decimal.places
    return decimal.value * scale in (round(value * scale), math.trunc(value * scale))


def _equal_formulas(expected: Answer, given: Answer) -> bool:
    left, right = _meaning(expected), _meaning(given)
    if left is None or right is None:
        return False
    if not (_is_number(left) and _is_number(right)):
        # Without math-verify's own timeout, which counts wall time and so depends on how busy the machine is.
        return bool(verify(left, right, timeout_seconds=None, raise_on_error=True))
    # 40 digits, so that the tolerance of 1e-30 for exact values is above the error of the evaluation.
    a, b = left.evalf(40), right.evalf(40)
    # A relative tolerance: math-verify's own is absolute (5e-7), which would accept any two tiny numbers.
    precision = "1e-13" if left.has(Float) or right.has(Float) else "1e-30"
    if abs(a - b) <= max(abs(a), abs(b)) * Float(precision, 40):
        return True
    formula, number = (b, expected.number) if expected.number else (a, given.number)
    return (
        number is not None
        and bool(formula.is_real)
        and abs(formula) < 1e100
        and _rounds(Fraction(str(formula)), number)
    )


def _meaning(answer: Answer) -> Any:
    """The formula as math-verify parses it; `None` if it cannot."""
    if answer.number:
        return Rational(answer.number.value.numerator, answer.number.value.denominator)
    found = _parsed(answer.text)
    return found[0] if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Expr) and bool(value.is_number) and bool(value.is_finite)


def _usable(answer: Answer) -> bool:
    """Whether an expected formula can be parsed and, if it is a number, evaluated. If not, no completion can match."""
    meaning = _meaning(answer)
    return meaning is not None and (not _is_number(meaning) or bool(meaning.evalf(40).is_number))


def _formulas(answer: Answer) -> Iterator[Answer]:
    """The parts of an answer that math-verify has to parse."""
    for item in answer.items:
        yield from _formulas(item)
    if not (answer.items or answer.number or answer.choice or answer.base):
        yield answer


def _parsed(text: str) -> list[Any]:
    """The parsed formula; empty if it cannot be parsed."""
    if _HUGE.search(text) or any(int(high) * math.log10(max(int(low), 1)) > 5 for low, high in _TOWER.findall(text)):
        return []
    try:
        return parse(f"${text}$", _TARGETS, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    except Exception:  # not a formula; a timeout is a BaseException and propagates
        return []


# ------------------------------------------------------------------------------------------------- time


@contextmanager
def _processor_limit(limit_s: float) -> Iterator[None]:
    """Raise `TimeoutException` after that much CPU time, so the result does not depend on how busy the machine is."""
    before = signal.signal(signal.SIGPROF, _raise)
    signal.setitimer(signal.ITIMER_PROF, limit_s, 0.1)  # repeats, because a library may swallow the first exception
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeoutException

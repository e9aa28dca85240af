"""1 when the reply's final answer equals the `answer` column as mathematics, else 0, by math-verify.

`\\boxed{\\frac12}`, `0.5` and `1/2` are equal; so are `1,234` and `1234`. A reply without a readable answer is wrong. When
the *expected* answer cannot be read as mathematics, this abstains: nobody can say that the reply is wrong (of words with
one number, `72 clips`, the number counts; for `Paris` use `exact_answer`). With `marker` (`####`) only what follows its
last occurrence is read, and a reply without it is wrong; else math-verify searches the whole reply, first for `\\boxed`,
and may prefer a number near the word "answer" to the last one. A reply whose answer takes longer than `limit_s` to read
or to compare (`9^{9^{9^9}}`) fails alone and stays unscored.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

from gspo.reward.reply import reply_text

EXAMPLE: dict[str, Any] = {"reply": "So it is $\\boxed{\\frac{1}{2}}$.", "columns": {"answer": "0.5"}, "options": {}}

_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:[ ,][0-9]{3})+(?:\.[0-9]*)?")
_NAMES = re.compile(r"(?<![A-Za-z\\])(sin|cos|tan|log|exp|ln|pi)(?![A-Za-z])")
_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt\(([^()]*)\)")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warnings repeat whole replies


def score(
    prompts: list[Any],
    completions: list[Any],
    answer: list[Any],
    *,
    marker: str = "",
    limit_s: int = 2,
    **columns: Any,
) -> list[float | Exception | None]:
    expected = {text: _expected(text, limit_s) for text in set(map(str, answer))}
    stated = [_stated(reply_text(c), marker) for c in completions]
    return [_score(expected[str(a)], text, limit_s) for a, text in zip(answer, stated, strict=True)]


def _stated(reply: str, marker: str) -> str:
    """Where to look for the reply's answer."""
    if not marker:
        return reply
    return reply.rpartition(marker)[2] if marker in reply else ""


def _expected(answer: str, limit_s: int) -> list[Any]:
    """What the expected answer means, read as a whole: math-verify's plain reading of `3x+1` would find the 3."""
    try:
        if number := _number(answer):
            return _parse(f"${number}$", limit_s)
        if "$" in answer or "\\boxed" in answer:
            return _parse(answer, limit_s)
        latex = _ROOT.sub(r"\\sqrt{\1}", _NAMES.sub(r"\\\1", answer))
        if "\\" in answer or not _WORD.search(latex):  # as LaTeX, words would be products of variables
            return _parse(f"${latex}$", limit_s)
        return _parse(answer, limit_s) if len(re.findall(r"[0-9]+(?:[.,][0-9]+)*", answer)) == 1 else []
    except TimeoutException:
        return []


def _number(text: str) -> str:
    """The number that is the whole text, written out in digits; empty if it is none."""
    text = re.sub("[ ,]", "", text.strip()) if _THOUSANDS.fullmatch(text.strip()) else text
    try:
        number = Decimal(text)
    except InvalidOperation:
        return ""
    return format(number, "f") if number.is_finite() and abs(number.adjusted()) < 100 else ""


def _score(expected: list[Any], reply: str, limit_s: int) -> float | Exception | None:
    if not expected:
        return None
    try:
        given = _parse(reply, limit_s)
        return 1.0 if any(_equal(e, g, limit_s) for e in expected for g in given) else 0.0
    except TimeoutException:
        return TimeoutError(f"math-verify needed more than {limit_s} s")


def _parse(text: str, limit_s: int) -> list[Any]:
    try:
        return parse(text, _TARGETS, fallback_mode="no_fallback", parsing_timeout=limit_s, raise_on_error=True)
    except Exception:  # not an expression, whatever the reason; a timeout is no Exception and passes through
        return []


def _equal(expected: Any, given: Any, limit_s: int) -> bool:
    try:
        return bool(verify(expected, given, timeout_seconds=limit_s, raise_on_error=True))
    except Exception:  # two things that cannot be compared are not equal
        return False

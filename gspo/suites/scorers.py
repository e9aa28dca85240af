"""How the answers of a benchmark are extracted and scored.

In: a completion. Out: its answer, in a notation that a vote can compare; None if it has none in the form that was asked
for. Invariant: the answer is part of what the reward function reads. That function may read more: the last sentence of
a completion that marks no answer.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from gspo.reward.final_answer import final_answer
from gspo.reward.rewards.code_tests import program_of

_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_NUMBER = re.compile(r"[-+]?[0-9]{1,300}(\.[0-9]{1,300}|/[0-9]{1,300})?")


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A reward function with the settings of a protocol."""

    reward: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float
    """`reward.timeout_s`."""
    answer: Callable[[str], str | None]
    votes: bool
    """Whether answers can be compared, so that a majority exists."""
    extraction: str
    """What is extracted, for the documentation."""


def math_answer(completion: str) -> str | None:
    """The final answer, without differences in notation that are certain to mean the same."""
    found = final_answer(completion)
    return None if found is None or not found.marked else "; ".join(map(_canonical, found.texts))


def _canonical(text: str) -> str:
    plain = "".join(text.split()).strip("$").removesuffix(".").replace("\\left", "").replace("\\right", "")
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    if _THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    if _NUMBER.fullmatch(plain) and not re.fullmatch(r".*/0+", plain):
        return str(Fraction(plain))
    return plain


def program(completion: str) -> str | None:
    """The program, if it is Python."""
    code = program_of(completion)
    if not code.strip():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in what a model wrote
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return code


MATH = Scorer(
    reward="math_answer",
    timeout_s=30.0,
    answer=math_answer,
    votes=True,
    extraction="the final answer (`\\boxed{}` first), compared as mathematics",
)


def code(limit_s: float) -> Scorer:
    """Run the program in the sandbox, with this many seconds for all tests of a problem."""
    return Scorer(
        reward="code_tests",
        options={"limit_s": limit_s},
        timeout_s=20 * limit_s,
        answer=program,
        votes=False,
        extraction=f"the last Python block, run in the sandbox for at most {limit_s:g} s",
    )

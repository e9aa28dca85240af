"""MATH-500: 500 competition problems of MATH, with their subject and level."""

from __future__ import annotations

from gspo.suites.fields import Fields
from gspo.suites.scorers import MATH
from gspo.suites.suite import Suite, SuiteProblem


def _read(row: Fields) -> SuiteProblem:
    problem = row.text("problem")
    return SuiteProblem(
        problem=problem,
        prompt=f"{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        columns={"answer": row.text("answer")},
        breakdown={name: str(row.value(name)) for name in ("level", "subject") if row.value(name) is not None},
    )


SUITE = Suite(
    title="MATH-500",
    schema="problem, answer, and optionally subject and level",
    count=500,
    hub="HuggingFaceH4/MATH-500",
    samples=4,
    temperature=0.6,
    top_p=0.95,
    max_tokens=32768,
    ks=(1, 4),
    scorer=MATH,
    read=_read,
    source="DeepSeek-R1, arXiv:2501.12948 (4 to 64 completions, depending on the size of the test set)",
)

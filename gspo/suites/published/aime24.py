"""AIME 2024: 30 competition problems whose answers are integers from 0 to 999."""

from __future__ import annotations

from gspo.suites.fields import Fields
from gspo.suites.scorers import MATH
from gspo.suites.suite import Suite, SuiteProblem


def _read(row: Fields) -> SuiteProblem:
    problem = row.text("problem")
    answer = row.number("answer")
    if not 0 <= answer <= 999:
        raise row.error(f"field 'answer' must be from 0 to 999, not {answer}")
    return SuiteProblem(
        problem=problem,
        prompt=f"{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        columns={"answer": str(answer)},
    )


SUITE = Suite(
    title="AIME 2024",
    schema="problem, answer",
    count=30,
    hub="HuggingFaceH4/aime_2024",
    split="train",
    samples=64,
    temperature=0.6,
    top_p=0.95,
    max_tokens=32768,
    ks=(1, 8, 64),
    scorer=MATH,
    read=_read,
    source="DeepSeek-R1, arXiv:2501.12948",
)

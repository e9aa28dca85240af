"""GSM8K: grade-school word problems. The result follows `####` at the end of `answer`."""

from __future__ import annotations

from gspo.suites.fields import Fields
from gspo.suites.scorers import MATH
from gspo.suites.suite import Suite, SuiteProblem


def _read(row: Fields) -> SuiteProblem:
    question = row.text("question")
    _, mark, result = row.text("answer").rpartition("####")
    if not mark or not result.strip():
        raise row.error("field 'answer' must end with '#### ' and the result")
    return SuiteProblem(problem=question, prompt=question, columns={"answer": result.strip().replace(",", "")})


SUITE = Suite(
    title="GSM8K",
    schema="question, answer",
    count=1319,
    hub="openai/gsm8k",
    hub_config="main",
    system="Please reason step by step, and put your final answer within \\boxed{}.",
    samples=1,
    temperature=0.0,
    max_tokens=2048,
    scorer=MATH,
    read=_read,
    source="Qwen2.5-Math, evaluation/sh/eval.sh with prompt qwen25-math-cot",
)

"""HumanEval: 164 Python functions to complete from their signature and docstring."""

from __future__ import annotations

from gspo.suites.fields import Fields
from gspo.suites.scorers import code
from gspo.suites.suite import Suite, SuiteProblem


def _read(row: Fields) -> SuiteProblem:
    prompt = row.text("prompt")
    asked = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
    return SuiteProblem(
        problem=prompt,
        prompt=f"{asked}\n```\n{prompt.strip()}\n```",
        # The imports and helpers of the prompt precede the program.
        columns={"prompt": prompt, "test": row.text("test"), "entry_point": row.text("entry_point")},
    )


SUITE = Suite(
    title="HumanEval",
    schema="prompt, test, entry_point",
    count=164,
    hub="openai/openai_humaneval",
    samples=1,
    temperature=0.0,
    max_tokens=768,
    scorer=code(limit_s=5.0),
    read=_read,
    source="EvalPlus, evalplus/codegen.py: its instruction and limits, without the beginning of the answer",
)

"""MBPP: short Python tasks with three asserts each. The test split has the task ids 11 to 510."""

from __future__ import annotations

from gspo.suites.fields import Fields
from gspo.suites.scorers import code
from gspo.suites.suite import Suite, SuiteProblem


def _read(row: Fields) -> SuiteProblem | None:
    if not 11 <= row.number("task_id") <= 510:
        return None
    task = row.text("text", "prompt").strip()  # the sanitized version has `prompt`
    tests = row.texts("test_list")
    asked = f"You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:"
    columns = {name: row.value(name) for name in ("test_setup_code", "test_imports") if row.value(name)}
    return SuiteProblem(problem=task, prompt="\n".join([asked, "", *tests]), columns={"test_list": tests, **columns})


SUITE = Suite(
    title="MBPP",
    schema="task_id, text (or prompt), test_list, and optionally test_setup_code and test_imports",
    count=500,
    hub="google-research-datasets/mbpp",
    hub_config="full",
    samples=1,
    temperature=0.0,
    max_tokens=768,
    scorer=code(limit_s=5.0),
    read=_read,
    source="Austin et al., arXiv:2108.07732: the prompt without examples; greedy with the token limit of EvalPlus",
)

"""Tasks are found by name, and every task keeps the protocol."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from gspo.data.task import build_task, task_names
from gspo.errors import ConfigError


def task_cases():
    return [f"{name}:leg_counting" if name == "reasoning_gym" else name for name in task_names()]


@pytest.mark.parametrize("name", task_cases())
def test_every_task_keeps_the_protocol(name):
    if name.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    task = build_task(name, {})
    problems = [task.generate(random.Random(f"{i}")) for i in range(50)]
    assert problems == [build_task(name, {}).generate(random.Random(f"{i}")) for i in range(50)]
    assert len({p.prompt for p in problems}) > 10
    assert list(task.alphabet) == sorted(set(task.alphabet))
    for p in problems:
        columns = json.loads(json.dumps({**p.columns, "answer": p.answer}))
        assert bool(p.demonstration) is task.has_demonstrations
        assert task.score(p.demonstration or p.answer, columns) == 1.0
        assert task.score("", columns) < 1.0
        assert task.score("nonsense", columns) < 1.0
        if task.alphabet:
            assert set(p.prompt + p.demonstration) <= set(task.alphabet)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("subtraction", {}, r"no task 'subtraction'; there are: addition, calculation, countdown, reasoning_gym"),
        ("addition:big", {}, r"'addition' has no variants"),
        ("addition", {"digit": 3}, r"data\.task_options\.digit: .* it has: digits"),
        ("addition", {"digits": 0}, r"data\.task_options\.digits: must be a whole number from 1"),
        ("addition", {"digits": True}, r"data\.task_options\.digits"),
        ("addition", {"digits": "3"}, r"data\.task_options\.digits"),
        ("sorting", {"min_items": 9}, r"min_items: 9 is more than max_items=8"),
        ("countdown", {"numbers": 1}, r"data\.task_options\.numbers"),
        ("countdown", {"depth": 1}, r"it has: numbers, max_number, max_target"),
    ],
)
def test_unknown_names_and_options_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_task(name, options)


def test_the_package_imports_nothing_heavy():
    code = (
        "import sys, gspo.data.problems, gspo.data.task as t; "
        "[t.build_task(n, {}) for n in ('addition', 'countdown')]; "
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'reasoning_gym'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

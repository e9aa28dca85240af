"""Tasks for environments: their demonstrations score 1, and anything else 0."""

from __future__ import annotations

import random

import pytest

from gspo.data.task import build_task
from gspo.errors import ConfigError


@pytest.mark.parametrize("name", ["calculation", "secret_number"])
def test_demonstrations_are_correct(name: str) -> None:
    task = build_task(name, {})
    rng = random.Random(0)
    for _ in range(200):
        problem = task.generate(rng)
        columns = {"answer": problem.answer, **problem.columns}
        assert task.score(problem.demonstration, columns) == 1.0
        assert task.score(f"{problem.demonstration}1", columns) == 0.0


def test_small_calculations_need_no_carry() -> None:
    task = build_task("calculation", {"large_share": 0.5})
    rng = random.Random(0)
    problems = [task.generate(rng) for _ in range(300)]
    small = [p for p in problems if p.columns["kind"] == "small"]
    assert 100 < len(small) < 200
    for problem in small:
        a, b = map(int, problem.prompt.split("+"))
        assert a % 10 + b < 10
    with pytest.raises(ConfigError, match="large_share: must be a number from 0 to 1"):
        build_task("calculation", {"large_share": 2})

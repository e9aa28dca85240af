"""Word problems: every answer agrees with its demonstration, and only correct completions score."""

from __future__ import annotations

import math
import random
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.data.task import build_task
from gspo.data.tasks.countdown import evaluate
from gspo.errors import ConfigError

KINDS = ["add", "subtract", "multiply", "divide", "chain", "plain"]


@given(st.integers(), st.integers(1, 10_000), st.sampled_from(KINDS))
def test_demonstrations_are_correct_and_other_numbers_are_not(seed, largest, kind):
    task = build_task("word_problems", {"largest": largest, "kinds": [kind]})
    problem = task.generate(random.Random(seed))
    columns = {"answer": problem.answer, **problem.columns}
    assert columns["kind"] == kind
    assert task.score(problem.demonstration, columns) == 1.0
    assert task.score(f"so it is {problem.answer} apples.", columns) == 1.0
    for wrong in ("", "none", str(int(problem.answer) + 1), f"{problem.answer} or {int(problem.answer) + 1}"):
        assert task.score(wrong, columns) == 0.0
    for step in problem.demonstration.split(", ") if "gcd" not in problem.demonstration else ():
        left, right = step.split(" = ")
        assert evaluate(left) == Fraction(right)
    if found := re.fullmatch(r"gcd\((\d+), (\d+)\) = (\d+)", problem.demonstration):
        assert math.gcd(int(found[1]), int(found[2])) == int(found[3])


@given(st.integers(), st.sampled_from(KINDS))
def test_the_prompt_contains_the_numbers_of_the_working(seed, kind):
    problem = build_task("word_problems", {"kinds": [kind]}).generate(random.Random(seed))
    given_numbers = re.findall(r"\d+", problem.prompt)
    first = problem.demonstration.split(" = ")[0]
    assert sorted(re.findall(r"\d+", first)) == sorted(
        given_numbers[: 2 if kind == "chain" or len(given_numbers) == 3 else None]
    )
    assert "{" not in problem.prompt
    assert problem.prompt.endswith("?")


def test_numbers_stay_below_the_largest():
    task = build_task("word_problems", {"largest": 9, "kinds": ["add", "subtract"]})
    rng = random.Random(0)
    for _ in range(200):
        assert max(map(int, re.findall(r"\d+", task.generate(rng).prompt))) <= 9


def test_an_unknown_kind_is_named():
    with pytest.raises(
        ConfigError, match=r"data.task_options.kinds: there is no kind 'cube'; there are: add, subtract"
    ):
        build_task("word_problems", {"kinds": ["cube"]})
    with pytest.raises(ConfigError, match=r"data.task_options.kinds"):
        build_task("word_problems", {"kinds": []})

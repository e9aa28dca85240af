"""reasoning-gym tasks: their questions and verifiers, and entries that survive JSON exactly."""

from __future__ import annotations

import json
import random
import sys

import pytest

from gspo.config import DataConfig
from gspo.data.problems import demonstrations, load_problems
from gspo.data.task import build_task
from gspo.errors import ConfigError


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        build_task("reasoning_gym:leg_counting", {})


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def problem_of(task):
    problem = task.generate(random.Random(0))
    return problem, json.loads(json.dumps({**problem.columns, "answer": problem.answer}))


def test_tags_are_read_if_present(gym):
    task = build_task("reasoning_gym:leg_counting", {})
    problem, columns = problem_of(task)
    assert task.score(f"I count <answer>1</answer>, no: <answer> {problem.answer} </answer>.", columns) == 1.0
    assert task.score(f" {problem.answer}\n", columns) == 1.0
    assert task.score("<answer>1</answer>", columns) == 0.0
    assert task.score("</answer><answer>", columns) == 0.0


@pytest.mark.parametrize("name", ["rearc", "polynomial_multiplication", "countdown", "mini_sudoku"])
def test_verifiers_get_back_tuples_and_keys_after_json(gym, name):
    task = build_task(f"reasoning_gym:{name}", {"size": 50})
    problem, columns = problem_of(task)
    assert task.score(problem.answer, columns) == 1.0


def test_wrong_names_and_options(gym):
    with pytest.raises(ConfigError, match=r"no task 'leg_countin'; .*leg_counting"):
        build_task("reasoning_gym:leg_countin", {})
    with pytest.raises(ConfigError, match="write reasoning_gym:NAME"):
        build_task("reasoning_gym", {})
    with pytest.raises(ConfigError, match=r"data\.task_options\.legs: .*min_animals"):
        build_task("reasoning_gym:leg_counting", {"legs": 2})
    with pytest.raises(ConfigError, match="max_animals must be >= min_animals"):
        build_task("reasoning_gym:leg_counting", {"min_animals": 9, "max_animals": 1})


def test_problems_load_and_there_is_no_cold_start(gym, plain_tokenizer):
    config = DataConfig(task="reasoning_gym:leg_counting", task_size=20, held_out=5, max_prompt_tokens=2000)
    problems = load_problems(config, plain_tokenizer, 0)
    assert (len(problems.train), len(problems.held_out)) == (20, 5)
    assert "legs" in problems.train[0].text
    with pytest.raises(ConfigError, match=r"cold_start\.steps=0"):
        demonstrations(config, 0)

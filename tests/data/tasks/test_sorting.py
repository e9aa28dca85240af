"""Sorting digits: only exact answers score."""

from __future__ import annotations

import random

import pytest

from gspo.data.task import build_task


def test_problem_and_answer_have_the_same_digits():
    task = build_task("sorting", {"min_items": 2, "max_items": 5})
    for seed in range(50):
        problem = task.generate(random.Random(seed))
        word, *digits = problem.prompt.split(" ")
        assert word == "sort"
        assert 2 <= len(digits) <= 5
        assert problem.answer == problem.demonstration == " ".join(sorted(digits))


@pytest.mark.parametrize(
    ("completion", "score"), [("2 5 9", 1), (" 2 5 9\n", 1), ("259", 0), ("2  5 9", 0), ("2 5", 0)]
)
def test_score_is_exact(completion, score):
    assert build_task("sorting", {}).score(completion, {"answer": "2 5 9"}) == score

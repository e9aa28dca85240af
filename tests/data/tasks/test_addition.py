"""Column addition: demonstrations score 1, corrupted answers score 0."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gspo.data.task import build_task


class Fixed(random.Random):
    """Returns the given numbers."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def randint(self, low, high):
        assert low <= self.numbers[0] <= high
        return self.numbers.pop(0)


def test_working_of_the_documented_example():
    problem = build_task("addition", {}).generate(Fixed(437, 385))
    assert (problem.prompt, problem.answer) == ("437+385", "822")
    assert problem.demonstration == "7+5=12;3+8+1=12;4+3+1=8|822"


def test_no_carry_and_final_carry():
    task = build_task("addition", {"digits": 2})
    assert task.generate(Fixed(12, 34)).demonstration == "2+4=6;1+3=4|46"
    assert task.generate(Fixed(95, 95)).demonstration == "5+5=10;9+9+1=19|190"


@given(st.integers(1, 12), st.integers(), st.integers(1, 9))
def test_demonstrations_score_one_and_corrupted_answers_zero(digits, seed, change):
    task = build_task("addition", {"digits": digits})
    problem = task.generate(random.Random(seed))
    columns = {"answer": problem.answer}
    left, right = problem.prompt.split("+")
    assert int(left) + int(right) == int(problem.answer)
    assert len(left) == len(right) == digits
    assert task.score(problem.demonstration, columns) == 1.0
    assert task.score(f"| {problem.answer} \n", columns) == 1.0
    working = problem.demonstration.split("|")[0]
    for wrong in (int(problem.answer) + change, f"0{problem.answer}", "", f"{problem.answer}|{problem.answer}"):
        assert task.score(f"{working}|{wrong}", columns) == 0.0
    assert task.score(problem.answer, columns) == 0.0
    assert task.score(f"|{problem.demonstration}", columns) == 0.0


def test_a_small_task_knows_its_number_of_problems():
    assert build_task("addition", {"digits": 1}).unique_problems == 100

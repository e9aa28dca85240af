"""Countdown: its own exact evaluator, which no completion can break."""

from __future__ import annotations

import random
import re
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.data.task import build_task
from gspo.data.tasks.countdown import MAX_DEPTH, evaluate
from gspo.errors import ConfigError

SIGNS = st.sampled_from("+-*/")
TREES = st.recursive(st.integers(0, 30), lambda t: st.tuples(SIGNS, t, t), max_leaves=8)


def text_of(tree):
    return str(tree) if isinstance(tree, int) else f"({text_of(tree[1])}{tree[0]}{text_of(tree[2])})"


def value_of(tree):
    if isinstance(tree, int):
        return Fraction(tree)
    sign, a, b = tree[0], value_of(tree[1]), value_of(tree[2])
    if a is None or b is None or (sign == "/" and b == 0):
        return None
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[sign]()


def python_value(text):
    """Python's own precedence, for flat expressions that the test itself builds."""
    try:
        return eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


@given(TREES)
def test_evaluates_trees_like_an_independent_evaluator(tree):
    assert evaluate(text_of(tree)) == value_of(tree)


@given(st.lists(st.tuples(SIGNS, st.integers(0, 99)), max_size=8), st.integers(0, 99))
def test_precedence_and_associativity_are_those_of_arithmetic(steps, first):
    text = str(first) + "".join(f" {sign} {n}" for sign, n in steps)
    assert evaluate(text) == python_value(text)


@given(st.text() | st.text("0123456789+-*/() ", max_size=300))
def test_hostile_text_never_raises(text):
    value = evaluate(text)
    assert value is None or isinstance(value, Fraction)
    assert build_task("countdown", {}).score(text, {"numbers": [3, 5, 7], "target": 22}) in (0.0, 1.0)


def traced(function, *arguments):
    """The result of a call, and the number of lines of Python that it executed."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return function(*arguments), lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "()",
        "(",
        "1+",
        "+1",
        "-1",
        "1 2",
        "1//2",
        "2**3",
        "9**9**9",
        "1/0",
        "1/(2-2)",
        "(1",
        "1)",
        "1+2=3",
        "٣+1",
        "²",
        "1.5",
        "1e3",
        "1_0",
        "0x1",
        "__import__('os')",
        "(" * 10_000,
        "(" * 50 + "1" + ")" * 50,
        "1" * 1_000_000,
        "1\n+2",
    ],
)
def test_malformed_too_long_or_too_deep_has_no_value(text):
    value, lines = traced(evaluate, text)
    assert value is None
    assert lines < 10_000, "the longest text is refused before it is read"


def test_nesting_up_to_the_limit_is_read():
    assert evaluate("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH) == 7


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("3*5+7", 1),
        (" 7 + (5*3) \n", 1),
        ("22", 0),
        ("3*5+7+0", 0),
        ("3*5+7*1", 0),
        ("3+5+7", 0),
        ("15+7", 0),
        ("3*5+7=22", 0),
        ("the answer is 3*5+7", 0),
        ("3*5*7/7+7", 0),
    ],
)
def test_score_requires_the_target_and_each_number_once(completion, score):
    assert build_task("countdown", {}).score(completion, {"numbers": [3, 5, 7], "target": 22}) == score


def test_rational_steps_are_exact():
    # 8 / (3 - 8/3) = 24: every step of floating-point arithmetic is off here.
    assert build_task("countdown", {}).score("8/(3-8/3)", {"numbers": [3, 3, 8, 8], "target": 24}) == 1.0


@given(st.integers(), st.integers(2, 6), st.integers(1, 30), st.integers(1, 50))
def test_every_generated_problem_is_solved_by_its_demonstration(seed, numbers, max_number, max_target):
    options = {"numbers": numbers, "max_number": max_number, "max_target": max_target}
    task = build_task("countdown", options)
    problem = task.generate(random.Random(seed))
    columns = {**problem.columns, "answer": problem.answer}
    assert task.score(problem.demonstration, columns) == 1.0
    assert problem.prompt == f"{' '.join(map(str, columns['numbers']))} -> {columns['target']}"
    assert 1 <= columns["target"] <= max_target
    assert "((" not in problem.demonstration or numbers > 3


def test_options_without_solvable_problems_are_an_error():
    task = build_task("countdown", {"numbers": 2, "max_number": 1_000_000, "max_target": 1})
    with pytest.raises(ConfigError, match="raise max_target"):
        task.generate(random.Random(0))

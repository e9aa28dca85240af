"""Scores of the built-in rewards, through a pool as in a run."""

from __future__ import annotations

import random

import pytest

from gspo.config import RewardConfig
from gspo.data.task import build_task
from gspo.errors import ConfigError
from gspo.reward.reward import RewardPool
from gspo.types import Status

HALF = r"so \boxed{\frac{1}{2}}"

MATH = [
    # expected, text, reward
    ("0.5", HALF, 1.0),
    ("1/2", HALF, 1.0),
    (r"\frac{1}{2}", "The answer is 0.5.", 1.0),
    (r"$\frac{1}{2}$", "0.50", 1.0),
    (0.5, HALF, 1.0),
    ("0.5", r"\boxed{\frac{1}{3}}", 0.0),
    ("72", "Natalia sold 48/2 = 24 clips.\n#### 72", 1.0),
    (72, "#### 72", 1.0),
    (27.0, r"\boxed{27}", 1.0),
    ("72", "#### 73", 0.0),
    ("72", "", 0.0),
    ("72", "I do not know.", 0.0),
    ("1,234", "1234", 1.0),
    ("1234", "The answer is 1,234.", 1.0),
    ("1,234", r"\boxed{1{,}234}", 1.0),
    ("1,234", "1235", 0.0),
    ("-3", "$x = -3$", 1.0),
    ("-3", "$3$", 0.0),
    ("x^2+1", r"\boxed{1 + x^2}", 1.0),
    ("x^2+1", r"\boxed{x^2}", 0.0),
    ("(1,2)", r"\boxed{(1, 2)}", 1.0),
    (r"\sqrt{2}\text{ inches}", r"\boxed{\sqrt{2}}", 1.0),
    ("2*sin(x)", r"\boxed{2\sin(x)}", 1.0),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
    ("50%", r"\boxed{0.5}", 1.0),
    ("sqrt(8)", r"\boxed{2\sqrt{2}}", 1.0),
    ("2*pi", r"\boxed{2\pi}", 1.0),
    ("1 234", "1234", 1.0),
    (1e-05, "0.00001", 1.0),
    ("1e5", "100000", 1.0),
    ("+5", "5", 1.0),
    ("$12", "12", 1.0),
    ("72 clips", "#### 72", 1.0),
    ("3x+1", "3", 0.0),
    ("3x+1", r"\boxed{1+3x}", 1.0),
    ("x^2+1", "1", 0.0),
    # the expected answer is not mathematics, so the completion cannot be called wrong
    ("Paris", "Paris", None),
    ("Paris", "72", None),
    ("between 12 and 13 clips", "13", None),
    ("", "72", None),
    (None, "72", None),
]

EXACT = [
    # options, expected, text, reward
    ({}, "Paris", "  Paris\n", 1.0),
    ({}, "New York", "New \n York", 1.0),
    ({}, "Paris", "paris", 0.0),
    ({"ignore_case": True}, "Paris", "PARIS", 1.0),
    ({}, "Paris", "It is Paris", 0.0),
    ({"marker": "####"}, "72", "48 + 24\n#### 72", 1.0),
    ({"marker": "####"}, "72", "#### 71 #### 72", 1.0),
    ({"marker": "####"}, "72", "72", 0.0),
    ({"marker": "####"}, 72, "####72", 1.0),
    ({}, "1,234", "1234", 1.0),
    ({}, "5", ".5e1", 1.0),
    # Not numbers, though they end like one.
    ({}, "322", "e322", 0.0),
    ({}, "e322", "e322", 1.0),
    ({}, "322", "-e5", 0.0),
    ({}, 1234, "1,234.0", 1.0),
    ({}, "1234", "12,34", 0.0),
    ({}, 0.5, ".5", 1.0),
    ({}, "-5", "5", 0.0),
    ({"numbers": False}, "1234", "1,234", 0.0),
    ({}, ["Paris", "City of Light"], "City of Light", 1.0),
    ({}, ["Paris", 7], "7.0", 1.0),
    ({}, ["Paris"], "Rome", 0.0),
    ({}, "", "", 1.0),
    ({}, "72", "<think>71</think>\n72", 1.0),
    ({}, "72", "<think>72</think>\n71", 0.0),
    ({}, "72", "<think>72", 0.0),
    ({}, "72", "<think>71</think><answer>72</answer>", 1.0),
    ({}, "72", "<answer>72</answer><answer>73</answer>", 0.0),
    ({"marker": "####"}, "72", "<think>#### 72</think> #### 71", 0.0),
    ({"marker": "####"}, "72", "<think>#### 72</think> 72", 0.0),
    ({}, "-5", "\u22125", 1.0),
    ({}, "12000", "1.2e4", 1.0),
    ({}, "1,234", "1\u202f234", 1.0),
    ({}, "34", "٣٤", 1.0),
    ({}, None, "x", None),
    ({}, [], "x", None),
]

LAST_NUMBER = [
    # expected, text, reward
    ("3/4", "It is 3/4.", 1.0),
    ("3/4", "It is 4.", 0.0),
    ("4", "It is 3/4.", 0.0),
    ("72", "That makes 72 million.", 0.0),
    ("72", "That makes 72 dozen.", 0.0),
    ("12000", "It is 1.2e4", 1.0),
    ("-5", "It is \u22125", 1.0),
    ("1234", "It is 1\u2009234", 1.0),
    ("72", "<think>71</think> 72", 1.0),
    ("72", "<think>72</think> 71", 0.0),
    ("72", "<think>72</think>", 0.0),
    ("72", "<think>it is 72", 0.0),
    ("0.0000002", "0.0000003", 0.0),
]


@pytest.fixture(scope="module")
def math_pool():
    with RewardPool(RewardConfig(functions=("math_answer",), timeout_s=20.0)) as pool:
        yield pool


@pytest.mark.parametrize("chat", [False, True])
def test_math_answer(math_pool, group, chat):
    content = [{"role": "user", "content": "?"}] if chat else "?"
    scores = math_pool.score([group([text], content=content, answer=answer) for answer, text, _ in MATH])
    got = [(answer, text, score.reward) for (answer, text, _), (score,) in zip(MATH, scores, strict=True)]
    assert got == MATH


def test_math_answer_abstains_rather_than_saying_wrong(math_pool, group):
    (score,) = math_pool.score([group(["Paris"], answer="Paris")])[0]
    assert (score.status, score.failure) == (Status.UNSCORED, "abstained: every reward returned None")


def test_math_answer_with_a_marker(make_pool, group):
    """Without a marker, math-verify would take the number after the word "answer"."""
    pool = make_pool("math_answer", options={"math_answer": {"marker": "####"}})
    texts = ["as an answer: 9 / 45 = 20%\n#### 21", "as an answer: 19\n#### 20", "20", "#### 19\n#### 20"]
    assert [s.reward for s in pool.score([group(texts, answer="20")])[0]] == [0.0, 1.0, 0.0, 1.0]


BOMBS = [
    "$9^{9^{9^9}}$",
    "$(10^9)!$",
    "9**9**9**9",
    "9" * 100_000,
    r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 300 + "}",
    r"$\sum_{i=1}^{10000000} \frac{1}{i^i}$",
    r"\boxed{(x+y+z+w)^{200}}",
    r"\boxed{((((9!)!)!)!)}",
    r"\boxed{\exp(\exp(\exp(\exp(9))))}",
]


def test_bombs_affect_only_their_own_score(group):
    """A bomb is wrong, never unscored, and completions before and after it keep their scores."""
    right, wrong = "#### 72", "#### 71"
    texts = [right, wrong]
    for bomb in BOMBS:
        texts += [bomb, right, wrong]
    order = random.Random(0).sample(range(len(texts)), len(texts))
    groups = [group(texts[:10], answer="72"), group(texts[10:], answer="72")]
    groups.append(group([texts[i] for i in order[:8]], answer="72"))
    config = RewardConfig(functions=("math_answer",), options={"math_answer": {"limit_s": 0.3}}, timeout_s=60.0)
    with RewardPool(config) as pool:
        scores = pool.score(groups)
    for (_, completions), row in zip(groups, scores, strict=True):
        for completion, score in zip(completions, row, strict=True):
            assert score.reward == float(completion.text == right), completion.text[:60]


def test_exact_answer(make_pool, group):
    for options in ({}, {"marker": "####"}, {"ignore_case": True}, {"numbers": False}):
        rows = [row for row in EXACT if row[0] == options]
        pool = make_pool("exact_answer", options={"exact_answer": options})
        scores = pool.score([group([text], answer=answer) for _, answer, text, _ in rows])
        assert [(*row[:3], s.reward) for row, (s,) in zip(rows, scores, strict=True)] == rows
        pool.close()


def test_last_number(make_pool, group):
    scores = make_pool("last_number").score([group([text], answer=answer) for answer, text, _ in LAST_NUMBER])
    got = [(answer, text, score.reward) for (answer, text, _), (score,) in zip(LAST_NUMBER, scores, strict=True)]
    assert got == LAST_NUMBER


def test_task_answer_does_not_read_the_thinking(make_pool, group):
    pool = make_pool(task=("addition", {}))
    texts = ["<think>8</think>1+6=7|7", "<think>1+6=7|7</think>8", "<think>1+6=7|7", "1+6=7|7"]
    assert [s.reward for s in pool.score([group(texts, answer="7")])[0]] == [1.0, 0.0, 0.0, 1.0]


def test_task_answer_is_the_default_for_a_generated_task(make_pool, group):
    problem = build_task("addition", {"digits": 2}).generate(random.Random(0))
    pool = make_pool(task=("addition", {"digits": 2}))
    texts = [problem.demonstration, problem.demonstration + "0", ""]
    scores = pool.score([group(texts, content=problem.prompt, answer=problem.answer, **problem.columns)])[0]
    assert pool.names == ("task_answer",)
    assert [(s.reward, s.correct) for s in scores] == [(1.0, True), (0.0, False), (0.0, False)]


def test_task_answer_with_a_second_reward(make_pool, group):
    options = {"completion_format": {"pattern": "[0-9|+=;]*"}}
    pool = make_pool("task_answer", "completion_format", task=("addition", {}), weights=(1.0, 0.5), options=options)
    assert [s.reward for s in pool.score([group(["|7", "7", "?"], answer="7")])[0]] == [1.5, 0.5, 0.0]


def test_bad_task_is_rejected(make_pool):
    for task in (("no_such_task", {}), ("addition", {"digit": 2})):
        with pytest.raises(ConfigError, match=r"data\.task"):
            make_pool(task=task)


def test_a_column_with_the_name_of_an_option_is_not_the_option(make_pool, group):
    pool = make_pool("exact_answer")
    assert pool.score([group(["7"], answer="7", marker="####")])[0][0].reward == 1.0


def test_completion_format(make_pool, group):
    pool = make_pool("completion_format", options={"completion_format": {"pattern": "<think>.*</think>.*"}})
    texts = ["<think>a\nb</think> 7", "x<think></think>", "<think>", ""]
    assert [s.reward for s in pool.score([group(texts)])[0]] == [1.0, 0.0, 0.0, 0.0]


def test_pattern_that_backtracks_forever_times_out(make_pool, group):
    pool = make_pool("completion_format", options={"completion_format": {"pattern": "(a+)+b"}}, timeout_s=0.5)
    good, bad = pool.score([group(["aab", "a" * 60])])[0]
    assert (good.reward, bad.reward, bad.notes) == (1.0, 0.0, {"completion_format": ("timeout",)})

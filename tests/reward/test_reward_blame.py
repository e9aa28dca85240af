"""Whose fault a failure is: what a completion does to a built-in reward is a 0, everything else is unscored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from gspo.types import Status

BOMB = r"\boxed{((((9!)!)!)!)}"
SLOW = {"math_answer": {"limit_s": 3600}}
"""The pool's own deadline comes first."""


@pytest.mark.parametrize("texts", [["72", BOMB, "73"], [BOMB], [BOMB, BOMB]], ids=["in company", "alone", "two bombs"])
def test_a_completion_that_makes_the_verifier_hang_is_wrong(make_pool: Any, group: Any, texts: list[str]) -> None:
    pool = make_pool("math_answer", options=SLOW, timeout_s=2.0)
    scores = pool.score([group(texts, answer="72")])[0]
    assert [s.reward for s in scores] == [float(text == "72") for text in texts]
    assert all(s.notes == {"math_answer": ("timeout",)} for s, text in zip(scores, texts, strict=True) if text == BOMB)
    assert pool.new_faults() == []


def test_a_completion_that_makes_the_verifier_eat_memory_is_wrong(make_pool: Any, group: Any) -> None:
    pool = make_pool("math_answer", options=SLOW, timeout_s=60.0, memory_mb=1)
    (score,) = pool.score([group([BOMB], answer="72")])[0]
    assert (score.reward, score.notes) == (0.0, {"math_answer": ("memory",)})


def test_a_reference_that_makes_the_verifier_hang_leaves_its_completions_unscored(make_pool: Any, group: Any) -> None:
    pool = make_pool("math_answer", options=SLOW, timeout_s=1.0)
    bad, good = pool.score([group(["72", "73"], answer="((((9!)!)!)!)"), group(["72"], answer="72", id="train/1")])
    assert [(s.status, s.reward) for s in bad] == [(Status.UNSCORED, None)] * 2
    assert good[0].reward == 1.0


def test_a_function_of_the_user_that_hangs_on_a_completion_stays_unscored(
    make_pool: Any, group: Any, reward_file: Callable[..., str]
) -> None:
    name = reward_file("""
        import time
        def score(completions, **_):
            return [time.sleep(3600) if c == "bad" else 1.0 for c in completions]
    """)
    good, bad = make_pool(name, timeout_s=1.0).score([group(["a", "bad"])])[0]
    assert (good.reward, bad.status) == (1.0, Status.UNSCORED)


def test_a_verifier_that_does_not_get_the_processor_is_asked_once_more(make_pool: Any, group: Any) -> None:
    pool = make_pool("math_answer", timeout_s=4.0)
    (stopped,) = pool.pids()
    os.killpg(stopped, signal.SIGSTOP)
    (score,) = pool.score([group(["72"], answer="72")])[0]
    assert score.reward == 1.0
    assert pool.pids() != [stopped]

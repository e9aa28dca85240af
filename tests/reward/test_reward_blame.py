"""Blame for failures: a completion that makes a built-in reward fail scores 0; every other failure is unscored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from gspo.reward import jobs, process, reward, second_try
from gspo.types import Status

BOMB = r"\boxed{((((9!)!)!)!)}"
SLOW = {"math_answer": {"limit_s": 3600}}
"""Longer than the pool's own deadline, which therefore applies."""


@pytest.mark.parametrize("texts", [["72", BOMB, "73"], [BOMB], [BOMB, BOMB]], ids=["in a group", "alone", "two bombs"])
def test_completion_that_makes_the_verifier_hang_is_wrong(make_pool: Any, group: Any, texts: list[str]) -> None:
    pool = make_pool("math_answer", options=SLOW, timeout_s=2.0)
    scores = pool.score([group(texts, answer="72")])[0]
    assert [s.reward for s in scores] == [float(text == "72") for text in texts]
    assert all(s.notes == {"math_answer": ("timeout",)} for s, text in zip(scores, texts, strict=True) if text == BOMB)
    assert pool.new_faults() == []


def test_completion_that_makes_the_verifier_exceed_its_memory_limit_is_wrong(make_pool: Any, group: Any) -> None:
    pool = make_pool("math_answer", options=SLOW, timeout_s=60.0, memory_mb=1)
    (score,) = pool.score([group([BOMB], answer="72")])[0]
    assert (score.reward, score.notes) == (0.0, {"math_answer": ("memory",)})


def test_reference_that_makes_the_verifier_hang_leaves_its_completions_unscored(make_pool: Any, group: Any) -> None:
    pool = make_pool("math_answer", options=SLOW, timeout_s=1.0)
    bad, good = pool.score([group(["72", "73"], answer="((((9!)!)!)!)"), group(["72"], answer="72", id="train/1")])
    assert [(s.status, s.reward) for s in bad] == [(Status.UNSCORED, None)] * 2
    assert good[0].reward == 1.0


def test_completion_on_which_a_user_function_hangs_is_unscored(
    make_pool: Any, group: Any, reward_file: Callable[..., str]
) -> None:
    name = reward_file("""
        import time
        def score(completions, **_):
            return [time.sleep(3600) if c == "bad" else 1.0 for c in completions]
    """)
    good, bad = make_pool(name, timeout_s=1.0).score([group(["a", "bad"])])[0]
    assert (good.reward, bad.status) == (1.0, Status.UNSCORED)


def test_verifier_that_gets_no_cpu_time_is_retried(make_pool: Any, group: Any) -> None:
    pool = make_pool("math_answer", timeout_s=4.0)
    (stopped,) = pool.pids()
    os.killpg(stopped, signal.SIGSTOP)
    (score,) = pool.score([group(["72"], answer="72")])[0]
    assert score.reward == 1.0
    assert pool.pids() != [stopped]


@pytest.mark.parametrize("machine", ["waits", "runs"])
def test_second_try_blames_the_machine_only_if_it_starves_the_reference_process(
    machine: str, make_pool: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_try, "PATIENCE_ALONE", 3.0 if machine == "waits" else 1000.0)
    monkeypatch.setattr(process, "processor_seconds", lambda pid: 0.0)
    if machine == "waits":
        monkeypatch.setattr(second_try, "processor_seconds", lambda pid: 0.0)
    pool = make_pool("completion_format", options={"completion_format": {"pattern": "(a+)+b"}}, timeout_s=0.5)
    (score,) = pool.score([group(["a" * 60])])[0]
    if machine == "runs":
        assert (score.reward, score.notes) == (0.0, {"completion_format": ("timeout",)})
    else:
        assert (score.status, score.notes) == (Status.UNSCORED, {})
        assert "the machine was too slow" in score.failure


def test_hanging_completions_are_all_wrong_even_if_they_outnumber_the_workers(
    make_pool: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward, "MOST_SPARES", 1)
    monkeypatch.setattr(jobs, "LONGEST", 1000)  # a busy machine may take long
    pool = make_pool("completion_format", options={"completion_format": {"pattern": "(a+)+b"}}, timeout_s=0.5)
    texts = ["a" * 60] * 6 + ["aab"]
    scores = pool.score([group([text], id=f"train/{i}") for i, text in enumerate(texts)])
    assert [s.reward for (s,) in scores] == [float(text == "aab") for text in texts]

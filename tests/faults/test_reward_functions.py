"""F19: seventeen ways in which a reward function can misbehave. The numbers are those of docs/reliability.md.

Every function gives a completion its own number (its length over seven) and misbehaves on the completions `bad`. It
writes a mark before it does, so that the faults are counted. Each test checks that all other rewards are bitwise
identical, the fault has its own name, the batch ends in time, and the pool has all its workers.
"""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.reward.reward import MOST_SPARES
from gspo.types import Status

TIMEOUT_S = 2.0
GROUPS = [["one", "bad", "three", "fourteen"], ["x", "yy"], ["bad", "seventeen letters", "z"], ["abc", "d"]]
FUNCTION = """
    import faulthandler, os, sys, threading, time
    held, lock = [], threading.Lock()
    def mark():
        os.close(os.open({marks!r} + f"/{{os.getpid()}}-{{time.monotonic_ns()}}", os.O_CREAT | os.O_WRONLY))
    def bad(prompts, columns):
        mark()
        {bad}
    def score(prompts, completions, **columns):
        values = []
        for c in completions:
            values.append(bad(prompts, columns) if c == "bad" else len(c) / 7)
        return {result}
"""
CASES: dict[str, tuple[str, str | float]] = {
    # What the function does on a bad completion -> the expected kind of failure, or the expected number.
    "raises": ("raise ValueError('no')", "raised"),
    "gives None": ("return None", "abstained"),
    "gives NaN": ("return float('nan')", "invalid"),
    "gives inf": ("return float('inf')", "invalid"),
    "gives a str": ("return '1'", "invalid"),
    "gives a numpy number": ("import numpy; return numpy.float32(0.5)", 0.5),
    "gives a bool": ("return True", 1.0),
    "sleeps forever": ("time.sleep(3600)", "timeout"),
    "exits": ("sys.exit(3)", "raised"),
    "exits immediately": ("os._exit(0)", "died"),
    "crashes": ("faulthandler._sigsegv()", "died"),
    "forks": ("os.fork(); return 0.25", 0.25),
    "prints 1 GB": ("[sys.stdout.write('x' * 2**20) for _ in range(1024)]; return 0.25", 0.25),
    "changes its arguments": (
        "prompts.clear(); [v.clear() for v in columns.values()]; columns.clear(); return 0.25",
        0.25,
    ),
    "holds the GIL in C": ("(10 ** 8) ** (10 ** 7)", "timeout"),
    "allocates 4 GB": ("held.extend(bytearray(b'x' * 2**26) for _ in range(64)); return 0.25", "memory"),
    "needs another thread's lock": (
        "t = threading.Thread(target=lock.acquire); t.start(); t.join(); lock.acquire()",
        "timeout",
    ),
}


@pytest.fixture
def misbehaving(make_pool: Callable[..., Any], reward_file: Callable[..., str], tmp_path: Path) -> Callable[..., Any]:
    """A pool whose function does this on a bad completion, and the folder for its marks."""

    def make(bad: str, result: str = "values", **settings: Any) -> tuple[Any, Path]:
        marks = tmp_path / "marks"
        marks.mkdir()
        name = reward_file(textwrap.dedent(FUNCTION).format(marks=str(marks), bad=bad, result=result))
        return make_pool(name, **{"timeout_s": TIMEOUT_S, "workers": 2, "memory_mb": 300, **settings}), marks

    return make


def check_others(scores: list[list[Any]], groups: list[list[str]]) -> None:
    for row, texts in zip(scores, groups, strict=True):
        for score, text in zip(row, texts, strict=True):
            if text != "bad":
                assert (score.status, score.reward, score.failure) == (Status.SCORED, len(text) / 7, None), text


def wait_for(pool: Any, workers: int) -> None:
    """Wait until the pool has all its workers: a new pool may still be starting its second."""
    until = time.monotonic() + 60
    while len(pool.pids()) != workers and time.monotonic() < until:
        time.sleep(0.01)
    assert len(pool.pids()) == workers


@pytest.mark.parametrize("case", CASES)
def test_f19_a_function_that_misbehaves(case: str, misbehaving: Callable[..., Any], group: Callable[..., Any]) -> None:
    bad, expected = CASES[case]
    timeout_s = TIMEOUT_S if expected == "timeout" else 120.0  # on a busy machine, slow is not a fault
    pool, marks = misbehaving(bad, timeout_s=timeout_s)
    groups = [group(texts, id=f"train/{i}") for i, texts in enumerate(GROUPS)]
    began = time.monotonic()
    scores = pool.score(groups)
    assert time.monotonic() - began < timeout_s + 30, "a hanging function sleeps for an hour"
    assert len(list(marks.iterdir())) >= 2, "the fault did not happen"
    check_others(scores, GROUPS)
    guilty = [
        s for row, texts in zip(scores, GROUPS, strict=True) for s, t in zip(row, texts, strict=True) if t == "bad"
    ]
    if isinstance(expected, str):
        assert [s.failure.partition(": ")[0] for s in guilty] == [expected] * 2
        assert [(s.status, s.reward, s.correct) for s in guilty] == [(Status.UNSCORED, None, None)] * 2
    else:
        assert [s.reward for s in guilty] == [expected] * 2
    wait_for(pool, 2)
    check_others(pool.score([group(["after", "it"])]), [["after", "it"]])


def test_f19_a_wrong_number_of_values_fails_only_that_call(
    misbehaving: Callable[..., Any], group: Callable[..., Any]
) -> None:
    pool, marks = misbehaving("return 1.0", result="values + [1.0] * ('bad' in completions)")
    scores = pool.score([group(texts, id=f"train/{i}") for i, texts in enumerate(GROUPS)])
    assert len(list(marks.iterdir())) == 2
    for row, texts in zip(scores, GROUPS, strict=True):
        if "bad" in texts:
            assert {s.failure.partition(": ")[0] for s in row} == {"invalid"}
        else:
            check_others([row], [texts])


def test_f19_many_hanging_completions_share_one_deadline_and_affect_no_other_score(
    misbehaving: Callable[..., Any], group: Callable[..., Any]
) -> None:
    """Eight hang with two workers. In sequence they would take four deadlines, and eight when retried alone."""
    pool, marks = misbehaving("time.sleep(3600)", timeout_s=5.0)
    groups = [["bad" if i == n % 3 else "a" * (n + i + 1) for i in range(3)] for n in range(8)]
    began = time.monotonic()
    scores = pool.score([group(texts, id=f"train/{i}") for i, texts in enumerate(groups)])
    assert time.monotonic() - began < 4 * 5.0
    check_others(scores, groups)
    assert Counter(s.failure.partition(": ")[0] for row in scores for s in row if s.failure) == {"timeout": 8}
    assert len(list(marks.iterdir())) >= 8
    wait_for(pool, 2)


def test_f19_when_all_calls_hang_the_batch_ends_in_time_and_names_completions_that_were_not_scored(
    misbehaving: Callable[..., Any], group: Callable[..., Any]
) -> None:
    pool, _ = misbehaving("time.sleep(3600)")
    began = time.monotonic()
    scores = pool.score([group(["bad"] * 8, id=f"train/{i}") for i in range(16)])
    assert time.monotonic() - began < 16 * TIMEOUT_S, "in sequence they would take 64 deadlines"
    kinds = Counter(s.failure.partition(": ")[0] for row in scores for s in row)
    assert kinds["timeout"] + kinds["not_run"] == 128
    assert 0 < kinds["timeout"] <= 8 * (2 + MOST_SPARES)
    wait_for(pool, 2)


def test_f19_a_slow_function_is_not_a_hanging_one(
    make_pool: Callable[..., Any], reward_file: Callable[..., str], group: Callable[..., Any]
) -> None:
    """Each call takes half of its deadline, and all together take several.

    Every result counts, and that of the whole group is preferred (it returns the size of the group).
    """
    name = reward_file("""
        import time
        def score(completions, **_):
            time.sleep(1.6 if len(completions) > 1 else 0.1)
            return [float(len(completions))] * len(completions)
    """)
    pool = make_pool(name, timeout_s=3.0, workers=1)
    scores = pool.score([group(["a", "b", "c"], id=f"train/{i}") for i in range(4)])
    assert [s.reward for s in scores[0]] == [3.0] * 3
    assert all(s.status is Status.SCORED for row in scores for s in row)


def test_f19_processes_that_a_function_leaves_running_end_with_it(
    make_pool: Callable[..., Any], reward_file: Callable[..., str], group: Callable[..., Any], tmp_path: Path
) -> None:
    """Daemons with a double fork, their own session and closed pipes: after a hang, after a crash, and at the end."""
    note = tmp_path / "pids"
    name = reward_file(f"""
        import os, time
        def daemon():
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                with open({str(note)!r}, "a") as file:
                    file.write(f"{{os.getpid()}}\\n")
                os.closerange(0, 100)
                time.sleep(3600)
                os._exit(0)
            os.wait()
            while not os.path.exists({str(note)!r}):
                time.sleep(0.01)
        def score(completions, **_):
            if completions[0] != "good":
                daemon()
                time.sleep(0.2)
            if completions[0] == "hang":
                time.sleep(3600)
            if completions[0] == "die":
                os._exit(1)
            return [1.0]
    """)
    pool = make_pool(name, timeout_s=3.0)
    for completion in ("hang", "die", "stay"):
        pool.score([group([completion])])
    assert pool.score([group(["good"])])[0][0].reward == 1.0
    pool.close()
    daemons = list(map(int, note.read_text().split()))
    assert len(daemons) >= 3
    assert not [pid for pid in daemons if Path(f"/proc/{pid}").exists()]

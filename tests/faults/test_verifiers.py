"""F20, F21: verifier bombs, and workers that hang hundreds of times. The numbers are those of docs/reliability.md."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from processes import descriptors, settled, steady

from gspo.types import Status

LIMIT_S = 1
TIMEOUTS = 200
"""A thousand would take three minutes and show the same."""
BOMBS = [
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{(10^9)!}",
    "\\boxed{" + "7" * 100_000 + "}",
    "\\boxed{" + "\\sqrt{" * 300 + "2" + "}" * 300 + "}",
    "\\boxed{\\sum_{i=1}^{10000000} i^i}",
    "\\boxed{" + "1+" * 500_000 + "1}",
    "\\boxed{\udc80\udcff 7 \x00}",
]


def golden() -> list[tuple[str, str, float]]:
    """200 completions with their expected answer and score, from arithmetic alone."""
    rng = random.Random(20)
    cases = []
    for i in range(50):
        a = rng.randint(2, 99)
        b = rng.randint(2, 99)
        cases.append((f"So it is \\boxed{{{a * b}}}.", str(a * b), 1.0))
        cases.append((f"So it is \\boxed{{{a * b + 1}}}.", str(a * b), 0.0))
        cases.append((f"That makes $\\boxed{{\\frac{{{a * 3}}}{{{b * 3}}}}}$.", f"{a}/{b}", 1.0))
        cases.append((f"I do not know {'.' * i}", str(a), 0.0))
    return cases


def scores(pool: Any, group: Callable[..., Any], cases: list[tuple[str, str, float]]) -> list[float | None]:
    return [
        row[0].reward
        for row in pool.score(
            [group([completion], answer=a, id=f"train/{i}") for i, (completion, a, _) in enumerate(cases)]
        )
    ]


def test_f20_scores_do_not_depend_on_thread_order_or_bombs(
    make_pool: Callable[..., Any], group: Callable[..., Any]
) -> None:
    pool = make_pool("math_answer", options={"math_answer": {"limit_s": LIMIT_S}}, timeout_s=20.0, workers=2)
    cases = golden()
    assert len(cases) == 200
    expected = [value for _, _, value in cases]
    assert scores(pool, group, cases) == expected
    from_thread: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: from_thread.append(scores(pool, group, cases)))
    thread.start()
    thread.join(timeout=120)
    assert from_thread == [expected]
    mixed = [*cases, *((bomb, "72", -1.0) for bomb in BOMBS)]
    random.Random(1).shuffle(mixed)
    found = scores(pool, group, mixed)
    assert sum(value == -1.0 for _, _, value in mixed) == len(BOMBS)
    assert [v for v, (_, _, value) in zip(found, mixed, strict=True) if value >= 0] == [v for *_, v in mixed if v >= 0]
    assert all(v == 0.0 for v, (_, _, value) in zip(found, mixed, strict=True) if value < 0)


@pytest.mark.slow
@pytest.mark.parametrize("bomb", range(len(BOMBS)))
def test_f20_a_bomb_ends_within_its_limit(bomb: int, make_pool: Callable[..., Any], group: Callable[..., Any]) -> None:
    """Parsing and comparing have a limit; a call that exceeds it is killed at `timeout_s`. It is wrong either way."""
    timeout_s = 3.0
    pool = make_pool("math_answer", options={"math_answer": {"limit_s": LIMIT_S}}, timeout_s=timeout_s)
    began = time.monotonic()
    (score,) = pool.score([group([BOMBS[bomb]], answer="72")])[0]
    assert time.monotonic() - began < 10 * timeout_s  # about 1 s more on an idle machine; without a limit it never ends
    assert (score.status, score.reward) == (Status.SCORED, 0.0)
    assert scores(pool, group, [("\\boxed{72}", "72", 1.0)]) == [1.0]


@pytest.mark.slow
def test_f21_many_timeouts_leave_nothing(
    make_pool: Callable[..., Any], reward_file: Callable[..., str], group: Callable[..., Any], children: Any
) -> None:
    name = reward_file("""
        import time
        def score(completions, **_):
            if completions[0] == "bad":
                time.sleep(3600)
            return [1.0]
    """)
    pool = make_pool(name, timeout_s=0.3, workers=2)
    batch = [group(["a"], id="train/0"), *(group(["bad"], id=f"train/{i}") for i in range(1, 30))]
    pool.score(batch)
    assert settled(lambda: len(pool.pids()), 2) == 2
    open_before = steady(descriptors)
    other_children = children() - set(pool.pids())
    threads = threading.active_count()
    kinds: Counter[str] = Counter()
    while kinds["timeout"] < TIMEOUTS:
        rows = pool.score(batch)
        assert rows[0][0].reward == 1.0
        kinds.update(s.failure.partition(":")[0] for row in rows for s in row if s.failure)
    assert set(kinds) <= {"timeout", "not_run"}
    assert settled(lambda: len(pool.pids()), 2) == 2
    assert settled(descriptors, open_before) == open_before
    assert settled(threading.active_count, threads) == threads
    assert settled(lambda: children() - set(pool.pids()), other_children) == other_children  # includes zombies
    print(f"{dict(kinds)}")

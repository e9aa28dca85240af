"""F20, F21: verifier bombs, and workers that hang hundreds of times. Numbers are those of docs/reliability.md."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gspo.types import Status

LIMIT_S = 1
TIMEOUTS = 200
"""A thousand take three minutes, and leave as little."""
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
    """200 replies with their expected answer and score, from arithmetic alone."""
    chance, cases = random.Random(20), []
    for i in range(50):
        a, b = chance.randint(2, 99), chance.randint(2, 99)
        cases.append((f"So it is \\boxed{{{a * b}}}.", str(a * b), 1.0))
        cases.append((f"So it is \\boxed{{{a * b + 1}}}.", str(a * b), 0.0))
        cases.append((f"That makes $\\boxed{{\\frac{{{a * 3}}}{{{b * 3}}}}}$.", f"{a}/{b}", 1.0))
        cases.append((f"I do not know {'.' * i}", str(a), 0.0))
    return cases


def scores(pool: Any, group: Callable[..., Any], cases: list[tuple[str, str, float]]) -> list[float | None]:
    return [
        row[0].reward
        for row in pool.score([group([r], answer=a, id=f"train/{i}") for i, (r, a, _) in enumerate(cases)])
    ]


def test_f20_the_same_scores_from_any_thread_in_any_order_and_beside_bombs(
    make_pool: Callable[..., Any], group: Callable[..., Any]
) -> None:
    pool = make_pool("math_answer", options={"math_answer": {"limit_s": LIMIT_S}}, timeout_s=20.0, workers=2)
    cases = golden()
    assert len(cases) == 200
    expected = [value for _, _, value in cases]
    assert scores(pool, group, cases) == expected
    seen: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: seen.append(scores(pool, group, cases)))
    thread.start()
    thread.join(timeout=120)
    assert seen == [expected]
    mixed = [*((reply, answer, value) for reply, answer, value in cases), *((bomb, "72", -1.0) for bomb in BOMBS)]
    random.Random(1).shuffle(mixed)
    found = scores(pool, group, mixed)
    assert sum(value == -1.0 for _, _, value in mixed) == len(BOMBS)
    assert [v for v, (_, _, value) in zip(found, mixed, strict=True) if value >= 0] == [v for *_, v in mixed if v >= 0]
    assert all(v == 0.0 for v, (_, _, value) in zip(found, mixed, strict=True) if value < 0)


@pytest.mark.slow
@pytest.mark.parametrize("bomb", range(len(BOMBS)))
def test_f20_a_bomb_is_over_within_its_limit(
    bomb: int, make_pool: Callable[..., Any], group: Callable[..., Any]
) -> None:
    """Reading and comparing have a limit; what outruns it is killed with its process at `timeout_s`. It is wrong either way."""
    timeout_s = 3.0
    pool = make_pool("math_answer", options={"math_answer": {"limit_s": LIMIT_S}}, timeout_s=timeout_s)
    began = time.monotonic()
    (score,) = pool.score([group([BOMBS[bomb]], answer="72")])[0]
    assert time.monotonic() - began < 10 * timeout_s  # about 1 s later on an idle machine; without a limit, never
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
    before, mine, threads = len(os.listdir("/proc/self/fd")), children() - set(pool.pids()), threading.active_count()
    kinds: Counter[str] = Counter()
    while kinds["timeout"] < TIMEOUTS:
        rows = pool.score(batch)
        assert rows[0][0].reward == 1.0
        kinds.update(s.failure.partition(":")[0] for row in rows for s in row if s.failure)
    assert set(kinds) <= {"timeout", "untried"}
    assert len(pool.pids()) == 2
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    assert children() - set(pool.pids()) == mine  # no zombie either
    print(f"{dict(kinds)}")

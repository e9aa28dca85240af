"""`code_tests` as a reward: program extraction, scores, and errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from code_tests_problems import PROBLEMS, Problem
from sandbox_attacks import ATTACKS, filled

from gspo.errors import ConfigError, RewardError
from gspo.reward.rewards import code_tests
from gspo.reward.rewards.code_tests import program_of, score
from gspo.reward.sandbox import probe
from gspo.types import Status

TESTS = [{"function": "double", "args": [x], "expected": 2 * x} for x in (1, 2, 3, 4)]
RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"
WRONG = "```python\ndef double(x):\n    return x + 1\n```"
LOOP = "```python\nwhile True: pass\n```"


def scored(texts: list[str], prompt: Any = "?", options: Any = None, **row: Any) -> list[Any]:
    columns = {key: [value] * len(texts) for key, value in row.items()}
    return score(prompts=[prompt] * len(texts), completions=texts, **(options or {}), **columns)


# ------------------------------------------------------------------------------------------- the fixed set


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_right_programs_score_1_and_wrong_ones_0(problem: Problem) -> None:
    texts = [text for pair in zip(problem.right * 9, problem.wrong, strict=False) for text in pair]
    texts += problem.right
    expected = [1.0, 0.0] * len(problem.wrong) + [1.0] * len(problem.right)
    assert scored(texts, problem.prompt, **problem.row) == expected


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.share], ids=lambda problem: problem.name)
def test_shares(problem: Problem) -> None:
    texts = [problem.right[0], *problem.wrong]
    values = scored(texts, problem.prompt, {"all_or_nothing": False}, **problem.row)
    assert values == pytest.approx([1.0, *problem.share])


# ------------------------------------------------------------------------------------------- program extraction


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("    return 1\n", "    return 1\n"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```python\nx = 1\n```\nno:\n```python\nx = 2\n```", "x = 2"),
        ("```py\nx = 1\n```", "x = 1"),
        ("```Python3\r\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nOutput:\n```\n1\n```", "x = 1"),
        ("```\nx = 1\n```\n```bash\nls\n```", "x = 1"),
        ("```python\nx = 1\ny = 2", "x = 1\ny = 2"),
        ("```python\n    return 1\n```", "    return 1"),
        ("  ```python\n  x = 1\n  ```", "  x = 1"),
        ("```python\n```", ""),
        ("", ""),
        ("``` python\nx\n```", "x"),
        ("```python\nx = '```'\ny = 1\n```", "x = '```'\ny = 1"),
    ],
)
def test_program_of(text: str, program: str) -> None:
    assert program_of(text) == program


def test_long_hostile_completion_is_parsed_fast() -> None:
    for text in ("```python\n" * 200_000, "`" * 2_000_000, "```\n" * 400_000):
        start = time.monotonic()
        program_of(text)
        assert time.monotonic() - start < 60, "quadratic time would be hours"


# ------------------------------------------------------------------------------------------- options and errors


def test_options() -> None:
    assert scored([LOOP, RIGHT], options={"limit_s": 0.5}, tests=TESTS) == [0.0, 1.0]
    half = "def double(x):\n    return 2 * x if x < 3 else 0"
    assert scored([half], options={"all_or_nothing": False}, tests=TESTS) == [0.5]
    assert scored([half], tests=TESTS) == [0.0]
    hungry = "data = bytearray(300 * 2**20)\ndef double(x): return 2 * x"
    assert scored([hungry], tests=TESTS) == [1.0]
    assert scored([hungry], options={"memory_mb": 128}, tests=TESTS) == [0.0]
    assert scored([RIGHT], options={"python": probe.sandbox_level().python.path}, tests=TESTS) == [1.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_s": 0}, "limit_s: 0: must be a number of seconds above 0"),
        ({"limit_s": "5"}, "limit_s: '5'"),
        ({"limit_s": True}, "limit_s: True"),
        ({"memory_mb": 1}, "memory_mb: 1: must be a whole number, at least 64"),
        ({"memory_mb": 100.5}, "memory_mb: 100.5"),
        ({"all_or_nothing": "yes"}, "all_or_nothing: 'yes': must be true or false"),
        ({"python": 3}, "python: 3: must be the path of a Python"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.options\.code_tests") as caught:
        code_tests.check(**options)
    assert words in str(caught.value)


def test_row_without_tests_is_an_error_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "sandbox_level", lambda *_: pytest.fail("too late"))
    for row in ({}, {"tests": []}, {"test_list": ["x = 1"]}, {"test": "def check(c): pass", "entry_point": "f"}):
        with pytest.raises(RewardError):
            scored([RIGHT], **row)


def test_broken_tests_leave_the_completion_unscored() -> None:
    slow = {"test_list": ["import time\ntime.sleep(60)\nassert double(1) == 2"]}
    (value,) = scored([RIGHT], options={"limit_s": 0.3}, **slow)
    assert isinstance(value, RewardError)
    assert "the tests themselves took more than" in str(value)
    dead = {"test_list": ["import os\nassert double(1) == 2", "os._exit(0)\nassert double(1)"]}
    values = scored([RIGHT, "x", RIGHT], **dead)
    assert [type(v).__name__ for v in values] == ["SandboxError"] * 3


@pytest.mark.parametrize(
    ("prompt", "row"),
    [
        ("import no_such_module\ndef f(x):\n    'Doc.'\n", {"test": "def check(f): assert f(1)", "entry_point": "f"}),
        ("", {"test_list": ["assert f(1)"], "test_imports": ["import no_such_module"]}),
        ("", {"test": "def check(f):\n    import no_such_module\n    assert f(1)", "entry_point": "f"}),
    ],
)
def test_row_that_needs_a_missing_module_is_unscored(prompt: str, row: dict[str, Any]) -> None:
    (value,) = scored(["def f(x): return x"], prompt, **row)
    assert isinstance(value, RewardError)
    assert "the row's tests do not work: ModuleNotFoundError: No module named 'no_such_module'; fix" in str(value)


def test_program_that_needs_a_missing_module_scores_0() -> None:
    programs = ["import no_such_module\ndef f(x): return x", "def f(x):\n    import no_such_module\n    return x"]
    assert scored(programs, test_list=["y = f(1)\nassert y == 1"]) == [0.0, 0.0]


def test_different_rows_in_one_call() -> None:
    tests = [[{"function": "f", "args": [], "expected": x}] for x in (1, 2, 1)]
    assert score(["?"] * 3, ["def f(): return 1"] * 3, tests=tests) == [1.0, 0.0, 1.0]


def test_scores_are_deterministic() -> None:
    """The order of a set of strings, and the tests' own random numbers, are the same in every process."""
    program = "def f(xs):\n    return list(set(xs))"
    words = ["assert f(['a', 'b', 'c', 'd']) == ['d', 'c', 'b', 'a']"]
    assert len({scored([program], test_list=words)[0] for _ in range(6)}) == 1
    lucky = ["import random\nassert f(random.random()) < 0.5"]
    assert len({scored(["def f(x): return x"], test_list=lucky)[0] for _ in range(6)}) == 1


# ------------------------------------------------------------------------------------------- through the pool


def test_through_the_pool(make_pool: Callable[..., Any], group: Callable[..., Any]) -> None:
    """Attackers and honest programs in one batch; a row without tests is unscored, with the reason."""
    attacks = ["S1 fork bomb", "S11 os._exit", "S11 killing itself", "S13 writing everywhere", "S18 daemon"]
    places = {"secret": "", "place": "/tmp", "plant": "x", "pid": os.getpid()}
    hostile = [f"```python\n{filled(ATTACKS[name], places).replace('solve', 'double')}\n```" for name in attacks]
    texts = [r for h in hostile for r in (RIGHT, h, WRONG)]
    pool = make_pool("code_tests", workers=2)
    groups = [
        group(texts, id="a", tests=TESTS),
        group([RIGHT], id="b", tests=TESTS),
        group([RIGHT], id="c", answer=1),
    ]
    first, second, third = pool.score(groups)
    assert [s.reward for s in first] == [1.0, 0.0, 0.0] * len(hostile)
    assert [s.correct for s in second] == [True]
    assert third[0].status is Status.UNSCORED
    assert third[0].failure == (
        "raised: code_tests: RewardError: the row has no tests; give it a column `tests`, `test_list` (MBPP), or "
        "`test` and `entry_point` (HumanEval) (suite.py:" + third[0].failure.rpartition("suite.py:")[2]
    )


def test_group_may_take_longer_than_the_pool_timeout(make_pool: Callable[..., Any], group: Callable[..., Any]) -> None:
    """Each program stays within its own limit, but all of them together exceed `reward.timeout_s`."""
    pool = make_pool("code_tests", workers=2, timeout_s=2.5, options={"code_tests": {"limit_s": 0.6}})
    sleep = "import time\ntime.sleep(60)"
    (scores,) = pool.score([group([sleep, RIGHT, sleep, WRONG, sleep, RIGHT], tests=TESTS)])
    assert [s.reward for s in scores] == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_sleeping_program_cannot_get_its_worker_killed(
    make_pool: Callable[..., Any], group: Callable[..., Any]
) -> None:
    """Its two tries take longer than `reward.timeout_s` and still end with a score."""
    pool = make_pool("code_tests", workers=1, timeout_s=2.0, options={"code_tests": {"limit_s": 1.0}})
    workers = pool.pids()
    (scores,) = pool.score([group(["import time\ntime.sleep(60)"], tests=TESTS)])
    assert [s.reward for s in scores] == [0.0], scores
    assert pool.pids() == workers


def test_bad_settings_stop_the_run_at_once(make_pool: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.options\.code_tests\.limit_s"):
        make_pool("code_tests", options={"code_tests": {"limit_s": -1}})
    with pytest.raises(ConfigError, match="did you mean limit_s"):
        make_pool("code_tests", options={"code_tests": {"limit": 1}})


# ------------------------------------------------------------------------------------------- notes and limits


def test_how_a_program_ended_is_noted_in_the_score(make_pool: Callable[..., Any], group: Callable[..., Any]) -> None:
    cheat = "```python\nimport os\ndef double(x):\n    os._exit(0)\n```"
    pool = make_pool("code_tests", options={"code_tests": {"limit_s": 1}}, timeout_s=20.0)
    right, wrong, loop, died, empty = pool.score([group([RIGHT, WRONG, LOOP, cheat, ""], tests=TESTS)])[0]
    assert [s.reward for s in (right, wrong, loop, died, empty)] == [1.0, 0.0, 0.0, 0.0, 0.0]
    notes = [s.notes["code_tests"] for s in (right, wrong, loop, died, empty)]
    assert notes == [("passed",), ("wrong",), ("timeout",), ("died", "trick"), ("empty",)]
    assert pool.about["code_tests"].startswith("sandbox L")


def test_timeout_below_a_programs_own_limit_is_rejected(make_pool: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.timeout_s: 5 s.*at least 6"):
        make_pool("code_tests", timeout_s=5.0)
    with pytest.raises(ConfigError, match=r"at least 31"):
        make_pool("code_tests", options={"code_tests": {"limit_s": 30}}, timeout_s=20.0)


def test_memory_limit_below_a_programs_own_is_rejected(make_pool: Callable[..., Any]) -> None:
    """Otherwise a program within its own limit could get its worker killed and stay unscored."""
    with pytest.raises(ConfigError, match=r"reward\.memory_mb: 2048.* at least 4096"):
        make_pool("code_tests", options={"code_tests": {"memory_mb": 2048}}, memory_mb=2048)
    with pytest.raises(ConfigError, match=r"reward\.memory_mb: 1000.* at least 1024"):
        make_pool("code_tests", memory_mb=1000)


def test_many_endless_programs_are_wrong_not_unscored(make_pool: Callable[..., Any], group: Callable[..., Any]) -> None:
    """Together they take longer than a call's deadline, but each ends at its own limit."""
    pool = make_pool("code_tests", options={"code_tests": {"limit_s": 0.6}}, timeout_s=1.6, workers=2)
    groups = [group([RIGHT, *[LOOP] * 3, RIGHT], tests=TESTS, id=f"train/{i}") for i in range(2)]
    for row in pool.score(groups):
        assert [s.reward for s in row] == [1.0, 0.0, 0.0, 0.0, 1.0], [s.failure for s in row]
    assert len(pool.pids()) == 2

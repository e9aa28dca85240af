"""Reward functions that misbehave: the affected completion is unscored with the reason, all other scores are unchanged.

Each function returns `1.0` for a good completion and misbehaves on the completion `bad`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import descriptors, settled, steady

from gspo.errors import RewardError
from gspo.types import Status

SHAPE = """
    import ctypes, faulthandler, math, os, signal, subprocess, sys, threading, time
    from fractions import Fraction
    {extra}
    def bad():
        {bad}
    def score(prompts, completions, **columns):
        return [bad() if c == "bad" else 1.0 for c in completions]
"""


def code(bad: str, extra: str = "") -> str:
    return SHAPE.format(bad=bad, extra=extra)


def check_innocent(scores, guilty):
    """Check that all completions except the one at `guilty` have their score."""
    others = [s for i, s in enumerate(scores) if i != guilty]
    assert [(s.status, s.reward, s.correct, s.failure) for s in others] == [(Status.SCORED, 1.0, True, None)] * len(
        others
    )
    return scores[guilty]


CASES = [
    ("raise ValueError('no')", "raised: score: ValueError: no (mine.py:6)"),
    ("raise ValueError('two\\nlines \\x1b[31m\\ud800')", "raised: score: ValueError: two lines ?[31m? (mine.py:6)"),
    ("raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})()", "raised: score: Odd: unprintable Odd"),
    ("raise TimeoutError('judge')", "timeout: score: TimeoutError: judge (mine.py:6)"),
    ("return ValueError('given back')", "raised: score: ValueError: given back"),
    ("sys.exit(0)", "raised: score: SystemExit: 0 (mine.py:6)"),
    ("raise KeyboardInterrupt", "raised: score: KeyboardInterrupt (mine.py:6)"),
    ("return bad()", "raised: score: RecursionError"),
    ("return math.nan", "invalid: score: returned nan, not a finite number"),
    ("return math.inf", "invalid: score: returned inf"),
    ("return 10 ** 400", "invalid: score: returned inf"),
    ("return '1.0'", "invalid: score: returned '1.0' (str), not a number"),
    ("return [1.0]", "invalid: score: 1 step rewards, not one for each of 2 tokens"),
    ("return {}", "invalid: score: returned {} (dict)"),
    ("return 1j", "invalid: score: returned 1j (complex)"),
    ("return type('Odd', (), {'__repr__': lambda s: 1 / 0})()", "invalid: score: returned an unprintable Odd"),
    ("os._exit(0)", "died: score: exit code 0"),
    ("print('so long'); sys.stdout.flush(); os._exit(9)", "died: score: exit code 9; it printed: so long"),
    ("faulthandler._sigsegv()", "died: score: killed by SIGSEGV"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "died: score: killed by SIGKILL"),
    ("os.closerange(0, 100)", "died: score: "),
    ("return None", "abstained: every reward returned None"),
]


@pytest.mark.parametrize(("bad", "failure"), CASES)
def test_one_bad_completion(make_pool, reward_file, group, bad, failure):
    pool = make_pool(reward_file(code(bad)))
    scores = pool.score([group(["a", "bad", "b", "c"]), group(["d", "e"])])
    score = check_innocent(scores[0], 1)
    check_innocent([None, *scores[1]], 0)
    assert (score.status, score.reward, score.correct) == (Status.UNSCORED, None, None)
    assert score.failure.startswith(failure)
    assert len(score.failure.splitlines()) == 1
    check_innocent([None, *pool.score([group(["a", "b"])])[0]], 0)
    assert len(pool.pids()) == 1


@pytest.mark.parametrize(
    ("good", "value"),
    [
        ("return True", 1.0),
        ("return 3", 3.0),
        ("return Fraction(1, 4)", 0.25),
        ("import numpy; return numpy.float32(0.5)", 0.5),
        ("import numpy; return numpy.bool_(True)", 1.0),
        ("import numpy; return numpy.array(2)", 2.0),
        ("sys.stdout.write('{}\\n' * 10 ** 6); os.write(1, b'forged\\n'); os.write(2, b'x' * 10 ** 6); return 2", 2.0),
        ("return float(sys.stdin.read() == '')", 1.0),
        ("threading.Thread(target=time.sleep, args=(60,)).start(); return 2", 2.0),
        ("os.fork(); return 2", 2.0),
        ("os.chdir('/'); sys.path.clear(); return 2", 2.0),
    ],
)
def test_odd_but_fine(make_pool, reward_file, group, good, value):
    pool = make_pool(reward_file(code(good)))
    for _ in range(2):
        assert [s.reward for s in pool.score([group(["a", "bad", "b"])])[0]] == [1.0, value, 1.0]


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        ("[1.0]", "invalid: score: returned 1 values for 3 completions"),
        ("[1.0] * (len(completions) + 1)", "invalid: score: returned 4 values for 3 completions"),
        ("1.0", "invalid: score: returned 1.0 (float) instead of a list"),
        ("None", "invalid: score: returned None (NoneType) instead of a list"),
        ("'1' * len(completions)", "invalid: score: returned '111' (str) instead of a list"),
        ("{c: 1.0 for c in completions}", "invalid: score: returned"),
        ("iter(int, 1)", "invalid: score: returned a different number of values for 3 completions"),
    ],
)
def test_wrong_shape_of_the_result(make_pool, reward_file, group, result, failure):
    """No completion of the call is scored or retried: alone, the result could have the right shape by chance."""
    pool = make_pool(
        reward_file(f"""
            def score(completions, **_):
                return {result} if "bad" in completions else [1.0] * len(completions)
        """)
    )
    wrong, innocent = pool.score([group(["a", "bad", "b"]), group(["a", "b"], id="train/1")])
    assert all(s.status is Status.UNSCORED and s.reward is None and s.failure.startswith(failure) for s in wrong)
    assert [s.reward for s in innocent] == [1.0, 1.0]


def test_arrays_and_tuples_are_lists(make_pool, reward_file, group):
    for result in ("tuple(x)", "np.array(x, dtype=np.float32)", "iter(x)"):
        pool = make_pool(
            reward_file(f"import numpy as np\ndef score(completions, **_):\n    x = [1.0, 2.0]\n    return {result}")
        )
        assert [s.reward for s in pool.score([group(["a", "b"])])[0]] == [1.0, 2.0]


def test_mutated_arguments_do_not_affect_other_calls(make_pool, reward_file, group):
    name = reward_file("""
        def score(prompts, completions, tags, setting, **_):
            values = []
            for t in tags:
                values.append(float(len(t)) + len(setting))
                tags[0].append(1)
            prompts.clear(); completions.clear(); setting.append(1)
            return values
    """)
    pool = make_pool(name, options={name: {"setting": []}})
    first = group(["a", "b"], tags=[])
    for _ in range(2):
        assert [s.reward for s in pool.score([first, first])[0]] == [0.0, 0.0]


@pytest.mark.parametrize(
    "bad",
    [
        "time.sleep(60)",
        "[signal.signal(s, signal.SIG_IGN) for s in (2, 14, 15)]; (10 ** 8) ** (10 ** 7)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_hang_costs_only_its_own_completion(make_pool, reward_file, group, bad):
    pool = make_pool(reward_file(code(bad)), timeout_s=0.7, workers=2)
    began = time.monotonic()
    scores = pool.score([group(["a", "b"]), group(["a", "bad", "b", "c"]), group(["d", "e"])])
    assert time.monotonic() - began < 30, "one call takes a minute"
    assert check_innocent(scores[1], 1).failure == "timeout: score: no result after 0.7 s"
    for others in (scores[0], scores[2]):
        check_innocent([None, *others], 0)
    assert len(pool.pids()) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_function_that_always_hangs_is_given_up(make_pool, reward_file, group, workers):
    pool = make_pool(reward_file(code("time.sleep(60)")), timeout_s=0.5, workers=workers)
    began = time.monotonic()
    scores = pool.score([group(["bad"] * 6, id=f"train/{g}") for g in range(8)])
    assert time.monotonic() - began < 30, "one call takes a minute"
    kinds = Counter(s.failure.partition(": ")[0] for g in scores for s in g)
    assert set(kinds) == {"timeout", "not_run"}
    assert scores[-1][-1].failure.startswith("not_run: score: every ")
    assert len(pool.pids()) == workers


@pytest.mark.parametrize("harm", ["time.sleep(60)", "os._exit(1)"])
def test_good_completions_keep_their_scores_however_many_are_bad(make_pool, reward_file, group, harm):
    pool = make_pool(reward_file(code(harm)), timeout_s=2.0, workers=2)
    for scores in pool.score([group(["a", "b", "bad", "c"], id=f"train/{g}") for g in range(4)]):
        check_innocent(scores, 2)


def test_function_that_fails_only_on_groups_is_called_per_completion(make_pool, reward_file, group):
    name = reward_file("""
        import time
        def score(completions, **_):
            if len(completions) > 1:
                time.sleep(60)
            return [2.0]
    """)
    pool = make_pool(name, timeout_s=0.3, workers=2)
    scores = pool.score([group(["a", "b", "c"], id=f"train/{g}") for g in range(12)])
    assert all(s.reward == 2.0 for g in scores for s in g)


def test_worker_killed_from_outside_costs_no_score(make_pool, reward_file, group, tmp_path):
    log = tmp_path / "log"
    pool = make_pool(
        reward_file(f"""
            import os, time
            def score(completions, **_):
                os.write(os.open({str(log)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), b"x")
                time.sleep(0.05)
                return [float(c) for c in completions]
        """),
        workers=2,
    )
    groups = [group([str(10 * g + i) for i in range(1 + g % 2)], id=f"train/{g}") for g in range(30)]
    killed = []

    def kill():
        while not log.exists():
            time.sleep(0.01)
        for _ in range(3):
            time.sleep(0.15)
            for pid in pool.pids()[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    scores = pool.score(groups)
    killer.join()
    assert killed
    assert [[s.reward for s in g] for g in scores] == [[10.0 * g + i for i in range(1 + g % 2)] for g in range(30)]


def test_worker_killed_while_idle_is_replaced(make_pool, reward_file, group):
    pool = make_pool(reward_file(code("pass")))
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    while _alive(pid):
        time.sleep(0.01)
    check_innocent([None, *pool.score([group(["a", "b"])])[0]], 0)
    assert pool.pids() != [pid]


def test_nothing_leaks(make_pool, reward_file, group, children):
    """No file descriptors, zombies or threads leak after many failures, or after closing."""
    before, threads, open_before = children(), threading.active_count(), descriptors()
    pool = make_pool(reward_file(code("os._exit(1)")), timeout_s=2.0, workers=2)
    pool.score([group(["a", "bad"])])
    assert settled(lambda: len(pool.pids()), 2) == 2
    open_now = steady(descriptors)
    for _ in range(5):
        check_innocent(pool.score([group(["a", "bad", "b"])])[0], 1)
    assert settled(descriptors, open_now) == open_now
    assert settled(lambda: len(pool.pids()), 2) == 2
    assert children() - before == set(pool.pids())
    pool.close()
    assert settled(children, before) == before
    assert settled(threading.active_count, threads) == threads
    assert settled(descriptors, open_before) == open_before


def test_children_of_a_hanging_function_die_with_it(make_pool, reward_file, group, tmp_path):
    note = tmp_path / "pid"
    bad = f"p = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    make_pool(reward_file(code(bad)), timeout_s=0.5).score([group(["bad"])])
    assert not _alive(int(note.read_text()))


def test_grandchild_that_holds_the_pipes_does_not_hide_a_death(make_pool, reward_file, group):
    pool = make_pool(reward_file(code("os.fork() and os._exit(7); time.sleep(60)")), timeout_s=50.0)
    began = time.monotonic()
    assert check_innocent(pool.score([group(["a", "bad"])])[0], 1).failure == "died: score: exit code 7"
    assert time.monotonic() - began < 30, "the grandchild holds the pipes for a minute"


def test_workers_die_with_a_killed_trainer(reward_file, tmp_path):
    """Even during a call that never ends, and although a thread of the pool started them."""
    name = reward_file(f"""
        import os, time
        def score(completions, **_):
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
            while True: pass
    """)
    script = f"""
from gspo.config import RewardConfig
from gspo.reward.reward import RewardPool
from gspo.types import Completion, Prompt, StopReason
pool = RewardPool(RewardConfig(functions=({name!r},), workers=2))
completion = Completion(
    prompt_id="p", sample=0, token_ids=(), text="", logp_sampler=(), stop=StopReason.EOS, version=0
)
pool.score([(Prompt(id="p", content="", text="", token_ids=()), [completion])])
"""
    trainer = subprocess.Popen([sys.executable, "-c", script])
    pid = _wait_for(tmp_path / "pid")
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 60
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise even if the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_trainer(interruptible, make_pool, reward_file, group, tmp_path):
    pool = make_pool(
        reward_file(f"""
            import pathlib, time
            def score(completions, **_):
                pathlib.Path({str(tmp_path / "pid")!r}).write_text("1")
                time.sleep(60 if completions[0] == "slow" else 0)
                return [1.0] * len(completions)
        """),
        timeout_s=60.0,
        workers=2,
    )

    def interrupt():
        _wait_for(tmp_path / "pid")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pool.score([group(["slow"])])
    check_innocent([None, *pool.score([group(["a"])])[0]], 0)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 30, "the function sleeps for a minute"
    assert pool.pids() == []


def test_closing_while_another_thread_scores(make_pool, reward_file, group, tmp_path):
    pool = make_pool(
        reward_file(f"""
            import time
            def score(completions, **_):
                open({str(tmp_path / "pid")!r}, "w").write("1")
                time.sleep(60)
        """),
        timeout_s=60.0,
    )
    caught = []

    def run():
        try:
            pool.score([group(["a"]), group(["b"])])
        except RewardError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    _wait_for(tmp_path / "pid")
    pool.close()
    thread.join(timeout=5)
    assert caught == ["the reward pool was closed while it was scoring"]


def test_worker_that_cannot_be_restarted_is_an_error_not_a_hang(make_pool, reward_file, group, tmp_path):
    flag = str(tmp_path / "broken")
    pool = make_pool(
        reward_file(code("open(FLAG, 'w'); os._exit(1)", f"FLAG = {flag!r}; assert not os.path.exists(FLAG)"))
    )
    with pytest.raises(RewardError, match="cannot import"):
        pool.score([group(["a", "bad"])])
    os.unlink(flag)
    check_innocent([None, *pool.score([group(["a"])])[0]], 0)


def test_two_threads_can_score_concurrently(make_pool, reward_file, group):
    pool = make_pool(reward_file(code("raise ValueError")), workers=2)
    seen = []

    def run():
        seen.append([s.reward for g in pool.score([group(["a", "bad", "b"])] * 10) for s in g])

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert seen == [[1.0, None, 1.0] * 10] * 3


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(path: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was never written")

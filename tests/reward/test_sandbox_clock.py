"""Blame for slow programs, and the lock that lets one program run alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import sandbox_attacks
from processes import descendants
from sandbox_attacks import CALLS, GOOD, OUTPUT, SHORT

from gspo.reward.sandbox.box import Box, DeadlinePassed
from gspo.reward.sandbox.clock import PATIENCE, PATIENCE_ALONE, Clock, MachineBusy, ProgramWaited
from gspo.reward.sandbox.grade import End, Grade, grade_all
from gspo.reward.sandbox.level import NAMES, Level
from gspo.reward.sandbox.machine_lock import machine_lock
from gspo.reward.sandbox.suite import read_suite


@pytest.fixture(scope="module", params=[5, 6], ids=lambda number: NAMES[number])
def level(request: pytest.FixtureRequest) -> Level:
    for candidate in sandbox_attacks.levels():
        if isinstance(candidate, Level) and candidate.number == request.param:
            return candidate
    pytest.skip("this machine does not have this level")


# ------------------------------------------------------------------------------------------- the rule by itself


class Machine:
    """A fake process whose times the test sets, so nothing here depends on a real clock."""

    def __init__(self, cpu: float = 0.0, waited: float = 0.0) -> None:
        self.cpu, self.wait = cpu, waited

    def cpu_s(self) -> float:
        return self.cpu

    def waited(self) -> float:
        return self.wait


def outcome(*, spent: float, waited: float = 0.0, reference: float | None = None) -> tuple[str, float]:
    """The outcome, and when it is reached, for a program with a limit of 1 s and these fractions of the elapsed
    time."""
    box: Any = Machine(cpu=5.0, waited=5.0)
    reference_box: Any = None if reference is None else Machine(cpu=7.0)
    clock = Clock(box, 1.0, reference_box)
    clock.start()
    start = clock.deadline - 1.0
    while True:
        passed = clock.deadline - start
        box.cpu = 5.0 + spent * passed
        box.wait = 5.0 + waited * passed
        if reference_box:
            reference_box.cpu = 7.0 + (reference or 0.0) * passed
        try:
            clock.extend()
        except (DeadlinePassed, ProgramWaited, MachineBusy) as error:
            return type(error).__name__, passed


@pytest.mark.parametrize(
    ("shares", "end", "least", "most"),
    [
        ({"spent": 1.0}, "DeadlinePassed", 1.0, 1.0),
        ({"spent": 4.0}, "DeadlinePassed", 1.0, 1.0),
        ({"spent": 0.0}, "ProgramWaited", 1.0, 1.0),
        ({"spent": 0.5}, "ProgramWaited", 1.0, 1.0),
        ({"spent": 0.5, "waited": 0.5}, "DeadlinePassed", 1.8, 2.0),
        ({"spent": 0.2, "waited": 0.8}, "ProgramWaited", 0.9 * PATIENCE, PATIENCE),
        ({"spent": 0.0, "waited": 30.0}, "ProgramWaited", PATIENCE, PATIENCE),
        ({"spent": 0.0, "reference": 1.0}, "DeadlinePassed", 1.0, 1.0),
        ({"spent": 0.0, "waited": 1.0, "reference": 1.0}, "DeadlinePassed", 1.0, 1.0),
        ({"spent": 0.1, "waited": 32.0, "reference": 0.5}, "DeadlinePassed", 1.8, 2.0),
        ({"spent": 0.2, "waited": 0.8, "reference": 0.2}, "DeadlinePassed", 4.5, 5.0),
        ({"spent": 0.5, "reference": 0.0}, "DeadlinePassed", 1.8, 2.0),
        ({"spent": 0.05, "waited": 0.95, "reference": 0.05}, "MachineBusy", PATIENCE_ALONE, PATIENCE_ALONE),
        ({"spent": 0.0, "reference": 0.0}, "MachineBusy", PATIENCE_ALONE, PATIENCE_ALONE),
    ],
)
def test_who_is_to_blame(shares: dict[str, float], end: str, least: float, most: float) -> None:
    found, seconds = outcome(**shares)
    assert found == end
    assert least - 1e-6 <= seconds <= most + 1e-6


def test_clock_pauses_while_the_tests_run() -> None:
    box: Any = Machine()
    reference_box: Any = Machine()
    clock = Clock(box, 200.0, reference_box)
    for _ in range(5):
        clock.start()
        took = clock.stop()
        assert took < 100
        reference_box.cpu += 200.0  # the reference keeps running
    clock.start()
    assert clock.deadline - time.monotonic() > 100
    clock.extend()  # does not raise: the reference's CPU time while the tests run does not count


def test_threads_together_cannot_exceed_the_limit() -> None:
    box: Any = Machine()
    clock = Clock(box, 1e-9, None)
    clock.start()
    time.sleep(0.001)
    clock.stop()
    clock.check()
    box.cpu = 1.0
    with pytest.raises(DeadlinePassed):
        clock.check()


# ------------------------------------------------------------------------------------------- with real processes


LIMITS = replace(SHORT, limit_s=1.5)
"""Long enough to be stopped while it computes, even on a busy machine."""


@contextmanager
def stopping(most: int) -> Iterator[list[int]]:
    """Stop up to `most` sandboxed processes once each has used 0.3 s of CPU time. Yields the stopped processes."""
    over = threading.Event()
    mine = set(descendants(os.getpid()))
    stopped: list[int] = []

    def hold() -> None:
        while len(stopped) < most and not over.wait(0.01):
            for pid in set(descendants(os.getpid())) - mine - set(stopped):
                with suppress(OSError):
                    if time.clock_gettime((~pid << 3) | 2) > 0.3 and len(stopped) < most:
                        os.kill(pid, signal.SIGSTOP)
                        stopped.append(pid)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield stopped
    finally:
        over.set()
        thread.join()


def test_stalled_machine_does_not_score_0(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """A computing program and its reference process are stopped from outside before they reach the limit."""
    monkeypatch.setattr("gspo.reward.sandbox.clock.PATIENCE_ALONE", 2.0)
    with stopping(99):
        (grade,) = grade_all(["def solve(x):\n    while True: pass"], CALLS, level, LIMITS)
    assert isinstance(grade, MachineBusy), grade
    assert "waited" in str(grade)


@pytest.mark.parametrize("suite", [CALLS, OUTPUT], ids=["calls", "stdin"])
def test_sleeping_program_is_retried_and_scores_0(suite: Any, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.reward.sandbox.clock.PATIENCE_ALONE", 100.0)  # however busy this machine is
    modes: list[str] = []
    init = Box.__init__

    def noted(self: Box, level: Level, role: str, **options: Any) -> None:
        modes.extend([role] if role == "candidate" else [])
        init(self, level, role, **options)

    monkeypatch.setattr(Box, "__init__", noted)
    program = "import time\ntime.sleep(1000)\n"
    (grade,) = grade_all([program], suite, level, SHORT)
    assert isinstance(grade, Grade), grade
    assert (grade.end, grade.value(all_or_nothing=True)) == (End.TIMEOUT, 0.0)
    assert len(modes) == 3  # the program twice, the reference once


def test_program_that_keeps_the_tests_asking_scores_0(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process gets a third of a CPU, so neither side uses its limit before the first deadline."""
    for module in ("clock", "grade"):
        monkeypatch.setattr(f"gspo.reward.sandbox.{module}.PATIENCE_ALONE", 100.0)
    used = Box.cpu_s
    monkeypatch.setattr(Box, "cpu_s", lambda box: used(box) / 3)
    monkeypatch.setattr(Box, "waited", lambda box: 0.0)
    suite = read_suite({"tests": ["assert f(lambda n: sum(range(20_000))) == 1"]}, "")
    (grade,) = grade_all(["def f(g):\n    while True: g(1)"], suite, level, SHORT)
    assert isinstance(grade, Grade), grade
    assert grade.end is End.TIMEOUT


def test_program_that_was_stopped_once_gets_a_second_try(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE", "PATIENCE_ALONE"):
        monkeypatch.setattr(f"gspo.reward.sandbox.clock.{name}", 100.0)  # however busy this machine is
    # A third of the limit: on a busy machine, the reference may get up to three times the CPU time of the program.
    program = "import time\nwhile time.process_time() < 0.5: pass\n" + GOOD
    with stopping(1) as stopped:
        (grade,) = grade_all([program], CALLS, level, LIMITS)
    assert len(stopped) == 1
    assert isinstance(grade, Grade), grade
    assert grade.end is End.PASSED, grade


# ------------------------------------------------------------------------------------------- turns


def test_exclusive_turn_excludes_all_others() -> None:
    events: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with machine_lock(alone=False, patience_s=60.0):
            inside.set()
            leave.wait()
            events.append("other ends")

    def alone() -> None:
        with machine_lock(alone=True, patience_s=60.0):
            events.append("alone")

    first = threading.Thread(target=other)
    first.start()
    inside.wait()
    with machine_lock(alone=False, patience_s=60.0):
        pass  # shared turns do not block each other
    second = threading.Thread(target=alone)
    second.start()
    time.sleep(0.1)
    assert events == []
    leave.set()
    first.join()
    second.join()
    assert events == ["other ends", "alone"]


def test_waiting_for_the_lock_is_bounded() -> None:
    with (
        machine_lock(alone=True, patience_s=60.0),
        machine_lock(alone=True, patience_s=0.05),
        machine_lock(alone=False, patience_s=0.05),
    ):
        pass

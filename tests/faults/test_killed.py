"""A trainer killed at random instants, and what it leaves behind. `test_saves.py` covers kills within a save.

The trainer runs in a forked child, so that a restart needs no new interpreter. Every kill is counted.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ends import run_of, same_end

from gspo.config import Config
from gspo.learner import checkpoint
from gspo.record.run_dir import read_jsonl
from gspo.trainer import resume, train


class Silent:
    def message(self, text: str) -> None: ...
    def cold_start(self, *rest: Any) -> None: ...
    def evaluated(self, metrics: Any) -> None: ...
    def step(self, *rest: Any) -> None: ...
    def close(self) -> None: ...


def start_or_resume(config: Config) -> None:
    """Start the run, or resume it."""
    if (run_of(config) / "config.toml").exists():
        resume(run_of(config), Silent())
    else:
        shutil.rmtree(run_of(config), ignore_errors=True)
        train(config, Silent())


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a forked child. Returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def wait(child: int, limit_s: float = 60) -> int:
    """Exit status of a child: 0, or minus the signal that killed it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


@pytest.mark.slow
def test_f1_killed_at_twenty_random_instants(tiny: Callable[..., Config]) -> None:
    setting = ("steps=30", "eval.every=7", "checkpoint.every=2", "checkpoint.keep=2")
    golden, cut = tiny(*setting, run_dir="golden"), tiny(*setting, run_dir="cut")
    assert wait(forked(lambda: start_or_resume(golden)), 300) == 0
    rng = random.Random(4)
    kills = 0
    while kills < 20:
        child = forked(lambda: start_or_resume(cut))
        time.sleep(rng.uniform(0.3, 2.0))
        os.kill(child, signal.SIGKILL)
        if wait(child) == -signal.SIGKILL:
            kills += 1
        steps = checkpoint.saved(run_of(cut) / "checkpoints")
        if steps and int(steps[-1].name) >= 28:  # nearly done: start over and continue counting
            shutil.rmtree(run_of(cut))
    assert wait(forked(lambda: start_or_resume(cut)), 300) == 0
    same_end(run_of(golden), run_of(cut))


class StopAfterOne(Silent):
    def step(self, *rest: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_f8_nothing_outlives_a_killed_trainer(tiny: Callable[..., Config], tmp_path: Path) -> None:
    mark = f"gspo-orphan-{os.getpid()}-{time.monotonic_ns()}"

    def work() -> None:
        os.environ["GSPO_TEST_MARK"] = mark
        start_or_resume(tiny("steps=500", "eval.every=0"))

    child = forked(work)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and len(read_jsonl(tmp_path / "run/metrics.jsonl")) < 2:
        time.sleep(0.05)
    workers = marked_processes(mark) - {child}
    assert workers, "no reward worker was found, so their absence later would prove nothing"
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    deadline = time.monotonic() + 60  # generous for a busy machine; on an idle one they end within 5 s
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked_processes(mark)


def marked_processes(mark: str) -> set[int]:
    """Processes that have the mark in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_f11_a_run_resumes_exactly_from_every_step(tiny: Callable[..., Config]) -> None:
    """Two epochs of a data set smaller than two batches, interrupted at every step."""
    setting = ("data.task_size=7", "data.held_out=2", "steps=5", "eval.every=2", "checkpoint.every=1")
    whole = tiny(*setting, run_dir="whole")
    train(whole, Silent())
    for cut_at in range(6):
        cut = tiny(*setting, run_dir=f"cut-{cut_at}")
        train(cut, Silent())
        for later in checkpoint.saved(run_of(cut) / "checkpoints"):
            if int(later.name) > cut_at:
                shutil.rmtree(later)
        resume(run_of(cut), Silent())
        same_end(run_of(whole), run_of(cut))

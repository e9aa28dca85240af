"""A trainer that is killed: at random instants, at every file operation of a save, between a save and the clean-up after it.

The trainer runs in a forked child, so that a kill costs no new interpreter. Every kill is counted.
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
from gspo.observe.run_dir import read_jsonl
from gspo.policy import checkpoint
from gspo.train import resume, train


class Silent:
    def message(self, text: str) -> None: ...
    def cold_start(self, *rest: Any) -> None: ...
    def evaluated(self, metrics: Any) -> None: ...
    def step(self, *rest: Any) -> None: ...
    def close(self) -> None: ...


def go(config: Config) -> None:
    """Start the run, or go on with it."""
    if (run_of(config) / "config.toml").exists():
        resume(run_of(config), Silent())
    else:
        shutil.rmtree(run_of(config), ignore_errors=True)
        train(config, Silent())


def forked(work: Callable[[], None]) -> int:
    """The process id of a child that does the work and exits."""
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
    assert wait(forked(lambda: go(golden)), 300) == 0
    chance, kills = random.Random(4), 0
    while kills < 20:
        child = forked(lambda: go(cut))
        time.sleep(chance.uniform(0.3, 2.0))
        os.kill(child, signal.SIGKILL)
        if wait(child) == -signal.SIGKILL:
            kills += 1
        steps = checkpoint.saved(run_of(cut) / "checkpoints")
        if steps and int(steps[-1].name) >= 28:  # nearly done: begin anew, the count goes on
            shutil.rmtree(run_of(cut))
    assert wait(forked(lambda: go(cut)), 300) == 0
    same_end(run_of(golden), run_of(cut))


OPERATIONS = (
    (checkpoint, "save_model"),
    (checkpoint, "save_file"),
    (checkpoint, "_flush"),
    (checkpoint, "_retire"),
    (Path, "rename"),
    (Path, "write_text"),
    (shutil, "rmtree"),
)
"""File operations of a save."""


def count_and_kill(at: int, counter: Path) -> Callable[[], None]:
    """In a child: count the file operations of the save of step 2 and die before the `at`-th (0: only count)."""

    def prepare() -> None:
        calls, saving, original_save = [0], [False], checkpoint.save

        def save(folder: Path, policy: Any, optimizer: Any, state: Any, **options: Any) -> Path:
            saving[0] = state.step == 2
            try:
                return original_save(folder, policy, optimizer, state, **options)
            finally:
                saving[0] = False
                if state.step == 2:
                    counter.write_bytes(str(calls[0]).encode())

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def instead(*args: Any, **kwargs: Any) -> Any:
                if saving[0]:
                    calls[0] += 1
                    if calls[0] == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return instead

        for owner, name in OPERATIONS:
            setattr(owner, name, counted(getattr(owner, name)))
        checkpoint.save = save

    return prepare


class StopAfterOne(Silent):
    def step(self, *rest: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f2_f6_killed_at_every_file_operation_of_a_save(tiny: Callable[..., Config], tmp_path: Path) -> None:
    golden = tiny("steps=3", "eval.every=0", "checkpoint.keep=1", run_dir="golden")
    train(golden, StopAfterOne())
    shutil.copytree(run_of(golden), tmp_path / "begun")

    def run(path: Path, at: int) -> int:
        def work() -> None:
            count_and_kill(at, tmp_path / "count")()
            resume(path, Silent())

        return wait(forked(work))

    assert run(run_of(golden), 0) == 0
    operations = int((tmp_path / "count").read_text())
    assert operations >= 15
    for at in range(1, operations + 1):
        cut = tmp_path / f"cut-{at}"
        shutil.copytree(tmp_path / "begun", cut)
        assert run(cut, at) == -signal.SIGKILL, f"operation {at} did not kill"
        newest, _ = checkpoint.newest(cut / "checkpoints")
        assert newest.name in ("000001", "000002")
        assert wait(forked(lambda cut=cut: resume(cut, Silent()))) == 0
        same_end(run_of(golden), cut)
        assert len(checkpoint.saved(cut / "checkpoints")) == 1
        assert not list((cut / "checkpoints").glob(".tmp-*"))
        shutil.rmtree(cut)


def test_f8_nothing_outlives_a_killed_trainer(tiny: Callable[..., Config], tmp_path: Path) -> None:
    mark = f"gspo-orphan-{os.getpid()}-{time.monotonic_ns()}"

    def work() -> None:
        os.environ["GSPO_TEST_MARK"] = mark
        go(tiny("steps=500", "eval.every=0"))

    child = forked(work)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(read_jsonl(tmp_path / "run/metrics.jsonl")) < 2:
        time.sleep(0.05)
    mine = marked(mark) - {child}
    assert mine, "the reward workers were not found, so their end would prove nothing"
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked(mark)


def marked(mark: str) -> set[int]:
    """Processes that were started with the mark in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_f11_every_step_is_a_place_to_stop(tiny: Callable[..., Config]) -> None:
    """Two epochs of a data set that is smaller than two batches, cut at every step."""
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

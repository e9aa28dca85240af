"""Saves interrupted by the system: killed at each system call, a full disk at each file, failing writes and flushes.

One save is prepared as a run would make it and repeated in forks with one fault each. `strace` injects the fault at one
system call; a small file system fills the disk. Every fault is counted: a fork without its fault fails the test.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ends import run_of, same_end
from needs import unusable
from test_killed import Silent, StopAfterOne, forked, wait
from tools import traced
from transformers.utils.logging import disable_progress_bar

import gspo.loop
from gspo.config import Config
from gspo.learner import checkpoint
from gspo.trainer import resume, train

pytestmark = pytest.mark.slow

CALLS = (
    "openat",
    "write",
    "fsync",
    "rename",
    "renameat2",
    "unlink",
    "unlinkat",
    "mkdir",
    "rmdir",
    "ftruncate",
    "lseek",
)
"""System calls of a save at which it is killed."""


class SaveCaptured(Exception):
    """Ends the run when the arguments of the save are known."""


@dataclass(frozen=True, kw_only=True)
class PreparedSave:
    """A run that is about to save its second step, and the uninterrupted run to compare with."""

    run: Path
    golden: Path
    arguments: tuple[Any, ...]

    def save(self, run: Path) -> None:
        """Save the second step in a copy of the run."""
        checkpoint.save(run / "checkpoints", *self.arguments, keep=1)


@pytest.fixture
def prepared(tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSave:
    # Forks share the progress bar's lock: a fork that dies while holding it would block the next.
    disable_progress_bar()
    setting = ("steps=3", "eval.every=0", "checkpoint.keep=1")
    golden = tiny(*setting, run_dir="golden")
    partial = tiny(*setting, run_dir="partial")
    train(golden, Silent())
    train(partial, StopAfterOne())
    captured: list[tuple[Any, ...]] = []

    def capture(folder: Path, *arguments: Any, **options: Any) -> None:
        captured.append(arguments)
        raise SaveCaptured

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", capture)
        with pytest.raises(SaveCaptured):
            resume(run_of(partial), Silent())
    assert captured[0][-1].step == 2
    return PreparedSave(run=run_of(partial), golden=run_of(golden), arguments=captured[0])


@pytest.fixture
def copies(prepared: PreparedSave, tmp_path: Path) -> Callable[[], Path]:
    """Fresh copies of the prepared run, one at a time."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return shutil.copytree(prepared.run, tmp_path / "copy")

    return copy


def count_calls(log: Path) -> Counter[str]:
    """How often each system call was made."""
    return Counter(m[1] for line in log.read_text().splitlines() if (m := re.match(r"[0-9]+ +([a-z0-9_]+)\(", line)))


def signature(run: Path) -> tuple[Any, ...]:
    """Names and sizes of all files in the checkpoint folder."""
    found = sorted(p for p in (run / "checkpoints").rglob("*"))
    return tuple((str(p.relative_to(run)), p.stat().st_size if p.is_file() else -1) for p in found)


def assert_resumes_exactly(run: Path, golden: Path) -> None:
    assert wait(forked(lambda: resume(run, Silent(), trust_run=True))) == 0
    same_end(golden, run)
    assert len(checkpoint.saved(run / "checkpoints")) == 1
    assert not list((run / "checkpoints").glob(".tmp-*"))


def test_f2_f6_killed_at_every_system_call_of_a_save(
    prepared: PreparedSave, copies: Callable[[], Path], tmp_path: Path
) -> None:
    log, run = tmp_path / "log", copies()
    assert traced(lambda: prepared.save(run), log, ["-e", f"trace={','.join(CALLS)}"]) == 0
    calls = count_calls(log)
    assert calls["openat"] > 10
    assert calls["write"] > 5
    assert calls["fsync"] > 5
    assert calls["rename"] == 2, "one into place, one out of the way"
    assert calls["unlinkat"] + calls["unlink"] > 5
    states = set()
    kills = 0
    ends = Counter[str]()
    for call, number in calls.items():
        for n in range(1, number + 1):
            run = copies()
            kill = ["-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={n}"]
            assert traced(lambda run=run: prepared.save(run), log, kill) == -signal.SIGKILL, f"{call} {n} did not kill"
            kills += 1
            newest, complaints = checkpoint.newest(run / "checkpoints")
            ends[newest.name] += 1
            assert newest.name in ("000001", "000002")
            assert not complaints
            assert len(checkpoint.saved(run / "checkpoints")) <= 2
            state = tuple(name for name, _ in signature(run))
            if state not in states:
                states.add(state)
                assert_resumes_exactly(run, prepared.golden)
    assert kills == sum(calls.values())
    assert set(ends) == {"000001", "000002"}
    print(f"{kills} kills at {len(calls)} kinds of system calls, {len(states)} different states, {dict(ends)}")


OPERATIONS = (
    (checkpoint, "save_model"),
    (checkpoint, "save_file"),
    (checkpoint, "_flush"),
    (checkpoint, "_retire"),
    (Path, "rename"),
    (Path, "write_text"),
    (shutil, "rmtree"),
)
"""Python functions of a save at which it is killed, for machines without strace."""


def save_and_kill(prepared: PreparedSave, run: Path, count: Path, at: int) -> int:
    """Save in a fork and kill it before the `at`-th file operation; `0` only counts them. Returns the exit code."""
    calls = [0]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return instead

    def work() -> None:
        for owner, name in OPERATIONS:
            setattr(owner, name, counting(getattr(owner, name)))
        prepared.save(run)
        count.write_bytes(str(calls[0]).encode())

    return wait(forked(work))


@pytest.mark.parametrize("again", [False, True])
def test_f2_killed_at_every_file_operation_of_a_save(
    again: bool, prepared: PreparedSave, copies: Callable[[], Path], tmp_path: Path
) -> None:
    """With `again`, the same step is saved a second time, over the only checkpoint."""
    count = tmp_path / "count"
    newest_names = set()

    def copy() -> Path:
        run = copies()
        if again:
            prepared.save(run)
        return run

    assert save_and_kill(prepared, copy(), count, 0) == 0
    number = int(count.read_text())
    assert number >= 15
    for at in range(1, number + 1):
        run = copy()
        assert save_and_kill(prepared, run, count, at) == -signal.SIGKILL, f"operation {at} did not kill"
        newest, complaints = checkpoint.newest(run / "checkpoints")
        assert not complaints
        newest_names.add(newest.name)
    assert newest_names == ({"000002"} if again else {"000001", "000002"})


def test_f6_five_resumes_each_killed_before_the_cleanup(prepared: PreparedSave, copies: Callable[[], Path]) -> None:
    """With `keep = 1`, killed repeatedly after writing the new checkpoint and before deleting the old one."""
    run = copies()
    kills = 0

    def work() -> None:
        def die(*arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint._retire = die
        resume(run, Silent(), steps=20, trust_run=True)

    for _ in range(5):
        assert wait(forked(work)) == -signal.SIGKILL
        kills += 1
        assert len(checkpoint.saved(run / "checkpoints")) <= 1 + kills
        checkpoint.newest(run / "checkpoints")
    assert int(checkpoint.newest(run / "checkpoints")[0].name) == 1 + kills
    assert wait(forked(lambda: resume(run, Silent(), steps=20, trust_run=True)), 120) == 0
    assert [p.name for p in checkpoint.saved(run / "checkpoints")] == ["000020"]
    assert kills == 5


FAULTS = ("fsync:error=EIO", "write:error=EIO", "write:error=ENOSPC", "write:retval=1")
"""`retval=1`: the system reports one written byte, but wrote none."""


def test_f5_a_flush_or_write_that_fails_is_a_failed_save(
    prepared: PreparedSave, copies: Callable[[], Path], tmp_path: Path
) -> None:
    for fault in FAULTS:
        check_each_call(fault, prepared, copies, tmp_path)


def check_each_call(fault: str, prepared: PreparedSave, copies: Callable[[], Path], tmp_path: Path) -> None:
    call, log, run = fault.partition(":")[0], tmp_path / "log", copies()
    assert traced(lambda: prepared.save(run), log, ["-e", f"trace={call}"]) == 0
    whole = {p.name: p.read_bytes() for p in checkpoint.newest(run / "checkpoints")[0].iterdir()}
    number = count_calls(log)[call]
    assert number > 5
    shots = 0
    for n in range(1, number + 1):
        run = copies()
        before = signature(run)
        code = traced(
            lambda run=run: prepared.save(run), log, ["-e", f"trace={call}", "-e", f"inject={fault}:when={n}"]
        )
        shots += log.read_text().count("(INJECTED)")
        newest, complaints = checkpoint.newest(run / "checkpoints")
        assert not complaints, (fault, n)
        if code == 0 or newest.name == "000002":  # nothing was lost, or only the final fsync of the folder failed
            assert {p.name: p.read_bytes() for p in newest.iterdir()} == whole
        else:
            assert code == 2, f"{fault} at {n}: an error other than OSError"
            assert signature(run) == before
    assert shots == number


# ------------------------------------------------------------------------------------------------- F4: a full disk


def small_disk(path: Path, size: int) -> None:
    """Mount a file system of `size` bytes at a path, visible only to this process. Call it in a fork."""
    system = ctypes.CDLL(None, use_errno=True)
    # CLONE_NEWNS; without root also CLONE_NEWUSER, which grants the right to mount.
    spaces = 0x00020000 | (0x10000000 if os.geteuid() else 0)
    if system.unshare(spaces):
        os._exit(77)
    private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC: the mount does not propagate to other processes
    system.mount(b"none", b"/", None, ctypes.c_ulong(private), None)
    if system.mount(b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(0), f"size={size}".encode()):
        os._exit(77)


def round_to_pages(size: int) -> int:
    return -(-size // 4096) * 4096


def too_small(files: list[Path]) -> list[tuple[str, int]]:
    """For each file, in the order of writing, a disk size that fits all files before it and at most half of it."""
    sizes = [round_to_pages(path.stat().st_size) for path in files]
    return [(path.name, sum(sizes[:i]) + sizes[i] // 2 // 4096 * 4096) for i, path in enumerate(files)]


def test_f4_the_disk_is_full_at_each_file_of_a_save(
    prepared: PreparedSave, copies: Callable[[], Path], tmp_path: Path
) -> None:
    whole = copies()
    prepared.save(whole)
    files = sorted(checkpoint.newest(whole / "checkpoints")[0].iterdir(), key=lambda p: p.stat().st_mtime_ns)
    assert len(files) >= 6
    rooms = too_small(files)
    old = sum(round_to_pages(p.stat().st_size) for p in (prepared.run / "checkpoints/000001").iterdir())
    failures = []
    for name, room in rooms:
        run, report = copies(), tmp_path / "report"
        report.unlink(missing_ok=True)

        def work(run: Path = run, room: int = room, report: Path = report) -> None:
            kept = shutil.copytree(run / "checkpoints", tmp_path / "kept", dirs_exist_ok=True)
            small_disk(run / "checkpoints", old + room)
            shutil.copytree(kept, run / "checkpoints", dirs_exist_ok=True)
            before = signature(run)
            try:
                prepared.save(run)
            except OSError as error:
                assert signature(run) == before
                assert checkpoint.newest(run / "checkpoints")[0].name == "000001"
                report.write_text(str(error))

        code = wait(forked(work))
        if code == 77:
            unusable("bwrap", "no file system can be mounted here, as bubblewrap would")
        assert code == 0
        assert report.exists(), f"room for all files before {name}, and the save did not fail"
        failures.append(report.read_text())
    assert len(failures) == len(files)
    assert all("No space left" in text or "os error 28" in text for text in failures), failures


def test_f4_a_run_on_a_full_disk_continues_and_recovers(
    tiny: Callable[..., Config], prepared: PreparedSave, tmp_path: Path
) -> None:
    """The disk is full while steps 2 and 3 are saved, and has room again for step 4."""
    config, whole = tiny("steps=5", "eval.every=0", run_dir="full"), tiny("steps=5", "eval.every=0", run_dir="room")
    train(whole, Silent())
    size = sum(round_to_pages(p.stat().st_size) for p in (prepared.run / "checkpoints/000001").iterdir())
    ballast = run_of(config) / "checkpoints/ballast"

    class Filler(Silent):
        def step(self, step: int, *rest: Any) -> None:
            if step == 2:
                with suppress(OSError), ballast.open("wb", buffering=0) as file:
                    while True:  # until the disk is full
                        file.write(b"x" * 4096)
            if step == 4:
                ballast.unlink()

    def work() -> None:
        create = gspo.loop.RunDir.describe

        def describe(self: Any, *what: Any) -> None:
            create(self, *what)
            small_disk(self.checkpoints, 8 * size)

        gspo.loop.RunDir.describe = describe
        train(config, Filler())
        shutil.copytree(run_of(config) / "checkpoints", tmp_path / "saved")

    code = wait(forked(work))
    if code == 77:
        unusable("bwrap", "no file system can be mounted here, as bubblewrap would")
    assert code == 0
    shutil.copytree(tmp_path / "saved", run_of(config) / "checkpoints", dirs_exist_ok=True)
    assert [p.name for p in checkpoint.saved(tmp_path / "saved")] == ["000000", "000001", "000004", "000005"]
    assert not list((tmp_path / "saved").glob(".tmp-*"))
    same_end(run_of(whole), run_of(config))

"""The ranks of a run as forked processes, so that they need no new interpreter. Each runs the `gspo` command.

`hook(rank)` runs in each process before the command, to break something in it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gspo.model.load
from gspo.cli import main
from gspo.config import Config, to_toml
from gspo.ranks.environment import free_port
from gspo.ranks.group import Ranks
from gspo.record.run_dir import read_metrics

Hook = Callable[[int], None]
SETTINGS = ("steps=4", "ranks.timeout_s=60")
"""Settings of the runs that are compared with an undisturbed one."""
LIMIT_S = 600.0
"""On any machine a run of a few steps has ended by then, also if ten other programs run there, and a deadline of a few
seconds has passed."""


class ForkedRanks:
    """A command on several ranks. What a rank prints is in `FOLDER/RANK.out`."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        count: int = 2,
        hook: Hook = lambda rank: None,
        port: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.codes: dict[int, int] = {}
        """Exit codes of the ranks that have ended; minus the signal that killed one."""
        port = port or free_port()
        self.pids = [self._fork(rank, count, port, arguments, hook) for rank in range(count)]

    def _fork(self, rank: int, count: int, port: int, arguments: Sequence[str], hook: Hook) -> int:
        child = os.fork()
        if child:
            return child
        code = 99
        try:
            output = os.open(self.folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # pytest has replaced them to capture what tests print.
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            if count > 1:
                launched = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in launched.items()})
            _use_one_thread()
            hook(rank)
            code = main(list(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # the disk of its log may be full
                    stream.flush()
            os._exit(code)

    def poll(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended so far."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return self.codes

    def wait(self, ranks: Sequence[int] | None = None, limit_s: float = LIMIT_S) -> list[int]:
        """The exit codes of these ranks, by default of all. Those that do not end are killed, and that is a failure."""
        wanted = range(len(self.pids)) if ranks is None else ranks
        until = time.monotonic() + limit_s
        while any(rank not in self.poll() for rank in wanted):
            if time.monotonic() > until:
                hung = [rank for rank in wanted if rank not in self.codes]
                outputs = "\n".join(f"--- rank {rank}\n{self.output(rank)[-2000:]}" for rank in range(len(self.pids)))
                self.kill()
                raise AssertionError(f"ranks {hung} have not ended after {limit_s:g} s\n{outputs}")
            time.sleep(0.02)
        return [self.codes[rank] for rank in wanted]

    def kill(self) -> None:
        """Kill what is left."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.poll():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def output(self, rank: int = 0) -> str:
        file = self.folder / f"{rank}.out"
        return file.read_text() if file.exists() else ""


def in_forks(count: int, work: Callable[[Ranks], None], folder: Path) -> None:
    """Do some work on the ranks of a process group, each of which is a fork of this process; it must succeed."""
    pids = []
    for rank in range(count):
        child = os.fork()
        if child:
            pids.append(child)
            continue
        code = 1
        try:
            _use_one_thread()
            if count > 1:
                limit = timedelta(seconds=LIMIT_S)
                dist.init_process_group(
                    "gloo", timeout=limit, init_method=f"file://{folder}/store", rank=rank, world_size=count
                )
            work(Ranks(rank=rank, count=count))
            code = 0
        except BaseException:
            (folder / f"{rank}.out").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * count, [file.read_text()[-3000:] for file in folder.glob("*.out")]


def _use_one_thread() -> None:
    """The pools of threads that this process has had before the fork are gone, and a parallel region would wait for
    them forever."""
    # It may fail after it has set the number, because one of the pools cannot be changed.
    with suppress(RuntimeError):
        torch.set_num_threads(1)
    patch(gspo.model.load, "_choose_threads", lambda original: lambda *rest: None)


def spawned(arguments: Sequence[str]) -> None:
    """Run the `gspo` command in new processes, for libraries with threads of their own; it must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gspo", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def write_recipe(config: Config) -> Path:
    """The config as a recipe, next to its run directory."""
    file = Path(config.run_dir).with_suffix(".toml")
    file.write_text(to_toml(config))
    return file


def train(config: Config, count: int = 2, hook: Hook = lambda rank: None) -> ForkedRanks:
    """Start the run of a config."""
    run = Path(config.run_dir)
    return ForkedRanks(run.parent / f"{run.name}-out", ["train", str(write_recipe(config))], count, hook)


def resume(run: Path, count: int = 2, hook: Hook = lambda rank: None, more: Sequence[str] = ()) -> ForkedRanks:
    """Resume a run."""
    return ForkedRanks(run.parent / f"{run.name}-out", ["train", "--resume", str(run), *more], count, hook)


def finished(ranks: ForkedRanks) -> ForkedRanks:
    """The ranks once all of them have ended without an error."""
    codes = ranks.wait()
    assert codes == [0] * len(codes), f"{codes}\n{ranks.output(0)[-3000:]}\n{ranks.output(1)[-3000:]}"
    return ranks


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function in this process: `make` gets the original."""
    setattr(owner, name, make(getattr(owner, name)))


def without_functional_collectives(rank: int) -> None:
    """In this rank: the collectives with which DTensors communicate by themselves fail. On gloo, about one in 100,000
    of them ends its process with a segmentation fault (torch 2.13)."""

    def fail(*rest: Any) -> None:
        raise AssertionError("a functional collective")

    patch(torch.distributed._functional_collectives, "wait_tensor", lambda original: fail)


def at_step(step: int, action: Callable[[], None]) -> None:
    """In the leader: do something once this step is recorded."""
    from gspo.record.run_dir import RunDir

    def make(original: Any) -> Any:
        def write(self: RunDir, values: Any) -> None:
            original(self, values)
            if values["step"] == step:
                action()

        return write

    patch(RunDir, "write_timings", make)


def own_signal(number: int) -> Callable[[], None]:
    """An action: this process gets a signal."""
    return lambda: os.kill(os.getpid(), number)


LAYOUT = (
    "padding/saved",
    "sampler/decode_steps",
    "sampler/running_mean",
    "routing/stored_bytes",
    "conversation/reused_fraction",
)
"""Metrics of how the work is laid out, which depend on the number of ranks."""


def agree(a: Path, b: Path, *, tolerance: float = 1e-5, only: Sequence[str] = (), last: int = 1 << 30) -> None:
    """Assert equal metrics up to rounding, of the steps up to the last one."""
    rows = [[row for row in read_metrics(run) if row["step"] <= last] for run in (a, b)]
    assert len(rows[0]) == len(rows[1]) > 1
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() & only if only else one.keys() - LAYOUT:
            close = one[key] is not None and pytest.approx(one[key], rel=tolerance, abs=tolerance, nan_ok=True)
            assert other[key] in (one[key], close), (one["step"], key, one[key], other[key])


def during_sampling(stream: str, action: Callable[[], None]) -> None:
    """In this rank: do something in the middle of sampling the completions of a stream."""
    from gspo.rollout.engines.local import LocalEngine

    def make(original: Any) -> Any:
        def generate(self: LocalEngine, prompts: Any, options: Any) -> Any:
            if options.stream.startswith(stream):
                action()
            return original(self, prompts, options)

        return generate

    patch(LocalEngine, "generate", make)

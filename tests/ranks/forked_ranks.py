"""The ranks of a run as forked processes, so that they need no new interpreter. Each runs the `gspo` command.

`hook(rank)` runs in each process before the command, to break something in it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gspo.cli import main
from gspo.config import Config, to_toml

Hook = Callable[[int], None]
LIMIT_S = 120.0
"""On any machine a run of a few steps has ended by then, and a deadline of a few seconds has passed."""


class ForkedRanks:
    """A command on several ranks. What a rank prints is in `FOLDER/RANK.out`."""

    def __init__(self, folder: Path, arguments: Sequence[str], count: int = 2, hook: Hook = lambda rank: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.codes: dict[int, int] = {}
        """Exit codes of the ranks that have ended; minus the signal that killed one."""
        port = _free_port()
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
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
            if count > 1:
                launched = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in launched.items()})
            hook(rank)
            code = main(list(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

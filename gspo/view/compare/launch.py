"""Runs as processes of their own, several at a time.

In: `Job`s. Out: those that failed, and which signal stopped the rest. Invariant: no process outlives this one, not even if
it is killed; a job that fails does not stop the others; a stop is passed on once, and then waited for.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from gspo.config import Config, to_toml
from gspo.record.run_dir import replace_text
from gspo.signals import StopRequest
from gspo.view.compare.logs import MARK, tail
from gspo.view.compare.plan import Job, clear_unborn

REPORT_EVERY_S = 30.0
POLL_S = 0.1
LOCK_LIMIT_S = 10.0
"""How long a killed trainer may take to let go of its run directory."""
_PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that ended with an error."""

    job: Job
    code: int

    def __str__(self) -> str:
        how = f"ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"
        lines = "\n".join(f"    {line}" for line in tail(self.job.log, 6))
        return f"{self.job.label}: {how}; the end of {self.job.log}:\n{lines}"


def default_jobs(config: Config) -> int:
    """How many runs fit side by side: one on a GPU, on a CPU as many as their threads leave room for."""
    if _on_gpu(config.model.device):
        return 1
    threads = config.model.threads or (1 if config.model.build else cores())
    return max(1, cores() // threads)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_gpu(device: str) -> bool:
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def run_jobs(
    jobs: Sequence[Job], *, side_by_side: int, say: Say, stop: StopRequest, trust_run: bool = False
) -> list[Failure]:
    """Run what is not finished. After a stop, those under way have saved what they had."""
    waiting = [job for job in jobs if not job.finished]
    failures: list[Failure] = []
    with ExitStack() as stack:
        running: dict[subprocess.Popen[bytes], Job] = {}
        stack.callback(lambda: _kill(running))
        pace, told = _Pace(jobs), False
        while running or (waiting and not stop):
            while waiting and len(running) < side_by_side and not stop:
                job = waiting.pop(0)
                say(f"{job.label}: {'goes on' if job.begun else 'begins'}")
                running[_start(job, side_by_side, trust_run)] = job
            if stop and not told:
                _terminate(running)
                told = True
            failures += _collect(running, say, stopping=bool(stop))
            pace.report(list(running.values()), say)
            time.sleep(POLL_S)
    return failures


def _start(job: Job, side_by_side: int, trust_run: bool) -> subprocess.Popen[bytes]:
    _wait_until_free(job.path)
    clear_unborn(job.path)
    for file in (job.config_file, job.log):
        file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(job.config_file, to_toml(job.config))
    what = ["--resume", str(job.path), *(["--trust-run"] if trust_run else [])] if job.begun else [str(job.config_file)]
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // side_by_side)), **os.environ} if side_by_side > 1 else None
    parent = os.getpid()
    with job.log.open("ab") as log:
        log.write(f"{MARK}{datetime.now():%Y-%m-%d %H:%M:%S} gspo train {' '.join(what)}\n".encode())
        log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "gspo.cli", "train", *what],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the comparison only, which passes it on once
            preexec_fn=lambda: _die_with_parent(parent),
        )


def _die_with_parent(parent: int) -> None:
    """Linux: the kernel kills this process when the comparison is gone. Runs between fork and exec."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


_LIBC = ctypes.CDLL(None)  # loaded here: after a fork only what is at hand is safe


def _wait_until_free(path: Path) -> None:
    """A trainer that was just killed may still hold its run directory. One that works there is left for the run to refuse."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    while _locked(path / ".lock") and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _locked(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open("r+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _collect(running: dict[subprocess.Popen[bytes], Job], say: Say, *, stopping: bool) -> list[Failure]:
    """Take out what has ended."""
    failures = []
    for process in [p for p in running if p.poll() is not None]:
        job, code = running.pop(process), process.returncode
        if job.finished:
            say(f"{job.label}: finished; {_last_words(job)}")
        elif stopping and code in (128 + signal.SIGTERM, -signal.SIGTERM):
            say(f"{job.label}: stopped")
        else:
            failures.append(Failure(job=job, code=code))
            say(f"{job.label}: FAILED, the others go on; {'; '.join(tail(job.log, 1))}")
    return failures


def _terminate(running: dict[subprocess.Popen[bytes], Job]) -> None:
    for process in running:
        with suppress(ProcessLookupError):
            process.terminate()


def _kill(running: dict[subprocess.Popen[bytes], Job]) -> None:
    """Leaving early: end the processes with everything they started."""
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Pace:
    """Says from time to time how far things are."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._began = self._last = time.monotonic()
        self._at_start = sum(job.done for job in jobs)

    def report(self, running: Sequence[Job], say: Say) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_EVERY_S or not running:
            return
        self._last = now
        for job in running:
            say(f"{job.label}: {'; '.join(tail(job.log, 1))}")
        done = sum(job.done for job in self._jobs)
        gone, left = done - self._at_start, len(self._jobs) - done
        about = f", about {timedelta(seconds=round((now - self._began) * left / gone))} left" if gone > 0 else ""
        say(f"{sum(job.finished for job in self._jobs)} of {len(self._jobs)} runs finished{about}")


def _last_words(job: Job) -> str:
    """The line in which the run said what it reached."""
    steps = [line for line in tail(job.log, 40) if line.startswith(("step ", "cold start"))]
    return steps[-1] if steps else "no step was needed"

"""Run jobs as subprocesses, several at a time.

In: `Job`s. Out: the failures. Invariant: no subprocess outlives this process, not even if it is killed; a failed job
does not stop the others; a stop signal is forwarded once and then awaited.
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
from gspo.view.compare.plan import Job, remove_empty_run

REPORT_EVERY_S = 30.0
POLL_S = 0.1
LOCK_LIMIT_S = 10.0
"""How long a killed trainer may take to release the lock of its run directory."""
_PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that exited with an error."""

    job: Job
    code: int

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with code {self.code}"
        lines = "\n".join(f"    {line}" for line in tail(self.job.log, 6))
        return f"{self.job.label}: {how}; last lines of {self.job.log}:\n{lines}"


def default_jobs(config: Config) -> int:
    """Number of concurrent runs: one on a GPU; on a CPU, the cores divided by the threads of a run."""
    # Two runs on one GPU would compete for memory and make each other's times meaningless.
    if _on_gpu(config.model.device):
        return 1
    threads = config.model.threads or (1 if config.model.build else cores())
    return max(1, cores() // threads)


def cores() -> int:
    """Number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_gpu(device: str) -> bool:
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def run_jobs(
    jobs: Sequence[Job], *, concurrency: int, say: Say, stop: StopRequest, trust_run: bool = False
) -> list[Failure]:
    """Run the unfinished jobs. After a stop request, running jobs save a checkpoint and exit."""
    waiting = [job for job in jobs if not job.finished]
    failures: list[Failure] = []
    with ExitStack() as stack:
        running: dict[subprocess.Popen[bytes], Job] = {}
        stack.callback(lambda: _kill(running))
        progress = _Progress(jobs)
        forwarded = False
        while running or (waiting and not stop):
            while waiting and len(running) < concurrency and not stop:
                job = waiting.pop(0)
                say(f"{job.label}: {'resumed' if job.started else 'started'}")
                running[_start(job, concurrency, trust_run)] = job
            if stop and not forwarded:
                _terminate(running)
                forwarded = True
            failures += _pop_exited(running, say, stopping=bool(stop))
            progress.report(list(running.values()), say)
            time.sleep(POLL_S)
    return failures


def _start(job: Job, concurrency: int, trust_run: bool) -> subprocess.Popen[bytes]:
    _wait_for_lock(job.path)
    remove_empty_run(job.path)
    for file in (job.config_file, job.log):
        file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(job.config_file, to_toml(job.config))
    arguments = [str(job.config_file)]
    if job.started:
        arguments = ["--resume", str(job.path), *(["--trust-run"] if trust_run else [])]
    # Concurrent runs share the cores: with the default thread count each would oversubscribe all of them.
    # A value that the user has set wins.
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // concurrency)), **os.environ} if concurrency > 1 else None
    parent = os.getpid()
    # Appended to, so that the log still shows why an earlier process failed.
    with job.log.open("ab") as log:
        log.write(f"{MARK}{datetime.now():%Y-%m-%d %H:%M:%S} gspo train {' '.join(arguments)}\n".encode())
        log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "gspo.cli", "train", *arguments],
            # Several runs share the terminal; none may read from it.
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the comparison, which forwards it once
            preexec_fn=lambda: _die_with_parent(parent),
        )


def _die_with_parent(parent: int) -> None:
    """Ask the Linux kernel to kill this process when the comparison dies. Runs between fork and exec."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the comparison died before prctl took effect
            os._exit(1)


_LIBC = ctypes.CDLL(None)  # loaded at import: loading a library between fork and exec is not safe


def _wait_for_lock(path: Path) -> None:
    """Wait for a trainer that was just killed to release its run directory.

    If the lock is still held after the limit, another trainer is at work and the new run refuses to start.
    """
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


def _pop_exited(running: dict[subprocess.Popen[bytes], Job], say: Say, *, stopping: bool) -> list[Failure]:
    """Remove processes that have exited and return those that failed."""
    failures = []
    for process in [p for p in running if p.poll() is not None]:
        job, code = running.pop(process), process.returncode
        if job.finished:
            say(f"{job.label}: finished; {_final_status(job)}")
        # A trainer that stops cleanly exits with 128 + SIGTERM. One that is still starting has no handler yet, and the
        # signal ends it.
        elif stopping and code in (128 + signal.SIGTERM, -signal.SIGTERM):
            say(f"{job.label}: stopped")
        else:
            failures.append(Failure(job=job, code=code))
            say(f"{job.label}: FAILED, the others continue; {'; '.join(tail(job.log, 1))}")
    return failures


def _terminate(running: dict[subprocess.Popen[bytes], Job]) -> None:
    for process in running:
        # SIGTERM, which a trainer answers with a checkpoint. After SIGKILL a resume would repeat steps.
        with suppress(ProcessLookupError):
            process.terminate()


def _kill(running: dict[subprocess.Popen[bytes], Job]) -> None:
    """Kill the process groups that are still running when an exception ends the comparison."""
    for process in running:
        if process.poll() is None:
            # The whole group: a trainer has reward workers, which would otherwise keep running.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Progress:
    """Reports progress and the estimated time left at a fixed interval."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._started = self._last = time.monotonic()
        # What earlier processes have done must not count as this one's pace.
        self._at_start = sum(job.done for job in jobs)

    def report(self, running: Sequence[Job], say: Say) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_EVERY_S or not running:
            return
        self._last = now
        for job in running:
            say(f"{job.label}: {'; '.join(tail(job.log, 1))}")
        done = sum(job.done for job in self._jobs)
        completed = done - self._at_start
        remaining = len(self._jobs) - done
        eta = ""
        if completed > 0:
            eta = f", about {timedelta(seconds=round((now - self._started) * remaining / completed))} left"
        say(f"{sum(job.finished for job in self._jobs)} of {len(self._jobs)} runs finished{eta}")


def _final_status(job: Job) -> str:
    """The last progress line that the run printed."""
    steps = [line for line in tail(job.log, 40) if line.startswith(("step ", "cold start"))]
    return steps[-1] if steps else "no step was needed"

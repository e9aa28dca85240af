"""One worker process, seen from the trainer.

In: calls as JSON values. Out: the worker's answers, or `WorkerHung` / `WorkerDied`. Invariant: an answer bears the
token of its call and has the form of an answer, so that what functions or libraries write into the pipe is ignored,
or is at worst a failure of that call; every wait has a deadline on a monotonic clock, a worker that failed is killed
with all it started and reaped, what it prints is drained and forgotten except for a short tail, and what it holds in
memory beyond what its functions took to load has a limit.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import gspo
from gspo.errors import ConfigError, RewardError
from gspo.reward.function import RewardWarning, Source, one_line
from gspo.reward.memory import held, processor_seconds

START_LIMIT_S = 120.0
"""For importing the functions: a user's file may import torch."""
ANSWER_LIMIT = 16 * 2**20
"""Bytes of one answer."""
END_LIMIT_S = 2.0
"""For the overseer to end all that the functions have started."""
_TAIL, _NOISE = 2000, 2**20
_SLICE_S = 0.1


class WorkerHung(Exception):
    """The deadline passed."""

    processor_s = 0.0
    """What the process and all it started used of the processor during the call; infinite if that is unknown."""


class WorkerDied(Exception):
    """The process ended in the middle of a call."""


class WorkerOverMemory(WorkerDied):
    """It held too much memory."""


class ScoringCancelled(Exception):
    """The pool is closing, or nobody waits for the answer any more."""


class WorkerProcess:
    """Owns a process and its three pipes. Belongs to one thread: the kernel kills the process when that thread ends."""

    def __init__(self, sources: Sequence[Source], closing: Callable[[], bool], *, memory_mb: int = 0) -> None:
        self._load = {"load": [asdict(source) for source in sources]}
        self._closing = closing
        self._memory_mb, self._most, self._weighed = memory_mb, 0, 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._tail = b""
        self.needs: list[list[str]] = []
        """Columns each function cannot be called without; known once the functions are loaded."""
        self.about: list[str] = []
        """What each function has to say of itself; likewise."""
        self.bounded_s: list[float] = []
        """Seconds within which each function is done with one completion, or 0; likewise."""

    @property
    def pid(self) -> int | None:
        """Of the live process, if there is one."""
        process = self._process
        return process.pid if process and _exit_code(process) is None else None

    def start(self) -> None:
        """Start the process if it is not there; `prepare` waits for it."""
        if self.pid is not None:
            return
        self.kill()  # reap one that ended on its own
        self._tail = b""
        try:
            self._process = _popen()
        except OSError as error:
            raise RewardError(f"reward.workers: cannot start a worker process: {error}; use fewer") from None

    def prepare(self) -> None:
        """Start the process if needed and wait until it has loaded the functions."""
        self.start()
        if self._ready:
            return
        try:
            answer = self._load_functions()
        except WorkerHung:
            self.kill()
            raise RewardError(
                f"reward.functions: importing {self._names()} took more than {START_LIMIT_S:g} s; import less"
            ) from None
        except WorkerDied as error:
            self.kill()
            raise RewardError(
                f"reward.functions: the process that imports {self._names()} ended: {error}; fix the file"
            ) from None
        if "error" in answer:
            self.kill()
            raise (ConfigError if answer["error"] == "config" else RewardError)(answer["message"])
        for text in answer["warnings"]:
            warnings.warn(text, RewardWarning, stacklevel=2)
        self.needs, self.about, self.bounded_s = answer["needs"], answer["about"], answer["bounded_s"]
        self._most = held(self._process.pid) + self._memory_mb * 2**20 if self._memory_mb and self._process else 0
        self._ready = True

    def _load_functions(self) -> dict[str, Any]:
        try:
            return self._loaded()
        except WorkerDied:  # once more: someone may have killed it, for want of memory for example
            self.kill()
            self.start()
            return self._loaded()

    def _loaded(self) -> dict[str, Any]:
        answer = self._exchange(self._load, START_LIMIT_S)
        if not _is_loaded(answer, len(self._load["load"])):
            raise WorkerDied("its first answer was not one")
        return answer

    def call(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        unwanted: Callable[[], bool] = lambda: False,
        more_s: Callable[[float], float] = lambda used_s: 0.0,
    ) -> dict[str, Any]:
        """The answer to one call. `more_s` says how much longer it may take when the deadline passes, given the processor
        time that it has used. After `WorkerDied` or `ScoringCancelled` the process is gone; `printed` is not. After `WorkerHung`
        it still has to be killed, which takes a while where it does not run."""
        self._tail = b""
        before_s = self._processor_s()
        try:
            answer = self._exchange(request, timeout_s, unwanted, lambda: more_s(self._processor_s() - before_s))
            if not _is_result(answer, len(request["completions"])):
                raise WorkerDied("its answer was not one value for each completion")
            return answer
        except WorkerHung as hung:
            hung.processor_s = self._processor_s() - before_s if sys.platform == "linux" else math.inf
            raise
        except (WorkerDied, ScoringCancelled):
            self.kill()
            raise

    def _processor_s(self) -> float:
        return processor_seconds(self._process.pid) if self._process else 0.0

    def printed(self) -> str:
        """The end of what the functions have printed since the last call began."""
        if self._process is not None:
            self._drain_all()
        return self._tail.decode(errors="replace")

    def kill(self) -> None:
        """End the process and its children, reap it, close its pipes. Harmless when there is none."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        _told_to_end(process)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # before reaping: afterwards the number may be someone else's
        for pipe in _pipes(process):
            pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)

    def _exchange(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        unwanted: Callable[[], bool] = lambda: False,
        more_s: Callable[[], float] = lambda: 0.0,
    ) -> dict[str, Any]:
        """Write a line and read the line that bears its token, draining what the functions print meanwhile."""
        process = self._process
        assert process
        token = secrets.token_hex(16)
        pending = memoryview(json.dumps({"token": token, **request}).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        into, out, noise = (pipe.fileno() for pipe in _pipes(process))
        poller, answers = select.poll(), _Answers(token.encode())
        for descriptor, event in ((into, select.POLLOUT), (out, select.POLLIN), (noise, select.POLLIN)):
            poller.register(descriptor, event)
        while answers.found is None:
            left = deadline - time.monotonic()
            if self._closing() or unwanted():
                raise ScoringCancelled
            if left <= 0:
                left = more_s()
                deadline = time.monotonic() + left
            if left <= 0:
                raise WorkerHung
            self._weigh(process.pid)
            ready = [descriptor for descriptor, _ in poller.poll(1000 * min(left, _SLICE_S) + 1)]
            if not ready and _exit_code(process) is not None:  # a grandchild may hold the pipes open
                raise WorkerDied(self._last_words())
            if into in ready and not (pending := self._send(into, pending)):
                poller.unregister(into)
            if noise in ready and not self._drain(noise):
                poller.unregister(noise)
            if out in ready:
                answers.add(self._receive(out))
        return _decoded(answers.found)

    def _weigh(self, pid: int) -> None:
        if self._most and time.monotonic() >= self._weighed + _SLICE_S:
            if held(pid, at_least=self._most) > self._most:
                raise WorkerOverMemory(
                    f"it took more than {self._memory_mb} MB; raise reward.memory_mb if it needs them"
                )
            self._weighed = time.monotonic()

    def _send(self, descriptor: int, pending: memoryview) -> memoryview:
        try:
            return pending[os.write(descriptor, pending[: 2**16]) :]
        except BlockingIOError:
            return pending
        except OSError:
            raise WorkerDied(self._last_words()) from None

    def _receive(self, descriptor: int) -> bytes:
        try:
            data = os.read(descriptor, 2**16)
        except BlockingIOError:
            return b""
        if not data:
            raise WorkerDied(self._last_words())
        return data

    def _drain(self, descriptor: int) -> bool:
        """Whether there can be more."""
        try:
            data = os.read(descriptor, _NOISE)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        return bool(data)

    def _drain_all(self) -> None:
        assert self._process
        noise = _pipes(self._process)[2].fileno()
        for _ in range(1000):  # not for ever: its children may go on printing
            before = self._tail
            if not self._drain(noise) or self._tail is before:
                break

    def _last_words(self) -> str:
        process = self._process
        assert process
        self._drain_all()
        words = one_line(self._tail.decode(errors="replace"))
        return _ending(process) + (f"; it printed: {words}" if words else "")

    def _names(self) -> str:
        return ", ".join(source["spec"] for source in self._load["load"])


def _popen() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gspo.reward.worker"],  # -P: a json.py in the current directory is not ours
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=_environment(),
        start_new_session=True,  # Ctrl-C in the terminal is the trainer's; and one kill reaches its children
    )
    for pipe in _pipes(process):
        os.set_blocking(pipe.fileno(), False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # a function that prints a gigabyte need not wait for every 64 KB of it
        with suppress(OSError):
            fcntl.fcntl(_pipes(process)[2].fileno(), fcntl.F_SETPIPE_SZ, _NOISE)
    return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    """Requests, answers, and what the functions print."""
    return process.stdin, process.stdout, process.stderr  # type: ignore[return-value]  # all three are piped


class _Answers:
    """What comes out of a worker's pipe, until the answer is there. Whatever else is in it is passed over."""

    def __init__(self, token: bytes) -> None:
        self._token, self._line, self._size = token, bytearray(), 0
        self.found: bytes | None = None

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > ANSWER_LIMIT:
            raise WorkerDied(f"it wrote more than {ANSWER_LIMIT} bytes into the pipe of its answers")
        self._line += data
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        for line in lines:
            _, token, answer = line.partition(self._token)
            if token and self.found is None:
                self.found = bytes(answer)


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise WorkerDied("its answer was not JSON")
    return answer


def _is_result(answer: Mapping[str, Any], count: int) -> bool:
    results = answer.get("results")
    if results is None:
        return set(answer) <= {"failure", "trace"} and isinstance(answer.get("failure"), str) and _is_text(answer)
    return isinstance(results, list) and len(results) == count and all(map(_is_part, results))


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not set(part) <= {"value", "failure", "notes", "trace"}:
        return False
    value, notes = part.get("value"), part.get("notes", [])
    number = value is None or (type(value) in (int, float) and math.isfinite(value))
    return number and isinstance(notes, list) and all(isinstance(n, str) for n in notes) and _is_text(part)


def _is_text(answer: Mapping[str, Any]) -> bool:
    return isinstance(answer.get("failure"), str | None) and isinstance(answer.get("trace", ""), str)


def _is_loaded(answer: Mapping[str, Any], count: int) -> bool:
    if "error" in answer:
        return isinstance(answer.get("message"), str)
    lists = [answer.get(key) for key in ("needs", "about", "bounded_s")]
    return all(isinstance(found, list) and len(found) == count for found in lists) and "warnings" in answer


def _environment() -> dict[str, str]:
    """The trainer's own, and where to find this package if it is not installed."""
    environment = dict(os.environ)
    home = Path(gspo.__file__).resolve().parent.parent
    if home.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), environment.get("PYTHONPATH")]))
    return environment


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As `Popen.poll`, but without reaping: until the group is killed, the process must keep its number."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # another thread has just reaped it
        return process.poll() or 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _told_to_end(process: subprocess.Popen[bytes]) -> None:
    """Let the overseer end what the functions have started, before the rest is done by force."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux" and _exit_code(process) is None:
            os.kill(process.pid, signal.SIGTERM)
    until = time.monotonic() + END_LIMIT_S
    while sys.platform == "linux" and _exit_code(process) is None and time.monotonic() < until:
        time.sleep(0.002)


def _ending(process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 1.0  # the pipes close a moment before the process ends
    while (code := _exit_code(process)) is None and time.monotonic() < until:
        time.sleep(0.005)
    if code is None:
        return "it closed its pipes"
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"

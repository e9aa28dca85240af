"""The trainer's side of one worker process.

In: calls as JSON values. Out: the worker's answers, or `WorkerHung` / `WorkerDied`. Invariant: an answer must carry the
token of its call and be well-formed, so anything functions or libraries write into the pipe is ignored or, at worst,
fails that call. Every wait has a deadline on a monotonic clock. A failed worker is killed with all its descendants and
reaped. Its output is drained, and only a short tail is kept. Its memory beyond what loading the functions took is
limited.
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
from gspo.reward.function import RewardWarning, RunFacts, Source, one_line
from gspo.reward.process_usage import memory_bytes, processor_seconds
from gspo.reward.second_try import SecondTry
from gspo.reward.service_usage import COUNTS
from gspo.reward.traits import Service

START_LIMIT_S = 120.0
"""Time limit for importing the functions. A user's file may import torch."""
SERVICE_LIMIT_S = 1800.0
"""Time limit for starting a service. It may download and load a model."""
ANSWER_LIMIT = 16 * 2**20
"""Maximum size of one answer in bytes."""
END_LIMIT_S = 2.0
"""Time limit for the overseer to kill everything the functions started."""
_TAIL = 2000
"""Bytes of a function's output that are kept."""
_OUTPUT_BUFFER = 2**20
# Between two looks at memory, cancellation and the process itself.
_SLICE_S = 0.1


class WorkerHung(Exception):
    """The worker did not answer before the deadline."""

    processor_s = 0.0
    """CPU time of the process and its descendants during the call; infinite if unknown."""


class WorkerDied(Exception):
    """The process ended during a call."""


class WorkerOverMemory(WorkerDied):
    """The process exceeded its memory limit."""


class WorkerLost(Exception):
    """The machine of the process is gone, so nobody knows what the call did."""


class ScoringCancelled(Exception):
    """The pool is closing, or the answer is no longer needed."""


class ChildProcess:
    """Owns a Python process and its three pipes. Belongs to one thread; the kernel kills the process when that thread
    ends."""

    def __init__(self, module: str, setting: str, keeps: Callable[[str], bool] = lambda name: True) -> None:
        """`module` is what the process runs, and `setting` how many there are. Errors use it. `keeps` says which
        environment variables of this process it gets."""
        self._module = module
        self._keeps = keeps
        self._setting = setting
        self._process: subprocess.Popen[bytes] | None = None
        self._tail = b""

    @property
    def pid(self) -> int | None:
        """Process id of the live process; `None` if there is none."""
        process = self._process
        return process.pid if process and _exit_code(process) is None else None

    def start(self) -> None:
        """Start the process unless it is running."""
        if self.pid is not None:
            return
        self.kill()  # reap one that ended on its own
        self._tail = b""
        try:
            self._process = _popen(self._module, self._keeps)
        except OSError as error:
            raise RewardError(f"{self._setting}: cannot start a worker process: {error}; use fewer") from None

    def printed(self) -> str:
        """The tail of the output since the last call started."""
        if self._process is not None:
            self._drain_all()
        return self._tail.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and its children, reap it, and close its pipes. Does nothing if there is no process."""
        process = self._process
        self._process = None
        if process is None:
            return
        _terminate_overseer(process)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # before reaping: afterwards the pid may be reused
        for pipe in _pipes(process):
            pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """Those of the pipes for requests, answers and output."""
        assert self._process
        requests, out, printed = (pipe.fileno() for pipe in _pipes(self._process))
        return requests, out, printed

    def send(self, pending: memoryview) -> memoryview:
        """Write what fits into the pipe; the rest."""
        try:
            return pending[os.write(self.descriptors[0], pending[: 2**16]) :]
        except BlockingIOError:
            return pending
        except OSError:
            raise WorkerDied(self.last_words()) from None

    def receive(self) -> bytes:
        """What is in the pipe. `WorkerDied` at its end."""
        try:
            data = os.read(self.descriptors[1], 2**16)
        except BlockingIOError:
            return b""
        if not data:
            raise WorkerDied(self.last_words())
        return data

    def drain(self) -> bool:
        """Read available output. False at the end of the stream."""
        try:
            data = os.read(self.descriptors[2], _OUTPUT_BUFFER)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        return bool(data)

    def last_words(self) -> str:
        """How the process ended, and what it printed."""
        process = self._process
        assert process
        self._drain_all()
        words = one_line(self._tail.decode(errors="replace"))
        return _ending(process) + (f"; it printed: {words}" if words else "")

    def _drain_all(self) -> None:
        for _ in range(1000):  # bounded, because its children may keep printing
            before = self._tail
            if not self.drain() or self._tail is before:
                break


class WorkerProcess(ChildProcess):
    """The process in which reward functions run."""

    def __init__(
        self,
        sources: Sequence[Source],
        closing: Callable[[], bool],
        *,
        facts: RunFacts,
        memory_mb: int = 0,
        service: int | None = None,
    ) -> None:
        """`service`: the function whose model or endpoint is started, in this process only."""
        super().__init__("gspo.reward.worker", "reward.workers")
        self._load: dict[str, Any] = {
            "load": [asdict(source) for source in sources],
            "start": service,
            "facts": asdict(facts),
        }
        self._start_limit_s = START_LIMIT_S if service is None else SERVICE_LIMIT_S
        self._closing = closing
        self._memory_mb = memory_mb
        self._memory_limit = 0
        self._memory_checked = 0.0
        self._ready = False
        self.needs: list[list[str]] = []
        """Columns that each function requires. Known once the functions are loaded."""
        self.about: list[str] = []
        """Each function's description of itself. Known once the functions are loaded."""
        self.bounded_s: list[float] = []
        """Each function's own time limit per completion, or 0. Known once the functions are loaded."""
        self.services: list[Service | None] = []
        """The model or endpoint that each function asks. Known once the functions are loaded."""
        self.warnings: list[str] = []
        """What the functions have warned of while they were loaded."""
        self.usage: dict[str, float] = {}
        """What the service did in the last call."""

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
                f"reward.functions: loading {self._names()} took more than {self._start_limit_s:g} s; import less"
            ) from None
        except WorkerDied as error:
            self.kill()
            raise RewardError(
                f"reward.functions: the process that imports {self._names()} ended: {error}; fix the file"
            ) from None
        if "error" in answer:
            self.kill()
            raise (ConfigError if answer["error"] == "config" else RewardError)(answer["message"])
        self.warnings = answer["warnings"]
        for text in self.warnings:
            warnings.warn(text, RewardWarning, stacklevel=2)
        self.needs, self.about, self.bounded_s = answer["needs"], answer["about"], answer["bounded_s"]
        self.services = [Service(**fields) if fields else None for fields in answer["services"]]
        if self._memory_mb and self._process:
            # Measured after loading, so the limit covers scoring only: importing torch alone takes hundreds of MB.
            self._memory_limit = memory_bytes(self._process.pid) + self._memory_mb * 2**20
        else:
            self._memory_limit = 0
        self._ready = True

    def _load_functions(self) -> dict[str, Any]:
        try:
            return self._loaded()
        except WorkerDied:  # retry once: the OOM killer, for example, may have killed it
            self.kill()
            self.start()
            return self._loaded()

    def _loaded(self) -> dict[str, Any]:
        answer = self._exchange(self._load, self._start_limit_s)
        if not _is_loaded(answer, len(self._load["load"])):
            raise WorkerDied("its first answer was malformed")
        return answer

    def call(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        unwanted: Callable[[], bool] = lambda: False,
        second: SecondTry | None = None,
    ) -> list[dict[str, Any]]:
        """Send one request and return the answer to each of its calls.

        When the deadline passes, a `second` try may give the call more time. After `WorkerDied` or `ScoringCancelled`
        the process is gone, but `printed` still works. After `WorkerHung` the caller has to kill the process, which
        takes a while if it is not scheduled.
        """
        self._tail = b""
        before_s = self._processor_s()
        try:
            more_s = (lambda: second.more_s(self._processor_s() - before_s)) if second else (lambda: 0.0)
            answer = self._exchange(request, timeout_s, unwanted, more_s)
            answers, calls = answer.get("answers"), request["calls"]
            if not isinstance(answers, list) or len(answers) != len(calls):
                raise WorkerDied("its answer did not hold one result per call")
            if not all(_is_result(a, len(c["completions"])) for a, c in zip(answers, calls, strict=True)):
                raise WorkerDied("its answer did not hold one value per completion")
            self.usage = _usage(answer)
            return answers
        except WorkerHung as hung:
            hung.processor_s = self._processor_s() - before_s if sys.platform == "linux" else math.inf
            raise
        except (WorkerDied, ScoringCancelled):
            self.kill()
            raise

    def second_try(self, timeout_s: float) -> SecondTry:
        """For a call that may have been slow because of this machine."""
        return SecondTry(timeout_s)

    def _processor_s(self) -> float:
        return processor_seconds(self._process.pid) if self._process else 0.0

    def kill(self) -> None:
        self._ready = False
        super().kill()

    def _exchange(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        unwanted: Callable[[], bool] = lambda: False,
        more_s: Callable[[], float] = lambda: 0.0,
    ) -> dict[str, Any]:
        """Write a request and read the answer with its token, while draining the functions' output."""
        process = self._process
        assert process
        # Random, so that nothing a function prints into the pipe can pass for an answer.
        token = secrets.token_hex(16)
        pending = memoryview(json.dumps({"token": token, **request}).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        requests, out, printed = self.descriptors
        poller = select.poll()
        answers = _AnswerReader(token.encode())
        for descriptor, event in ((requests, select.POLLOUT), (out, select.POLLIN), (printed, select.POLLIN)):
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
            self._check_memory(process.pid)
            # Wake up every slice: cancellation, memory and the process's death do not show up in the pipes.
            ready = [descriptor for descriptor, _ in poller.poll(1000 * min(left, _SLICE_S) + 1)]
            if not ready and _exit_code(process) is not None:  # a grandchild may hold the pipes open
                raise WorkerDied(self.last_words())
            if requests in ready and not (pending := self.send(pending)):
                poller.unregister(requests)
            if printed in ready and not self.drain():
                poller.unregister(printed)
            if out in ready:
                answers.add(self.receive())
        return _decoded(answers.found)

    def _check_memory(self, pid: int) -> None:
        if self._memory_limit and time.monotonic() >= self._memory_checked + _SLICE_S:
            if memory_bytes(pid, at_least=self._memory_limit) > self._memory_limit:
                raise WorkerOverMemory(
                    f"it used more than {self._memory_mb} MB; raise reward.memory_mb if it needs more"
                )
            self._memory_checked = time.monotonic()

    def _names(self) -> str:
        return ", ".join(source["spec"] for source in self._load["load"])


def _popen(module: str, keeps: Callable[[str], bool]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],  # -P: do not import a json.py from the current directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={name: value for name, value in _environment().items() if keeps(name)},
        start_new_session=True,  # Ctrl-C must reach only the trainer, and one killpg must reach all children
    )
    for pipe in _pipes(process):
        os.set_blocking(pipe.fileno(), False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # with the default 64 KB, a function that prints a lot would block often
        with suppress(OSError):
            fcntl.fcntl(_pipes(process)[2].fileno(), fcntl.F_SETPIPE_SZ, _OUTPUT_BUFFER)
    return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    """The pipes for requests, answers and the functions' output."""
    return process.stdin, process.stdout, process.stderr  # type: ignore[return-value]  # all three are piped


class _AnswerReader:
    """Collects a worker's output until the answer with the token is complete. Everything else is skipped."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._line = bytearray()
        self._size = 0
        self.found: bytes | None = None

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > ANSWER_LIMIT:
            raise WorkerDied(f"it wrote more than {ANSWER_LIMIT} bytes into the answer pipe")
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


def _is_result(answer: Any, count: int) -> bool:
    if not isinstance(answer, dict):
        return False
    results = answer.get("results")
    if results is None:
        return (
            set(answer) <= {"failure", "trace", "notes"} and isinstance(answer.get("failure"), str) and _is_text(answer)
        )
    return isinstance(results, list) and len(results) == count and all(map(_is_part, results))


def _usage(answer: Mapping[str, Any]) -> dict[str, float]:
    found = answer.get("usage")
    numbers = {k: v for k, v in found.items() if type(v) in (int, float)} if isinstance(found, dict) else {}
    return {name: float(numbers[name]) for name in COUNTS if name in numbers}


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not set(part) <= {"value", "failure", "notes", "trace", "steps"}:
        return False
    if not _are_steps(part.get("steps", [])):
        return False
    value, notes = part.get("value"), part.get("notes", [])
    number = value is None or (type(value) in (int, float) and math.isfinite(value))
    return number and isinstance(notes, list) and all(isinstance(n, str) for n in notes) and _is_text(part)


def _are_steps(steps: Any) -> bool:
    """Whether these are numbers at token indices in ascending order."""
    if not isinstance(steps, list) or not all(isinstance(s, list) and len(s) == 2 for s in steps):
        return False
    indices = [at for at, _ in steps]
    whole = all(type(at) is int and at >= 0 for at in indices)
    return (
        whole
        and indices == sorted(set(indices))
        and all(type(value) in (int, float) and math.isfinite(value) for _, value in steps)
    )


def _is_text(answer: Mapping[str, Any]) -> bool:
    return isinstance(answer.get("failure"), str | None) and isinstance(answer.get("trace", ""), str)


def _is_loaded(answer: Mapping[str, Any], count: int) -> bool:
    if "error" in answer:
        return isinstance(answer.get("message"), str)
    lists = [answer.get(key) for key in ("needs", "about", "bounded_s", "services")]
    return all(isinstance(found, list) and len(found) == count for found in lists) and "warnings" in answer


def _environment() -> dict[str, str]:
    """The trainer's environment, plus the path of this package if it is not installed."""
    environment = dict(os.environ)
    home = Path(gspo.__file__).resolve().parent.parent
    if home.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), environment.get("PYTHONPATH")]))
    return environment


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As `Popen.poll`, but without reaping: until the process group is killed, its pid must not be reused."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # another thread has just reaped it
        return process.poll() or 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _terminate_overseer(process: subprocess.Popen[bytes]) -> None:
    """Let the overseer kill what the functions started, before the process group is killed."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux" and _exit_code(process) is None:
            os.kill(process.pid, signal.SIGTERM)
    until = time.monotonic() + END_LIMIT_S
    while sys.platform == "linux" and _exit_code(process) is None and time.monotonic() < until:
        # Polled, because waiting would reap the process and free its id before its group is killed.
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

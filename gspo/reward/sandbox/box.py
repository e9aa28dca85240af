"""One sandboxed process, from start to exit.

In: a level, and lines to send. Out: the lines that come back, or `DeadlinePassed` / `ProcessExited`. Invariant: every
wait has a deadline on a monotonic clock, answers have a maximum size, and the process and all its descendants are gone
when `close` returns. A process that cannot be started or confined is a `SandboxError`, never the program's fault.
"""

from __future__ import annotations

import marshal
import math
import os
import select
import subprocess
import time
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from gspo.errors import RewardError
from gspo.reward.function import one_line
from gspo.reward.process_usage import descendants, processor_seconds
from gspo.reward.sandbox.inside.candidate import READY, TOKEN
from gspo.reward.sandbox.inside.values import LENGTH
from gspo.reward.sandbox.interpreter import ENVIRONMENT, INSIDE
from gspo.reward.sandbox.level import Level, identity, settings

START_S = 30.0
"""Time limit for starting a process. It is generous because the machine may be busy."""


# The code of `inside` arrives on stdin as marshaled code objects, so the sandbox needs no access to this package.
_BOOTSTRAP = f"""
import marshal, os, sys
sys.path[:] = [folder for folder in sys.path if folder]
def take(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part: os._exit(1)
        data += part
    return data
code, role, settings = marshal.loads(take(int(take(8))))
package = sys.modules["{INSIDE}"] = type(sys)("{INSIDE}")
for name, body in marshal.loads(code):
    module = sys.modules[name] = type(sys)(name)
    setattr(package, name.rpartition(".")[2], module)
    exec(body, module.__dict__)
    if name.endswith("." + role): break
sys.modules["{INSIDE}." + role].main(settings)
"""


class SandboxError(RewardError):
    """The sandbox itself failed."""


class DeadlinePassed(Exception):
    """No answer arrived before the deadline."""


class ProcessExited(Exception):
    """The process ended or violated the protocol. The message says how."""


class Box:
    """Owns a sandboxed process. Belongs to the thread that created it: the kernel kills the process with that
    thread."""

    def __init__(self, level: Level, role: str, *, mode: str = "calls", limit_s: float, memory_mb: int) -> None:
        user = identity(level.own_users)
        limits = {"mode": mode, "memory": memory_mb * 2**20, "cpu_s": math.ceil(limit_s) + 1, **settings(level)}
        header = marshal.dumps((level.python.code, role, limits), 2)
        self._pending = b"%8d" % len(header) + header
        self._received = bytearray()
        self._token = b""
        try:
            self._process = subprocess.Popen(
                level.command(_BOOTSTRAP),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Nothing of the trainer's environment, which may hold tokens.
                env=ENVIRONMENT,
                cwd="/",
                **user,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(
                f"sandbox: cannot start a process: {one_line(error)}; use fewer reward.workers"
            ) from None
        # Not select(), which fails for descriptors above 1023.
        self._poller = select.poll()
        for pipe in self._pipes[:2]:
            os.set_blocking(pipe.fileno(), False)
        self._poller.register(self._pipes[1].fileno(), select.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        """Wait until the process has confined itself."""
        try:
            line = self.receive(time.monotonic() + START_S)
        except (DeadlinePassed, ProcessExited) as error:
            reason = f"no answer in {START_S:g} s" if isinstance(error, DeadlinePassed) else str(error)
            raise SandboxError(f"sandbox: cannot start a process: {self._last_words() or reason}") from None
        if line != READY.encode():
            raise SandboxError(f"sandbox: an unexpected first line: {one_line(line)}")
        for pid in (self.pid, *descendants(self.pid)):
            _prefer_for_oom_kill(pid)

    def ask(self, line: bytes, deadline: float) -> bytes:
        """Send a request and wait for its answer."""
        self.check_silence()
        self.send(line)
        return self.receive(deadline)

    def check_silence(self) -> None:
        """Raise `ProcessExited` if the process wrote anything without being asked."""
        if self._poller.poll(0):
            self._read_available()
        if self._received:
            raise ProcessExited("protocol: it wrote without being asked")

    def send(self, line: bytes) -> None:
        """Queue a request with a random token that its answer must repeat. `receive` writes it."""
        self._token = os.urandom(TOKEN // 2).hex().encode()
        self._pending += self._token + line + b"\n"

    def waited(self) -> float:
        """Seconds that the process and its descendants were runnable but waited for a CPU."""
        return sum(map(_waited, [self.pid, *descendants(self.pid)]))

    def cpu_s(self) -> float:
        """CPU time of the process and its descendants, including threads and reaped children."""
        return processor_seconds(self.pid)

    def close(self) -> None:
        """Kill the process and wait for it. May be called twice."""
        self._process.kill()
        for pipe in self._pipes:
            pipe.close()
        # A process in an uninterruptible system call must not stop the worker.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process: Any = self._process
        return process.stdin, process.stdout, process.stderr

    def receive(self, deadline: float) -> bytes:
        """The next line. May be called again after `DeadlinePassed`."""
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlinePassed
            self._poll_for_writing()
            for descriptor, _ in self._poller.poll(1000 * left + 1):
                self._read_available() if descriptor == self._pipes[1].fileno() else self._write_pending()
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray()
        # The rest would be an answer to a question that was not asked yet.
        if rest or not line.startswith(self._token):
            raise ProcessExited("protocol: it wrote more than the answer")
        return bytes(line[len(self._token) :])

    def _poll_for_writing(self) -> None:
        requests = self._pipes[0].fileno()
        if self._pending:
            self._poller.register(requests, select.POLLOUT)
        else:  # otherwise an always writable pipe would make `receive` spin
            with suppress(KeyError):
                self._poller.unregister(requests)

    def _write_pending(self) -> None:
        try:
            self._pending = self._pending[os.write(self._pipes[0].fileno(), self._pending[: 2**16]) :]
        except BlockingIOError:
            return
        except OSError:
            raise ProcessExited("died: it ended") from None

    def _read_available(self) -> None:
        try:
            data = os.read(self._pipes[1].fileno(), 2**16)
        except BlockingIOError:
            return
        if not data:
            raise ProcessExited("died: it ended")
        self._received += data
        if len(self._received) > LENGTH + 2 + TOKEN:
            raise ProcessExited(f"output: more than {LENGTH} bytes")

    def _last_words(self) -> str:
        os.set_blocking(self._pipes[2].fileno(), False)
        with suppress(OSError):
            lines = (os.read(self._pipes[2].fileno(), 2**16) or b"").decode(errors="replace").strip().splitlines()
            return one_line(lines[-1]) if lines else ""
        return ""


def _prefer_for_oom_kill(pid: int) -> None:
    """If the machine runs out of memory, the kernel kills this process first, not the trainer."""
    with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write("1000")


def _waited(pid: int) -> float:
    # The second field of schedstat is the run-queue wait time in nanoseconds.
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0

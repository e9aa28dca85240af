"""The actor that runs one process of a run on its node.

In: a command, as JSON. Out: the output of the process, and how it ended, as JSON. Invariant: the process never outlives
the actor, nor the launcher that polls it. Output that is not taken is bounded, and the process never waits for it.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import gspo
from gspo.cluster.connect import process_environment
from gspo.ranks.environment import free_port

KEPT = 1 << 20
"""Bytes of output that are kept until they are taken."""
POLL_S = 0.5
"""The longest that `poll` waits for something to report."""
LEASE_S = 60.0
"""Seconds after the last `poll` after which the process is killed: its launcher is gone, or cannot reach this node and
may resume the run elsewhere."""
END_S = 5.0
"""Seconds that a process gets to end after a signal."""
LEFT_OPEN_S = 1.0
"""How long output is read after the process has ended: a child of it may hold the pipes open."""
_EXEC = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, int(sys.argv[2]))\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, [])\n"
    "os.execv(sys.argv[3], sys.argv[3:])"
)
"""Run by the new process: the kernel sends it a signal if the actor dies. It runs in an interpreter of its own, because
code between fork and exec in a process with threads, such as the actor, may wait forever."""


class ProcessHost:
    """Runs one process. The methods are called through Ray, from several threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._error = ""
        self._code: int | None = None
        self._changed = threading.Condition()
        self._chunks: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self._polled = time.monotonic()
        self._folder = ""

    def about(self) -> str:
        """The node, and a free port on it."""
        from ray.util import get_node_ip_address

        address = get_node_ip_address()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return json.dumps({"address": address, "cores": cores, "port": free_port(address), "version": gspo.__version__})

    def start(self, command: str) -> str:
        """Start Python with arguments, an environment, a folder, and the signal that it gets if this actor dies.
        Returns an error, or nothing."""
        given = json.loads(command)
        self._polled = time.monotonic()
        started = threading.Event()
        # The kernel watches the thread that has started the process, so it must live as long as that.
        threading.Thread(target=self._run, args=(given, started), name="placed process", daemon=True).start()
        started.wait()
        return self._error

    def poll(self) -> str:
        """New output as [stream, base64], and the exit code once the process has ended and its output is read."""
        with self._changed:
            self._polled = time.monotonic()
            self._changed.wait_for(lambda: self._chunks or self._code is not None, timeout=POLL_S)
            chunks = [[stream, base64.b64encode(data).decode()] for stream, data in self._chunks]
            self._chunks.clear()
            self._size = 0
            return json.dumps({"output": chunks, "code": self._code})

    def write(self, files: str) -> str:
        """Write texts into a new folder, by their names. Returns its path."""
        self._folder = tempfile.mkdtemp(prefix="gspo-placed-")
        for name, text in json.loads(files).items():
            (Path(self._folder) / name).write_text(text, encoding="utf-8")
        return self._folder

    def end(self) -> None:
        """End the process with all of its children: with SIGTERM first, so that it can end them itself."""
        process = self._process
        for number, wait_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)) if process else ():
            assert process is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # it leads a group of its own
            with self._changed:
                self._changed.wait_for(lambda: self._code is not None, timeout=wait_s)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process is not None and self._code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _run(self, given: dict[str, object], started: threading.Event) -> None:
        try:
            self._process = self._popen(given)
        except OSError as error:
            self._error = f"{error.strerror}: {error.filename}"
            return
        finally:
            started.set()
        self._read(self._process)
        code = self._process.wait()
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def _popen(self, given: dict[str, object]) -> subprocess.Popen[bytes]:
        arguments, environment, folder = given["arguments"], given["environment"], given["folder"]
        last = str(given.get("last_signal", int(signal.SIGKILL)))
        assert isinstance(arguments, list)
        assert isinstance(environment, dict)
        assert isinstance(folder, str)
        environment = process_environment(environment)
        home = Path(gspo.__file__).resolve().parent.parent
        if home.name not in ("site-packages", "dist-packages"):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), environment.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), last, sys.executable, *arguments],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        until = float("inf")
        with selectors.DefaultSelector() as selector:
            for stream, pipe in (("out", process.stdout), ("err", process.stderr)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, stream)
            while (selector.get_map() or process.poll() is None) and time.monotonic() < until:
                for key, _ in selector.select(timeout=0.1):
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        self._add(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
                if time.monotonic() > self._polled + LEASE_S:
                    process.kill()
                if process.poll() is not None:
                    until = min(until, time.monotonic() + LEFT_OPEN_S)

    def _add(self, stream: str, data: bytes) -> None:
        with self._changed:
            self._chunks.append((stream, data))
            self._size += len(data)
            while self._size > KEPT:
                self._size -= len(self._chunks.popleft()[1])
            self._changed.notify_all()

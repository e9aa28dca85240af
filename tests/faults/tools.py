"""Run a function under `strace`, for tests of what is on disk when a process dies."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from needs import unusable


def traced(work: Callable[[], None], log: Path, options: Sequence[str], limit_s: float = 60) -> int:
    """Run `work` in a fork, traced from its first system call. Returns its exit code (as `Popen.returncode`)."""
    if shutil.which("strace") is None:
        unusable("strace", "not installed (apt-get install strace)")
    go_read, go_write = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # PR_SET_PTRACER: the tracer is not an ancestor of this process, so Yama requires permission.
            ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_long(-1))
            os.write(ready_write, b"x")
            os.read(go_read, 1)
            work()
            code = 0
        except OSError:
            code = 2
        finally:
            os._exit(code)
    os.read(ready_read, 1)
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", str(log), *options, "-p", str(child)], stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + limit_s
        while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
            if tracer.poll() is not None or time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                _, stderr = tracer.communicate()
                unusable("strace", f"cannot trace: {stderr.decode().strip()}")
            time.sleep(0.002)
        os.write(go_write, b"x")
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the traced process hangs")
    finally:
        for descriptor in (go_read, go_write, ready_read, ready_write):
            os.close(descriptor)
        with suppress(subprocess.TimeoutExpired):
            tracer.wait(timeout=10)
        tracer.kill()
        tracer.communicate()

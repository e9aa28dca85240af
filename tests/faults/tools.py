"""Work watched by `strace`, for tests of what is on disk when a process dies."""

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
    """Do the work in a fork, with `strace` on it from its first system call on; how the fork ended (as `Popen.returncode`)."""
    if shutil.which("strace") is None:
        unusable("strace", "not installed (apt-get install strace)")
    (wait, go), (begun, ready) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(
                0x59616D61, ctypes.c_long(-1)
            )  # a tracer that is no ancestor needs leave (PR_SET_PTRACER)
            os.write(ready, b"x")
            os.read(wait, 1)
            work()
            code = 0
        except OSError:
            code = 2
        finally:
            os._exit(code)
    os.read(begun, 1)
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", str(log), *options, "-p", str(child)], stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + limit_s
        while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
            if tracer.poll() is not None or time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                _, words = tracer.communicate()
                unusable("strace", f"cannot trace: {words.decode().strip()}")
            time.sleep(0.002)
        os.write(go, b"x")
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the traced work hangs")
    finally:
        for descriptor in (wait, go, begun, ready):
            os.close(descriptor)
        with suppress(subprocess.TimeoutExpired):
            tracer.wait(timeout=10)
        tracer.kill()
        tracer.communicate()

"""`gspo train --nproc N`: start N ranks of a run on this machine, and end with the leader's exit code.

In: the arguments of this process. Out: an exit code. Invariant: no rank outlives this process. Signals go to the
leader, which saves a checkpoint and lets the others end. If the leader is gone, the others are killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gspo.errors import ConfigError

GRACE_S = 15.0
"""Seconds that the others get to end after the leader has."""


def launch(count: int, arguments: Sequence[str] | None = None) -> int:
    """Run `gspo` with these arguments on `count` ranks. By default, they are those of this process."""
    if count < 1:
        raise ConfigError(f"--nproc: must be at least 1, is {count}")
    given = _without_nproc(sys.argv[1:] if arguments is None else arguments)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "gspo", *given],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            # Of their own: Ctrl-C in a terminal must reach the leader alone, and only once.
            start_new_session=True,
        )
        for rank in range(count)
    ]
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    leader = ranks[0]

    def forward(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):
            leader.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        code = leader.wait()
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # As a shell reports a process that a signal has killed.
    return code if code >= 0 else 128 - code


def _without_nproc(arguments: Sequence[str]) -> list[str]:
    """The arguments of each rank."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            kept.append(argument)
        skip = argument == "--nproc"
    return kept


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

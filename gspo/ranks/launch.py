"""`gspo train --nproc N`: start N ranks of a run on this machine, and end with the leader's exit code.

In: the arguments of this process. Out: an exit code. Invariant: no rank outlives this process. Signals go to the
leader, which saves a checkpoint and lets the others end. If the leader is gone or frozen, the others end, and what is
left is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.ranks.environment import ENDED, JOINED, LAUNCHED, LEADER_SILENT, free_port, signal_name, world_size

GRACE_S = 10.0
"""Seconds that the others get to end after the leader has."""
UNNOTICED_S = 120.0
"""Seconds that the leader gets to notice that another rank has failed."""
UNJOINED_S = 10.0
"""The same before it has found the others: it would wait for the failed one. It may have found a mistake itself."""


def check_count(count: int) -> None:
    """Refuse a number of ranks that cannot be started."""
    if count < 1:
        raise ConfigError(f"--nproc: must be at least 1, is {count}")
    if count > 1 and world_size() > 1:
        raise ConfigError(
            f"--nproc: this process is already one of {world_size()} that a launcher started (WORLD_SIZE); leave out "
            "--nproc, or unset WORLD_SIZE"
        )


def launch(count: int, arguments: Sequence[str] | None = None) -> int:
    """Run `gspo` with these arguments on `count` ranks. By default, they are those of this process."""
    given = without_options(sys.argv[1:] if arguments is None else arguments, ("--nproc",))
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        LAUNCHED: str(count),
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    ranks: list[subprocess.Popen[bytes]] = []
    ended = tempfile.TemporaryDirectory(prefix="gspo-ranks-")
    environment[ENDED] = ended.name

    def forward(number: int, frame: Any) -> None:
        for leader in ranks[:1]:
            with suppress(ProcessLookupError):
                leader.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        for rank in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", "gspo", *given],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                # Of their own: Ctrl-C in a terminal must reach the leader alone, and only once.
                start_new_session=True,
                preexec_fn=_end_with_launcher,
            )
            ranks.append(process)
        return _wait(ranks, Path(ended.name))
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        ended.cleanup()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], ended: Path) -> int:
    leader, *followers = ranks
    failed_at: float | None = None
    told: set[int] = set()
    while leader.poll() is None:
        for rank, follower in enumerate(followers, start=1):
            # Only the launcher can know it. The leader reports it.
            if (follower.poll() or 0) < 0 and rank not in told:
                (ended / str(rank)).write_text(str(-follower.returncode))
                told.add(rank)
        if any(follower.poll() == LEADER_SILENT for follower in followers):
            _report("does not respond (ranks.timeout_s)", len(ranks))
            return 1
        failed = [rank for rank, follower in enumerate(followers, start=1) if follower.poll()]
        failed_at = failed_at or (time.monotonic() if failed else None)
        joined = (ended / JOINED).exists()
        if failed_at is not None and time.monotonic() > failed_at + (UNNOTICED_S if joined else UNJOINED_S):
            code = followers[failed[0] - 1].returncode
            what = "failed" if code > 0 else f"was killed by {signal_name(-code)}"
            remedy = _remedy(len(ranks)) if joined else "start the command again"
            print(f"gspo: rank {failed[0]} {what}, and rank 0 still waits for it; {remedy}", file=sys.stderr)
            return 1
        time.sleep(0.05)
    for follower in followers:
        # Those that have joined the run ignore it, and end because the leader has.
        with suppress(ProcessLookupError):
            follower.terminate()
    deadline = time.monotonic() + GRACE_S
    while any(follower.poll() is None for follower in followers) and time.monotonic() < deadline:
        time.sleep(0.05)
    code = leader.returncode
    if code < 0 and -code not in (signal.SIGINT, signal.SIGTERM):
        _report(f"was killed by {signal_name(-code)}", len(ranks))
    # As a shell reports a process that a signal has killed.
    return code if code >= 0 else 128 - code


def _report(what: str, count: int) -> None:
    """Print what has happened to the leader, which cannot do it."""
    print(f"gspo: rank 0, which leads the run, {what}; {_remedy(count)}", file=sys.stderr)


def _remedy(count: int) -> str:
    return f"continue with: gspo train --resume RUN --nproc {count}"


def _end_with_launcher() -> None:
    """In a new rank: if the launcher is killed, the rank gets SIGTERM. The leader then saves a checkpoint and ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def without_options(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """The arguments of each rank: without the launcher's own options, each of which has a value."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        own = argument in names
        if not skip and not own and not argument.startswith(tuple(f"{name}=" for name in names)):
            kept.append(argument)
        skip = own and not skip
    return kept

"""Joining the ranks of a run: the process group of a launcher, and who among its members is alive.

In: the environment that `torchrun` or `gspo train --nproc` sets. Out: `Ranks`. Invariant: no rank waits forever. A rank
that ends closes its connections, so its peers stop waiting immediately. A rank that is frozen, or whose machine has
vanished, misses its heartbeats, and its peers stop waiting after the deadline. The error names the rank and carries
what it last wrote.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from gspo.errors import ConfigError, RankError
from gspo.ranks.group import ONE, Ranks
from gspo.signals import Interrupted

BEAT = 1.0
"""Seconds between two heartbeats."""
LATE = 2.5
"""Seconds without a heartbeat after which a rank is named as the cause of an error."""
LINES = 12
"""How many of its last lines an error carries of a rank."""
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the launcher of this one has started."""
    world = environment.get("WORLD_SIZE", "1")
    return int(world) if world.isdecimal() else 1


@contextmanager
def join_ranks(deadline_s: float) -> Iterator[Ranks]:
    """The ranks of this run, as the environment describes them; a single one without a launcher.

    `deadline_s` is how long a rank waits for the others in a collective."""
    if world_size() == 1:
        yield ONE
        return
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world_size()}, but {', '.join(missing)} is not set; start the processes with torchrun, "
            "or with gspo train --nproc"
        )
    import torch
    import torch.distributed as dist

    rank, count, deadline = int(os.environ["RANK"]), world_size(), timedelta(seconds=deadline_s)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=deadline))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=count,
            timeout=deadline,
        )
        # The leader may score completions for as long as the rewards allow.
        commands = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    except (RuntimeError, dist.DistError) as error:
        raise RankError(
            f"rank {rank}: the {count} ranks did not find each other within {deadline_s:g} s at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({str(error).splitlines()[0]}); "
            "start all of them, or raise ranks.timeout_s"
        ) from error
    watch = Watch(rank, count, deadline_s)
    ranks = Ranks(rank=rank, count=count, commands=commands, explain=watch.explain, cancel=watch.cancel, watch=watch)
    try:
        yield ranks
        ranks.end()
        dist.destroy_process_group()
    except BaseException as error:
        watch.report_failure(error)
        raise
    finally:
        watch.stop()


class Watch:
    """A thread that tells the other ranks that this one is alive, and learns the same of them."""

    def __init__(self, rank: int, count: int, deadline_s: float) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.run: Path | None = None
        """The run directory, once it is known; it has the outputs of the followers."""
        self._others = [other for other in range(count) if other != rank]
        self._deadline_s = deadline_s
        self._seen = {other: (b"", time.monotonic()) for other in self._others}
        self._call: int | None = None
        self._cancelled = False
        self._stopped = threading.Event()
        # A connection of its own: another one may be blocked by a call that waits.
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
        self._thread = threading.Thread(target=self._beat, name="rank watch", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        beats = 0
        try:
            while not self._stopped.wait(BEAT if self._call is None else BEAT / 4):
                beats += 1
                self._store.set(f"beat/{self.rank}", str(beats))
                for other in self._others if self.rank == 0 else [0]:
                    key = f"beat/{other}"
                    if self._store.check([key]) and (value := self._store.get(key)) != self._seen[other][0]:
                        self._seen[other] = (value, time.monotonic())
                self._check_leader()
                self._check_cancelled()
        except RuntimeError:  # the rank that holds the store has ended; collectives notice it, too
            pass

    def _check_leader(self) -> None:
        """End this process if the leader is frozen: a follower waits for its commands without a deadline."""
        if self.rank and self.silent_s(0) > self._deadline_s:
            print(f"rank {self.rank}: rank 0 has not responded for {self._deadline_s:g} s", file=sys.stderr, flush=True)
            os._exit(1)

    def _check_cancelled(self) -> None:
        call = self._call
        if call is not None and not self._cancelled and self._store.check([f"cancel/{call}"]):
            self._cancelled = True
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGUSR1)

    def silent_s(self, other: int) -> float:
        """Seconds since the last heartbeat of another rank."""
        return time.monotonic() - self._seen[other][1]

    def cancel(self, call: int) -> None:
        """Ask the followers to end the sampling of a call."""
        with suppress(RuntimeError):
            self._store.set(f"cancel/{call}", "1")

    @contextmanager
    def cancellable(self, call: int) -> Iterator[None]:
        """Inside, sampling raises `Interrupted` when the leader cancels the call."""

        def receive(number: int, frame: FrameType | None) -> None:
            # A scheduler may send the same signal to all processes. Only the leader acts on it.
            if self._cancelled and self._call is not None:
                raise Interrupted

        before = signal.signal(signal.SIGUSR1, receive)
        self._cancelled, self._call = False, call
        try:
            yield
        finally:
            self._call = None
            signal.signal(signal.SIGUSR1, before)

    def report_failure(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}"[:2000])

    def explain(self, error: BaseException) -> str:
        """Which rank is the cause of a failed collective, and what it last wrote."""
        time.sleep(LATE + BEAT)  # until a rank that has ended has missed heartbeats
        causes = [text for other in self._others if (text := self._cause(other))]
        first = (str(error).splitlines() or [""])[0]
        return "; ".join(causes) or f"rank {self.rank}: lost the connection to the other ranks ({first:.200})"

    def _cause(self, other: int) -> str:
        failure = ""
        with suppress(RuntimeError):
            if self._store.check([f"failed/{other}"]):
                failure = self._store.get(f"failed/{other}").decode(errors="replace")
        if failure.startswith(RankError.__name__):  # it only noticed that another one failed
            return ""
        if failure:
            return f"rank {other} failed: {failure}"
        if self.silent_s(other) <= LATE:
            return ""
        return f"rank {other} has not responded for {self.silent_s(other):.0f} s{self._last_lines(other)}"

    def _last_lines(self, other: int) -> str:
        if self.run is None:
            return ""
        try:
            text = (self.run / "ranks" / f"{other}.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        last = [line for line in text.splitlines() if line.strip()][-LINES:]
        return "; its last lines:\n  " + "\n  ".join(last) if last else ""

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)


def check_device(device: Any, ranks: Ranks) -> None:
    """Refuse what several ranks were never seen to do."""
    if ranks.several and device.type != "cpu" and not os.environ.get("GSPO_UNTESTED_NCCL"):
        raise ConfigError(
            f"model.device: {ranks.count} ranks on {device.type} have never been tried (NCCL): the results may be "
            "wrong; compare them with one process first (benchmarks/ranks_gpu.py), with GSPO_UNTESTED_NCCL=1"
        )

"""Joining the ranks of a run: the process group of a launcher, and who among its members is alive.

In: the environment that `torchrun` or `gspo train --nproc` sets. Out: `Ranks`. Invariant: no rank waits forever. A rank
that ends closes its connections, so its peers stop waiting immediately. A rank that is frozen, or whose machine has
vanished, misses its heartbeats, and its peers stop waiting after the deadline. The error names the rank and carries
what it last wrote.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from gspo.errors import ConfigError, RankError
from gspo.ranks.environment import (
    LEADER_SILENT,
    killed_by,
    own_rank,
    report_joined,
    resume_command,
    signal_name,
    world_size,
)
from gspo.ranks.group import ONE, Ranks
from gspo.signals import Interrupted, end_phase

BEAT = 1.0
"""Seconds between two heartbeats."""
LATE = 3.0
"""Seconds without a heartbeat after which a rank is named as the cause of an error."""
LINES = 12
"""How many of its last lines an error carries of a rank."""
JOIN_S = 600.0
"""Seconds that a follower waits for the leader to appear. It does not know the settings of the run yet."""


@contextmanager
def join_ranks(deadline_s: float | None = None) -> Iterator[Ranks]:
    """The ranks of this run, as the environment describes them; a single one without a launcher.

    `deadline_s` is how long a rank waits for the others in a collective. A follower learns it from the leader."""
    if world_size() == 1:
        yield ONE
        return
    rank, count = own_rank(), world_size()
    watch, commands = _connect(rank, count, deadline_s)
    if rank == 0:
        report_joined()
    import torch.distributed as dist

    ranks = Ranks(rank=rank, count=count, commands=commands, watch=watch)
    try:
        yield ranks
        ranks.end()
        dist.destroy_process_group()
    except BaseException as error:
        watch.report_failure(error)
        # A process group whose peers are gone may wait for them when it is destroyed.
        atexit.register(_exit)
        raise
    finally:
        watch.stop()


def _connect(rank: int, count: int, deadline_s: float | None) -> tuple[Watch, Any]:
    """The watch, and the process group of the leader's commands."""
    import torch
    import torch.distributed as dist

    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=deadline_s or JOIN_S)))
        if deadline_s is None:
            deadline_s = float(store.get("deadline"))
        else:
            store.set("deadline", repr(deadline_s))
        deadline = timedelta(seconds=deadline_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=count,
            timeout=deadline,
        )
        # A follower waits for commands while the leader scores completions for as long as the rewards allow. The watch
        # ends it if the leader is gone.
        commands = dist.new_group(backend="gloo", timeout=timedelta(days=7) if rank else deadline)
        return Watch(rank, count, deadline_s), commands
    except (RuntimeError, dist.DistError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(error):
            raise RankError(f"MASTER_PORT: {where} is in use by another process; choose another port") from error
        raise RankError(
            f"rank {rank}: the {count} ranks did not find each other within {deadline_s or JOIN_S:g} s at {where} "
            f"({str(error).splitlines()[0]:.200}); start all of them, or raise ranks.timeout_s"
        ) from error


def _exit() -> None:
    """End this process after an error, with the exit code of errors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


class Watch:
    """Threads that tell the other ranks that this one is alive, and learn the same of them."""

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
        # A connection of its own: another one may be blocked by a call that waits. torchrun restarts a run with the
        # same store.
        self._store = dist.PrefixStore(
            f"watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
            ),
        )
        self._threads = [
            threading.Thread(target=target, name=f"rank {target.__name__}", daemon=True)
            for target in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def _beat(self) -> None:
        beats = 0
        try:
            while not self._stopped.wait(BEAT if self._call is None else BEAT / 4):
                beats += 1
                self._store.set(f"beat/{self.rank}", str(beats))
                for other in self._others:
                    key = f"beat/{other}"
                    if self._store.check([key]) and (value := self._store.get(key)) != self._seen[other][0]:
                        self._seen[other] = (value, time.monotonic())
                self._check_cancelled()
        except RuntimeError:  # the process that holds the store has ended
            pass

    def _guard(self) -> None:
        """Apart from the heartbeats, because these wait for the store, which a frozen leader may hold."""
        awake = time.monotonic()
        while not self._stopped.wait(BEAT / 2):
            now = time.monotonic()
            if now - awake > LATE:  # this process itself was frozen (Ctrl-Z), so it could not see heartbeats
                self._seen = {other: (value, now) for other, (value, _) in self._seen.items()}
            awake = now
            silent = next((other for other in self._others if self.silent_s(other) > self._patience_s(other)), None)
            if silent is None:
                continue
            text = f"rank {silent} has not responded for {self.silent_s(silent):.0f} s"
            if self.rank == 0:
                # In a collective, the main thread notices it by itself.
                cause = self._cause(silent) or text + self._last_lines(silent)
                end_phase(RankError(cause + self._remedy()))
            elif silent == 0:
                # A follower waits for the commands of the leader without a deadline.
                print(f"gspo: rank {self.rank}: {text}", file=sys.stderr, flush=True)
                os._exit(LEADER_SILENT)

    def _check_cancelled(self) -> None:
        call = self._call
        if call is not None and not self._cancelled and self._store.check([f"cancel/{call}"]):
            self._cancelled = True
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGUSR1)

    def _patience_s(self, other: int) -> float:
        """How long a rank may be silent while this one waits for something else."""
        return self._deadline_s if killed_by(other) is None else LATE + BEAT

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
        """Tell the others why this rank ends, or why it did not do what the leader asked for."""
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}"[:2000])

    def forget_failure(self) -> None:
        """All ranks had the same error, and the run continues."""
        with suppress(RuntimeError):
            self._store.delete_key(f"failed/{self.rank}")

    def explain(self, error: BaseException) -> str:
        """Which rank is the cause of a failed collective, and what it last wrote."""
        until = time.monotonic() + LATE + BEAT  # by then a rank that has ended has missed heartbeats
        while not (causes := [text for other in self._others if (text := self._cause(other))]):
            if time.monotonic() > until:
                break
            time.sleep(BEAT / 4)
        return ("; ".join(causes) or self._without_cause(error)) + self._remedy()

    def _without_cause(self, error: BaseException) -> str:
        if "imed out" in str(error):
            return (
                f"rank {self.rank}: another rank is alive but took longer than {self._deadline_s:g} s; if it is slow, "
                "raise ranks.timeout_s"
            )
        first = (str(error).splitlines() or [""])[0]
        return f"rank {self.rank}: lost the connection to the other ranks ({first:.200})"

    def _remedy(self) -> str:
        if self.run is None or not (self.run / "config.toml").exists():
            return ""
        return f"\ncontinue with: {resume_command(self.run)}"

    def _cause(self, other: int) -> str:
        failure = ""
        with suppress(RuntimeError):
            if self._store.check([f"failed/{other}"]):
                failure = self._store.get(f"failed/{other}").decode(errors="replace")
        if (number := killed_by(other)) is not None:
            return f"rank {other} was killed by {signal_name(number)}{self._last_lines(other)}"
        if failure.startswith(RankError.__name__):  # it only noticed that another one failed
            return ""
        if failure:
            return f"rank {other} failed: {failure}{self._last_lines(other)}"
        if self.silent_s(other) <= LATE:
            return ""
        return f"rank {other} has not responded for {self.silent_s(other):.0f} s{self._last_lines(other)}"

    def _last_lines(self, other: int) -> str:
        if self.run is None or not other:
            return ""
        file = self.run / "ranks" / f"{other}.log"
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        last = [line for line in text.splitlines() if line.strip()][-LINES:]
        return f"; the last lines of {file}:\n  " + "\n  ".join(last) if last else ""

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)


def check_device(device: Any, ranks: Ranks) -> None:
    """Refuse what several ranks were never seen to do."""
    if ranks.several and device.type != "cpu" and not os.environ.get("GSPO_UNTESTED_NCCL"):
        raise ConfigError(
            f"model.device: {ranks.count} ranks on {device.type} have never been tried (NCCL): the results may be "
            "wrong; compare them with one process first (benchmarks/ranks_gpu.py), with GSPO_UNTESTED_NCCL=1"
        )

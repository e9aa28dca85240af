"""The ranks of a run: the processes that hold the policy together, and how their values become one.

In: values that each rank has computed for its own part of a batch, and what the leader, rank 0, asks the others to do.
Out: the values of the whole batch, the same on every rank. Invariant: a single process is the only rank of its run, and
then nothing here copies, communicates or imports `torch.distributed`. All ranks make the same calls in the same order.
A call whose peers do not answer within the deadline raises `RankError`.

The leader runs the training loop. It alone scores completions and writes the run directory. `follower.py` is what the
other ranks do: they wait for a command, and run the same function as the leader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gspo.clock import Clock
from gspo.errors import GspoError, RankError
from gspo.ranks.codec import encode
from gspo.signals import shielded

if TYPE_CHECKING:
    from gspo.ranks.context import ContextGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process as one of the `count` ranks of a run."""

    rank: int = 0
    count: int = 1
    commands: Any = None
    """The process group through which the leader sends commands and the followers reply. A follower waits for commands
    without a deadline, because the leader may score completions for long."""
    watch: Any = None
    """Knows which ranks are alive (`ranks/start.py`); None for a single one."""
    context: ContextGroup | None = None
    """The ranks that compute the same micro-batches as this one (`learner.context_parallel`); None if it computes its
    micro-batches alone."""
    by_layer: bool = False
    """Whether ranks gather the weights layer by layer while they sample, instead of all of them at once
    (`ranks.sampling_weights`)."""
    clock: Clock = field(default_factory=Clock)
    """Seconds of this rank's own work, by what it was for (`ranks/usage.py`)."""
    _state: _State = field(default_factory=lambda: _State())

    @property
    def leads(self) -> bool:
        """Whether this rank decides what all ranks do, scores completions and writes the run directory."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def data_count(self) -> int:
        """How many ranks, or context groups, have micro-batches of their own."""
        return self.count // (self.context.size if self.context else 1)

    @property
    def data_rank(self) -> int:
        """Which of them this rank is, or belongs to."""
        return self.rank // (self.context.size if self.context else 1)

    # ---- commands

    @contextmanager
    def together(self, command: str, **arguments: Any) -> Iterator[None]:
        """Have the followers run a command, which is what the leader does inside.

        An error that all ranks raise at the same point leaves them in step. Any other leaves them waiting for each
        other, and the run ends."""
        if not self.several:
            yield
            return
        with shielded():  # a stop request between two collectives would leave the followers waiting
            self.send(command, **arguments)
            try:
                with self.peers_answer():
                    yield
            except BaseException as error:
                self._state.in_step &= isinstance(error, GspoError) and not isinstance(error, RankError)
                raise

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command to all followers."""
        import torch.distributed as dist

        if self._state.replies is not None or self._state.awaits_replies:  # of sampling that was interrupted
            self.replies()
        data = _tensor(encode({"command": command, "arguments": arguments}))
        with self.peers_answer():
            dist.broadcast(torch.tensor([len(data)]), src=0, group=self.commands)
            dist.broadcast(data, src=0, group=self.commands)

    def receive(self) -> bytes:
        """The command that the leader has sent."""
        import torch.distributed as dist

        with self.peers_answer():
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, src=0, group=self.commands)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, src=0, group=self.commands)
        return content.numpy().tobytes()

    def end(self) -> None:
        """Let the followers exit, if they are in step and wait for a command. Only the leader does something."""
        if self.several and self.leads and self._state.in_step:
            self.send("end")

    def call(self, command: str, **arguments: Any) -> None:
        """Send a command to which the followers reply."""
        self.send(command, call=self._state.calls, **arguments)
        self._state.awaits_replies = True
        self._state.calls += 1

    def reply(self, data: bytes) -> None:
        """Reply to the leader's call."""
        import torch.distributed as dist

        # Through the group of commands: ranks may take very different times to sample.
        with self.peers_answer():
            dist.send(torch.tensor([len(data)]), dst=0, group=self.commands)
            dist.send(_tensor(data), dst=0, group=self.commands)

    def replies(self) -> list[bytes]:
        """What the followers have replied, in the order of their ranks. A stop request may interrupt the wait. The next
        command then waits for the replies and drops them."""
        if self._state.replies is None:
            self._state.replies = _in_thread(lambda: [self._from(source) for source in range(1, self.count)])
        with self.peers_answer():
            replies = self._state.replies.result()
        self._state.replies, self._state.awaits_replies = None, False
        return replies

    def cancel(self) -> None:
        """Ask the followers to reply to the last call early."""
        self.watch.cancel(self._state.calls - 1)

    # ---- values

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all ranks. It is exact where all ranks but one add 0."""
        return self._reduced(own, "SUM")

    def sum_micro_batches(self, own: Tensor) -> Tensor:
        """The sum over all ranks of what they have computed from whole micro-batches. The ranks of a context group have
        the same values, which count once."""
        copy = self.context is not None and self.context.rank > 0
        return self.sum(torch.zeros_like(own) if copy else own)

    def max(self, own: Tensor) -> Tensor:
        """The maximum over all ranks."""
        return self._reduced(own, "MAX")

    def gather(self, own: Tensor) -> Tensor:
        """The tensors of all ranks, which are equally long, one after the other."""
        if not self.several:
            return own
        with self.peers_answer():
            return all_gather(own, self.count)

    def _from(self, source: int) -> bytes:
        import torch.distributed as dist

        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=source, group=self.commands)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, src=source, group=self.commands)
        return content.numpy().tobytes()

    def _reduced(self, own: Tensor, operation: str) -> Tensor:
        if not self.several:
            return own
        import torch.distributed as dist

        # gloo has no boolean, and small integers would overflow in a sum.
        total = own.to(torch.int64) if own.dtype in (torch.bool, torch.int16, torch.uint8) else own.clone()
        with self.peers_answer():
            dist.all_reduce(total, op=getattr(dist.ReduceOp, operation))
        return total.to(own.dtype)

    @contextmanager
    def peers_answer(self) -> Iterator[None]:
        """Turn the errors of collectives into a `RankError` that says which rank is the cause."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, GspoError) or not _is_collective(error):
                raise
            self._state.in_step = False
            raise RankError(self.watch.explain(error) if self.watch else str(error)) from error


@dataclass
class _State:
    in_step: bool = True
    """Whether all followers wait for a command whenever the leader does not wait for them."""
    awaits_replies: bool = False
    replies: Future[list[bytes]] | None = None
    """The replies, if they are being received."""
    calls: int = 0


def _is_collective(error: RuntimeError) -> bool:
    """Whether a peer has closed its connection, or the deadline has passed. Collectives inside a forward or backward
    pass raise plain errors of torch."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(text in str(error) for text in _SIGNS)


_SIGNS = ("gloo", "Connection closed", "Connection reset", "Timed out waiting", "Broken pipe", "NCCL")


def all_gather(own: Tensor, count: int, group: Any = None) -> Tensor:
    """The tensors of the `count` ranks of a process group, which have the same shape, one after the other."""
    import torch.distributed as dist

    everything = own.new_empty(count * len(own), *own.shape[1:])
    # Torch has renamed it, and warns about the name that older versions have.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everything, own.contiguous(), group=group)
    return everything


ONE = Ranks()
"""The only rank of a run in a single process."""


def _tensor(data: bytes) -> Tensor:
    # A copy that can be written: torch warns about memory that it must not write.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _in_thread(wait: Callable[[], T]) -> Future[T]:
    """Wait in a thread, so that signals can interrupt the main thread, which they cannot do inside of gloo."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(wait())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rank replies", daemon=True).start()
    return future

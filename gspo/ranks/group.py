"""The ranks of a run: the processes that hold the policy together, and how their values become one.

In: values that each rank has computed for its own part of a batch. Out: the values of the whole batch, the same on
every rank. Invariant: a single process is the only rank of its run, and then nothing here copies, communicates or
imports `torch.distributed`. All ranks must make the same calls in the same order. A call whose peers do not answer
within the deadline raises `RankError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.errors import RankError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process as one of the `count` ranks of a run."""

    rank: int = 0
    count: int = 1
    explain: Callable[[BaseException], str] = str
    """Why a peer did not answer, for the message of the error."""

    @property
    def leads(self) -> bool:
        """Whether this rank decides what all ranks do, scores completions and writes the run directory."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.count > 1

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all ranks. It is exact where all ranks but one add 0."""
        return self._reduced(own, "SUM")

    def max(self, own: Tensor) -> Tensor:
        """The maximum over all ranks."""
        return self._reduced(own, "MAX")

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes that the leader has; the other ranks pass None."""
        if not self.several:
            assert data is not None
            return data
        import torch.distributed as dist

        with self._deadline():
            size = torch.tensor([0 if data is None else len(data)])
            dist.broadcast(size, src=0)
            content = torch.empty(int(size), dtype=torch.uint8) if data is None else _tensor(data)
            dist.broadcast(content, src=0)
        return content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, on the leader; empty on the other ranks."""
        if not self.several:
            return [data]
        import torch.distributed as dist

        with self._deadline():
            if not self.leads:
                dist.send(torch.tensor([len(data)]), dst=0)
                dist.send(_tensor(data), dst=0)
                return []
            return [data, *(_receive(source) for source in range(1, self.count))]

    def _reduced(self, own: Tensor, operation: str) -> Tensor:
        if not self.several:
            return own
        import torch.distributed as dist

        # gloo has no boolean, and bytes would overflow in a sum.
        total = own.to(torch.int64) if own.dtype in (torch.bool, torch.int16, torch.uint8) else own.clone()
        with self._deadline():
            dist.all_reduce(total, op=getattr(dist.ReduceOp, operation))
        return total.to(own.dtype)

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # a peer has closed its connection, or the time limit of the group is over
            raise RankError(self.explain(error)) from error


ONE = Ranks()
"""The only rank of a run in a single process."""


def _tensor(data: bytes) -> Tensor:
    # A writable copy: torch warns about memory that it must not write.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _receive(source: int) -> bytes:
    import torch.distributed as dist

    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=source)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(content, src=source)
    return content.numpy().tobytes()

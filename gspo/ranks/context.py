"""The ranks that compute a micro-batch together, each of them some of its tokens (context parallelism).

In: tensors of which each rank of the group has a part. Out: the same values, distributed otherwise, with a gradient.
Invariant: the collectives only move values. A gradient is never multiplied by the number of ranks: each rank gets the
gradient of what it has computed itself, and the gradients of all ranks add up to that of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo.ranks.group import Ranks


@dataclass(frozen=True, kw_only=True)
class ContextGroup:
    """The `size` ranks that share the tokens of a micro-batch; this process is number `rank` of them."""

    size: int
    rank: int
    group: Any = None
    """Their process group. A plan can be made without one."""

    def exchange(self, parts: Tensor) -> Tensor:
        """All-to-all: part i goes to rank i. What rank i has sent to this one becomes part i."""
        received: Tensor = _AllToAll.apply(parts, self.group)
        return received

    def gather(self, own: Tensor, at: Tensor, count: int) -> Tensor:
        """All `count` values, of which this rank has computed `own`, those with the indices `at`. Every rank of the
        group must compute the same loss from them."""
        values: Tensor = _Gather.apply(own, at, count, self.group)
        return values


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # The exchange is its own inverse, so it takes each gradient to where the value came from.
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, at: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(at)
        values = own.new_zeros(count).index_copy(0, at, own)
        dist.all_reduce(values, group=group)  # exact, because all ranks but one add 0
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Not the sum over the group: its ranks compute the same loss, so their gradients are copies of each other.
        return gradients[0][ctx.saved_tensors[0]], None, None, None


def join_context(ranks: Ranks, size: int, deadline_s: float) -> ContextGroup:
    """The context group of this rank: `size` consecutive ones form a group. All ranks must call this."""
    own = None
    for first in range(0, ranks.count, size):
        # Every rank takes part in making every group, also those that it does not belong to.
        members = range(first, first + size)
        group = dist.new_group(list(members), timeout=timedelta(seconds=deadline_s))
        own = group if ranks.rank in members else own
    return ContextGroup(size=size, rank=ranks.rank % size, group=own)

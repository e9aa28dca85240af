"""Packed tokens and the sequences they belong to.

In: `[N]` values and the sequence of each token. Out: per-sequence sums and means. Invariant: a sequence is its tokens,
wherever they stand; no padding exists here. When a sequence is spread over several processes (context parallelism),
`reduce` adds the partial sums up before any mean is taken, so that no process ever sees half a sequence's ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Which of `count` sequences each packed token belongs to."""

    index_N: Tensor
    count: int
    reduce: Callable[[Tensor], Tensor] | None = None
    """Adds a `[B]` tensor over the processes that share these sequences; values only, no gradient flows through it."""

    def sum(self, x_N: Tensor) -> Tensor:
        """Per-sequence sums `[B]`."""
        total_B = torch.zeros(self.count, dtype=x_N.dtype, device=x_N.device).index_add(0, self.index_N, x_N)
        return self.reduce(total_B) if self.reduce else total_B

    def mean(self, x_N: Tensor) -> Tensor:
        """Per-sequence means `[B]`; 0 for a sequence without tokens."""
        return self.sum(x_N) / self.length_B.clamp(min=1).to(x_N.dtype)

    def expand(self, x_B: Tensor) -> Tensor:
        """Give every token its sequence's value `[N]`."""
        return x_B[self.index_N]

    @cached_property
    def length_B(self) -> Tensor:
        """Tokens per sequence."""
        ones_N = torch.ones_like(self.index_N, dtype=torch.float64)
        return self.sum(ones_N)


@dataclass(frozen=True)
class Tokens:
    """What an objective sees of a micro-batch: whole sequences, packed. All log-probabilities have one dtype."""

    logp_N: Tensor
    """Learning policy; the only one that carries gradient."""
    logp_old_N: Tensor
    advantage_N: Tensor
    sequences: Sequences
    logp_sampler_N: Tensor | None = None
    logp_ref_N: Tensor | None = None
    entropy_N: Tensor | None = None
    selected_N: Tensor | None = None
    """Tokens singled out over the whole optimiser step, for the objectives that do so."""

    def __post_init__(self) -> None:
        shape = self.logp_N.shape
        for name in ("logp_old_N", "advantage_N", "logp_sampler_N", "logp_ref_N", "entropy_N", "selected_N"):
            value = getattr(self, name)
            assert value is None or value.shape == shape, f"{name}: {tuple(value.shape)}, not {tuple(shape)}"

    @property
    def logp_behavior_N(self) -> Tensor:
        """What the replies were drawn from: the sampler if it reported, else the old policy."""
        return self.logp_old_N if self.logp_sampler_N is None else self.logp_sampler_N

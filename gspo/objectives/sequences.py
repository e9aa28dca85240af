"""Packed tokens and the sequences they belong to.

In: `[N]` values and the sequence of each token. Out: per-sequence sums and means. Invariant: there is no padding, and
the tokens of a sequence may be anywhere in the batch. Sequences are whole: with context parallelism, log-probs are
gathered before an objective sees them, so no process ever sees the ratio of half a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Which of `count` sequences each packed token belongs to."""

    index_N: Tensor
    count: int

    def sum(self, x_N: Tensor) -> Tensor:
        """Per-sequence sums `[B]`."""
        return torch.zeros(self.count, dtype=x_N.dtype, device=x_N.device).index_add(0, self.index_N, x_N)

    def mean(self, x_N: Tensor) -> Tensor:
        """Per-sequence means `[B]`; 0 for a sequence without tokens."""
        return self.sum(x_N) / self.length_B.clamp(min=1).to(x_N.dtype)

    def expand(self, x_B: Tensor) -> Tensor:
        """The value of its sequence for every token `[N]`."""
        return x_B[self.index_N]

    def minimum_before(self, x_N: Tensor) -> Tensor:
        """The smallest value among the earlier tokens of the same sequence `[N]`; 0 for its first token.

        The tokens of a sequence must be in order; other tokens may be between them."""
        if not len(x_N):
            return x_N
        # Sequence by sequence. The sort is stable, so it keeps the order within each of them.
        order_N = torch.argsort(self.index_N, stable=True)
        _, row_N, length_P = torch.unique_consecutive(self.index_N[order_N], return_inverse=True, return_counts=True)
        at_N = torch.arange(len(x_N), device=x_N.device) - (length_P.cumsum(0) - length_P)[row_N]
        # One column more than the longest sequence needs: column t + 1 takes token t, so a running minimum up to
        # column t is over the tokens before t.
        shifted_PT = x_N.new_full((len(length_P), int(length_P.max()) + 1), torch.inf)
        shifted_PT[row_N, at_N + 1] = x_N[order_N]
        smallest_N = shifted_PT.cummin(1).values[row_N, at_N]
        return torch.empty_like(x_N).index_put((order_N,), torch.where(at_N == 0, 0.0, smallest_N))

    @cached_property
    def length_B(self) -> Tensor:
        """Tokens per sequence."""
        # float64, so that weights such as 1 / (B * length) are rounded once, to the dtype of the loss.
        ones_N = torch.ones_like(self.index_N, dtype=torch.float64)
        return self.sum(ones_N)


@dataclass(frozen=True)
class Tokens:
    """What an objective sees of a micro-batch: whole sequences, packed. All log-probs have the same dtype."""

    logp_N: Tensor
    """The policy being trained; the only one with a gradient."""
    logp_old_N: Tensor
    advantage_N: Tensor
    sequences: Sequences
    logp_sampler_N: Tensor | None = None
    logp_ref_N: Tensor | None = None
    entropy_N: Tensor | None = None
    selected_N: Tensor | None = None
    """Tokens selected over the whole optimizer step, for objectives that select tokens."""
    turn_N: Tensor | None = None
    """Number of the token's turn within its sequence; None if every sequence is a single turn."""

    def __post_init__(self) -> None:
        shape = self.logp_N.shape
        for name in ("logp_old_N", "advantage_N", "logp_sampler_N", "logp_ref_N", "entropy_N", "selected_N", "turn_N"):
            value = getattr(self, name)
            assert value is None or value.shape == shape, f"{name}: {tuple(value.shape)}, not {tuple(shape)}"

    def take(self, at_N: Tensor) -> Tokens:
        """Some of the tokens; the sequences keep their numbers."""
        values: dict[str, Any] = {k: v[at_N] for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **values, sequences=replace(self.sequences, index_N=self.sequences.index_N[at_N]))

    @property
    def turns(self) -> Sequences:
        """The tokens by turn: what `sequences` is for whole sequences."""
        if self.turn_N is None or not len(self.turn_N):
            return self.sequences
        width = int(self.turn_N.max()) + 1
        return Sequences(self.sequences.index_N * width + self.turn_N, self.sequences.count * width)

    @property
    def logp_behavior_N(self) -> Tensor:
        """The policy that sampled the completions: the sampler's own log-probs if known, else the old policy's."""
        return self.logp_old_N if self.logp_sampler_N is None else self.logp_sampler_N

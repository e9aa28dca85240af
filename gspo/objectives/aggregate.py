"""Per-token loss weights, computed once per optimizer step, before it is split into micro-batches.

In: the lengths of all sequences of the step, over all micro-batches and ranks. Out: `weight_B`, the weight of every
token of a sequence. Invariant: the loss of any micro-batch is `(weight_N * loss_N).sum()`, so the objective does not
depend on how the step is split, packed, ordered or distributed over ranks. Sequences without tokens are in no
denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gspo.errors import ConfigError


def sequence_mean(length_B: Tensor) -> Tensor:
    """1/B sum_i 1/|y_i| sum_t: every completion has the same weight."""
    # The clamp only avoids 1 / 0: an empty sequence has no token that would use its weight.
    return 1.0 / (_present(length_B) * length_B.clamp(min=1))


def token_mean(length_B: Tensor) -> Tensor:
    """1/(sum_i |y_i|) sum_i sum_t: every token has the same weight."""
    return (1.0 / length_B.sum().clamp(min=1)).expand_as(length_B)


def sequence_sum(length_B: Tensor) -> Tensor:
    """1/B sum_i sum_t: the weight of a completion is proportional to its length."""
    return (1.0 / _present(length_B)).expand_as(length_B)


@dataclass(frozen=True)
class ConstantLength:
    """1/(B L) sum_i sum_t with a constant L = `max_length`, so that a token's weight does not depend on any length."""

    max_length: int = 3000

    def __post_init__(self) -> None:
        if not (isinstance(self.max_length, int) and self.max_length >= 1):
            raise ConfigError(f"max_length: must be a whole number of tokens, at least 1, not {self.max_length}")

    def __call__(self, length_B: Tensor) -> Tensor:
        return sequence_sum(length_B) / self.max_length


def _present(length_B: Tensor) -> Tensor:
    # Empty sequences (all tokens masked) contribute nothing and must not dilute the mean.
    return (length_B > 0).sum().clamp(min=1).to(length_B.dtype)

"""The importance ratio of the policy to an older one, as a log-ratio per token.

In: packed tokens. Out: `log_ratio_N`, with the value of the log-ratio and the gradient of `logp_N`. Invariant: a
sequence-level ratio has one value for all tokens of a sequence. Its gradient flows through the token's own log-prob
only (GSPO-token's form, eq. 14 of arXiv:2507.18071). If all tokens of a sequence have the same weight, value and
gradient equal those of the plain sequence form, and no collective needs to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper

import torch
from torch import Tensor

from gspo.objectives.sequences import Tokens

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before exp. e^20 is beyond every trust region and still finite."""


class Ratio:
    """Packed tokens -> `log_ratio_N`."""

    __name__: str

    def __init__(self, compute: Callable[[Tokens], Tensor], *, length_normalized: bool) -> None:
        self.compute = compute
        self.length_normalized = length_normalized
        """Whether it is a mean over the completion, so that it moves far less than the ratio of a token."""
        update_wrapper(self, compute)

    def __call__(self, tokens: Tokens) -> Tensor:
        return self.compute(tokens)

    def __reduce__(self) -> str:
        # Pickle and copy by name, as functions are: rows of the table stay equal to their copies.
        return self.__name__

    def __repr__(self) -> str:
        return self.__name__


def ratio(*, length_normalized: bool = False) -> Callable[[Callable[[Tokens], Tensor]], Ratio]:
    """Turn a function into a ratio."""
    return lambda compute: Ratio(compute, length_normalized=length_normalized)


@ratio()
def token(tokens: Tokens) -> Tensor:
    """r_t = pi(y_t) / pi_old(y_t)."""
    return (tokens.logp_N - tokens.logp_old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@ratio(length_normalized=True)
def sequence(tokens: Tokens) -> Tensor:
    """s = exp(mean_t log pi/pi_old): the length-normalized ratio of the whole completion."""
    log_ratio_N = (tokens.logp_N - tokens.logp_old_N).detach()
    log_s_B = tokens.sequences.mean(log_ratio_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return with_gradient_of(tokens.sequences.expand(log_s_B), tokens.logp_N)


@ratio()
def product(tokens: Tokens) -> Tensor:
    """W = prod_t pi/mu: the exact ratio of the whole completion to the policy that sampled it."""
    # Not clamped: the sum over a long completion easily exceeds MAX_LOG_RATIO, and GammaWeight computes in log space.
    log_ratio_N = (tokens.logp_N - tokens.logp_behavior_N).detach()
    return with_gradient_of(tokens.sequences.expand(tokens.sequences.sum(log_ratio_N)), tokens.logp_N)


@ratio()
def none(tokens: Tokens) -> Tensor:
    """No correction: the sample is treated as on-policy."""
    return with_gradient_of(torch.zeros_like(tokens.logp_N), tokens.logp_N)


def with_gradient_of(value_N: Tensor, logp_N: Tensor) -> Tensor:
    """sg[value] + logp - sg[logp]: the value of the first, the gradient of the second."""
    # The parentheses make the second term exactly 0, so the value does not lose a bit.
    return value_N + (logp_N - logp_N.detach())

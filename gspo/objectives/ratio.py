"""Stage 5: how far the policy has moved from the one that is compared with, as a log-ratio per token.

In: packed tokens. Out: `log_ratio_N`, whose value is the ratio used and whose gradient is that of `logp_N`.
Invariant: a sequence-level ratio has one value for all tokens of a sequence. Its gradient runs through the token's own
log-probability only (GSPO-token's form, eq. 14 of arXiv:2507.18071); under equal token weights within a sequence, value
and gradient equal those of the plain sequence form, and no collective ever needs to be differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.objectives.sequences import Tokens

MAX_LOG_RATIO = 20.0
"""Token log-ratios are clamped to +-20 before exp: e^20 is beyond every trust region and still finite."""


def token(tokens: Tokens) -> Tensor:
    """r_t = pi(y_t) / pi_old(y_t)."""
    return (tokens.logp_N - tokens.logp_old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence(tokens: Tokens) -> Tensor:
    """s = exp(mean_t log pi/pi_old): the length-normalised ratio of the whole reply."""
    log_ratio_N = (tokens.logp_N - tokens.logp_old_N).detach()
    log_s_B = tokens.sequences.mean(log_ratio_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return with_gradient_of(tokens.sequences.expand(log_s_B), tokens.logp_N)


def product(tokens: Tokens) -> Tensor:
    """W = prod_t pi/mu: the true ratio of the whole reply against the policy that sampled it."""
    log_ratio_N = (tokens.logp_N - tokens.logp_behavior_N).detach()
    return with_gradient_of(tokens.sequences.expand(tokens.sequences.sum(log_ratio_N)), tokens.logp_N)


def none(tokens: Tokens) -> Tensor:
    """No correction: the sample is taken as on-policy."""
    return with_gradient_of(torch.zeros_like(tokens.logp_N), tokens.logp_N)


def with_gradient_of(value_N: Tensor, logp_N: Tensor) -> Tensor:
    """sg[value] + logp - sg[logp]: the value of one, the gradient of the other."""
    return value_N + (logp_N - logp_N.detach())

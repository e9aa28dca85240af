"""Corrections for completions that another policy sampled: mismatch weights and the off-policy mask.

In: packed tokens. Out: a detached factor of the policy term per token. Invariant: a factor of 0 drops a term and leaves
every denominator unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.objectives.ratio import MAX_LOG_RATIO
from gspo.objectives.sequences import Tokens

MISMATCH_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.001),
    "sequence_tis": (None, 2.0),
}
"""Correction -> default (mismatch_low, mismatch_high); `None` if it has no such bound."""


def mismatch_weight(kind: str, low: float | None, high: float | None, tokens: Tokens) -> Tensor:
    """A detached weight per token, from rho = pi_old / mu (not its inverse).

    token_tis: min(rho_t, high). icepop: rho_t inside [low, high], else 0. sequence_mask: 1 if the geometric mean of rho
    over the completion is inside [low, high], else 0. sequence_tis: min(prod_t rho_t, high).
    """
    sampler_N = tokens.logp_sampler_N
    assert sampler_N is not None
    assert high is not None
    log_rho_N = tokens.logp_old_N - sampler_N
    sequences = tokens.sequences
    rho_N = log_rho_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "token_tis":
        return rho_N.clamp(max=high)
    if kind == "sequence_tis":
        # Clamped in log space: the product over a long completion is heavy-tailed and can overflow.
        product_B = sequences.sum(log_rho_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return sequences.expand(product_B.clamp(max=high))
    assert low is not None
    if kind == "icepop":
        # Zero, not clamped: a token outside the range gets no gradient at all.
        return torch.where((rho_N >= low) & (rho_N <= high), rho_N, 0.0)
    assert kind == "sequence_mask"
    # The geometric mean, because the product of a long completion would leave so narrow a range by rounding alone.
    geometric_B = sequences.mean(log_rho_N).exp()
    return sequences.expand(((geometric_B >= low) & (geometric_B <= high)).to(rho_N.dtype))


def off_policy_keep(delta: float, tokens: Tokens) -> Tensor:
    """0 where A < 0 and mean_t log(mu/pi) of the completion is above delta, else 1 (DeepSeek-V3.2)."""
    # Only A < 0: pushing down completions that the policy no longer produces destabilizes training.
    drift_B = tokens.sequences.mean(tokens.logp_behavior_N - tokens.logp_N.detach())
    dropped_N = (tokens.advantage_N < 0) & (tokens.sequences.expand(drift_B) > delta)
    return (~dropped_N).to(tokens.logp_N.dtype)

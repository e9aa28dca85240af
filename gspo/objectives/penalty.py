"""Options of any objective: KL penalty, sampler-mismatch weights, off-policy sequence masks, length shaping.

In: packed tokens or lengths. Out: a value per token. Invariant: KL and entropy terms use the objective's own token
weights and are never multiplied by a mismatch weight. Masks zero a term and leave every denominator unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.ratio import MAX_LOG_RATIO, token
from gspo.objectives.sequences import Tokens

# ---------------------------------------------------------------------------- KL(pi || pi_ref)


def k1(tokens: Tokens) -> Tensor:
    """log pi - log pi_ref. Unbiased, high variance; as a loss its expected gradient is 0."""
    return tokens.logp_N - _ref(tokens)


def k2(tokens: Tokens) -> Tensor:
    """(log pi - log pi_ref)^2 / 2. As a loss it has the gradient of the reverse KL."""
    return 0.5 * k1(tokens) ** 2


def k3(tokens: Tokens) -> Tensor:
    """pi_ref/pi - 1 - log(pi_ref/pi). Unbiased, never negative; as a loss it has the gradient of the forward KL."""
    log_r_N = (-k1(tokens)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(x) - 1 loses the digits of a small x, and k3 is of order x^2.
    return torch.expm1(log_r_N) - log_r_N


def k3_plus(tokens: Tokens) -> Tensor:
    """The value of k3 with the gradient of k2."""
    k2_N = k2(tokens)
    return k3(tokens).detach() + k2_N - k2_N.detach()


def k3_ratio(tokens: Tokens) -> Tensor:
    """(pi/pi_old) k3 with gradient through both factors. The reverse KL, even off-policy (DeepSeek-V3.2)."""
    return token(tokens).exp() * k3(tokens)


KL_ESTIMATORS: dict[str, Callable[[Tokens], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3+": k3_plus,
    "k3_ratio": k3_ratio,
}


def _ref(tokens: Tokens) -> Tensor:
    assert tokens.logp_ref_N is not None
    return tokens.logp_ref_N


# ---------------------------------------------------------------------------- pi_old / mu: numerics of the sampler

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
        product_B = sequences.sum(log_rho_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return sequences.expand(product_B.clamp(max=high))
    assert low is not None
    if kind == "icepop":
        return torch.where((rho_N >= low) & (rho_N <= high), rho_N, 0.0)
    assert kind == "sequence_mask"
    geometric_B = sequences.mean(log_rho_N).exp()
    return sequences.expand(((geometric_B >= low) & (geometric_B <= high)).to(rho_N.dtype))


def off_policy_keep(delta: float, tokens: Tokens) -> Tensor:
    """0 where A < 0 and mean_t log(mu/pi) of the completion is above delta, else 1 (DeepSeek-V3.2)."""
    # Only A < 0: pushing down completions that the policy no longer produces destabilizes training.
    drift_B = tokens.sequences.mean(tokens.logp_behavior_N - tokens.logp_N.detach())
    dropped_N = (tokens.advantage_N < 0) & (tokens.sequences.expand(drift_B) > delta)
    return (~dropped_N).to(tokens.logp_N.dtype)


# ---------------------------------------------------------------------------- length


def soft_overlong(length: int, limit: int, cache: int) -> float:
    """DAPO's penalty added to the reward: 0 up to limit - cache, falling linearly to -1 at the limit, -1 beyond it."""
    if not 0 < cache <= limit:
        raise ConfigError(f"overlong_cache: must be between 1 and the limit of {limit} tokens, not {cache}")
    return max(-1.0, min(0.0, (limit - cache - length) / cache))

"""Estimators of KL(pi || pi_ref) per token, for the KL penalty to the reference.

In: packed tokens with the reference's log-probs. Out: a value per token. Invariant: the KL term uses the objective's
own token weights and is never multiplied by a mismatch weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gspo.objectives.ratio import MAX_LOG_RATIO, token
from gspo.objectives.sequences import Tokens


def k1(tokens: Tokens) -> Tensor:
    """log pi - log pi_ref. Unbiased, high variance; as a loss its expected gradient is 0."""
    return tokens.logp_N - _ref(tokens)


def k2(tokens: Tokens) -> Tensor:
    """(log pi - log pi_ref)^2 / 2. As a loss it has the gradient of the reverse KL."""
    return 0.5 * k1(tokens) ** 2


def k3(tokens: Tokens) -> Tensor:
    """pi_ref/pi - 1 - log(pi_ref/pi). Unbiased, never negative; as a loss it has the gradient of the forward KL."""
    # Bounded, so that one token that the policy hardly ever produces does not make the loss infinite.
    log_r_N = (-k1(tokens)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(x) - 1 loses the digits of a small x, and k3 is of order x^2.
    return torch.expm1(log_r_N) - log_r_N


def k3_plus(tokens: Tokens) -> Tensor:
    """The value of k3 with the gradient of k2."""
    k2_N = k2(tokens)
    return k3(tokens).detach() + k2_N - k2_N.detach()


def k3_ratio(tokens: Tokens) -> Tensor:
    """(pi/pi_old) k3 with gradient through both factors. The reverse KL, even off-policy (DeepSeek-V3.2)."""
    # The token's own ratio for every objective: a sequence ratio does not correct the KL term of a token.
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

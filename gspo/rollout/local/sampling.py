"""Drawing one token per row.

In: logits, a `Sampling`, and a uniform number per row from its own counter-based stream. Out: tokens and their
log-probabilities under the distribution they were drawn from. Invariant: a row's draw depends on nothing but its own
logits, stream and position in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.types import Sampling

GREEDY = -1
"""Stands for a random stream, whose keys are never negative, in a row that takes the likeliest token."""


def uniform(key_R: Tensor, index_R: Tensor) -> Tensor:
    """Element `index` of the SplitMix64 sequence seeded with `key`, as a float64 in (0, 1).

    Counter-based, so a reply's numbers do not depend on its neighbours; integer arithmetic, so they are the same on
    every device."""
    z = key_R + (index_R + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    # 52 bits: with 53, adding a half could round up to 1.
    return (_shifted(z, 12).to(torch.float64) + 0.5) * 2.0**-52


def _signed(word: int) -> int:
    return word - (1 << 64)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits_RV: Tensor, sampling: Sampling, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution, and its log-probability."""
    if sampling.temperature == 0:
        return _likeliest(logits_RV)
    logp_RV = torch.log_softmax(_kept(logits_RV.float() / sampling.temperature, sampling), dim=-1)
    cumulative_RV = logp_RV.exp().to(torch.float64).cumsum(-1)
    # The first entry that reaches a threshold above 0: never a token of probability 0.
    threshold_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    # NaN logits would point past the end; the clamp keeps that an error that can be reported.
    token_R1 = torch.searchsorted(cumulative_RV, threshold_R1).clamp_(max=logits_RV.shape[1] - 1)
    return token_R1.squeeze(1), logp_RV.gather(1, token_R1).squeeze(1)


def with_greedy(
    logits_RV: Tensor, sampling: Sampling, key_R: Tensor, token_R: Tensor, logp_R: Tensor
) -> tuple[Tensor, Tensor]:
    """What was drawn, but the likeliest token in the rows whose key is `GREEDY`."""
    if not sampling.greedy_last:
        return token_R, logp_R
    greedy_R, (likeliest_R, sure_R) = key_R == GREEDY, _likeliest(logits_RV)
    return torch.where(greedy_R, likeliest_R, token_R), torch.where(greedy_R, sure_R, logp_R)


def _likeliest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    token_R = logits_RV.argmax(-1)
    return token_R, torch.zeros_like(token_R, dtype=torch.float32)


def _kept(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p of what is left: the others become impossible. Top-p keeps the token that crosses the mark."""
    if 0 < sampling.top_k < logits_RV.shape[1]:
        least_R1 = logits_RV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    if sampling.top_p < 1:
        sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
        p_RV = sorted_RV.softmax(-1, dtype=torch.float64)
        drop_RV = p_RV.cumsum(-1) - p_RV >= sampling.top_p
        drop_RV[:, 0] = False
        logits_RV = logits_RV.masked_fill(drop_RV.scatter(1, order_RV, drop_RV), -torch.inf)
    return logits_RV

"""PyTorch versions of the operations of `fused_linear_logprobs.py`, for CPUs, for float32 on a GPU, and for tests.

In: hidden states and a chunk of the LM head's weight, in any precision. Out: softmax statistics per row, or the
gradient of the logits, in float32 (float64 for float64). Invariant: chunks can be of any size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.model.kernels.fused_linear_logprobs import parts_of


def statistics(hidden: Tensor, weight: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: the maximum of the scaled logits, the sum of exp(x), the sum of x exp(x) with x = logit - maximum, and
    the logit of the target. Chunks are combined by online softmax."""
    hidden = _wide(hidden)
    most = hidden.new_full((len(hidden),), -torch.inf)
    total, dot, picked = (torch.zeros_like(most) for _ in range(3))
    for a, b in parts_of(max(1, len(hidden)), len(weight), hidden.device):
        logits = (hidden @ _wide(weight[a:b]).T).mul_(scale)
        at = target - a
        here = (at >= 0) & (at < b - a)
        picked = torch.where(here, logits.gather(-1, at.clamp(0, b - a - 1).unsqueeze(-1)).squeeze(-1), picked)
        new = torch.maximum(most, logits.amax(-1))
        # In place: the logits of a chunk are the largest tensor here.
        centered = logits.sub_(new.unsqueeze(-1))
        exp_centered = centered.exp()
        # Before the first chunk the maximum is minus infinity, and 0 * inf would be NaN.
        drop = torch.where(total > 0, most - new, 0)
        shrink = drop.exp()
        dot = shrink * (dot + total * drop) + torch.linalg.vecdot(exp_centered, centered)
        total = shrink * total + exp_centered.sum(-1)
        most = new
    return most, total, dot, picked


def logit_gradient(
    hidden: Tensor, weight: Tensor, target: Tensor, scale: float, per_row: Sequence[Tensor], out: Tensor
) -> None:
    """Fill `out` with the gradient of the logits of a chunk of the vocabulary; `target` is relative to its first
    entry."""
    log_sum, gain, level, slope = (t.unsqueeze(-1) for t in per_row)
    # `out` serves as scratch memory until its final values are computed.
    logp = torch.mm(_wide(hidden), _wide(weight).T, out=out).mul_(scale).sub_(log_sum)
    exp_centered = logp.exp()
    torch.addcmul(level, slope, logp, out=out).mul_(exp_centered).neg_()
    here = torch.nonzero((target >= 0) & (target < len(weight))).squeeze(-1)
    out[here, target[here]] += gain[here, 0]


def precision(hidden: Tensor) -> torch.dtype:
    """The dtype of the gradient of the logits."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(precision(tensor))

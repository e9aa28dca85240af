"""Plain torch twins of the pieces of `selected.py`: for a CPU, for float32 on a GPU, and to test the Triton ones against.

In: hidden states and (a part of) the head's weight, in any precision. Out: softmax statistics per row, or the gradient of
the logits, in float32 (float64 from float64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.model.kernels.fused_linear_logprobs import parts_of


def statistics(hidden: Tensor, weight: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: maximum of the scaled logits, sum of exp(x), sum of x exp(x), x = logit - maximum, and the target's logit."""
    hidden = _wide(hidden)
    most = hidden.new_full((len(hidden),), -torch.inf)
    total, dot, picked = (torch.zeros_like(most) for _ in range(3))
    for a, b in parts_of(max(1, len(hidden)), len(weight), hidden.device):
        logits = (hidden @ _wide(weight[a:b]).T).mul_(scale)
        at = target - a
        here = (at >= 0) & (at < b - a)
        picked = torch.where(here, logits.gather(-1, at.clamp(0, b - a - 1).unsqueeze(-1)).squeeze(-1), picked)
        new = torch.maximum(most, logits.amax(-1))
        apart = logits.sub_(new.unsqueeze(-1))
        share = apart.exp()
        # Before the first part nothing was summed, and its maximum of minus infinity must not enter a product.
        fall = torch.where(total > 0, most - new, 0)
        shrink = fall.exp()
        dot = shrink * (dot + total * fall) + torch.linalg.vecdot(share, apart)
        total = shrink * total + share.sum(-1)
        most = new
    return most, total, dot, picked


def logit_gradient(
    hidden: Tensor, weight: Tensor, target: Tensor, scale: float, per_row: Sequence[Tensor], out: Tensor
) -> None:
    """Fill `out` with the gradient of the logits of a part of the vocabulary; `target` counts from the part's first entry."""
    log_sum, gain, level, slope = (t.unsqueeze(-1) for t in per_row)
    logp = torch.mm(_wide(hidden), _wide(weight).T, out=out).mul_(scale).sub_(log_sum)
    share = logp.exp()
    torch.addcmul(level, slope, logp, out=out).mul_(share).neg_()
    here = torch.nonzero((target >= 0) & (target < len(weight))).squeeze(-1)
    out[here, target[here]] += gain[here, 0]


def precision(hidden: Tensor) -> torch.dtype:
    """Of the gradient of the logits."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(precision(tensor))

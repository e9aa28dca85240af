"""Log-prob of one target token per row, and the entropy, without materializing the logits.

In: hidden states `[N, H]`, the LM head's weight `[V, H]`, a target per row, the temperature. Out: `logp_N` and
`entropy_N` in float32 (float64 for float64 hidden states), both differentiable. Invariant: no logit is rounded below
that precision, no entry of a gradient is dropped, and a row whose incoming gradient is exactly zero (a clipped
completion, a zero advantage) costs nothing in the backward pass.

With z = hidden weight^T / temperature, p = softmax(z), y the target, g and e the gradients of logp and of the entropy
h,

    logp = z_y - log sum_v exp z_v,   h = -sum_v p_v log p_v,
    dz_v = g (1[v = y] - p_v) - e p_v (log p_v + h).

In rows with excluded tokens, these have p_v = 0 and dz_v = 0, and the sums run over all others.

The vocabulary is processed in chunks. The backward pass recomputes the logits of each chunk, turns them into dz and
multiplies that with the weight and with the hidden states: four matrix products in all, the minimum without storing
logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.model.micro_batch import ExcludedTokens

LOWEST = -1e30
"""The logit of an excluded token. Not minus infinity, which times the probability 0 is NaN in the entropy."""
HELD = 2**27
"""Entries of dz in memory at a time on a GPU: 256 MiB in bfloat16."""
HELD_CPU = 2**22
"""The same on a CPU, where a smaller chunk stays in the cache."""


def fused_linear_logprobs(
    hidden_N: Tensor,
    weight: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    weight_gradient: Tensor | None = None,
    excluded: ExcludedTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """(logp_N, entropy_N) of the targets. If `weight_gradient`, a float32 buffer, is given, the backward pass adds the
    weight's gradient to it and bypasses autograd, which would round it to the weight's precision every time. The tokens
    in `excluded` have probability 0 in its rows, whose forward pass takes plain PyTorch in float32."""
    assert hidden_N.shape == (len(target_N), weight.shape[1]), f"{hidden_N.shape}, {weight.shape}, {target_N.shape}"
    logp_N, entropy_N = _FusedLinearLogprobs.apply(hidden_N, weight, target_N, temperature, weight_gradient, excluded)
    return logp_N, entropy_N


class _FusedLinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_N: Tensor,
        weight: Tensor,
        target_N: Tensor,
        temperature: float,
        weight_gradient: Tensor | None,
        excluded: ExcludedTokens | None,
    ) -> tuple[Tensor, Tensor]:
        # Without an entropy bonus the entropy has no gradient; `None` then saves a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.weight_gradient = weight_gradient
        ctx.excluded = excluded
        statistics = _kernels(hidden_N).statistics(hidden_N, weight, target_N, 1 / temperature)
        if excluded is not None:
            # Summed again without the excluded tokens. Subtracting their share from the sums would lose all precision
            # where they are likely.
            rows = excluded.rows
            again = TorchKernels.statistics(hidden_N[rows], weight, target_N[rows], 1 / temperature, excluded.ids)
            statistics = tuple(s.index_copy(0, rows, new) for s, new in zip(statistics, again, strict=True))
        most_N, sum_N, dot_N, picked_N = statistics
        log_N = sum_N.log()
        entropy_N = log_N - dot_N / sum_N
        ctx.save_for_backward(hidden_N, weight, target_N, most_N + log_N, entropy_N)
        return picked_N - most_N - log_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden_N, weight, target_N, log_sum_N, entropy_N = ctx.saved_tensors
        gain_N, slope_N = (torch.zeros_like(log_sum_N) if g is None else g / ctx.temperature for g in gradients)
        per_row = torch.stack([log_sum_N, gain_N, gain_N + slope_N * entropy_N, slope_N])
        # Clipped completions and uniform groups have exact zeros.
        active_N = torch.nonzero((gain_N != 0) | (slope_N != 0)).squeeze(-1)
        excluded = ctx.excluded
        if len(active_N) == len(hidden_N):
            rows = hidden_N, target_N, per_row
        else:
            rows = hidden_N[active_N], target_N[active_N], per_row.index_select(1, active_N)
            if excluded is not None:
                # The same rows, numbered among the active ones.
                active = torch.nonzero(torch.isin(active_N, excluded.rows)).squeeze(-1)
                excluded = ExcludedTokens(rows=active, ids=excluded.ids)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        buffer = ctx.weight_gradient if wants_weight else None
        if wants_weight and buffer is None:
            # float32, as the products accumulate; it is rounded once, below.
            buffer = torch.zeros_like(weight, dtype=log_sum_N.dtype)
        hidden_gradient = _accumulate(*rows, weight, 1 / ctx.temperature, buffer, wants_hidden, excluded)
        if hidden_gradient is not None and len(active_N) < len(hidden_N):
            hidden_gradient = torch.zeros_like(hidden_N).index_copy_(0, active_N, hidden_gradient)
        weight_gradient = None if buffer is None or ctx.weight_gradient is not None else buffer.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None


def _accumulate(
    hidden_N: Tensor,
    target_N: Tensor,
    per_row: Tensor,
    weight: Tensor,
    scale: float,
    buffer: Tensor | None,
    wants_hidden: bool,
    excluded: ExcludedTokens | None,
) -> Tensor | None:
    """Process the vocabulary in chunks: add the weight's gradient to `buffer` and return that of the hidden states."""
    rows = len(hidden_N)
    kernels = _kernels(hidden_N)
    gradient_N = torch.zeros_like(hidden_N, dtype=per_row.dtype) if wants_hidden else None
    parts = list(parts_of(rows, len(weight), hidden_N.device)) if rows else []
    width = max((b - a for a, b in parts), default=0)
    # The TMA unit of a GPU needs rows of a multiple of 16 bytes.
    held = torch.empty(rows, -width // 8 * -8, dtype=kernels.precision(hidden_N), device=hidden_N.device)
    for a, b in parts:
        dz = held[:, : b - a]
        kernels.logit_gradient(hidden_N, weight[a:b], target_N - a, scale, per_row, dz)
        if excluded is not None:
            dz[excluded.rows[:, None], _within(excluded.ids, a, b)] = 0
        if gradient_N is not None:
            _add_product(gradient_N, dz, weight[a:b])
        if buffer is not None:
            _add_product(buffer[a:b], dz.T, hidden_N)
    return None if gradient_N is None else gradient_N.to(hidden_N.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in the precision of `total`."""
    if total.is_cuda and a.dtype != total.dtype:
        # Inputs in 16 bits, sum in float32: converting the inputs first would double their memory.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def parts_of(rows: int, vocabulary: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of the vocabulary such that the logits of a chunk fit into the limit."""
    # Multiples of 256, the widest tile of the Triton kernel.
    most = max(256, (HELD_CPU if device.type == "cpu" else HELD) // rows // 256 * 256)
    # Equal chunks: a small last one would leave most of a GPU idle.
    width = -(-vocabulary // -(-vocabulary // most)) + 255 & ~255
    return ((a, min(a + width, vocabulary)) for a in range(0, vocabulary, width))


def _within(ids: Tensor, a: int, b: int) -> Tensor:
    """Those of the tokens that are in the range from a to b, relative to a."""
    return ids[(ids >= a) & (ids < b)] - a


def _kernels(hidden_N: Tensor) -> Any:
    """Triton for half precision on a GPU, else plain PyTorch: float32 keeps torch's own, exact products."""
    if hidden_N.is_cuda and hidden_N.dtype in (torch.bfloat16, torch.float16) and hidden_N.shape[1] % 8 == 0:
        from gspo.model.kernels import fused_linear_logprobs_triton as triton_kernels

        return triton_kernels
    return TorchKernels


class TorchKernels:
    """The operations in plain PyTorch, for CPUs, for float32 on a GPU, and for tests: softmax statistics per row, and
    the gradient of the logits, in float32 (float64 for float64). Chunks can be of any size."""

    @staticmethod
    def statistics(
        hidden: Tensor, weight: Tensor, target: Tensor, scale: float, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Per row: the maximum of the scaled logits, the sum of exp(x), the sum of x exp(x) with x = logit - maximum,
        and the logit of the target. Chunks are combined by online softmax. `excluded` are tokens to leave out."""
        hidden = _wide(hidden)
        most = hidden.new_full((len(hidden),), -torch.inf)
        total, dot, picked = (torch.zeros_like(most) for _ in range(3))
        for a, b in parts_of(max(1, len(hidden)), len(weight), hidden.device):
            logits = (hidden @ _wide(weight[a:b]).T).mul_(scale)
            if excluded is not None:
                logits[:, _within(excluded, a, b)] = LOWEST
            at = target - a
            here = (at >= 0) & (at < b - a)
            picked = torch.where(here, logits.gather(-1, at.clamp(0, b - a - 1).unsqueeze(-1)).squeeze(-1), picked)
            new = torch.maximum(most, logits.amax(-1))
            centered = logits.sub_(new.unsqueeze(-1))
            exp_centered = centered.exp()
            # Before the first chunk the maximum is minus infinity, and 0 * inf would be NaN.
            drop = torch.where(total > 0, most - new, 0)
            shrink = drop.exp()
            dot = shrink * (dot + total * drop) + torch.linalg.vecdot(exp_centered, centered)
            total = shrink * total + exp_centered.sum(-1)
            most = new
        return most, total, dot, picked

    @staticmethod
    def logit_gradient(
        hidden: Tensor, weight: Tensor, target: Tensor, scale: float, per_row: Sequence[Tensor], out: Tensor
    ) -> None:
        """Fill `out` with the gradient of the logits of a chunk of the vocabulary; `target` is relative to its first
        entry."""
        log_sum, gain, level, slope = (t.unsqueeze(-1) for t in per_row)
        logp = torch.mm(_wide(hidden), _wide(weight).T, out=out).mul_(scale).sub_(log_sum)
        exp_centered = logp.exp()
        torch.addcmul(level, slope, logp, out=out).mul_(exp_centered).neg_()
        here = torch.nonzero((target >= 0) & (target < len(weight))).squeeze(-1)
        out[here, target[here]] += gain[here, 0]

    @staticmethod
    def precision(hidden: Tensor) -> torch.dtype:
        """The dtype of the gradient of the logits."""
        return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(TorchKernels.precision(tensor))

"""The experts of an MoE layer in training: all their products in two launches, and everything in between in one pass.

In: the hidden states of all tokens, and the experts and gate weights that the router chose. Out: the gated sum over
each token's experts, differentiable in all of them. Invariant: tokens are sorted by expert, and every sum over a
token's experts gathers its terms in a fixed order, forward and backward; nothing is scattered, so results are
bitwise reproducible. It replaces the forward of modules for which `supports_experts` holds.

Shape suffixes, in addition to those of `model/routing.py`: `T` tokens, `I` pairs of a token and one of its experts,
sorted by expert, `H` hidden size, `F` width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


def is_gated_experts(module: Any) -> bool:
    """Whether a module holds all experts of a layer in two tensors, as Qwen's does, without biases and clamps."""
    parts = [getattr(module, part, None) for part in ("gate_up_proj", "down_proj")]
    plain = not any(getattr(module, extra, False) for extra in ("has_bias", "is_transposed", "limit"))
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return silu and plain and all(isinstance(part, Tensor) and part.dim() == 3 for part in parts)


def supports_experts(module: Any) -> bool:
    """Whether `experts_forward` can replace the forward of this module. `grouped_mm` is fast in bfloat16 only."""
    if not is_gated_experts(module):
        return False
    return bool(module.down_proj.is_cuda and module.down_proj.dtype == torch.bfloat16)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a module that holds all experts of a layer."""
    row_I, place_TK, ends_E = sort_by_expert(top_k_index, module.num_experts)
    rows_IH = _Dispatch.apply(hidden_states, row_I, place_TK)
    gate_up_I2F = grouped_mm(rows_IH, module.gate_up_proj.transpose(1, 2), offs=ends_E)
    down_IH = grouped_mm(_GatedSilu.apply(gate_up_I2F), module.down_proj.transpose(1, 2), offs=ends_E)
    return _Combine.apply(down_IH, top_k_weights, row_I, place_TK)  # type: ignore[no-any-return]


def sort_by_expert(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert: the token of each, where each choice went, and where each expert's choices end."""
    # Few bits: the sort takes one pass per byte.
    keys = chosen_TK.flatten().to(torch.uint8 if experts <= 256 else torch.int16)
    sorted_I, order_I = keys.sort(stable=True)
    place_I = torch.empty_like(order_I)
    place_I[order_I] = torch.arange(len(order_I), device=order_I.device)
    expert_E = torch.arange(experts, device=keys.device)
    ends_E = torch.searchsorted(sorted_I.long(), expert_E, right=True, out_int32=True)
    return order_I // chosen_TK.shape[1], place_I.view_as(chosen_TK), ends_E


class _Dispatch(torch.autograd.Function):
    """Copies each token to the places of its experts."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, row_I: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return hidden_TH.index_select(0, row_I)

    @staticmethod
    def backward(ctx: Any, gradient_IH: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        return _kernels(gradient_IH).combine(gradient_IH.contiguous(), place_TK, None), None, None


class _GatedSilu(torch.autograd.Function):
    """silu(gate) * up of two halves."""

    @staticmethod
    def forward(ctx: Any, gate_up_I2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_I2F)
        return _kernels(gate_up_I2F).gated_silu(gate_up_I2F)

    @staticmethod
    def backward(ctx: Any, gradient_IF: Tensor) -> Tensor:
        (gate_up_I2F,) = ctx.saved_tensors
        return _kernels(gate_up_I2F).gated_silu_backward(gate_up_I2F, gradient_IF.contiguous())


class _Combine(torch.autograd.Function):
    """The sum over each token's experts, with the gate weights."""

    @staticmethod
    def forward(ctx: Any, down_IH: Tensor, weight_TK: Tensor, row_I: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(down_IH, weight_TK, place_TK)
        return _kernels(down_IH).combine(down_IH, place_TK, weight_TK)

    @staticmethod
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor, Tensor, None, None]:
        down_IH, weight_TK, place_TK = ctx.saved_tensors
        down, weight = _kernels(down_IH).combine_backward(gradient_TH.contiguous(), down_IH, place_TK, weight_TK)
        return down, weight, None, None


class TorchKernels:
    """The same operations in plain PyTorch."""

    @staticmethod
    def combine(x_IH: Tensor, place_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
        """The sum over the places of each token, weighted if weights are given."""
        terms = x_IH[place_TK].float()
        return (terms if weight_TK is None else terms * weight_TK.float().unsqueeze(-1)).sum(1).to(x_IH.dtype)

    @staticmethod
    def combine_backward(
        gradient_TH: Tensor, x_IH: Tensor, place_TK: Tensor, weight_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of `combine` in `x_IH` and in the weights."""
        wide = gradient_TH.float().unsqueeze(1)
        weight = (x_IH[place_TK].float() * wide).sum(-1).to(weight_TK.dtype)
        terms_TKH = (wide * weight_TK.float().unsqueeze(-1)).to(x_IH.dtype)
        return torch.empty_like(x_IH).index_copy_(0, place_TK.flatten(), terms_TKH.flatten(0, 1)), weight

    @staticmethod
    def gated_silu(x_I2F: Tensor) -> Tensor:
        """silu(gate) * up of the two halves of each row."""
        gate, up = x_I2F.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x_I2F.dtype)

    @staticmethod
    def gated_silu_backward(x_I2F: Tensor, gradient_IF: Tensor) -> Tensor:
        """The gradient of `gated_silu`."""
        gate, up = x_I2F.float().chunk(2, -1)
        opened, wide = torch.sigmoid(gate), gradient_IF.float()
        return torch.cat([wide * up * opened * (1 + gate * (1 - opened)), wide * gate * opened], -1).to(x_I2F.dtype)


def _kernels(x: Tensor) -> Any:
    if not x.is_cuda:
        return TorchKernels
    from gspo.model.kernels import experts_triton

    return experts_triton

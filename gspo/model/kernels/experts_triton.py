# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""The Triton kernels of `experts.py`. Sums are float32, and each result is rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def combine(x_IH: Tensor, place_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """The sum over the places of each token, weighted if weights are given."""
    tokens, chosen = place_TK.shape
    size = x_IH.shape[1]
    out = x_IH.new_empty(tokens, size)
    block = min(1024, triton.next_power_of_2(size))
    weight = place_TK if weight_TK is None else weight_TK.contiguous()  # any pointer will do without weights
    _combine_kernel[(tokens, triton.cdiv(size, block))](
        x_IH, place_TK, weight, out, K=chosen, SIZE=size, BLOCK=block, WEIGHTED=weight_TK is not None
    )
    return out


def combine_backward(gradient_TH: Tensor, x_IH: Tensor, place_TK: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `combine` in `x_IH` and in the weights."""
    tokens, chosen = place_TK.shape
    size = x_IH.shape[1]
    x_gradient, weight_gradient = torch.empty_like(x_IH), torch.empty_like(weight_TK)
    _combine_backward_kernel[(tokens * chosen,)](
        gradient_TH,
        x_IH,
        place_TK,
        weight_TK.contiguous(),
        x_gradient,
        weight_gradient,
        K=chosen,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=_warps(size),
    )
    return x_gradient, weight_gradient


def gated_silu(x_I2F: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of each row."""
    size = x_I2F.shape[1] // 2
    out = x_I2F.new_empty(len(x_I2F), size)
    _gated_silu_kernel[(len(x_I2F),)](x_I2F, out, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=_warps(size))
    return out


def gated_silu_backward(x_I2F: Tensor, gradient_IF: Tensor) -> Tensor:
    """The gradient of `gated_silu`."""
    size = x_I2F.shape[1] // 2
    out = torch.empty_like(x_I2F)
    _gated_silu_backward_kernel[(len(x_I2F),)](
        x_I2F, gradient_IF, out, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=_warps(size)
    )
    return out


def _warps(size: int) -> int:
    """Warps for a row of this many entries."""
    return min(8, max(1, triton.next_power_of_2(size) // 256))


@triton.jit
def _combine_kernel(
    x, place, weight, out, K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        term = tl.load(x + tl.load(place + token * K + k) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
        if WEIGHTED:
            term *= tl.load(weight + token * K + k).to(tl.float32)
        total += term
    tl.store(out + token * SIZE + at, total.to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _combine_backward_kernel(
    gradient,
    x,
    place,
    weight,
    x_gradient,
    weight_gradient,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    choice = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = tl.load(place + choice) * SIZE + at
    wide = tl.load(gradient + choice // K * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    given = tl.load(x + here, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(weight_gradient + choice, tl.sum(wide * given, 0).to(weight_gradient.dtype.element_ty))
    share = tl.load(weight + choice).to(tl.float32)
    tl.store(x_gradient + here, (wide * share).to(x_gradient.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _gated_silu_kernel(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _gated_silu_backward_kernel(x, gradient, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    wide = tl.load(gradient + row * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    kind = out.dtype.element_ty
    tl.store(out + row * 2 * SIZE + at, (wide * up * opened * (1 + gate * (1 - opened))).to(kind), mask=at < SIZE)
    tl.store(out + row * 2 * SIZE + SIZE + at, (wide * gate * opened).to(kind), mask=at < SIZE)

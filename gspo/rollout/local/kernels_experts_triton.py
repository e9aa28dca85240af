# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton kernels for the experts of an MoE model when each has few tokens: a decoding step streams the weights once.

In: activations of `R` rows, the choices of their experts grouped by `group_by_expert`, and the weights of all experts
in one tensor. Out: the outputs of the experts, in the order of the groups. Invariant: rounded where the model's own
code rounds, sums in float32. The grid depends on shapes alone, so that a CUDA graph can be replayed for other choices,
and configurations come from a table, so that results do not depend on timing.

Shape suffixes, in addition to those of `kernels.py`: `I` choices (rows times experts per row), `E` experts, `K`
experts per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a product of experts is split into programs."""

    tokens: int = 32
    outputs: int = 64
    inputs: int = 128
    """Tokens, outputs and inputs per step of a program."""
    stages: int = 4
    """Depth of the software pipeline. What is in flight hides the latency of memory."""
    warps: int = 4
    swap: bool = True
    """Compute `weight x^T` instead of `x weight^T`. Hopper's fast matrix instruction needs 64 rows on the left, and
    there are that many outputs, but not that many tokens."""
    tma: bool = False
    """Read weights through a tensor descriptor, with the bulk copy engine."""
    shares: int = 2
    """Programs that share the tokens of an expert. With more tokens than `shares * tokens` each program loops."""


GATE_UP = {
    16: Tiles(tokens=16, outputs=64, inputs=64, stages=5),
    32: Tiles(tokens=32, outputs=64, inputs=64, stages=5),
    64: Tiles(tokens=64, outputs=64, inputs=64, stages=4),
}
"""By tokens per program, for `gate_up_proj`. A program computes a tile of the gate and the same tile of the other
half."""
DOWN = {
    16: Tiles(tokens=16, outputs=64, inputs=128, stages=4),
    32: Tiles(tokens=32, outputs=128, inputs=64, stages=5),
    64: Tiles(tokens=64, outputs=64, inputs=128, stages=3),
}
"""By tokens per program, for `down_proj`."""


def tokens_per_program(choices: int, experts: int) -> int:
    """A few more tokens than an expert has on average, because another pass would read its weights again."""
    mean = choices / experts
    return 16 if mean <= 8 else 32 if mean <= 24 else 64


def expert_mlp(x_RH: Tensor, row_I: Tensor, ends_E: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The gated MLP of each choice: `down(silu(gate(x)) * up(x))`, before the weights of the router."""
    tokens = tokens_per_program(len(row_I), len(ends_E))
    hidden = gated_product(x_RH, row_I, ends_E, gate_up, GATE_UP[tokens])
    return product(hidden, ends_E, down, DOWN[tokens])


def gated_product(x_RH: Tensor, row_I: Tensor, ends_E: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """silu(gate) * up of each choice. `weight`: [E, 2 * outputs, inputs], the gate first."""
    out = x_RH.new_empty(len(row_I), weight.shape[1] // 2)
    _launch(x_RH, row_I, ends_E, weight, out, tiles, gated=True, gather=True)
    return out


def product(x_IH: Tensor, ends_E: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """The product of each choice with the weight of its expert, [E, outputs, inputs]."""
    out = x_IH.new_empty(len(x_IH), weight.shape[1])
    _launch(x_IH, ends_E, ends_E, weight, out, tiles, gated=False, gather=False)
    return out


def choose_experts(logits_RE: Tensor, chosen: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax and top-k in one launch: weights and experts of each row, best first. Among equal scores the expert with
    the lowest number wins, which is also what `torch.topk` selects on a GPU."""
    rows, experts = logits_RE.shape
    weight_RK = logits_RE.new_empty(rows, chosen)
    index_RK = torch.empty(rows, chosen, dtype=torch.int64, device=logits_RE.device)
    _choose_experts_kernel[(rows,)](
        logits_RE.contiguous(),
        weight_RK,
        index_RK,
        EXPERTS=experts,
        BLOCK=triton.next_power_of_2(experts),
        K=chosen,
        CHOSEN=triton.next_power_of_2(chosen),
        NORMALIZE=normalize,
        num_warps=1 if experts <= 256 else 4,
    )
    return weight_RK, index_RK


def _launch(
    x: Tensor, row_I: Tensor, ends_E: Tensor, weight: Tensor, out: Tensor, tiles: Tiles, *, gated: bool, gather: bool
) -> None:
    assert x.is_contiguous()
    assert weight.is_contiguous()
    experts, rows, size = weight.shape
    outputs = out.shape[1]
    tiles = _fitted(tiles, outputs, size)
    given: Any = weight
    if tiles.tma:
        given = TensorDescriptor.from_tensor(weight.view(-1, size), [tiles.outputs, tiles.inputs])
    grid = (triton.cdiv(outputs, tiles.outputs) * tiles.shares * experts,)
    _expert_product_kernel[grid](
        x,
        row_I,
        ends_E,
        given,
        out,
        ROWS=rows,
        OUTPUTS=outputs,
        INPUTS=size,
        BLOCK_M=tiles.tokens,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        SHARES=tiles.shares,
        GATED=gated,
        GATHER=gather,
        SWAP=tiles.swap,
        TMA=tiles.tma,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _fitted(tiles: Tiles, outputs: int, inputs: int) -> Tiles:
    """Tiles that are not larger than a small matrix. A tensor descriptor needs aligned rows."""
    return replace(
        tiles,
        outputs=min(tiles.outputs, max(16, triton.next_power_of_2(outputs))),
        inputs=min(tiles.inputs, max(16, triton.next_power_of_2(inputs))),
        tma=tiles.tma and inputs % 8 == 0,
    )


@triton.jit
def _read(start, at, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns `at` of the rows that start there, with a mask only if the last step is not full."""
    if INPUTS % BLOCK_K == 0:
        values = tl.load(start + at[None, :])
    else:
        values = tl.load(start + at[None, :], mask=at[None, :] < INPUTS, other=0.0)
    return values


@triton.jit
def _expert_product_kernel(
    x,
    row,
    ends,
    weight,
    out,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of outputs of one expert, for a share of its tokens."""
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    # The tiles of an expert and its shares are neighbors, so that the second share finds the weights in the L2 cache.
    tile = tl.program_id(0) % TILES
    share = tl.program_id(0) // TILES % SHARES
    expert = tl.program_id(0) // (TILES * SHARES)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    at_n, at_k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Outputs beyond the last are computed from another row and not stored, so that loads need no mask.
    real_n = tl.where(at_n < OUTPUTS, at_n, 0)
    # An expert without tokens does nothing.
    for first in range(begin + share * BLOCK_M, end, SHARES * BLOCK_M):
        place = first + tl.arange(0, BLOCK_M)
        # The same for tokens: the first one stands in for those that are missing.
        source = tl.where(place < end, place, first).to(tl.int64)
        if GATHER:
            source = tl.load(row + source)
        gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
        up = gate
        for k in range(0, INPUTS, BLOCK_K):
            given = _read(x + source[:, None] * INPUTS, at_k + k, INPUTS, BLOCK_K)
            if TMA:
                held = weight.load([expert * ROWS + tile * BLOCK_N, k])
            else:
                # int64: the weights of all experts together exceed 32 bits.
                start = weight + expert.to(tl.int64) * ROWS * INPUTS + real_n[:, None] * INPUTS
                held = _read(start, at_k + k, INPUTS, BLOCK_K)
            # ieee: the default rounds float32 inputs to TF32, with 10 bits of mantissa.
            if SWAP:
                gate = tl.dot(held, tl.trans(given), gate, input_precision="ieee")
            else:
                gate = tl.dot(given, tl.trans(held), gate, input_precision="ieee")
            if GATED:
                if TMA:
                    other = weight.load([expert * ROWS + OUTPUTS + tile * BLOCK_N, k])
                else:
                    start = weight + (expert.to(tl.int64) * ROWS + OUTPUTS) * INPUTS + real_n[:, None] * INPUTS
                    other = _read(start, at_k + k, INPUTS, BLOCK_K)
                if SWAP:
                    up = tl.dot(other, tl.trans(given), up, input_precision="ieee")
                else:
                    up = tl.dot(given, tl.trans(other), up, input_precision="ieee")
        kind = out.dtype.element_ty
        result = gate.to(kind)
        if GATED:
            # Rounded where the model's own code rounds.
            wide = result.to(tl.float32)
            opened = (wide / (1 + tl.exp(-wide))).to(kind).to(tl.float32)
            result = (opened * up.to(kind).to(tl.float32)).to(kind)
        if SWAP:
            result = tl.trans(result)
        to = place.to(tl.int64)[:, None] * OUTPUTS + at_n[None, :]
        tl.store(out + to, result, mask=(place < end)[:, None] & (at_n < OUTPUTS)[None, :])


@triton.jit
def _choose_experts_kernel(
    logits,
    weight,
    index,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    row = tl.program_id(0)
    at, slot = tl.arange(0, BLOCK), tl.arange(0, CHOSEN)
    x = tl.load(logits + row * EXPERTS + at, mask=at < EXPERTS, other=-float("inf")).to(tl.float32)
    share = tl.exp(x - tl.max(x, 0))
    # Below every score, so that padding is never chosen.
    total = tl.sum(share, 0)
    score = tl.where(at < EXPERTS, share / total, -1.0)
    best = tl.zeros([CHOSEN], tl.float32)
    which = tl.zeros([CHOSEN], tl.int32)
    for k in tl.static_range(K):
        most = tl.max(score, 0)
        # Scores that are NaN equal nothing. The number must still be that of an expert.
        first = tl.minimum(tl.min(tl.where(score == most, at, BLOCK), 0), EXPERTS - 1)
        best = tl.where(slot == k, most, best)
        which = tl.where(slot == k, first, which)
        score = tl.where(at == first, -1.0, score)
    if NORMALIZE:
        best = best / tl.sum(best, 0)
    # The maximum of NaN and a number is the number. NaN must reach the logits, where it is reported.
    best = tl.where(total == total, best, float("nan"))
    tl.store(weight + row * K + slot, best.to(weight.dtype.element_ty), mask=slot < K)
    tl.store(index + row * K + slot, which.to(tl.int64), mask=slot < K)

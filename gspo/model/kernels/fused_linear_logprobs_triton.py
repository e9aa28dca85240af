# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton versions of the operations of `fused_linear_logprobs.py`: matrix products whose logits never leave the chip.

In: hidden states and a chunk of the LM head's weight, in bfloat16 or float16, with rows of a multiple of 16 bytes. Out:
softmax statistics, or the gradient of the logits in the precision of the hidden states. Invariant: a logit is
accumulated, divided by the temperature and used in float32; it is never rounded and never stored.

The kernels are persistent: as many programs as multiprocessors, each of which processes many tiles, so that the loads
of the next tile overlap with the end of the last one. On Hopper, TMA does the loads. This is as fast as cuBLAS
without any softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

DEPTH = 64
"""Hidden entries per load."""
BAND = 16
"""Tiles of rows that traverse the vocabulary together, so that the weight is read from memory once for all of them."""
NEGATIVE = -1.0e30
"""A finite replacement for minus infinity, which would give NaN in the statistics of masked entries."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tile sizes that fit into the shared memory of a multiprocessor."""

    rows: int
    columns: int
    stages: int
    programs: int


@cache
def _tiling(device: torch.device, *, stored: bool) -> Tiling:
    """The tiling for a device; with `stored`, a tile of the result also goes through shared memory."""
    # Triton's interpreter, in tests: small tiles are quick, and several programs share the work as on a GPU.
    if device.type != "cuda":
        return Tiling(rows=32, columns=64, stages=1, programs=3)
    card: Any = torch.cuda.get_device_properties(device)
    # Hopper has 227 KiB of shared memory per block, other cards less.
    rows, columns = (128, 256) if card.shared_memory_per_block_optin > 200 * 1024 else (128, 128)
    # The result passes through shared memory in halves of 2 bytes per entry: rows * columns / 2 * 2 bytes.
    room = card.shared_memory_per_block_optin - 1024 - (rows * columns if stored else 0)
    stages = max(1, min(3, room // (2 * DEPTH * (rows + columns))))
    return Tiling(rows=rows, columns=columns, stages=stages, programs=card.multi_processor_count)


def statistics(hidden: Tensor, weight: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: the maximum of the scaled logits, the sum of exp(x), the sum of x exp(x) with x = logit - maximum, and
    the logit of the target."""
    rows = len(hidden)
    columns, size = weight.shape
    tiling = _tiling(hidden.device, stored=False)
    # Statistics per tile, merged by a second kernel in a fixed order. Atomic additions would make the sum depend on
    # timing.
    parts = torch.empty(3, triton.cdiv(columns, tiling.columns), rows, dtype=torch.float32, device=hidden.device)
    picked = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    _statistics[(tiling.programs,)](
        TensorDescriptor.from_tensor(hidden, [tiling.rows, DEPTH]),
        TensorDescriptor.from_tensor(weight, [tiling.columns, DEPTH]),
        target,
        *parts,
        picked,
        rows,
        columns,
        scale,
        size=size,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=DEPTH,
        BAND=BAND,
        NEGATIVE=NEGATIVE,
        PROGRAMS=tiling.programs,
        num_warps=8,
        num_stages=tiling.stages,
    )
    merged = torch.empty(3, rows, dtype=torch.float32, device=hidden.device)
    _merge[(triton.cdiv(rows, 32),)](*parts, *merged, rows, parts.shape[1], ROWS=32, TILES=64, NEGATIVE=NEGATIVE)
    return (*merged, picked)


def logit_gradient(
    hidden: Tensor, weight: Tensor, target: Tensor, scale: float, per_row: Sequence[Tensor], out: Tensor
) -> None:
    """Fill `out` with the gradient of the logits of a chunk of the vocabulary; `target` is relative to its first
    entry."""
    rows, size = hidden.shape
    columns = len(weight)
    tiling = _tiling(hidden.device, stored=True)
    _gradient[(tiling.programs,)](
        TensorDescriptor.from_tensor(hidden, [tiling.rows, DEPTH]),
        TensorDescriptor.from_tensor(weight, [tiling.columns, DEPTH]),
        TensorDescriptor.from_tensor(out, [tiling.rows, tiling.columns // 2]),
        target,
        *per_row,
        rows,
        columns,
        scale,
        size=size,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=DEPTH,
        BAND=BAND,
        PROGRAMS=tiling.programs,
        num_warps=8,
        num_stages=tiling.stages,
    )


def precision(hidden: Tensor) -> torch.dtype:
    """The dtype of the gradient of the logits."""
    return hidden.dtype


@triton.jit
def _place(tile, down, across, BAND: tl.constexpr):
    """Row and column of a tile in processing order: bands of rows, column by column."""
    first = (tile // (BAND * across)) * BAND
    height = tl.minimum(down - first, BAND)
    inside = tile % (BAND * across)
    return first + inside % height, inside // height


@triton.jit
def _product(
    hidden, weight, row, column, size: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """One tile of hidden @ weight.T, accumulated in float32. Entries outside of the matrices are read as 0."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, size, DEPTH):
        total = tl.dot(hidden.load([row, k]), weight.load([column, k]).T, total)
    return total


@triton.jit
def _statistics(
    hidden,
    weight,
    target,
    most_out,
    sum_out,
    dot_out,
    picked_out,
    rows,
    columns,
    scale,
    size: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        r, c = _place(tile, down, across, BAND)
        total = _product(hidden, weight, r * ROWS, c * COLUMNS, size, ROWS, COLUMNS, DEPTH)
        row, column = r * ROWS + tl.arange(0, ROWS), c * COLUMNS + tl.arange(0, COLUMNS)
        logit = tl.where((column < columns)[None, :], total * scale, NEGATIVE)
        real = row < rows
        wanted = tl.load(target + row, mask=real, other=-1)
        # A sum over one nonzero entry: a register tile cannot be indexed.
        picked = tl.sum(tl.where(column[None, :] == wanted[:, None], logit, 0.0), 1)
        here = (wanted >= c * COLUMNS) & (wanted < c * COLUMNS + COLUMNS)
        tl.store(picked_out + row, picked, mask=real & here)
        most = tl.max(logit, 1)
        centered = logit - most[:, None]
        exp_centered = tl.exp(centered)
        # int64: tiles times rows exceeds 32 bits for long batches.
        at = c.to(tl.int64) * rows + row
        tl.store(most_out + at, most, mask=real)
        tl.store(sum_out + at, tl.sum(exp_centered, 1), mask=real)
        tl.store(dot_out + at, tl.sum(exp_centered * centered, 1), mask=real)


@triton.jit
def _merge(
    most,
    total,
    dot,
    most_out,
    sum_out,
    dot_out,
    rows,
    tiles,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """Combine the statistics of all tiles of a row."""
    row, step = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILES)
    highest = tl.full((TILES, ROWS), NEGATIVE, dtype=tl.float32)
    for first in range(0, tiles, TILES):
        at = (first + step)[:, None] * rows + row[None, :]
        inside = (first + step < tiles)[:, None] & (row < rows)[None, :]
        highest = tl.maximum(highest, tl.load(most + at, mask=inside, other=NEGATIVE))
    top = tl.max(highest, 0)
    sums = tl.zeros((TILES, ROWS), dtype=tl.float32)
    dots = tl.zeros((TILES, ROWS), dtype=tl.float32)
    for first in range(0, tiles, TILES):
        at = (first + step)[:, None] * rows + row[None, :]
        inside = (first + step < tiles)[:, None] & (row < rows)[None, :]
        centered = tl.load(most + at, mask=inside, other=NEGATIVE) - top[None, :]
        part = tl.load(total + at, mask=inside, other=0.0)
        shrink = tl.exp(centered)
        sums += shrink * part
        dots += shrink * (tl.load(dot + at, mask=inside, other=0.0) + part * centered)
    tl.store(most_out + row, top, mask=row < rows)
    tl.store(sum_out + row, tl.sum(sums, 0), mask=row < rows)
    tl.store(dot_out + row, tl.sum(dots, 0), mask=row < rows)


@triton.jit
def _gradient(
    hidden,
    weight,
    out,
    target,
    log_sum,
    gain,
    level,
    slope,
    rows,
    columns,
    scale,
    size: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        r, c = _place(tile, down, across, BAND)
        total = _product(hidden, weight, r * ROWS, c * COLUMNS, size, ROWS, COLUMNS, DEPTH)
        row, column = r * ROWS + tl.arange(0, ROWS), c * COLUMNS + tl.arange(0, COLUMNS // 2)
        real = row < rows
        normalizer = tl.load(log_sum + row, mask=real, other=0.0)[:, None]
        g = tl.load(gain + row, mask=real, other=0.0)[:, None]
        a = tl.load(level + row, mask=real, other=0.0)[:, None]
        b = tl.load(slope + row, mask=real, other=0.0)[:, None]
        wanted = tl.load(target + row, mask=real, other=-1)[:, None]
        # In two halves: the first is stored while the second is computed, and each needs half the shared memory.
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        logp = left * scale - normalizer
        dz = tl.where(column[None, :] == wanted, g, 0.0) - tl.exp(logp) * (a + b * logp)
        out.store([r * ROWS, c * COLUMNS], dz.to(out.dtype))
        logp = right * scale - normalizer
        dz = tl.where(column[None, :] + COLUMNS // 2 == wanted, g, 0.0) - tl.exp(logp) * (a + b * logp)
        out.store([r * ROWS, c * COLUMNS + COLUMNS // 2], dz.to(out.dtype))

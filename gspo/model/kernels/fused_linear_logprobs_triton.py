# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton twins of the pieces in `selected.py`: products with the head's weight whose tiles never leave the chip as logits.

In: hidden states and (a part of) the head's weight, in bfloat16 or float16, rows of a multiple of 16 bytes. Out: softmax
statistics, or the gradient of the logits in the hidden states' precision. Invariant: a logit is accumulated, divided by
the temperature and used in float32; it is never rounded and never stored.

Each program goes through many tiles (as many programs as multiprocessors), so that the loads of the next tile run under
the end of the last one; on Hopper the loads are the copy engine's. That is as fast as cuBLAS without any softmax.
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
"""Hidden entries read at a time."""
BAND = 16
"""Tiles of rows that go over the vocabulary together, so that the weight is read from memory once for all of them."""
NEGATIVE = -1.0e30
"""Stands in for minus infinity, which would give NaN in the statistics of entries that do not exist."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """What fits into a multiprocessor's shared memory."""

    rows: int
    columns: int
    stages: int
    programs: int


@cache
def _tiling(device: torch.device, *, stored: bool) -> Tiling:
    """`stored`: a tile of the result goes through shared memory too."""
    if device.type != "cuda":
        return Tiling(rows=32, columns=64, stages=1, programs=3)
    card: Any = torch.cuda.get_device_properties(device)
    rows, columns = (128, 256) if card.shared_memory_per_block_optin > 200 * 1024 else (128, 128)
    room = card.shared_memory_per_block_optin - 1024 - (rows * columns if stored else 0)
    stages = max(1, min(3, room // (2 * DEPTH * (rows + columns))))
    return Tiling(rows=rows, columns=columns, stages=stages, programs=card.multi_processor_count)


def statistics(hidden: Tensor, weight: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: maximum of the scaled logits, sum of exp(x), sum of x exp(x), x = logit - maximum, and the target's logit."""
    rows, (columns, size), tiling = len(hidden), weight.shape, _tiling(hidden.device, stored=False)
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
    """Fill `out` with the gradient of the logits of a part of the vocabulary; `target` counts from the part's first entry."""
    (rows, size), columns, tiling = hidden.shape, len(weight), _tiling(hidden.device, stored=True)
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
    """Of the gradient of the logits."""
    return hidden.dtype


@triton.jit
def _place(tile, down, across, BAND: tl.constexpr):
    """Row and column of a tile in the order in which tiles are gone through: bands of rows, column by column."""
    first = (tile // (BAND * across)) * BAND
    height = tl.minimum(down - first, BAND)
    inside = tile % (BAND * across)
    return first + inside % height, inside // height


@triton.jit
def _product(
    hidden, weight, row, column, size: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """One tile of hidden x weight^T, accumulated in float32; what is outside the matrices is read as 0."""
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
        picked = tl.sum(tl.where(column[None, :] == wanted[:, None], logit, 0.0), 1)
        here = (wanted >= c * COLUMNS) & (wanted < c * COLUMNS + COLUMNS)
        tl.store(picked_out + row, picked, mask=real & here)
        most = tl.max(logit, 1)
        apart = logit - most[:, None]
        share = tl.exp(apart)
        at = c.to(tl.int64) * rows + row
        tl.store(most_out + at, most, mask=real)
        tl.store(sum_out + at, tl.sum(share, 1), mask=real)
        tl.store(dot_out + at, tl.sum(share * apart, 1), mask=real)


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
    """The statistics of all tiles as those of the row."""
    row, step = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILES)
    highest = tl.full((TILES, ROWS), NEGATIVE, dtype=tl.float32)
    for first in range(0, tiles, TILES):
        at, inside = (
            (first + step)[:, None] * rows + row[None, :],
            (first + step < tiles)[:, None] & (row < rows)[None, :],
        )
        highest = tl.maximum(highest, tl.load(most + at, mask=inside, other=NEGATIVE))
    top = tl.max(highest, 0)
    sums, dots = tl.zeros((TILES, ROWS), dtype=tl.float32), tl.zeros((TILES, ROWS), dtype=tl.float32)
    for first in range(0, tiles, TILES):
        at, inside = (
            (first + step)[:, None] * rows + row[None, :],
            (first + step < tiles)[:, None] & (row < rows)[None, :],
        )
        apart = tl.load(most + at, mask=inside, other=NEGATIVE) - top[None, :]
        part, shrink = tl.load(total + at, mask=inside, other=0.0), tl.exp(apart)
        sums += shrink * part
        dots += shrink * (tl.load(dot + at, mask=inside, other=0.0) + part * apart)
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
        normaliser = tl.load(log_sum + row, mask=real, other=0.0)[:, None]
        g = tl.load(gain + row, mask=real, other=0.0)[:, None]
        a = tl.load(level + row, mask=real, other=0.0)[:, None]
        b = tl.load(slope + row, mask=real, other=0.0)[:, None]
        wanted = tl.load(target + row, mask=real, other=-1)[:, None]
        # In two halves: the first one is stored while the second one is computed, and they take half the shared memory.
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        logp = left * scale - normaliser
        dz = tl.where(column[None, :] == wanted, g, 0.0) - tl.exp(logp) * (a + b * logp)
        out.store([r * ROWS, c * COLUMNS], dz.to(out.dtype))
        logp = right * scale - normaliser
        dz = tl.where(column[None, :] + COLUMNS // 2 == wanted, g, 0.0) - tl.exp(logp) * (a + b * logp)
        out.store([r * ROWS, c * COLUMNS + COLUMNS // 2], dz.to(out.dtype))

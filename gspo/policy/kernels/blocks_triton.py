# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton twin of `blocks.quantised_rows`: one kernel from activations to 8-bit floats and their scales.

In: `[M, K]` in any precision, rows contiguous. Out: values and scales, to the bit those of the torch twin, with rows of zeros
up to a multiple. It waits for nothing and allocates only its results, so a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows per program."""


def quantised_rows(x: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """(values `[M', K]`, scale `[M', K / 128]`, one column after the other), M' = M filled up to a multiple."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, size = x.shape
    filled = -(-rows // multiple) * multiple
    values = torch.empty(filled, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(size // 128, filled, dtype=torch.float32, device=x.device)
    _quantise[(triton.cdiv(filled, ROWS), size // 128)](x, values, scale, rows, filled, size, x.stride(0), ROWS=ROWS)
    return values, scale.t()


@triton.jit
def _quantise(x, values, scale, rows, filled, size, stride, ROWS: tl.constexpr):
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = block * 128 + tl.arange(0, 128)
    at = row.to(tl.int64)[:, None]
    given = tl.load(x + at * stride + column[None, :], mask=(row < rows)[:, None], other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(given), 1), 7.888609052210118e-31)  # blocks.TINY
    bits = most.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    there = row < filled
    tl.store(values + at * size + column[None, :], (given * inverse[:, None]).to(tl.float8e4nv), mask=there[:, None])
    tl.store(scale + block.to(tl.int64) * filled + row, (exponent << 23).to(tl.float32, bitcast=True), mask=there)

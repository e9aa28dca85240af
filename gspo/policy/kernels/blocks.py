"""Matrices in 8-bit floats (E4M3) with one scale per block, and their product.

In: activations `[M, K]` (a scale for every 128 entries of a row) and weights `[N, K]` (one for every 128 x 128 block). Out:
`X W^T` accumulated in float32. Invariant: a scale is the smallest power of two with which its block fits, so scaling itself
never rounds, a dequantised weight is exact in bfloat16, and a last-bit difference in the largest entry of a block does not
move the other 127: what engine and learner round is what differs between them anyway, not more.

On a Hopper GPU the product is torch's scaled matmul. Elsewhere it is emulated (dequantise, multiply in float32): for tests,
and as what the GPU is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
TINY = 2.0**-100
"""A block whose entries are all smaller is scaled as if its largest were this."""
ALIGNED = 16
"""Rows are filled up to a multiple of this for the GPU's product, which loads scales in 16-byte pieces."""


@dataclass(frozen=True)
class Blocks:
    """`values / scale` is what was quantised; the scales lie in memory as the GPU's product wants them."""

    values: Tensor
    scale: Tensor
    """Of rows: `[M, K / 128]`, one column after the other in memory. Of a weight: `[N / 128, K / 128]`, filled up to a
    multiple of 4 columns."""
    rows: int
    """Without those that fill up."""


def power_of_two(most: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) with which entries of at most `most` fit into E4M3, whose largest number is 448 = 1.75 * 2^8."""
    bits = most.clamp(min=TINY).view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def quantised_rows(x: Tensor) -> Blocks:
    """Activations `[M, K]`."""
    if x.is_cuda:
        from gspo.policy.kernels import blocks_triton

        return Blocks(*blocks_triton.quantised_rows(x, ALIGNED), len(x))
    parts = x.float().unflatten(1, (-1, BLOCK))
    scale, inverse = power_of_two(parts.abs().amax(-1))
    return Blocks((parts * inverse.unsqueeze(-1)).flatten(1).to(E4M3), scale, len(x))


def quantised_weight(weight: Tensor) -> Blocks:
    """A weight `[N, K]`."""
    parts = weight.detach().float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale, inverse = power_of_two(parts.abs().amax((1, 3)))
    values = (parts * inverse[:, None, :, None]).flatten(0, 1).flatten(1).to(E4M3)
    return Blocks(values, F.pad(scale, (0, -scale.shape[1] % 4)), len(weight))


def product(x: Blocks, weight: Blocks, dtype: torch.dtype) -> Tensor:
    """`[M, N]`."""
    if not x.values.is_cuda:
        return emulated(x, weight, dtype)
    return F.scaled_mm(
        x.values, weight.values.t(), x.scale, F.ScalingType.BlockWise1x128, weight.scale.t(),
        F.ScalingType.BlockWise128x128, output_dtype=dtype,
    )[: x.rows]  # fmt: skip


def emulated(x: Blocks, weight: Blocks, dtype: torch.dtype) -> Tensor:
    """The same numbers but for the order of sums."""
    rows = (x.values.float().unflatten(1, (-1, BLOCK)) * x.scale.unsqueeze(-1)).flatten(1)[: x.rows]
    return (rows @ dequantised(weight, torch.float32).T).to(dtype)


def dequantised(weight: Blocks, dtype: torch.dtype) -> Tensor:
    """The weight that the product multiplies with; exact in bfloat16 and more."""
    parts = weight.values.to(dtype).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = weight.scale[:, : parts.shape[2]].to(dtype)
    return (parts * scale[:, None, :, None]).flatten(0, 1).flatten(1)

"""A safetensors file that is written one tensor at a time, so that the tensors need not be in memory together.

In: the names, dtypes and shapes of all tensors, then the tensors in the same order. Out: a file that any reader of
safetensors accepts. Invariant: every tensor starts at a multiple of the size of its elements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gspo.errors import EngineError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    file: Path, shapes: Sequence[tuple[str, torch.dtype, torch.Size]], pairs: Iterable[tuple[str, Tensor]]
) -> None:
    """Write the tensors of `pairs`, which are those of `shapes`."""
    unknown = next((f"{name} is {dtype}" for name, dtype, _ in shapes if dtype not in NAMES), None)
    if unknown is not None:
        raise EngineError(f"engine 'vllm': {unknown}, which cannot be written to a safetensors file")
    offsets = _offsets(shapes)
    header = {
        name: {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": list(offsets[name])}
        for name, dtype, shape in shapes
    }
    text = json.dumps(dict(sorted(header.items(), key=lambda item: offsets[item[0]]))).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in pairs:
            out.seek(8 + len(text) + offsets[name][0])
            out.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _offsets(shapes: Sequence[tuple[str, torch.dtype, torch.Size]]) -> dict[str, tuple[int, int]]:
    """First byte and end of each tensor. Those with the widest elements come first, so that all are aligned."""
    offsets, end = {}, 0
    for name, dtype, shape in sorted(shapes, key=lambda entry: -entry[1].itemsize):
        offsets[name] = (end, end + dtype.itemsize * shape.numel())
        end = offsets[name][1]
    return offsets

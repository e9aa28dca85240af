"""Memory alignment of weights, which decides how some CPU kernels round.

In: a model, however it was built or loaded. Out: the same model, with every parameter and buffer contiguous and at the
start of its own allocation, aligned to 64 bytes. Invariant: tied weights stay tied.

A weight from a file is located wherever the file's header ends, a fresh one at a multiple of 64 bytes. MKL chooses
instructions by the alignment of its operands. Without this module, a resumed run would differ from an uninterrupted one
in the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.model.partial import has_part

ALIGNMENT = 64
"""In bytes: the size of a cache line and of the widest vector register, and torch's own alignment."""


def align(model: Any) -> None:
    """Copy each parameter and buffer that is not aligned into fresh memory, one at a time."""
    fresh: dict[tuple[Any, ...], Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if has_part(tensor):  # not a weight yet, and aligned when it is gathered
            continue
        if tensor.data_ptr() % ALIGNMENT or tensor.storage_offset() or not tensor.is_contiguous():
            # Two names of one tensor have the same view: they get the same copy and stay tied.
            view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if view not in fresh:
                fresh[view] = tensor.data.clone(memory_format=torch.contiguous_format)
            tensor.data = fresh[view]

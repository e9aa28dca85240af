"""Where tensors lie in memory, which decides how some CPU kernels round.

In: a model, however it was built or loaded. Out: the same model, with every parameter and buffer contiguous and at the start of
memory of its own, aligned to 64 bytes. Invariant: two names of one tensor stay that, so tied weights stay tied.

A weight that is read from a file lies wherever the file's header ends, and a fresh one at a multiple of 64 bytes. MKL chooses
instructions by the alignment of its operands, so without this a resumed run would differ from an uninterrupted one in the last
bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. A cache line, the widest vector register, and what torch aligns its own memory to."""


def align(model: Any) -> None:
    """Copy each parameter and buffer that is not so yet into fresh memory, one at a time."""
    fresh: dict[tuple[Any, ...], Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT or tensor.storage_offset() or not tensor.is_contiguous():
            view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if view not in fresh:
                fresh[view] = tensor.data.clone(memory_format=torch.contiguous_format)
            tensor.data = fresh[view]

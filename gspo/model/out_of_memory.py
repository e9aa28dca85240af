"""Running out of memory: recognizing it, and freeing memory.

In: an error. Out: whether it means that memory ran out. Invariant: covers GPU and CPU memory.
"""

from __future__ import annotations

import gc

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a tensor did not fit into GPU or main memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release_memory() -> None:
    """Free the memory that a failed forward or backward pass still holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""Running out of memory: telling it from other errors, and making room."""

from __future__ import annotations

import gc

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a tensor did not fit, on a GPU or in main memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release_memory() -> None:
    """Give back what a failed forward or backward left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

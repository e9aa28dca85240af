"""What the attention layers of a model are given, recorded in a trial.

In: a forward of a model with the attention of `packed_attention`. Out: for each layer, the window of the mask that the
model built for it and the window that it passed as an option; whether all scores are plain. Invariant: the window of a
mask is read from its mask function at positions far beyond any window, so that a trial of a few tokens shows windows of
thousands. Without a trial nothing is recorded, and masks are those of `sdpa`. That holds for other threads, too, which
may use models of their own during a trial.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

FAR = 2**19
"""A position beyond all windows."""
LONGEST = 2**18
"""Windows are searched up to this length."""
UNKNOWN = -1
"""The window of a mask that the model did not build with the mask functions of transformers."""


@dataclass(kw_only=True)
class ObservedLayers:
    """The windows of the attention layers, by module; None if unlimited."""

    by_mask: dict[Any, int | None] = field(default_factory=dict)
    """From the masks of forwards that are not packed, or `UNKNOWN`."""
    by_option: dict[Any, int | None] = field(default_factory=dict)
    """From the options of packed forwards."""
    masks: dict[int, tuple[Tensor, int | None]] = field(default_factory=dict)
    """Masks by the address of their memory. They are kept, so that no address is used twice."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread of the trial."""
    plain_scores: bool = True
    """Whether no layer has a soft cap or an attention sink."""


_observers: list[ObservedLayers] = []


@contextmanager
def observe_layers() -> Iterator[ObservedLayers]:
    """Record what all attention layers that run inside are given."""
    _observers.append(ObservedLayers())
    try:
        yield _observers[-1]
    finally:
        _observers.pop()


def _observer() -> ObservedLayers | None:
    """What the trial of this thread records; None outside a trial."""
    # The list comes first: compiled layers never ask for the thread then.
    return _observers[-1] if _observers and _observers[-1].thread == threading.get_ident() else None


def observe_layer(module: Any, mask: Tensor | None, window: int | None, *, plain_scores: bool, packed: bool) -> None:
    """Record what a layer is given, in a trial."""
    seen = _observer()
    if seen is None:
        return
    seen.plain_scores &= plain_scores
    if packed:
        seen.by_option[module] = window
    else:
        address = None if mask is None else mask.data_ptr()
        seen.by_mask[module] = seen.masks[address][1] if address in seen.masks else UNKNOWN


def probed_mask(*args: Any, **options: Any) -> Tensor | None:
    """The masks of `sdpa`, as a mask function of transformers. In a trial, a mask is always built and recorded."""
    seen = _observer()
    if seen is None:
        return sdpa_mask(*args, **options)
    mask = sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})
    if mask is not None and "mask_function" in options:
        seen.masks[mask.data_ptr()] = (mask, window_of(options["mask_function"]))
    return mask


def window_of(function: Callable[..., Tensor]) -> int | None:
    """The window of a causal mask function of transformers; `UNKNOWN` if it is of another kind."""
    if not _index_based(function):
        return UNKNOWN
    zero = torch.zeros(1, dtype=torch.int64)
    windows = set()
    # Two positions: chunks of a fixed length would give two windows.
    for position in (FAR, FAR + 777):
        distance = torch.cat([torch.arange(LONGEST, -2, -1), torch.tensor([position])])
        query = torch.tensor([position])
        seen = function(zero, zero, query, query - distance).expand(len(distance))
        count = int(seen.sum())
        window = None if count == len(distance) - 1 else count
        causal = (distance >= 0) & ((distance < count) if window else True)
        windows.add(window if count and torch.equal(seen, causal) else UNKNOWN)
    return windows.pop() if len(windows) == 1 else UNKNOWN


def _index_based(function: Any) -> bool:
    """Whether a mask function holds no tensors, which a far position could not index."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    while cells:
        value = cells.pop()
        if isinstance(value, tuple | list):
            cells += value
        elif isinstance(value, Tensor) or (callable(value) and not _index_based(value)):
            return False
    return True

"""The learner's weights, as an engine elsewhere needs them: by name, with a digest, and with a sign of when they changed.

In: a transformers model. Out: (name, tensor) pairs in checkpoint names. Invariant: both ends compute `digest` from the very
tensors they hold, so a tensor that was dropped, changed or left over from before is seen by comparing two short texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gspo.model import adapter

ADAPTER = "gspo-adapter"
"""The name by which requests to a server ask for the low-rank adapter; it is the server's first, so its number is 1."""
SAMPLED = 256
"""Values of a tensor that are looked at to see whether it has changed."""
CHUNK = 1 << 22
"""Words that are summed at a time, so that a digest needs little memory beside the weights."""


def named_weights(model: Any, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each tensor once: an output matrix that is tied to the input's is not repeated.
    Low-rank adapters are added to the matrices that they belong to, or left out (`merge` false)."""
    adapted, seen = adapter.layers(model), set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        owner, mark, rest = name.partition(".base_layer.")
        if mark:
            own = tensor.detach()
            add = merge and rest == "weight"
            yield f"{owner}.{rest}", adapter.joined(adapted[owner], own).to(own.dtype) if add else own
        elif not adapter.is_adapters(name):
            yield name, tensor.detach()


def changes(model: Any, *, adapters: bool = True) -> str:
    """Differs when the weights were changed by training: a digest of a few hundred values of every tensor. Torch's count of
    in-place changes alone would not do, because fused optimisers do not raise it. `adapters` false: of the model's own weights alone."""
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [t for name, t in named if adapters or not adapter.is_adapters(name)]
    some = [t.detach().flatten()[:: max(1, t.numel() // SAMPLED)][: 2 * SAMPLED].float().nan_to_num() for t in tensors]
    counted = f"{sum(t._version for t in tensors)} {[t.data_ptr() for t in tensors]}"
    values = torch.cat(some).cpu().numpy().tobytes() if some else b""
    return hashlib.blake2b(values + counted.encode(), digest_size=16).hexdigest()


class Digest:
    """One short text for names, types, shapes and every bit of the values; their order does not matter."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def over(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same pairs, counted as they pass."""
        for name, tensor in pairs:
            self.lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum(tensor)}")
            yield name, tensor

    def text(self) -> str:
        return hashlib.blake2b("\n".join(sorted(self.lines)).encode(), digest_size=16).hexdigest()


def digest(pairs: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of all of them."""
    counted = Digest()
    for _ in counted.over(pairs):
        pass
    return counted.text()


def _sum(tensor: Tensor) -> int:
    """Every 2-byte word times its place, summed modulo 2^64: cheap on any device, and no swap or shift goes unseen."""
    flat = tensor.contiguous().flatten()
    words = flat.view(torch.int16) if flat.element_size() % 2 == 0 else flat.view(torch.uint8)
    total = 0
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK].long()
        places = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        total += int((part * places).sum())
    return total % (1 << 64)

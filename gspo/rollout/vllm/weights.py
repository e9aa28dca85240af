"""The learner's weights for an engine elsewhere: by name, with a digest, and with a fingerprint that detects changes.

In: a transformers model, which may be sharded over ranks. Out: (name, whole tensor) pairs in checkpoint names.
Invariant: both sides compute `digest` from the very tensors they hold, so comparing two short strings detects a tensor
that was dropped, changed or left from before.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gspo.model import adapter
from gspo.model.sharding import full, is_sharded, local

ADAPTER = "gspo-adapter"
"""The name by which requests to a server select the LoRA adapter. It is the server's first adapter, so its id is 1."""
PROBED = 256
"""Values per tensor that the fingerprint reads."""
CHUNK = 1 << 22
"""Words that are summed at a time, so that a digest needs little extra memory."""


class Part(enum.Enum):
    """What is sent of a model with LoRA adapters. Without them, merged and base are the same."""

    MERGED = "merged"
    BASE = "base"
    ADAPTER = "adapter"


def named_weights(model: Any, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each tensor once: an LM head that is tied to the embedding is not repeated.
    LoRA adapters are merged into their base weights, or omitted if `merge` is false. If the model is sharded, each
    tensor is gathered when it is its turn, so all ranks must exhaust the iterator."""
    for name, tensor, layer in _tensors(model):
        own = full(tensor.detach())
        yield name, adapter.merged_weight(layer, own).to(own.dtype) if merge and layer is not None else own
        # Not referenced while the next one is gathered.
        del own


def shapes_of(model: Any, part: Part) -> list[tuple[str, torch.dtype, torch.Size]]:
    """Name, dtype and shape of each tensor of a part, without gathering any."""
    if part is Part.ADAPTER:
        return [(n, p.dtype, p.shape) for n, p in model.named_parameters() if adapter.is_adapter_parameter(n)]
    return [(name, tensor.dtype, tensor.shape) for name, tensor, _ in _tensors(model)]


def _tensors(model: Any) -> Iterator[tuple[str, Tensor, Any]]:
    """Name, tensor, and the layer that adapts it or None, of what `named_weights` sends."""
    adapted = {
        f"{path.replace('.base_layer', '')}.{adapter.tensor_name(layer)}": layer
        for path, layer in adapter.layers(model).items()
    }
    seen: set[tuple[bool, int]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Tied weights share their memory; empty tensors all have the same address, and so have empty shards.
        shard = is_sharded(tensor)
        place = (shard, id(tensor) if shard else tensor.data_ptr())
        if place in seen and tensor.numel():
            continue
        seen.add(place)
        if adapter.is_adapter_parameter(name):
            continue
        # Where peft keeps the base weight of an adapted layer. Wrappers of experts are nested, one for each tensor.
        plain = name.replace(".base_layer", "")
        yield plain, tensor, adapted.get(plain)


def fingerprint(model: Any, *, adapters: bool = True) -> str:
    """A string that changes when training changes the weights: a digest of a few hundred values of every tensor.
    Torch's version counter of in-place changes alone does not suffice, because fused optimizers do not increment it.
    With `adapters` false, only the base weights count. Of a sharded model, the shards of this rank do."""
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [local(t.detach()) for name, t in named if adapters or not adapter.is_adapter_parameter(name)]
    probes = [t.flatten()[:: max(1, t.numel() // PROBED)][: 2 * PROBED].float().nan_to_num() for t in tensors]
    # Addresses: weights that were replaced as a whole may agree in every probed value.
    identity = f"{sum(t._version for t in tensors)} {[t.data_ptr() for t in tensors]}"
    values = torch.cat(probes).cpu().numpy().tobytes() if probes else b""
    return hashlib.blake2b(values + identity.encode(), digest_size=16).hexdigest()


class Digest:
    """A short string for the names, dtypes, shapes and every bit of the values of tensors, in any order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def track(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same pairs and include them in the digest."""
        for name, tensor in pairs:
            self.lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum(tensor)}")
            yield name, tensor

    def text(self) -> str:
        return hashlib.blake2b("\n".join(sorted(self.lines)).encode(), digest_size=16).hexdigest()


def digest(pairs: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of all pairs."""
    result = Digest()
    for _ in result.track(pairs):
        pass
    return result.text()


def _sum(tensor: Tensor) -> int:
    """Every 2-byte word times its index, summed modulo 2^64: cheap on any device, and it detects swaps and shifts."""
    flat = tensor.contiguous().flatten()
    # Bits, not values: -0.0 and NaN must be told apart, too.
    words = flat.view(torch.int16) if flat.element_size() % 2 == 0 else flat.view(torch.uint8)
    total = 0
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK].long()
        places = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        total += int((part * places).sum())
    return total % (1 << 64)

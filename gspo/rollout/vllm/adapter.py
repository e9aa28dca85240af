"""A policy's low-rank adapter, given to vLLM as an adapter: the model's own weights travel once, then A and B alone.

In: the learner's model with adapters of peft's. Out: a folder in peft's format that vLLM reads, and the digest of what its
kernels must hold afterwards. Invariant: where vLLM cannot compute with the adapter as the learner does, `why_merged` says so
before vLLM is built, and the adapter is added to the weights that are sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.model import adapter
from gspo.model.routing import find_routers
from gspo.rollout.vllm.memory import memory_folder

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has room; a smaller one leaves some of it empty."""


def rank_of(model: Any) -> int:
    """The rank of a model's adapters."""
    return int(model.peft_config[adapter.NAME].r)


def settings_of(model: Any) -> dict[str, Any]:
    """What vLLM must be told to make room for one adapter, beside the layers that have one and no others."""
    return {
        "enable_lora": True,
        "max_lora_rank": next(room for room in RANKS if room >= rank_of(model)),
        "max_loras": 1,
        "max_cpu_loras": 1,
        "lora_target_modules": sorted(model.peft_config[adapter.NAME].target_modules),
    }


def why_merged(model: Any, settings: Mapping[str, Any]) -> str:
    """Why vLLM in this process, with these settings, cannot be given a model's adapter as such; empty: it can."""
    config = model.peft_config[adapter.NAME]
    if rank_of(model) > RANKS[-1]:
        return f"vLLM takes no adapters of a rank above {RANKS[-1]}"
    if config.rank_pattern or config.alpha_pattern:
        return "vLLM takes no adapters whose rank or scale differs by layer"
    if model.device.type == "cuda" and model.dtype == torch.float32:
        return "vLLM's kernels for adapters on GPUs compute in 16 bits, not in float32"
    if model.device.type == "cpu" and find_routers(model) is not None:
        return "with room for adapters vLLM takes a kernel for experts that needs a GPU (Triton), whichever layers have them"
    if settings.get("tensor_parallel_size", 1) != 1:
        return "with tensor_parallel_size above 1 it cannot be proved that the adapter arrived"
    return "" if _known_to_take(type(model).__name__) else f"this vLLM has no adapters for {type(model).__name__}"


def _known_to_take(architecture: str) -> bool:
    from vllm.model_executor.models import ModelRegistry, supports_lora

    found = ModelRegistry.models.get(architecture)
    return found is not None and supports_lora(found.load_model_cls())


@torch.no_grad()
def applied(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A, and B times the scale, of every layer: what vLLM's kernels read. A layer whose A is 0 adds nothing and is left out."""
    for path, layer in adapter.layers(model).items():
        a, b = (part[adapter.NAME].weight for part in (layer.lora_A, layer.lora_B))
        if a.any():
            yield f"{path}.A", a
            yield f"{path}.B", b * layer.scaling[adapter.NAME]


def write(model: Any) -> str:
    """The adapter as a new folder in peft's format, in memory if there is room."""
    folder = memory_folder(sum(t.numel() * t.element_size() for _, t in applied(model)))
    adapter.save(model, Path(folder))
    return folder


@contextmanager
def written(model: Any) -> Iterator[str]:
    """The same, gone afterwards."""
    folder = write(model)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

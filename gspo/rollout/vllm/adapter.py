"""A policy's LoRA adapter, sent to vLLM as an adapter: the base weights are sent once, then only A and B.

In: the learner's model with peft adapters, and their weights as whole tensors. Out: a folder in peft's format that
vLLM reads, and the digest of what its kernels must hold afterwards. Invariant: if vLLM cannot apply the adapter as the
learner does, `obstacle_to_adapter` says so before vLLM is built, and the adapter is merged into the weights that are
sent.
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
from gspo.model.routing import says_it_routes
from gspo.model.sharding import module_class
from gspo.rollout.vllm.transfer_folder import transfer_folder

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `max_lora_rank` that vLLM accepts. An adapter of a smaller rank is padded."""


def lora_rank(model: Any) -> int:
    """The rank of a model's adapters."""
    return int(model.peft_config[adapter.NAME].r)


def lora_settings(model: Any) -> dict[str, Any]:
    """The vLLM settings that reserve room for one adapter, in exactly the layers that have one."""
    return {
        "enable_lora": True,
        "max_lora_rank": next(room for room in RANKS if room >= lora_rank(model)),
        # Only the current adapter; each more would reserve as much memory again.
        "max_loras": 1,
        "max_cpu_loras": 1,
        "lora_target_modules": sorted(model.peft_config[adapter.NAME].target_modules),
    }


def obstacle_to_adapter(model: Any, settings: Mapping[str, Any]) -> str:
    """Why vLLM with these settings cannot apply a model's adapter, so that it must be merged; empty if it can."""
    config = model.peft_config[adapter.NAME]
    if lora_rank(model) > RANKS[-1]:
        return f"vLLM supports no adapters of a rank above {RANKS[-1]}"
    if config.target_parameters:
        return "vLLM reads no adapters of experts that peft has stored by tensor"
    if config.rank_pattern or config.alpha_pattern:
        return "vLLM supports no adapters whose rank or scale differs by layer"
    if model.device.type == "cuda" and model.dtype == torch.float32:
        return "vLLM's LoRA kernels on GPUs compute in 16 bits, not in float32"
    if model.device.type == "cpu" and says_it_routes(model):
        return "with LoRA enabled, vLLM's MoE kernel needs a GPU (Triton), whichever layers have adapters"
    if settings.get("tensor_parallel_size", 1) != 1:
        return "with tensor_parallel_size above 1, the transfer of an adapter cannot be verified"
    name = module_class(model).__name__
    return "" if _vllm_supports_lora(name) else f"this vLLM has no LoRA for {name}"


def _vllm_supports_lora(architecture: str) -> bool:
    from vllm.model_executor.models import ModelRegistry, supports_lora

    found = ModelRegistry.models.get(architecture)
    return found is not None and supports_lora(found.load_model_cls())


@torch.no_grad()
def kernel_weights(model: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A, and B times the scale, of every layer: what vLLM's kernels read. Layers whose A is 0 have no effect and are
    omitted."""
    for path, layer in adapter.layers(model).items():
        a, b = (weights[f"{path}.{part}.{adapter.NAME}.weight"] for part in ("lora_A", "lora_B"))
        if a.any():
            yield f"{path}.A", a
            yield f"{path}.B", b * layer.scaling[adapter.NAME]


def write(model: Any, weights: Mapping[str, Tensor]) -> str:
    """Write the adapter to a new folder in peft's format, in shared memory if it fits."""
    folder = transfer_folder(sum(t.numel() * t.element_size() for t in weights.values()))
    adapter.save(model, Path(folder), weights)
    return folder


@contextmanager
def temporary_folder(model: Any, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """The same, deleted afterwards."""
    folder = write(model, weights)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Tensors that enter a run at addresses that are no multiple of 64 bytes, as those read from a file may lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gspo.learner import checkpoint
from gspo.model import adapter

Patch = Callable[[Any, str, Any], None]


def placed(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` bytes after a multiple of 64."""
    raw = torch.empty(tensor.numel() * tensor.element_size() + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + offset
    copy = raw[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def misalign_loading(offset: int, patch: Patch = setattr) -> None:
    """From now on every model that transformers builds or loads, and every file of tensors, is in memory at this offset."""
    patch(AutoModelForCausalLM, "from_pretrained", _misaligned(AutoModelForCausalLM.from_pretrained, offset))
    patch(AutoModelForCausalLM, "from_config", _misaligned(AutoModelForCausalLM.from_config, offset))
    for module in (adapter, checkpoint):
        patch(module, "load_file", _misaligned_file(module.load_file, offset))


def _misaligned(load: Callable[..., Any], offset: int) -> Callable[..., Any]:
    def loaded(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu":
                tensor.data = placed(tensor.data, offset)
        return model

    return staticmethod(loaded)


def _misaligned_file(read: Callable[[Path], dict[str, Tensor]], offset: int) -> Callable[[Path], dict[str, Tensor]]:
    return lambda path: {name: placed(tensor, offset) for name, tensor in read(path).items()}

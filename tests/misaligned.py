"""Tensors at addresses that are not a multiple of 64 bytes, as tensors read from a file may be."""

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
    """A copy that starts `offset` bytes after a multiple of 64."""
    raw = torch.empty(tensor.numel() * tensor.element_size() + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + offset
    copy = raw[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def misalign_loading(offset: int, patch: Patch = setattr) -> None:
    """Place every model that transformers builds or loads, and every loaded tensor file, at this offset from now on."""
    patch(AutoModelForCausalLM, "from_pretrained", _misaligned(AutoModelForCausalLM.from_pretrained, offset))
    patch(AutoModelForCausalLM, "from_config", _misaligned(AutoModelForCausalLM.from_config, offset))
    for module in (adapter, checkpoint):
        patch(module, "load_file", _misaligned_file(module.load_file, offset))


def _misaligned(load: Callable[..., Any], offset: int) -> Callable[..., Any]:
    def load_misaligned(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu":
                tensor.data = placed(tensor.data, offset)
        return model

    return staticmethod(load_misaligned)


def _misaligned_file(read: Callable[[Path], dict[str, Tensor]], offset: int) -> Callable[[Path], dict[str, Tensor]]:
    return lambda path: {name: placed(tensor, offset) for name, tensor in read(path).items()}

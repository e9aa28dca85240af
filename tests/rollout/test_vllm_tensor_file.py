"""Safetensors files that are written one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gspo.errors import EngineError
from gspo.rollout.vllm.tensor_file import write_tensors


def test_a_file_has_the_tensors_of_any_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "weight": torch.randn(3, 5),
        "flag": torch.tensor(True),
        "half": torch.randn(5, 3).bfloat16().T,
        "empty": torch.zeros(0, 4),
        "count": torch.tensor([2**40]),
    }
    shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_tensors(tmp_path / "own", shapes, iter(tensors.items()))
    found = load_file(tmp_path / "own")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"x is torch\.complex64, which cannot be written"):
        write_tensors(tmp_path / "file", [("x", torch.complex64, torch.Size([1]))], iter(()))

"""The device of a rank, and the precision that a model has on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gspo.config import ModelConfig
from gspo.model.load import device_of, dtype_name


@pytest.mark.parametrize(
    ("name", "local", "expected"),
    [
        ("auto", None, "cuda"),
        ("auto", "2", "cuda:2"),
        ("cuda", "3", "cuda:3"),
        ("cuda", "5", "cuda:1"),  # a launcher that lets each rank see only some GPUs
        ("cuda:1", "3", "cuda:1"),
        ("cpu", "3", "cpu"),
    ],
)
def test_each_rank_of_a_machine_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, local: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert device_of(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("dtype", "gpu", "device", "expected"),
    [
        ("auto", True, "auto", "float16"),
        ("auto", True, "cpu", "float32"),
        ("auto", False, "auto", "float32"),
        ("bfloat16", True, "auto", "bfloat16"),
        ("float32", True, "auto", "float32"),
    ],
)
def test_auto_is_float16_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, gpu: bool, device: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert dtype_name(ModelConfig(dtype=dtype, device=device)) == expected

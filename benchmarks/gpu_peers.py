"""LM heads of other projects, for the table of `gpu.py`, if installed: pip install liger-kernel cut-cross-entropy.

In: the tensors that `gpu.py` measures with. Out: one callable per installed project. Invariant: a project that is not
installed is skipped with a message.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

PACKAGES = {"liger-kernel": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}


def peer_heads(
    hidden: Tensor, weight: Tensor, target: Tensor, gain: Tensor, sequences: int
) -> dict[str, Callable[[], Any]]:
    """Forward and backward pass of each project's head. Liger computes the whole loss, at sequence level."""
    for name, module in PACKAGES.items():
        if find_spec(module) is None:
            print(f"{name} is not installed: skipped")
    variants: dict[str, Callable[[], Any]] = {}

    def clear() -> None:
        hidden.grad, weight.grad = None, None

    if find_spec("cut_cross_entropy"):
        cut: Any = import_module("cut_cross_entropy").linear_cross_entropy

        def cross_entropy() -> None:
            clear()
            (-gain * cut(hidden, weight, target, reduction="none")).sum().backward()

        variants["cut-cross-entropy (drops small gradients)"] = cross_entropy
    if find_spec("liger_kernel"):
        liger_loss: Any = import_module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss
        loss = liger_loss(
            beta=0.0,
            use_ref_model=False,
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon_low=3e-4,
            epsilon_high=4e-4,
        )
        ids = target.view(sequences, -1)
        mask, advantage = torch.ones_like(ids), torch.randn(sequences, device=ids.device)

        def liger() -> None:
            clear()
            loss(hidden.view(*ids.shape, -1), weight, ids, mask, advantage)[0].backward()

        variants["Liger-Kernel fused linear GRPO, sequence level"] = liger
    return variants

"""Replace the learner's forward pass of a micro-batch, for tests of memory and of call counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.learner import batch, forward

Forward = Callable[..., Any]


def patch_forward(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Forward], Forward], *, training: bool) -> None:
    """Wrap the forward passes with autograd (`training`), or those without."""
    plain = forward.completion_logprobs
    wrapped = wrap(plain)

    def either(*given: Any, **options: Any) -> Any:
        return (wrapped if torch.is_grad_enabled() == training else plain)(*given, **options)

    for module in (forward, batch):
        monkeypatch.setattr(module, "completion_logprobs", either)

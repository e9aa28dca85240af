"""Replace the learner's forward pass of a micro-batch, for tests of memory and of call counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.learner import forward

Forward = Callable[..., Any]


def patch_forward(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Forward], Forward], *, training: bool) -> None:
    """Wrap the forward passes with autograd (`training`), or those without."""
    plain = forward.completion_logprobs
    wrapped = wrap(plain)

    def either(*given: Any, **options: Any) -> Any:
        return (wrapped if torch.is_grad_enabled() == training else plain)(*given, **options)

    monkeypatch.setattr(forward, "completion_logprobs", either)

"""Gradient checkpointing: a layer's activations are recomputed in the backward pass instead of stored.

In: a transformers model in eval mode. Out: the same model, still in eval mode. Invariant: whether activations are recomputed
does not change what is computed. Transformers recomputes in train mode only, in which many families also drop activations at
random, some of them by `torch.nn.functional.dropout`, which no module shows; so its switch is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gspo.errors import ConfigError


def recompute_activations(model: Any) -> None:
    """Recompute the activations of every layer that transformers could recompute."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"model.gradient_checkpointing: {type(model).__name__} does not support it; set it to false")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)

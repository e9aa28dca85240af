"""Gradient checkpointing: the activations of a layer are recomputed in the backward pass instead of stored.

In: a transformers model in eval mode. Out: the same model, still in eval mode. Invariant: recomputation does not change
the results. Transformers checkpoints only in train mode, in which many families also apply dropout, some of them with
`torch.nn.functional.dropout`, which no module reveals. Therefore its own switch is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gspo.errors import ConfigError


def recompute_activations(model: Any) -> None:
    """Recompute the activations of every layer that transformers can checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"model.gradient_checkpointing: {type(model).__name__} does not support it; set it to false")
    for layer in layers:
        layer.forward = checkpointed(layer.forward)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose activations are recomputed."""
    return partial(_recomputed, forward)


def is_checkpointed(forward: Callable[..., Any]) -> bool:
    """Whether a forward was made by `checkpointed`."""
    return isinstance(forward, partial) and forward.func is _recomputed


def without_checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that `checkpointed` was given; any other one as it is."""
    return forward.args[0] if isinstance(forward, partial) and forward.func is _recomputed else forward


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Without dropout there is no random state to restore.
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)

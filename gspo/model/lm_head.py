"""Bypassing the LM head: the model returns its last hidden states, so that logits are never materialized.

In: any transformers causal language model. Out: its LM head as a plain matrix; None if logits are more than hidden
states times a matrix (a bias, soft-capping, scaling). Invariant: this is found by running the model once, so an unknown
family falls back to plain logits with a warning and is never computed wrongly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gspo.model.patching import patched_forward
from gspo.model.sharding import module_class

_heads: WeakKeyDictionary[Any, torch.nn.Linear | None] = WeakKeyDictionary()
_logits_to_keep: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def lm_head(model: Any) -> torch.nn.Linear | None:
    """The LM head, if logits are hidden states times its weight; None if not. Found once per model."""
    if model not in _heads:
        obstacle = obstacle_to_head(model)
        if obstacle is not None:
            warnings.warn(
                f"log-probs are computed from all logits at once, which needs more memory: {obstacle}",
                RuntimeWarning,
                stacklevel=2,
            )
        _heads[model] = model.get_output_embeddings() if obstacle is None else None
        supports_logits_to_keep(model)
    return _heads[model]


def supports_logits_to_keep(model: Any) -> bool:
    """Whether the model returns only its last logits with `logits_to_keep`; found by a trial, once per model.

    A forward may not have the option, or accept it among other keywords and ignore it."""
    if model not in _logits_to_keep:
        try:
            whole = _run(model)
            last = _run(model, logits_to_keep=2)
            error = (last - whole[:, -2:]).square().mean().sqrt() / whole.std() if last.shape[1] == 2 else torch.inf
            _logits_to_keep[model] = bool(error <= (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1))
        except Exception:  # whatever fails inside the model's own code, the option cannot be used
            _logits_to_keep[model] = False
    return _logits_to_keep[model]


def obstacle_to_head(model: Any) -> str | None:
    """Why logits are not hidden states times a matrix; None if they are. Checks the layer first, then runs a trial."""
    name = type(model).__name__
    head = model.get_output_embeddings()
    if module_class(head) is not torch.nn.Linear or "forward" in vars(head):
        return f"the LM head of {name} is not a plain torch.nn.Linear"
    if head.bias is not None:
        return f"the LM head of {name} has a bias"
    seen: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, given, output: seen.extend((*given, output)))
    try:
        logits = _run(model)
    finally:
        hook.remove()
    # Soft-capping and scaling happen after the layer, where its own output does not show them.
    if len(seen) != 2 or not torch.equal(seen[1], logits):
        return f"{name} changes its logits after the LM head"
    if seen[0].dtype != head.weight.dtype:
        return f"the input of the LM head of {name} has another dtype than its weight ({head.weight.dtype})"
    return None


@contextmanager
def bypass_head(head: torch.nn.Linear) -> Iterator[None]:
    """Inside, the model's `logits` are the inputs of the LM head."""
    with patched_forward(head, _identity):
        yield


def gradient_buffer(weight: Tensor) -> Tensor | None:
    """A float32 buffer for the gradient of a weight that is stored in lower precision; None if none is needed, or if
    the weight was gathered from ranks: then its gradient must flow back through autograd, which scatters it."""
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return None
    if weight.grad_dtype != torch.float32 or weight.dtype == torch.float32:
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return weight.grad


def _identity(hidden: Tensor) -> Tensor:
    return hidden


@torch.no_grad()
def _run(model: Any, **options: Any) -> Tensor:
    ids = torch.arange(1, 9, device=model.device).view(2, 4) % model.get_input_embeddings().num_embeddings
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return logits

"""The model's output layer, passed by: its input instead of its output, so that the logits of a batch are never held.

In: any transformers causal language model. Out: its head as a plain matrix, or None where logits are more than hidden
states times a matrix (a bias, soft-capping, scaling). Invariant: which of the two is found by running the model once, so a
family that nobody thought of falls back to plain logits, with a message, and is never computed wrongly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_found: WeakKeyDictionary[Any, torch.nn.Linear | None] = WeakKeyDictionary()
_keeps: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def lm_head(model: Any) -> torch.nn.Linear | None:
    """The output layer, if logits are hidden states times its weight; looked for once per model."""
    if model not in _found:
        obstacle = obstacle_to_head(model)
        if obstacle is not None:
            warnings.warn(
                f"log-probabilities are computed from all logits at once, which takes memory: {obstacle}",
                RuntimeWarning,
                stacklevel=2,
            )
        _found[model] = model.get_output_embeddings() if obstacle is None else None
        keeps_last(model)
    return _found[model]


def keeps_last(model: Any) -> bool:
    """Whether the model gives its last logits alone when asked by `logits_to_keep`; tried once per model.

    A forward may not know the option, or take it with other keywords and ignore it."""
    if model not in _keeps:
        try:
            whole, last = _try(model), _try(model, logits_to_keep=2)
            apart = (last - whole[:, -2:]).square().mean().sqrt() / whole.std() if last.shape[1] == 2 else torch.inf
            _keeps[model] = bool(apart <= (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1))
        except Exception:  # any failure inside foreign model code means the same: do not ask
            _keeps[model] = False
    return _keeps[model]


def obstacle_to_head(model: Any) -> str | None:
    """Why logits are not hidden states times a matrix, or None. What the layer is first, then a trial."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or "forward" in vars(head):
        return f"the output layer of {name} is not a plain torch.nn.Linear"
    if head.bias is not None:
        return f"the output layer of {name} has a bias"
    made: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, given, output: made.extend((*given, output)))
    try:
        logits = _try(model)
    finally:
        hook.remove()
    if len(made) != 2 or not torch.equal(made[1], logits):
        return f"{name} changes its logits after the output layer"
    if made[0].dtype != head.weight.dtype:
        return f"{name} hands its output layer another precision than {head.weight.dtype}"
    return None


@contextmanager
def bypass_head(head: torch.nn.Linear) -> Iterator[None]:
    """Inside, the model's `logits` are what would have gone into the head."""
    head.forward = _same  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def gradient_buffer(weight: Tensor) -> Tensor | None:
    """Where to add the gradient of a weight kept in less than float32, if its gradient is to be kept in float32."""
    wanted = torch.is_grad_enabled() and weight.requires_grad and weight.grad_dtype == torch.float32
    if not wanted or weight.dtype == torch.float32:
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return weight.grad


def _same(hidden: Tensor) -> Tensor:
    return hidden


@torch.no_grad()
def _try(model: Any, **options: Any) -> Tensor:
    ids = torch.arange(1, 9, device=model.device).view(2, 4) % model.get_input_embeddings().num_embeddings
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return logits

"""A model of which each rank holds a part, from the moment it is read until it is sharded (`sharding.py`).

In: a function that loads a model with transformers. Out: the model, whose large weights have their shape but no
memory; each rank keeps its part of their values. Invariant: gathered weights are bitwise those of the file. While it
loads and is tried out, a rank holds its parts, at most one whole decoder layer, and what is outside of the layers. A
forward gathers each layer in turn, so all ranks must run the same forwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gspo.ranks.group import Ranks

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""With this variable, transformers reads a tensor when it is its turn. Its threads would read ahead of the others."""


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers, each of which is sharded and gathered by itself."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


class Parts:
    """The parts that this rank holds of a model's weights."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._gathered: Any = None
        """The layer that is whole."""
        self._hooks: list[Any] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, transformers loads a model of which only parts are kept."""
        before = os.environ.get(_ONE_BY_ONE)
        os.environ[_ONE_BY_ONE] = "1"
        keep_part: Any = self._keep_part  # torch declares that such hooks return nothing
        hook = register_module_parameter_registration_hook(keep_part)
        try:
            yield
        finally:
            hook.remove()
            os.environ.pop(_ONE_BY_ONE)
            if before is not None:
                os.environ[_ONE_BY_ONE] = before

    def own(self, model: Any) -> None:
        """Prepare a model that was read for forward passes."""
        layers = decoder_layers(model)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        for p in model.parameters():
            if id(p) not in inside:
                self._gather(p)
        for layer in layers:
            self._hooks.append(layer.register_forward_pre_hook(self._before))
            # The gradient of a trial forward.
            self._hooks.append(layer.register_full_backward_pre_hook(self._before))
        model.gspo_parts = self

    def finish(self, model: Any) -> None:
        """Stop gathering for forward passes; the caller takes each layer with `take`."""
        self._release()
        for hook in self._hooks:
            hook.remove()
        del model.gspo_parts

    def take(self, module: Any) -> None:
        """Make a module whole for good."""
        for p in module.parameters():
            if has_part(p):
                self._gather(p)
                del p.own_part

    @contextmanager
    def whole(self, model: Any) -> Iterator[None]:
        """Inside, all of a model is whole."""
        for p in model.parameters():
            self._gather(p)
        try:
            yield
        finally:
            for layer in decoder_layers(model):
                self._empty(layer)

    def tensor(self, p: Tensor) -> Tensor:
        """The whole values of a parameter. All ranks must ask for it."""
        part: Tensor | None = getattr(p, "own_part", None)
        if part is None:
            return p.detach()
        flat = self._ranks.gather(part.view(torch.uint8)).view(p.dtype)
        return flat[: p.numel()].view(p.shape)

    def _gather(self, p: nn.Parameter) -> None:
        p.data = self.tensor(p)

    def _before(self, layer: Any, *rest: Any) -> None:
        if self._gathered is not layer:
            self._release()
            for p in layer.parameters():
                self._gather(p)
            self._gathered = layer

    def _release(self) -> None:
        if self._gathered is not None:
            self._empty(self._gathered)
            self._gathered = None

    def _empty(self, layer: Any) -> None:
        for p in layer.parameters():
            if has_part(p):
                p.data = _without_memory(p)

    def _keep_part(self, module: Any, name: str, p: nn.Parameter | None) -> nn.Parameter | None:
        # transformers has marked what it has read. Small tensors, such as norms, stay as they are.
        if p is None or p.is_meta or p.dim() < 2 or has_part(p) or not getattr(p, "_is_hf_initialized", False):
            return None
        if p.dtype == torch.float16 and not bool(p.isfinite().all()):
            return None  # the model will be refused, on all ranks
        flat = p.detach().to(self._device).reshape(-1)
        size = -(-len(flat) // self._ranks.count)
        own = flat[self._ranks.rank * size : (self._ranks.rank + 1) * size]
        empty = nn.Parameter(_without_memory(p, self._device), requires_grad=p.requires_grad)
        vars(empty).update(vars(p))  # the marks of transformers
        part = flat.new_zeros(size)
        part[: len(own)] = own
        vars(empty)["own_part"] = part
        return empty


def has_part(p: Tensor) -> bool:
    """Whether a rank holds only a part of a parameter's values."""
    return hasattr(p, "own_part")


def parts_of(model: Any) -> Parts | None:
    """The parts that this rank holds of a model; None if it holds all of it, or if the model was sharded."""
    parts: Parts | None = vars(model).get("gspo_parts")
    return parts


@contextmanager
def whole(model: Any) -> Iterator[None]:
    """Inside, all of a model that was read in parts is whole."""
    parts = parts_of(model)
    with nullcontext() if parts is None else parts.whole(model):
        yield


def _without_memory(like: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=device or like.device).expand(like.shape)

"""One 8-bit forward for sampling and learning (the idea of Jet-RL, arXiv:2601.14243).

In: a model and `model.fp8`. Out: the same model, whose linear layers multiply in E4M3 with block scales
(`kernels/blocks.py`): weights 128 x 128, activations 1 x 128. The output layer, routers, embeddings and stacked experts stay
as they are. Invariant: engine and learner call the same layers, so they compute one policy; weights and masters keep
their precision, and what is saved is them. A weight is quantised once per version, in place, so that a CUDA graph that
was captured with it reads the new one; the optimiser sees to that, and an eager forward looks for itself.

Gradients pass the rounding straight through: dX = dY W~ with the quantised weight W~, dW = dY^T X.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.errors import ConfigError
from gspo.policy.kernels.blocks import BLOCK, Blocks, dequantised, product, quantised_rows, quantised_weight


def obstacle(device: torch.device) -> str | None:
    """Why this device cannot multiply in E4M3 with block scales, or None."""
    if device.type != "cuda":
        return "it needs an NVIDIA Hopper GPU (compute capability 9.0)"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return (
            f"it needs an NVIDIA Hopper GPU (compute capability 9.0), and {torch.cuda.get_device_name(device)} is none"
        )
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if cuda < (12, 9) or not hasattr(F, "scaled_mm"):
        return f"it needs a torch built with CUDA 12.9 or newer, and this is {torch.__version__}"
    return None


class Fp8Linear(torch.nn.Linear):
    """A linear layer that multiplies in 8 bits. Made from a plain one by `convert`; its weight is the plain one's."""

    fp8: Quantised

    def forward(self, input: Tensor) -> Tensor:
        if not self.fp8.shared.on:
            return super().forward(input)
        with torch.no_grad():
            weight, rows = self.fp8.of(self.weight), self.fp8.shared.rows(input)
        output: Tensor = _Product.apply(input, self.weight, rows, weight, self.fp8)
        return output if self.bias is None else output + self.bias


class Shared:
    """What the layers of one model share: whether they quantise, and the rows quantised last, since queries, keys and values
    (gate and up) are made from the same ones."""

    def __init__(self) -> None:
        self.on = True
        self._last: tuple[weakref.ref[Tensor], int, Blocks] | None = None

    def rows(self, x: Tensor) -> Blocks:
        """`x` with its leading dimensions flattened, quantised."""
        if self._last is not None and self._last[0]() is x and self._last[1] == x._version:
            return self._last[2]
        made = quantised_rows(x.reshape(-1, x.shape[-1]))
        self._last = weakref.ref(x), x._version, made
        return made


class Quantised:
    """A layer's weight in 8 bits, made anew when the weight has changed."""

    def __init__(self, weight: Tensor, shared: Shared) -> None:
        self.shared = shared
        self._blocks = quantised_weight(weight)
        self.version = _version(weight)

    def of(self, weight: Tensor) -> Blocks:
        """Its blocks; always in the same memory."""
        if self.version != _version(weight):
            made = quantised_weight(weight)
            self._blocks.values.copy_(made.values)
            self._blocks.scale.copy_(made.scale)
            self.version = _version(weight)
        return self._blocks


def _version(weight: Tensor) -> tuple[int, int]:
    """Changes with every write to the weight."""
    return weight.data_ptr(), weight._version


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Blocks, blocks: Blocks, of: Quantised) -> Tensor:
        ctx.save_for_backward(x)
        ctx.blocks, ctx.of, ctx.version, ctx.dtype = blocks, of, of.version, weight.dtype
        return product(rows, blocks, x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        assert ctx.version == ctx.of.version, "the weight has changed since the forward"
        (x,), gradient = ctx.saved_tensors, gradients[0].flatten(0, -2)
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        dx = (gradient @ dequantised(ctx.blocks, gradient.dtype)).view(x.shape) if wants_x else None
        dw = (gradient.T @ x.reshape(-1, x.shape[-1])).to(ctx.dtype) if wants_weight else None
        return dx, dw, None, None, None


def convert(model: Any) -> list[str]:
    """Let the linear layers of a model multiply in 8 bits; returns their names. The output layer stays, and gates, whose
    outputs are fewer than a block."""
    head, shared, found = model.get_output_embeddings(), Shared(), []
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or module is head or module.out_features < BLOCK:
            continue
        if module.in_features % BLOCK or module.out_features % BLOCK:
            raise ConfigError(f"model.fp8: {name} is {module.out_features} x {module.in_features}, and both must be multiples of {BLOCK}; leave model.fp8 out for this model")  # fmt: skip
        layer: Any = module
        layer.__class__ = Fp8Linear
        layer.fp8 = Quantised(layer.weight, shared)
        found.append(name)
    if not found:
        raise ConfigError(f"model.fp8: {type(model).__name__} has no linear layer of at least {BLOCK} outputs; leave model.fp8 out")  # fmt: skip
    return found


def layers(model: Any) -> list[Fp8Linear]:
    """Those that multiply in 8 bits."""
    return [module for module in model.modules() if isinstance(module, Fp8Linear)]


@torch.no_grad()
def refresh(changed: Sequence[Fp8Linear]) -> None:
    """Quantise the weights that have changed: a captured graph that holds the layers cannot look by itself."""
    for layer in changed:
        layer.fp8.of(layer.weight)


@contextmanager
def in_full(model: Any) -> Iterator[None]:
    """Inside, the layers multiply in the precision of their weights (graphs captured outside do not)."""
    shared = layers(model)[0].fp8.shared
    shared.on = False
    try:
        yield
    finally:
        shared.on = True

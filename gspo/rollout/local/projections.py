"""Linear layers of one input as one product, for decoding.

In: the linear layers of attention and gated MLPs. Out: the outputs of their linear layers, computed from copies of the
weights: `q_proj`, `k_proj` and `v_proj` are one matrix, `gate_proj` and `up_proj` another. Invariant: the copies belong
to one call of `generate`, so they are never older than the weights. A layer that is neither a plain `nn.Linear` nor
plain LoRA of one runs as its own module.

An adapter is not merged into its weight: in 16 bits, rounding would remove most of its update. Its factors become
columns and rows of the two products that the layers of an input need:

    [W, s B] [x, A x]^T = W x + s B A x

`A x` is one narrow product for all adapters of the input, rounded as in the learner. Kernels write `x` directly into
the buffer for `[x, A x]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gspo.model.sharding import is_sharded

Names = tuple[str, ...]
QKV: Names = ("q_proj", "k_proj", "v_proj")
OUTPUT: Names = ("o_proj",)
GATE_UP: Names = ("gate_proj", "up_proj")
DOWN: Names = ("down_proj",)
ALIGNMENT = 64
"""The columns of all adapters of an input are padded to a multiple of this, which keeps rows of weights aligned."""


@dataclass(frozen=True, kw_only=True)
class _Factors:
    """What a linear layer computes: `weight x + bias`, plus `scale b a x` for each adapter."""

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[tuple[Tensor, Tensor, float], ...] = ()
    """`a`, `b` and `scale` of each."""

    @property
    def rank(self) -> int:
        return sum(len(a) for a, _, _ in self.adapters)


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The linear layers of one input as one product."""

    sizes: tuple[int, ...]
    """Number of outputs of each layer."""
    weight_NK: Tensor
    """[outputs, inputs], followed by the columns of the adapters."""
    bias_N: Tensor | None
    narrow: Tensor | None
    """`A` of all adapters; None without adapters."""
    buffer: Tensor | None
    """[slots, inputs + columns of the adapters]; None without adapters. Projections of the same width share it."""

    def input(self, rows: int) -> Tensor | None:
        """Where a kernel should write the input of this projection; None if anywhere."""
        return None if self.buffer is None or self.narrow is None else self.buffer[:rows, : self.narrow.shape[1]]

    def __call__(self, x_RK: Tensor) -> Tensor:
        """The outputs of all layers side by side."""
        place = self.input(len(x_RK))
        if place is None:
            return linear(x_RK, self.weight_NK, self.bias_N)
        assert self.narrow is not None
        assert self.buffer is not None
        if x_RK.data_ptr() != place.data_ptr() or x_RK.stride() != place.stride():
            place.copy_(x_RK)
        torch.mm(place, self.narrow.T, out=self.buffer[: len(x_RK), place.shape[1] :])
        return linear(self.buffer[: len(x_RK)], self.weight_NK, self.bias_N)


Group = tuple[Any, Names]
"""A module, and the names of its linear layers that have the same input."""


class Projections:
    """The projections of a model."""

    def __init__(self, model: Any, groups: Iterable[Group], slots: int) -> None:
        self._held: dict[tuple[int, Names], Projection] = {}
        self._buffers: dict[int, Tensor] = {}
        self._after: dict[int, Projection] = {}
        for module, names, factors in _worth_a_copy(groups):
            self._held[id(module), names] = self._make(factors, slots)
        for layer in model.modules():
            self._connect(layer)

    def __call__(self, module: Any, names: Names, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the module's linear layers of these names for `x`, [R, 1, inputs] or [R, inputs]; each
        [R, outputs]."""
        held = self._held.get((id(module), names))
        if held is None:
            return tuple(getattr(module, name)(x).reshape(len(x), -1) for name in names)
        return held(x.view(len(x), -1)).split(held.sizes, dim=-1)

    def get(self, module: Any, names: Names) -> Projection | None:
        """The projection for these layers of a module; None if they run as modules."""
        return self._held.get((id(module), names))

    def input_after(self, norm: Any, rows: int) -> Tensor | None:
        """Where a norm should write its result, [R, inputs]; None if anywhere."""
        held = self._after.get(id(norm))
        return None if held is None else held.input(rows)

    @torch.no_grad()
    def _make(self, factors: Sequence[_Factors], slots: int) -> Projection:
        first = factors[0].weight
        size = first.shape[1]
        rank = _padded(sum(f.rank for f in factors))
        sizes = tuple(len(f.weight) for f in factors)
        weight_NK = first.new_zeros(sum(sizes), size + rank)
        narrow = first.new_zeros(rank, size) if rank else None
        row, column = 0, size
        for part in factors:
            weight_NK[row : row + len(part.weight), :size] = part.weight
            for a, b, scale in part.adapters:
                assert narrow is not None
                narrow[column - size : column - size + len(a)] = a
                weight_NK[row : row + len(b), column : column + len(a)] = b * scale
                column += len(a)
            row += len(part.weight)
        return Projection(
            sizes=sizes,
            weight_NK=weight_NK,
            bias_N=_joined_bias(factors),
            narrow=narrow,
            buffer=self._buffer(first, slots, size + rank) if rank else None,
        )

    def _buffer(self, like: Tensor, slots: int, width: int) -> Tensor:
        # One for all layers: an input is read by the products right after it and by nothing else.
        if width not in self._buffers:
            self._buffers[width] = like.new_zeros(slots, width)
        return self._buffers[width]

    def _connect(self, layer: Any) -> None:
        """Let the norms of a decoder layer write into the inputs of its projections."""
        # In these layers, only attention or the MLP reads the result of a norm.
        if not is_plain_layer(layer):
            return
        for norm, module, names in (
            (layer.input_layernorm, layer.self_attn, QKV),
            (layer.post_attention_layernorm, layer.mlp, GATE_UP),
        ):
            held = self.get(module, names)
            if held is not None:
                self._after[id(norm)] = held


def bytes_of_copies(groups: Iterable[Group]) -> int:
    """Memory of the projections of these groups."""
    return sum(
        sum(len(f.weight) for f in factors)
        * (factors[0].weight.shape[1] + _padded(sum(f.rank for f in factors)))
        * factors[0].weight.element_size()
        for _, _, factors in _worth_a_copy(groups)
    )


def is_plain_layer(layer: Any) -> bool:
    """Whether a decoder layer is norm, attention, sum, norm, MLP, sum, as in Llama, Mistral and Qwen."""
    kinds = ("Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
    kind = type(layer)
    return kind.__module__.startswith("transformers.") and kind.__name__ in [f"{name}DecoderLayer" for name in kinds]


def _worth_a_copy(groups: Iterable[Group]) -> Iterator[tuple[Any, Names, list[_Factors]]]:
    """The groups of several layers, and those with adapters, if all layers are plain."""
    for module, names in groups:
        factors = [f for name in names if (f := _factors(getattr(module, name, None))) is not None]
        kinds = {(f.weight.shape[1], f.weight.dtype, f.weight.device) for f in factors}
        if len(factors) == len(names) and len(kinds) == 1 and (len(names) > 1 or factors[0].rank):
            yield module, names, factors


def _factors(layer: Any) -> _Factors | None:
    """The factors of a plain linear layer, with or without plain LoRA; None for any other module."""
    if _is_plain(layer):
        return _Factors(weight=layer.weight, bias=layer.bias)
    base = _factors(layer.base_layer) if _is_lora(layer) else None
    if base is None or layer.disable_adapters or layer.merged:
        # peft itself runs the base layer alone, and undoes a merge if adapters are disabled.
        return None if base is None or (layer.disable_adapters and layer.merged) else base
    adapters = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b = layer.lora_A[name], layer.lora_B[name]
        plain = _is_plain(a) and _is_plain(b) and a.bias is None and b.bias is None
        same = plain and a.weight.dtype == b.weight.dtype == base.weight.dtype
        # A variant such as DoRA computes something else from the factors.
        if not same or name in layer.lora_variant or _drops(layer.lora_dropout[name]):
            return None
        adapters.append((a.weight, b.weight, float(layer.scaling[name])))
    return _Factors(weight=base.weight, bias=base.bias, adapters=tuple(adapters))


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and not _is_changed(layer) and not is_sharded(layer.weight)


def _is_lora(layer: Any) -> bool:
    kind = type(layer)
    plain = (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear")
    return plain and not getattr(layer, "fan_in_fan_out", False) and not _is_changed(layer)


def _is_changed(layer: Any) -> bool:
    """Whether calling a module does more than its class says."""
    return "forward" in vars(layer) or bool(layer._forward_hooks or layer._forward_pre_hooks)


def _drops(dropout: Any) -> bool:
    return not isinstance(dropout, nn.Identity) and dropout.training


def _joined_bias(factors: Sequence[_Factors]) -> Tensor | None:
    if all(f.bias is None for f in factors):
        return None
    return torch.cat([f.weight.new_zeros(len(f.weight)) if f.bias is None else f.bias for f in factors])


def _padded(rank: int) -> int:
    return -(-rank // ALIGNMENT) * ALIGNMENT

"""What the attention layers of a model compute, and running them on a paged KV cache through transformers' interface.

In: a transformers model whose attention layers call a function of `AttentionInterface` with queries, keys, values and
options. Out: `attention_layers`, the shapes and options of every layer; `replaced_attention`, which makes the layers
call a function of ours. Projections, norms and rotary embeddings remain the model's own code, so that one function
serves all families.
Invariant: a layer is accepted only if it is understood. Its window is read from the function with which the model
builds its mask, at positions far beyond the window. An option with an unknown name is refused. A layer that asks how
many tokens are cached (instead of reading `position_ids`) is refused. `check_attention` compares the kernel with
the model's own attention function on random inputs beyond the window.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gspo.model.kernels.packed_attention import NAME as PACKED
from gspo.rollout.local.blocks import BLOCK_SIZE, blocks_for
from gspo.rollout.local.kernels import kernels_for
from gspo.rollout.local.slots import LIVE, POSITION, Slots, make_slots
from gspo.rollout.local.states import forward_options

NAME = "gspo_paged"
IGNORED = ("position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "is_causal")
"""Options that do not change the attention of a causal model."""
MOST_POSITIONS = 2**18
"""Masks are checked up to this position."""


class UnsupportedAttention(Exception):
    """Why the attention of a model cannot run on a paged KV cache."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """The attention of one layer, as its module hands it to the attention function."""

    index: int
    source: int
    """The layer whose keys and values it reads. Another one in models that share a KV cache between layers."""
    heads: int
    """Key-value heads."""
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int | None
    """A token attends to as many tokens, itself included; None if unlimited."""
    scale: float
    softcap: float | None
    has_sinks: bool

    @property
    def bytes_per_block(self) -> int:
        """Memory of one KV cache block in this layer."""
        owned = self.heads * (self.key_size + self.value_size) * BLOCK_SIZE * self.dtype.itemsize
        return owned if self.source == self.index else 0

    def attend(
        self, kernels: Any, slots: Slots, query_RHD: Tensor, cache: tuple[Tensor, Tensor], sink_H: Tensor | None
    ) -> Tensor:
        """Attention of one token per row, [R, H * E]."""
        output: Tensor = kernels.paged_attention(
            slots, query_RHD, cache, self.scale, window=self.window, softcap=self.softcap, sink_H=sink_H
        )
        return output


class AttentionFunction(Protocol):
    """What replaces the model's attention: the function itself, and the one that builds masks for it."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """[rows, heads, tokens, size] in, [rows, tokens, heads, size] out."""

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None: ...


# --- Replacing the attention of a model ---

_active: AttentionFunction | None = None


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    assert _active is not None, f"attention {NAME!r} is used outside of `replaced_attention`"
    return _active.attend(module, query, key, value, attention_mask, options), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    assert _active is not None, f"attention {NAME!r} is used outside of `replaced_attention`"
    return _active.mask(*args, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def replaced_attention(model: Any, function: AttentionFunction) -> Iterator[None]:
    """Inside, the attention layers of the model call `function`."""
    global _active
    # The text model and its layers may have a config of their own.
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    outer = _active
    try:
        _active = function
        for config, _ in before:
            # The setter would also change the configs of vision and audio models below it.
            config._attn_implementation_internal = NAME
        yield
    finally:
        _active = outer
        for config, own in before:
            config._attn_implementation_internal = own


class OwnAttention:
    """The attention function of the model itself, and its masks."""

    def __init__(self, model: Any) -> None:
        self.name: str = model.config._attn_implementation

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        # The eager function is not registered: each family has its own, next to its attention class.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.name, eager)
        output: Tensor = function(module, query, key, value, mask, **options)[0]
        return output

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        built: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[self.name](*args, **kwargs)
        return built


class PositionsOnly(Cache):
    """A cache for decoding with a replaced attention function, which holds keys and values itself: the model's new
    ones pass through. A model that asks for more than that is refused in the trial."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Every row has another length. A layer that reads positions from here would be wrong in silence.
        raise UnsupportedAttention("it asks for the number of cached tokens, which differs between rows")

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


# --- What the layers compute ---

_layers: WeakKeyDictionary[Any, tuple[AttentionLayer, ...]] = WeakKeyDictionary()


def attention_layers(model: Any) -> tuple[AttentionLayer, ...]:
    """The attention layers in order, found by one forward pass of a few tokens, once per model."""
    if model not in _layers:
        _layers[model] = _find_layers(model).layers
    return _layers[model]


def check_attention(model: Any) -> None:
    """Raise `UnsupportedAttention` if the attention of the model cannot run on a paged KV cache."""
    own = model.config._attn_implementation
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedAttention("its attention cannot be replaced")
    if own not in ("eager", "sdpa", PACKED):
        raise UnsupportedAttention(f"it uses attention {own!r}; only 'sdpa' and 'eager' can be replaced")
    found = _find_layers(model)
    for call in found.distinct:
        _compare(model, call)
    _layers[model] = found.layers


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of the attention function."""

    module: Any
    layer: AttentionLayer
    queries: int
    options: dict[str, Any]
    mask_function: Callable[..., Tensor]


class _Recorder:
    """Runs the model's own attention and records how it is called."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.own = OwnAttention(model)
        self.calls: list[_Call] = []
        self.masks: list[tuple[Tensor, Callable[..., Tensor]]] = []
        self.pairs: list[tuple[int, Tensor, Tensor]] = []
        """Layer, keys and values of each call."""
        self.windows: dict[int, int | None] = {}
        """By the id of the mask function."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not type(module).__module__.startswith("transformers."):
            raise UnsupportedAttention(f"{type(module).__name__} is not a class of transformers")
        if index is None or index in {call.layer.index for call in self.calls}:
            raise UnsupportedAttention(f"{type(module).__name__} does not have one layer number per call")
        if query.shape[2] != key.shape[2]:
            raise UnsupportedAttention("it attends to other tokens than those of the input")
        function = next((f for made, f in self.masks if made is mask), None)
        if function is None:
            raise UnsupportedAttention("a layer uses a mask other than the common ones of transformers")
        # A layer that shares the KV cache of an earlier one is handed the same tensors.
        shared = (i for i, k, v in self.pairs if k is key and v is value)
        self.pairs.append((index, key, value))
        layer = AttentionLayer(
            index=index,
            source=next(shared, index),
            heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            dtype=key.dtype,
            **self._options(function, key.shape[3], options),
        )
        call = _Call(module=module, layer=layer, queries=query.shape[1], options=dict(options), mask_function=function)
        self.calls.append(call)
        return self.own(module, query, key, value, mask, options)

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        # Always a tensor, by which the function of each layer's mask is found.
        mask = self.own.mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        function = kwargs.get("mask_function")
        if mask is not None and function is not None:
            self.masks.append((mask, function))
        return mask

    def _options(self, mask_function: Callable[..., Tensor], size: int, given: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
        if options.pop("dropout", 0.0) or given.get("is_causal") is False:
            raise UnsupportedAttention("it has dropout or is not causal")
        if id(mask_function) not in self.windows:
            self.windows[id(mask_function)] = window_of(mask_function, _positions(self.model), self.model.device)
        window = self.windows[id(mask_function)]
        declared = options.pop("sliding_window", None)
        if declared is not None and declared != window and not (window is None and declared >= _positions(self.model)):
            raise UnsupportedAttention(f"a layer declares a window of {declared} tokens, but its mask has {window}")
        scale = options.pop("scaling", size**-0.5)
        softcap = options.pop("softcap", None)
        sinks = options.pop("s_aux", None)
        if options:
            raise UnsupportedAttention(f"unknown options: {', '.join(sorted(options))}")
        if not isinstance(scale, float | int) or not isinstance(softcap, float | int | None):
            raise UnsupportedAttention("its scale is not a number")
        return {"window": window, "scale": float(scale), "softcap": softcap, "has_sinks": sinks is not None}

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(call.layer for call in self.calls)

    @property
    def distinct(self) -> list[_Call]:
        """One call of each kind of layer."""

        def kind(call: _Call) -> tuple[Any, ...]:
            layer = call.layer
            shape = (call.queries, layer.heads, layer.key_size, layer.value_size, layer.dtype)
            return (*shape, layer.window, layer.scale, layer.softcap, layer.has_sinks)

        return list({kind(call): call for call in reversed(self.calls)}.values())


def _find_layers(model: Any) -> _Recorder:
    recorder = _Recorder(model)
    ids = torch.arange(1, 4, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    with torch.no_grad(), replaced_attention(model, recorder):
        model(input_ids=ids, use_cache=False, **forward_options(model))
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(layer.index for layer in recorder.layers) != list(range(expected)):
        raise UnsupportedAttention(
            f"{len(recorder.layers)} of {expected} layers call the attention function of transformers"
        )
    return recorder


def _positions(model: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    return min(getattr(config, "max_position_embeddings", None) or 4096, MOST_POSITIONS)


def window_of(mask_function: Callable[..., Tensor], positions: int, device: torch.device) -> int | None:
    """The window of a mask, None if it is unlimited. Refuses a mask that is not causal with a window.

    Whole rows of the mask are evaluated, at the start, around the window and at the last position."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    column_C = torch.arange(positions + 1, device=device)

    def row(query: int) -> Tensor:
        seen = mask_function(zero, zero, torch.full((), query, device=device), column_C)
        return torch.as_tensor(seen, device=device).expand(len(column_C))

    count = int(row(positions - 1).sum())
    window = count if count < positions else None
    around = (0, 1, 2, count - 1, count, count + 1, 2 * count + 1, positions // 2, positions - 2, positions - 1)
    for query in {q for q in around if 0 <= q < positions}:
        expected = column_C <= query
        if window is not None:
            expected &= column_C > query - window
        if not torch.equal(row(query), expected):
            raise UnsupportedAttention("a mask is not causal with a window of a fixed number of tokens")
    return window


def _compare(model: Any, call: _Call) -> None:
    """Compare the kernel with the model's own attention function on random keys and values, few and beyond the
    window. Both compute in float32, so that rounding does not hide a difference."""
    layer = call.layer
    beyond = min(layer.window or 0, _positions(model) - 1 - BLOCK_SIZE) + BLOCK_SIZE + 1
    error = max(_attention_error(model, call, length) for length in (3, max(beyond, 2 * BLOCK_SIZE + 5)))
    if not error <= 1e-2:  # `not <=`: NaN must fail
        options = {"softcap": layer.softcap, "s_aux": layer.has_sinks or None, "sliding_window": layer.window}
        known = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None) or "none"
        raise UnsupportedAttention(
            f"attention {model.config._attn_implementation!r} of the model computes something else (off by "
            f"{error:.2g}; its options: {known})"
        )


@torch.no_grad()
def _attention_error(model: Any, call: _Call, length: int) -> float:
    """The largest difference for one query over `length` tokens. Values are standard normal numbers."""
    layer, device = replace(call.layer, dtype=torch.float32), model.device
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    # Scores of the size of the soft cap, so that it acts; else a few standard deviations.
    spread = layer.softcap or 2.0
    query = normal(1, call.queries, 1, layer.key_size) * (spread / (layer.scale * layer.key_size**0.5))
    key, value = normal(1, layer.heads, length, layer.key_size), normal(1, layer.heads, length, layer.value_size)
    if layer.window is not None and layer.window < length:
        # The first token of the window and the one before it matter as much as all others together.
        value[:, :, length - layer.window - 1 : length - layer.window + 1] *= layer.window
    zero = torch.zeros((), dtype=torch.int64, device=device)
    seen_C = call.mask_function(zero, zero, zero + length - 1, torch.arange(length, device=device))
    mask = torch.as_tensor(seen_C, device=device).expand(1, 1, 1, length)
    if model.config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = OwnAttention(model)(call.module, query, key, value, mask, call.options).flatten()
    # The same keys and values in the blocks of one row.
    width = blocks_for(length)
    slots = make_slots(1, width, 1, device, None)
    slots.table_SW.copy_(torch.arange(1, width + 1)[None])
    slots.state[POSITION], slots.state[LIVE] = length - 1, 1
    cache = make_cache(layer, width + 1, device)
    for blocks, new in zip(cache, (key, value), strict=True):
        padded = torch.nn.functional.pad(new[0], (0, 0, 0, width * BLOCK_SIZE - length))
        blocks[1:] = padded.unflatten(1, (width, BLOCK_SIZE)).transpose(0, 1)
    found = layer.attend(kernels_for(device), slots, query[:, :, 0], cache, call.options.get("s_aux"))
    return float((found.flatten() - expected).abs().max())


def make_cache(layer: AttentionLayer, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty keys and values of a layer, [blocks, heads, BLOCK_SIZE, size]."""
    # Zeros: attention reads whole blocks, and entries that were never written must not be NaN.
    keys, values = (
        torch.zeros(blocks, layer.heads, BLOCK_SIZE, size, dtype=layer.dtype, device=device)
        for size in (layer.key_size, layer.value_size)
    )
    return keys, values


# --- Rotary embeddings that depend on the length ---


def length_dependent_ropes(model: Any) -> Sequence[Any]:
    """Rotary embeddings that look at the largest position of every forward, which a CUDA graph cannot do.

    Below `position_limit` their frequencies are constant: "longrope" switches at the original length of the model,
    "dynamic" at its maximum."""
    return [m for m in model.modules() if _depends_on_length(getattr(m, "rope_type", None))]


def _depends_on_length(kind: Any) -> bool:
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)


def constant_rope(rope: Any) -> Callable[..., Any]:
    """The forward of such a rotary embedding with the frequencies of short sequences."""
    if not isinstance(rope.rope_type, str):
        raise UnsupportedAttention("the rotary embedding of some layers depends on the length")
    # A forward at position 0 puts the frequencies of short sequences in place.
    rope(torch.zeros(1, device=rope.inv_freq.device), torch.zeros(1, 1, dtype=torch.int64, device=rope.inv_freq.device))
    plain = inspect.unwrap(type(rope).forward)
    return lambda *args, **kwargs: plain(rope, *args, **kwargs)

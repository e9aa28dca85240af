"""What a model has read of each row of a batch, and the forward pass that reads one token more.

In: a transformers causal language model. Out: `KVCacheState` (keys and values, one token per step) or `RecomputeState`
(token ids only, slow, right for any causal model). Invariant: both give the logits of a plain forward; `obstacle_to_cache`
tries before `KVCacheState` is used. Shape suffixes as in `engines/local.py`.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from gspo.errors import KernelWarning
from gspo.model.attention import attention_kinds
from gspo.model.kernels.packed_attention import NAME
from gspo.model.memory import out_of_memory
from gspo.model.routing import Routers

BLOCK = 64
"""Columns that a cache is given at a time, at the least."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Every module in eval mode (no dropout, and keys and values are kept), then each back in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class DecodeState(Protocol):
    """What the model has read of every slot. The first rows are the live ones; column = position."""

    def prefill(self, prompt_U: list[tuple[int, ...]]) -> Tensor | None:
        """Read prompts, all together, and hold them until the next call. Gives the experts of each token, [U, T, L, K],
        if they are being noted."""

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        """Rows `first ...` become copies of held prompts, each named by its place in the last `prefill`."""

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Rows `target` become copies of rows `source`."""

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
        """Read one more token per live row and give the logits after it, and its experts, [R, L, K], if they are noted."""


class RouteRecorder:
    """Runs a forward and gives the experts it used beside its output; None without routers to watch."""

    def __init__(self, routers: Routers | None) -> None:
        self.routers = routers

    def __call__(self, forward: Callable[[], Any]) -> tuple[Any, Tensor | None]:
        if self.routers is None:
            return forward(), None
        with self.routers.watch() as seen:
            output = forward()
        return output, seen.used_ILK


def padded(prompt_U: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Token ids, padded on the right: in a causal model no earlier position sees the padding."""
    width = max(map(len, prompt_U))
    return torch.tensor([ids + (0,) * (width - len(ids)) for ids in prompt_U], dtype=torch.int64, device=device)


class KVCacheState:
    """Keys and values of every row, so that a step computes one token per row."""

    def __init__(self, model: Any, slots: int, limit: int, routers: Routers | None = None) -> None:
        self.model = model
        self.noted = RouteRecorder(routers)
        self.cache = _KeyValueCache(slots, limit)
        self.held = DynamicCache()
        self.kinds = attention_kinds(model.config)
        assert self.kinds is not None
        self.column_C = torch.arange(limit, device=model.device)
        self.options = forward_options(model)

    def prefill(self, prompt_U: list[tuple[int, ...]]) -> Tensor | None:
        # Without a configuration every layer keeps all columns, sliding ones too; the model makes the masks itself.
        self.held = DynamicCache()
        if not len(prompt_U[0]):
            return None
        ids_UT = padded(prompt_U, self.model.device)
        options = {"past_key_values": self.held, "use_cache": True, **prefill_options(self.model)}
        _, routes_ILK = self.noted(lambda: self.model(input_ids=ids_UT, **options))
        return None if routes_ILK is None else routes_ILK.unflatten(0, ids_UT.shape)

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        self.cache.reserve(columns)
        layers: list[Any] = self.held.layers
        for layer, held in enumerate(layers):
            self.cache.put(layer, first, held.keys[prompt_A], held.values[prompt_A])

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        self.cache.move(source, target, columns)

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
        self.cache.aim(position_R, columns)
        mask = self._mask(position_R, columns)
        output, routes_RLK = self.noted(
            lambda: self.model(
                input_ids=input_R[:, None],
                position_ids=position_R[:, None],
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
                **self.options,
            )
        )
        return output.logits[:, -1], routes_RLK

    def _mask(self, position_R: Tensor, columns: int) -> Tensor | dict[str, Tensor]:
        """What to add to the attention scores, [rows, 1, 1, columns]; by kind of layer where the model has several."""
        assert self.kinds is not None
        back_RC = position_R[:, None] - self.column_C[:columns]
        masks = {kind: self._additive(back_RC, window) for kind, window in self.kinds.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, back_RC: Tensor, window: int | None) -> Tensor:
        hidden_RC = back_RC < 0
        if window is not None:
            hidden_RC |= back_RC >= window
        mask_RC = torch.zeros(hidden_RC.shape, dtype=self.model.dtype, device=hidden_RC.device)
        return mask_RC.masked_fill_(hidden_RC, torch.finfo(self.model.dtype).min)[:, None, None]


class _KeyValueCache(Cache):
    """Keys and values as [slots, heads, columns, head_dim] per layer; the model calls `update`, the engine the rest."""

    def __init__(self, slots: int, limit: int) -> None:
        super().__init__(layers=[])
        self.slots, self.limit = slots, limit
        self.pair: dict[int, tuple[Tensor, Tensor]] = {}
        self.capacity = 0
        self.columns = 0

    def reserve(self, columns: int) -> None:
        """Room for `columns`. Grows by half, so that copying stays a constant number of times the final size."""
        if columns <= self.capacity:
            return
        self.capacity = min(max(columns + BLOCK, self.capacity * 3 // 2), self.limit)
        for layer, (keys, values) in self.pair.items():
            self.pair[layer] = (self._grown(keys), self._grown(values))

    def _grown(self, old: Tensor) -> Tensor:
        # Zeros, not whatever is in memory: a masked column still enters the weighted sum, and 0 x NaN is NaN.
        new = old.new_zeros(self.slots, old.shape[1], self.capacity, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def _layer(self, layer: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if layer not in self.pair:
            keys, values = (t.new_zeros(self.slots, t.shape[1], self.capacity, t.shape[3]) for t in like)
            self.pair[layer] = (keys, values)
        return self.pair[layer]

    def put(self, layer: int, first: int, key_A: Tensor, value_A: Tensor) -> None:
        """Fill rows from `first` on, from column 0 on."""
        width = min(key_A.shape[2], self.capacity)
        for store, new in zip(self._layer(layer, (key_A, value_A)), (key_A, value_A), strict=True):
            store[first : first + len(new), :, :width] = new[:, :, :width]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        for pair in self.pair.values():
            for store in pair:
                store[target, :, :columns] = store[source, :, :columns]

    def aim(self, position_R: Tensor, columns: int) -> None:
        """The next forward writes each row at its position and reads `columns`."""
        self.reserve(columns)
        self.row_R = torch.arange(len(position_R), device=position_R.device)
        self.position_R, self.columns = position_R, columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._layer(layer_idx, (key_states, value_states))
        rows = len(self.row_R)
        # Under autocast a layer may hand over another precision than it did for the prompt.
        keys[self.row_R, :, self.position_R] = key_states[:, :, 0].to(keys.dtype)
        values[self.row_R, :, self.position_R] = value_states[:, :, 0].to(values.dtype)
        return keys[:rows, :, : self.columns], values[:rows, :, : self.columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.columns - 1, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


class RecomputeState:
    """Only the token ids of every row: a step computes the whole row. Right for any causal model, and slow."""

    def __init__(self, model: Any, slots: int, limit: int, forward_tokens: int, routers: Routers | None = None) -> None:
        self.model = model
        self.noted = RouteRecorder(routers)
        self.forward_tokens = forward_tokens
        self.ids = torch.zeros(slots, limit, dtype=torch.int64, device=model.device)
        self.held_UT = self.ids[:0]
        self.options = forward_options(model)

    def prefill(self, prompt_U: list[tuple[int, ...]]) -> Tensor | None:
        self.held_UT = padded(prompt_U, self.model.device)
        if self.noted.routers is None or not len(prompt_U[0]):
            return None
        _, routes_ILK = self.noted(lambda: self.model(input_ids=self.held_UT, use_cache=False, **self.options))
        return None if routes_ILK is None else routes_ILK.unflatten(0, self.held_UT.shape)

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        self.ids[first : first + len(prompt_A), : self.held_UT.shape[1]] = self.held_UT[prompt_A]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        self.ids[target] = self.ids[source]

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
        self.ids[torch.arange(len(input_R), device=input_R.device), position_R] = input_R
        rows = max(1, self.forward_tokens // columns)
        parts = zip(self.ids[: len(input_R), :columns].split(rows), position_R.split(rows), strict=True)
        logits, routes = zip(*(self._last(ids, position) for ids, position in parts), strict=True)
        return torch.cat(logits), None if routes[0] is None else torch.cat(routes)

    def _last(self, ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
        # No mask and no positions are given: the padding is on the right, where no causal model looks.
        output, routes_ILK = self.noted(lambda: self.model(input_ids=ids, use_cache=False, **self.options))
        row = torch.arange(len(ids), device=ids.device)
        return output.logits[row, position], None if routes_ILK is None else routes_ILK.unflatten(0, ids.shape)[
            row, position
        ]


def forward_options(model: Any) -> dict[str, Any]:
    """Router logits are for the learner's balancing loss, which cannot be computed from a prepared mask."""
    return {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}


def prefill_options(model: Any) -> dict[str, Any]:
    """Of a prompt no logits are needed; most models can leave out all but the last."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {**forward_options(model), "logits_to_keep": 1} if keeps else forward_options(model)


# --- Which models the cache is right for ---


def obstacle_to_cache(model: Any) -> str | None:
    """Why `KVCacheState` would be wrong for this model, or None. Declared properties first, then a trial."""
    name = type(model).__name__
    if attention_kinds(model.config) is None:
        return f"{name} has layers other than full and sliding-window attention"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not take a prepared attention mask"
    if model.config._attn_implementation not in ("eager", "sdpa", NAME):
        return f"attention {model.config._attn_implementation!r} does not take a prepared mask; 'sdpa' does"
    return difference_in_trial(model, lambda prompts, steps: _opened(model, prompts, steps))


def _opened(model: Any, prompts: list[tuple[int, ...]], steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    longest = max(map(len, prompts))
    rows = KVCacheState(model, len(prompts), longest + steps)
    rows.prefill(prompts)
    rows.admit(0, torch.arange(len(prompts), device=model.device), longest)
    return lambda token_R, position_R: rows.step(token_R, position_R, int(position_R.max()) + 1)[0]


Opened = Callable[[list[tuple[int, ...]], int], Callable[[Tensor, Tensor], Tensor]]
"""Given prompts and a number of steps, the step that reads a token per row at its position and gives logits."""


def difference_in_trial(model: Any, opened: Opened) -> str | None:
    """Why a way of decoding is wrong for this model, or None: it is tried."""
    name = type(model).__name__
    try:
        error = _trial(model, opened)
    except Exception as problem:  # any failure inside foreign model code means the same: do not use it
        if _inside_kernels(problem):
            warnings.warn(
                f"a kernel of engine 'local' fails for {name}; please report this bug", KernelWarning, stacklevel=2
            )
        return f"{name} cannot use the engine's cache ({type(problem).__name__}: {problem})".splitlines()[0]
    precise = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    if not error <= (1e-3 if precise else 0.1):
        return f"{name} gives other logits with the engine's cache (off by {error:.2g} of their spread)"
    return None


def _inside_kernels(problem: Exception) -> bool:
    """Whether one of our own kernels raised it: then the model is not to blame, and the slow path hides a bug."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(problem.__traceback__))
    return not out_of_memory(problem) and any(name.startswith("gspo.rollout.local.kernels") for name in modules)


@torch.no_grad()
def _trial(model: Any, opened: Opened) -> float:
    """Decode four rows of different lengths and compare with plain forward passes.

    The error is root-mean-square (the largest of many thousand logits is off by several times that in bfloat16), relative
    to the spread of the logits; the third quartile, since in a mixture of experts a near-tie in
    the router may send a single token elsewhere."""
    vocabulary = model.get_input_embeddings().num_embeddings
    steps, lengths = 3, (9, 7, 4, 2)
    sequences = [tuple((7 * i + 3 * j + 1) % vocabulary for j in range(n + steps)) for i, n in enumerate(lengths)]
    with evaluating(model):
        step = opened([ids[:n] for ids, n in zip(sequences, lengths, strict=True)], steps)
        options = forward_options(model)
        plain = [model(input_ids=padded([ids], model.device), **options).logits[0].float() for ids in sequences]
        errors = []
        for count in range(steps):
            position = [n + count for n in lengths]
            token_R = torch.tensor([ids[p] for ids, p in zip(sequences, position, strict=True)], device=model.device)
            cached_RV = step(token_R, torch.tensor(position, device=model.device)).float()
            expected_RV = torch.stack([logits[p] for logits, p in zip(plain, position, strict=True)])
            errors.append((cached_RV - expected_RV).square().mean(-1).sqrt() / expected_RV.std(-1))
    return float(torch.cat(errors).quantile(0.75))

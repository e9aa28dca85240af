"""The decoding state of a batch, and the forward pass that adds one token to each row.

In: a transformers causal language model. Out: `KVCacheState` (a KV cache, one token per row and step),
`HybridCacheState` (the same with the states of recurrent layers) or `RecomputeState` (token ids only; slow, but correct
for any causal model). Invariant: all give the logits of a plain forward; `obstacle_to_cache` runs a trial before a
cache is used. Shape suffixes as in `engines/local.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache

from gspo.model.kernel_bugs import warn_of_kernel_bug
from gspo.model.kernels.packed_attention import NAME, attention_kinds
from gspo.model.micro_batch import padded
from gspo.model.routing import Routers
from gspo.rollout.engine import eval_mode
from gspo.rollout.local.prefixes import KeptPrefix, Pairs

Prefixes = Sequence[KeptPrefix | None]
"""What need not be computed of each prompt; empty if nothing."""
BLOCK = 64
"""The minimum number of columns by which a cache grows."""


class DecodeState(Protocol):
    """The tokens of every slot, as the model needs them for the next step. Live rows come first; column = position."""

    def prefill(self, prompt_U: list[tuple[int, ...]], prefix_U: Prefixes = ()) -> Tensor | None:
        """Prefill prompts together and hold them until the next call; the experts of each token, [U, T, L, K], if
        recorded. Only the tokens after the prefixes are computed, and have experts here."""

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        """Copy held prompts to rows `first ...`. `prompt_A` are indices into the prompts of the last `prefill`."""

    def read(self, row: int, tokens: int) -> Pairs:
        """A copy of the keys and values of the first tokens of a row."""

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy rows `source` to rows `target`."""

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
        """Run one token per live row; its logits, and its experts, [R, L, K], if recorded."""


class RouteRecorder:
    """Runs a forward; its output and the experts it used (None without routers)."""

    def __init__(self, routers: Routers | None) -> None:
        self.routers = routers

    def __call__(self, forward: Callable[[], Any]) -> tuple[Any, Tensor | None]:
        if self.routers is None:
            return forward(), None
        with self.routers.watch() as trace:
            output = forward()
        return output, trace.used_ILK


class KVCacheState:
    """A KV cache, so that a step computes one token per row."""

    def __init__(self, model: Any, slots: int, limit: int, routers: Routers | None = None) -> None:
        self.model = model
        self.recorder = RouteRecorder(routers)
        self.cache = _KeyValueCache(slots, limit)
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the prompts that were prefilled last, [U, heads, columns, head_dim] per layer."""
        self.kinds = self._kinds()
        self.column_C = torch.arange(limit, device=model.device)
        self.options = forward_options(model)

    def _kinds(self) -> dict[str, int | None]:
        kinds = attention_kinds(self.model.config)
        assert kinds is not None
        return kinds

    def prefill(self, prompt_U: list[tuple[int, ...]], prefix_U: Prefixes = ()) -> Tensor | None:
        self.held = {}
        if any(prefix_U):
            return self._prefill_rest(prompt_U, prefix_U)
        if not len(prompt_U[0]):
            return None
        # Without a config, a DynamicCache keeps all columns in every layer, including sliding-window layers. The model
        # builds the masks itself.
        held = DynamicCache()
        ids_UT = padded(prompt_U, self.model.device)
        options = {"past_key_values": held, "use_cache": True, **prefill_options(self.model)}
        _, routes_ILK = self.recorder(lambda: self.model(input_ids=ids_UT, **options))
        layers: list[Any] = held.layers
        self.held = {i: (layer.keys, layer.values) for i, layer in enumerate(layers)}
        return None if routes_ILK is None else routes_ILK.unflatten(0, ids_UT.shape)

    def _prefill_rest(self, prompt_U: list[tuple[int, ...]], prefix_U: Prefixes) -> Tensor | None:
        """Prefill prompts whose first tokens were computed before: a step of several tokens per row."""
        rest = rest_of(prompt_U, prefix_U, self.model.device)
        held = _KeyValueCache(len(prompt_U), rest.columns)
        held.reserve(rest.columns)
        for u, prefix in enumerate(prefix_U):
            for layer, (keys, values) in (prefix.pairs if prefix else {}).items():
                held.put(layer, u, keys[None], values[None])
        routes_ILK = None
        if rest.ids_UT.numel():
            held.aim(rest.position_UT, rest.columns)
            options = {"past_key_values": held, "use_cache": True, **prefill_options(self.model)}
            mask = self._mask(rest.position_UT, rest.columns)
            _, routes_ILK = self.recorder(
                lambda: self.model(input_ids=rest.ids_UT, position_ids=rest.position_UT, attention_mask=mask, **options)
            )
        self.held = held.pair
        return None if routes_ILK is None else routes_ILK.unflatten(0, rest.ids_UT.shape)

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        self.cache.reserve(columns)
        for layer, (keys, values) in self.held.items():
            self.cache.put(layer, first, keys[prompt_A], values[prompt_A])

    def read(self, row: int, tokens: int) -> Pairs:
        return self.cache.read(row, tokens)

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        self.cache.move(source, target, columns)

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
        self.cache.aim(position_R[:, None], columns)
        mask = self._mask(position_R[:, None], columns)
        output, routes_RLK = self.recorder(
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

    def _mask(self, position_RT: Tensor, columns: int) -> Any:
        """The additive attention mask, [rows, 1, T, columns]; one per kind of layer if the model has several kinds."""
        back_RTC = position_RT[..., None] - self.column_C[:columns]
        masks = {kind: additive_mask(back_RTC, window, self.model.dtype) for kind, window in self.kinds.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def additive_mask(back_RTC: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """The mask of tokens that are `back` columns after the others, [rows, 1, T, columns]."""
    hidden_RTC = back_RTC < 0  # columns after a token's position are stale or not written yet
    if window is not None:
        hidden_RTC |= back_RTC >= window
    mask_RTC = torch.zeros(hidden_RTC.shape, dtype=dtype, device=hidden_RTC.device)
    # The smallest finite number, not -inf: a row in which everything is masked would become NaN.
    return mask_RTC.masked_fill_(hidden_RTC, torch.finfo(dtype).min)[:, None]


@dataclass(frozen=True, kw_only=True)
class PromptRest:
    """What is left to compute of prompts whose first tokens were computed before, padded on the right."""

    ids_UT: Tensor
    position_UT: Tensor
    """Padding has the position after the longest prompt, or less: always one that no prompt has yet."""
    real_UT: Tensor
    """Whether a token is no padding."""
    columns: int
    """Positions of all prompts, and one for padding."""


def rest_of(prompt_U: Sequence[tuple[int, ...]], prefix_U: Prefixes, device: torch.device) -> PromptRest:
    """What is left to compute of prompts."""
    start_U = [len(prefix.token_ids) if prefix else 0 for prefix in prefix_U]
    rest_U = [ids[start:] for ids, start in zip(prompt_U, start_U, strict=True)]
    longest = max(map(len, prompt_U))
    column_T = torch.arange(max(map(len, rest_U)), device=device)
    length_U1 = torch.tensor(list(map(len, rest_U)), device=device)[:, None]
    position_UT = torch.tensor(start_U, device=device)[:, None] + column_T
    return PromptRest(
        ids_UT=padded(rest_U, device),
        position_UT=position_UT.clamp(max=longest),
        real_UT=column_T < length_U1,
        columns=longest + 1,
    )


class _KeyValueCache(Cache):
    """Keys and values, [slots, heads, columns, head_dim] per layer. The model calls `update`, the engine the rest."""

    def __init__(self, slots: int, limit: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.limit = limit
        self.pair: dict[int, tuple[Tensor, Tensor]] = {}
        self.capacity = 0
        self.columns = 0

    def reserve(self, columns: int) -> None:
        """Make room for `columns`. Capacity grows by half, so that all copies together are linear in the final size."""
        if columns <= self.capacity:
            return
        self.capacity = min(max(columns + BLOCK, self.capacity * 3 // 2), self.limit)
        for layer, (keys, values) in self.pair.items():
            self.pair[layer] = (self._grown(keys), self._grown(values))

    def _grown(self, old: Tensor) -> Tensor:
        # Zeros, not uninitialized memory: a masked column still enters the weighted sum, and 0 * NaN is NaN.
        new = old.new_zeros(self.slots, old.shape[1], self.capacity, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def _layer(self, layer: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if layer not in self.pair:
            keys, values = (t.new_zeros(self.slots, t.shape[1], self.capacity, t.shape[3]) for t in like)
            self.pair[layer] = (keys, values)
        return self.pair[layer]

    def put(self, layer: int, first: int, key_A: Tensor, value_A: Tensor) -> None:
        """Fill rows `first ...`, starting at column 0."""
        width = min(key_A.shape[2], self.capacity)
        for store, new in zip(self._layer(layer, (key_A, value_A)), (key_A, value_A), strict=True):
            store[first : first + len(new), :, :width] = new[:, :, :width]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        for pair in self.pair.values():
            for store in pair:
                store[target, :, :columns] = store[source, :, :columns]

    def read(self, row: int, tokens: int) -> Pairs:
        """A copy of the first columns of a row."""
        return {
            layer: (keys[row, :, :tokens].clone(), values[row, :, :tokens].clone())
            for layer, (keys, values) in self.pair.items()
        }

    def aim(self, position_RT: Tensor, columns: int) -> None:
        """Make the next forward write the tokens of each row at their positions, and read `columns` columns."""
        self.reserve(columns)
        self.row_R1 = torch.arange(len(position_RT), device=position_RT.device)[:, None]
        self.position_RT = position_RT
        self.columns = columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._layer(layer_idx, (key_states, value_states))
        rows = len(self.row_R1)
        # Under autocast, a layer may produce another dtype than it did for the prompt. Indices around a slice move to
        # the front: [R, T, heads, size].
        keys[self.row_R1, :, self.position_RT] = key_states.transpose(1, 2).to(keys.dtype)
        values[self.row_R1, :, self.position_RT] = value_states.transpose(1, 2).to(values.dtype)
        return keys[:rows, :, : self.columns], values[:rows, :, : self.columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.columns - self.position_RT.shape[1], 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


KEPT = {
    "DynamicLayer": "DynamicLayer",
    "DynamicSlidingWindowLayer": "DynamicLayer",
    "LinearAttentionLayer": "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer": "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": "LinearAttentionAndFullAttentionLayer",
}
"""Cache layers of transformers, and those that keep all columns. By name, because earlier versions have fewer."""
States = dict[tuple[int, str, int], Tensor]
"""Recurrent states, [rows, ...], by layer, attribute and index in the layer."""


class HybridCacheState(KVCacheState):
    """A KV cache and the states of recurrent layers: linear attention, Mamba, short convolutions. Padding would change
    these states, so only prompts of equal length are prefilled together. A step of one token needs no mask there."""

    def __init__(self, model: Any, slots: int, limit: int, routers: Routers | None = None) -> None:
        super().__init__(model, slots, limit, routers)
        self.cache: _HybridCache = _HybridCache(slots, limit, hybrid_layers(model.config) or [])
        self.pair_U: dict[int, tuple[Tensor, Tensor]] = {}
        self.state_U: States = {}

    def _kinds(self) -> dict[str, int | None]:
        window = getattr(self.model.config.get_text_config(decoder=True), "sliding_window", None)
        return {"full_attention": None, "sliding_attention": window}

    def _mask(self, position_RT: Tensor, columns: int) -> Any:
        masks: dict[str, Tensor | None] = dict(super()._mask(position_RT, columns))
        return {**masks, "linear_attention": None, "conv": None}

    def prefill(self, prompt_U: list[tuple[int, ...]], prefix_U: Prefixes = ()) -> Tensor | None:
        assert not any(prefix_U), "recurrent states of earlier tokens are not kept"
        self.pair_U, self.state_U = {}, {}
        longest = max(map(len, prompt_U))
        routes_UTLK = None
        for length in sorted({len(ids) for ids in prompt_U}):
            group = [u for u, ids in enumerate(prompt_U) if len(ids) == length]
            routes_ILK = self._prefill_group(prompt_U, group, longest)
            if routes_ILK is not None and length:
                if routes_UTLK is None:
                    routes_UTLK = routes_ILK.new_zeros(len(prompt_U), longest, *routes_ILK.shape[1:])
                routes_UTLK[group, :length] = routes_ILK.unflatten(0, (len(group), length))
        return routes_UTLK

    def _prefill_group(self, prompt_U: list[tuple[int, ...]], group: list[int], longest: int) -> Tensor | None:
        """Prefill prompts of equal length and hold their states. Before the first token all states are 0; then one
        token is run for the shapes only."""
        length = len(prompt_U[group[0]])
        ids = [prompt_U[u] for u in group] if length else [(0,)]
        cache = DynamicCache(config=self.model.config)
        cache.layers = hybrid_layers(self.model.config) or []
        options = {"past_key_values": cache, "use_cache": True, **prefill_options(self.model)}
        _, routes_ILK = self.recorder(lambda: self.model(input_ids=padded(ids, self.model.device), **options))
        held: list[Any] = cache.layers
        for layer, of_layer in enumerate(held):
            for key, state in _states_of(layer, of_layer).items():
                if key not in self.state_U:
                    self.state_U[key] = state.new_zeros(len(prompt_U), *state.shape[1:])
                if length:
                    self.state_U[key][group] = state
            if getattr(of_layer, "keys", None) is None:
                continue
            if layer not in self.pair_U:
                keys, values = (
                    t.new_zeros(len(prompt_U), t.shape[1], longest, t.shape[3])
                    for t in (of_layer.keys, of_layer.values)
                )
                self.pair_U[layer] = (keys, values)
            for store, new in zip(self.pair_U[layer], (of_layer.keys, of_layer.values), strict=True):
                store[group, :, :length] = new[:, :, :length]
        return routes_ILK

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        self.cache.reserve(columns)
        for layer, (keys, values) in self.pair_U.items():
            self.cache.put(layer, first, keys[prompt_A], values[prompt_A])
        for key, state in self.state_U.items():
            self.cache.put_state(key, first, state[prompt_A])


class _HybridCache(_KeyValueCache):
    """Also recurrent states, [slots, ...] each. The model changes those of the live rows in place."""

    def __init__(self, slots: int, limit: int, layers: list[Any]) -> None:
        super().__init__(slots, limit)
        self.layers = layers
        self.states: States = {}

    def put_state(self, key: tuple[int, str, int], first: int, state_A: Tensor) -> None:
        """Fill rows `first ...`."""
        if key not in self.states:
            self.states[key] = state_A.new_zeros(self.slots, *state_A.shape[1:])
        self.states[key][first : first + len(state_A)] = state_A

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        super().move(source, target, columns)
        for state in self.states.values():
            state[target] = state[source]

    def aim(self, position_RT: Tensor, columns: int) -> None:
        super().aim(position_RT, columns)
        for (layer, name, index), state in self.states.items():
            of_layer: Any = self.layers[layer]
            # A view: the layer writes its new state into it.
            getattr(of_layer, name)[index] = state[: len(position_RT)]
            getattr(of_layer, f"is_{name}_initialized")[index] = True
            of_layer.has_previous_state[index] = True
            if name == "conv_states":
                of_layer.conv_kernel_size[index] = state.shape[-1]


def _states_of(layer: int, of_layer: Any) -> States:
    """The recurrent states that a forward has left in a layer of a cache."""
    if not _is_recurrent(of_layer):
        return {}
    named = {"conv_states": of_layer.conv_states, "recurrent_states": of_layer.recurrent_states}
    return {
        (layer, name, index): state
        for name, states in named.items()
        for index, state in states.items()
        if state is not None
    }


def hybrid_layers(config: Any) -> list[Any] | None:
    """Empty cache layers of a model with recurrent layers, which keep all columns; None if it has none, or layers of an
    unknown kind."""
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    if not any(map(_is_recurrent, layers)):
        return None
    if any(type(layer).__name__ not in KEPT for layer in layers):
        return None
    return [
        getattr(cache_utils, KEPT[type(layer).__name__])(
            **({"number_of_states": layer.number_of_states} if _is_recurrent(layer) else {})
        )
        for layer in layers
    ]


def _is_recurrent(layer: Any) -> bool:
    return isinstance(getattr(layer, "conv_states", None), dict)


class RecomputeState:
    """Only the token ids: a step recomputes the whole row. Correct for any causal model, and slow."""

    def __init__(self, model: Any, slots: int, limit: int, forward_tokens: int, routers: Routers | None = None) -> None:
        self.model = model
        self.recorder = RouteRecorder(routers)
        self.forward_tokens = forward_tokens
        self.ids = torch.zeros(slots, limit, dtype=torch.int64, device=model.device)
        self.held_UT = self.ids[:0]
        self.options = forward_options(model)

    def prefill(self, prompt_U: list[tuple[int, ...]], prefix_U: Prefixes = ()) -> Tensor | None:
        assert not any(prefix_U), "there is no cache to keep"
        self.held_UT = padded(prompt_U, self.model.device)
        if self.recorder.routers is None or not len(prompt_U[0]):
            return None
        _, routes_ILK = self.recorder(lambda: self.model(input_ids=self.held_UT, use_cache=False, **self.options))
        return None if routes_ILK is None else routes_ILK.unflatten(0, self.held_UT.shape)

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        self.ids[first : first + len(prompt_A), : self.held_UT.shape[1]] = self.held_UT[prompt_A]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        self.ids[target] = self.ids[source]

    def read(self, row: int, tokens: int) -> Pairs:
        raise NotImplementedError("there is no cache to keep")

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> tuple[Tensor, Tensor | None]:
        self.ids[torch.arange(len(input_R), device=input_R.device), position_R] = input_R
        rows = max(1, self.forward_tokens // columns)  # bounds the memory of activations and logits
        parts = zip(self.ids[: len(input_R), :columns].split(rows), position_R.split(rows), strict=True)
        logits, routes = zip(*(self._last(ids, position) for ids, position in parts), strict=True)
        return torch.cat(logits), None if routes[0] is None else torch.cat(routes)

    def _last(self, ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
        # No mask and no positions are needed: padding is on the right, and a causal model does not attend to the right.
        output, routes_ILK = self.recorder(lambda: self.model(input_ids=ids, use_cache=False, **self.options))
        row = torch.arange(len(ids), device=ids.device)
        logits = output.logits[row, position]
        return logits, None if routes_ILK is None else routes_ILK.unflatten(0, ids.shape)[row, position]


def forward_options(model: Any) -> dict[str, Any]:
    """Options of every forward. They disable router logits: the model's balance loss fails with a prepared 4D mask."""
    return {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}


def prefill_options(model: Any) -> dict[str, Any]:
    """Options of a prefill. It needs no logits, and most models can skip all but the last."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {**forward_options(model), "logits_to_keep": 1} if keeps else forward_options(model)


# --- Which models the cache supports ---


def cache_state(model: Any, slots: int, limit: int, routers: Routers | None = None) -> KVCacheState:
    """The decoding state with a cache for this kind of model."""
    kind = KVCacheState if hybrid_layers(model.config) is None else HybridCacheState
    return kind(model, slots, limit, routers)


def obstacle_to_cache(model: Any) -> str | None:
    """Why `cache_state` cannot be used for this model; None if it can. Checks declared properties, then runs a
    trial."""
    name = type(model).__name__
    if hybrid_layers(model.config) is not None:
        # Masks by kind of layer are left to the trial. This difference is too small for it in lower precision.
        if any(_limits_time_steps(module) for module in model.modules()):
            return f"{name} limits the time steps of its Mamba layers, which steps of one token ignore in transformers"
    else:
        if attention_kinds(model.config) is None:
            return f"{name} has layers other than full, sliding-window and linear attention"
        if not getattr(model, "_supports_attention_backend", False):
            return f"{name} does not take a prepared attention mask"
    if model.config._attn_implementation not in ("eager", "sdpa", NAME):
        return f"attention {model.config._attn_implementation!r} does not take a prepared mask; 'sdpa' does"
    return obstacle_in_trial(model, lambda prompts, steps: _open_trial(model, prompts, steps))


def obstacle_to_keeping(model: Any) -> str | None:
    """Why a model that `obstacle_to_cache` accepts cannot continue from keys and values of an earlier call; None if it
    can."""
    if hybrid_layers(model.config) is not None:
        return f"{type(model).__name__} has recurrent layers, whose states exist for the last token only"
    return obstacle_in_trial(model, lambda prompts, steps: _open_continued_trial(model, prompts, steps))


def _limits_time_steps(module: Any) -> bool:
    """Whether a layer clamps its time steps, as Nemotron-H does, in forwards of several tokens only."""
    limits = getattr(module, "time_step_limit", None)
    return limits is not None and tuple(limits) != (0.0, float("inf"))


def _open_trial(model: Any, prompts: list[tuple[int, ...]], steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    longest = max(map(len, prompts))
    rows = cache_state(model, len(prompts), longest + steps)
    rows.prefill(prompts)
    rows.admit(0, torch.arange(len(prompts), device=model.device), longest)
    return lambda token_R, position_R: rows.step(token_R, position_R, int(position_R.max()) + 1)[0]


def _open_continued_trial(model: Any, prompts: list[tuple[int, ...]], steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The same with prompts whose first tokens were computed by an earlier call."""
    longest = max(map(len, prompts))
    earlier = cache_state(model, len(prompts), longest)
    starts = trial_starts(prompts)
    earlier.prefill(starts)
    earlier.admit(0, torch.arange(len(prompts), device=model.device), longest)
    rows = cache_state(model, len(prompts), longest + steps)
    kept = [KeptPrefix(token_ids=ids, pairs=earlier.read(row, len(ids))) for row, ids in enumerate(starts)]
    rows.prefill(prompts, [prefix if prefix.token_ids else None for prefix in kept])
    rows.admit(0, torch.arange(len(prompts), device=model.device), longest)
    return lambda token_R, position_R: rows.step(token_R, position_R, int(position_R.max()) + 1)[0]


def trial_starts(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The tokens that an earlier call has computed: half of a prompt, and once all, and once none."""
    counts = [len(prompts[0]), *(len(ids) // 2 for ids in prompts[1:-1]), 0]
    return [ids[:count] for ids, count in zip(prompts, counts, strict=True)]


TrialDecoder = Callable[[list[tuple[int, ...]], int], Callable[[Tensor, Tensor], Tensor]]
"""Given prompts and a number of steps, prefills and returns the step: tokens and positions per row to logits."""


def obstacle_in_trial(model: Any, open_trial: TrialDecoder) -> str | None:
    """Why a decoder cannot be used for this model, found by a trial; None if it can."""
    name = type(model).__name__
    try:
        error = _trial(model, open_trial)
    except Exception as problem:  # whatever fails inside the model's own code, the decoder cannot be used
        warn_of_kernel_bug(problem, model, "sampling")
        return f"{name} cannot use the engine's cache ({type(problem).__name__}: {problem})".splitlines()[0]
    precise = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    if not error <= (1e-3 if precise else 0.1):  # `not <=`: NaN must fail
        return f"{name} computes different logits with the engine's cache (off by {error:.2g} of their spread)"
    return None


@torch.no_grad()
def _trial(model: Any, open_trial: TrialDecoder) -> float:
    """Decode four rows of different lengths and compare with plain forward passes.

    The error of a row is the root-mean-square difference, relative to the spread of the logits: in bfloat16 the maximum
    over many thousand logits is several times larger. The result is the third quartile over rows and steps, because in
    an MoE model a near-tie in a router may send a single token to another expert."""
    vocabulary = model.get_input_embeddings().num_embeddings
    steps = 3
    # Different lengths, so that an error in positions, padding or the mask shows.
    lengths = (9, 7, 4, 2)
    sequences = [tuple((7 * i + 3 * j + 1) % vocabulary for j in range(n + steps)) for i, n in enumerate(lengths)]
    with eval_mode(model):
        step = open_trial([ids[:n] for ids, n in zip(sequences, lengths, strict=True)], steps)
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

"""Sampling in process, with the learner's own weights: nothing is copied and nothing has to be synchronised.

In: a transformers causal language model, prompts, a `Sampling`. Out: for each prompt its replies in sample order.
Invariant: every reply is drawn from `softmax(logits / temperature)` (after top-k and top-p) of the unmodified model with
its own random stream, and `logp_sampler` is the log-probability under that distribution. Which replies share a batch
changes speed and floating-point rounding, nothing else.

How it is fast: each distinct prompt is computed once and its keys and values are copied to its replies; a finished reply
leaves the batch at once and a waiting one takes its place; when none waits, the batch shrinks; attention reads only the
columns that are filled. Live rows are always the first `R` rows of the cache, so no step computes a dead row.

Shape suffixes beside those of `types.py`: `R` live rows, `C` filled columns, `A` rows being admitted, `U` distinct
prompts in the order of the queue.
"""

from __future__ import annotations

import inspect
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from gspo.errors import ConfigError, DataError, NumericalError
from gspo.rollout.engine import EngineContext, stream_key
from gspo.types import Completion, Prompt, Sampling, StopReason

BLOCK = 64
"""Columns that a cache is given at a time, at the least."""


def build(context: EngineContext, *, slots: int = 256, prefill_tokens: int = 8192) -> LocalEngine:
    """`slots` replies are decoded together; prompts are computed in batches of about `prefill_tokens` tokens."""
    for name, value in (("slots", slots), ("prefill_tokens", prefill_tokens)):
        if value < 1:
            raise ConfigError(f"rollout.engine_options.{name}: must be at least 1, is {value}")
    return LocalEngine(context, slots=slots, prefill_tokens=prefill_tokens)


class LocalEngine:
    """Draws replies from `context.model`. Holds no memory between calls: learning needs it."""

    def __init__(self, context: EngineContext, *, slots: int, prefill_tokens: int) -> None:
        self.context: EngineContext | None = context
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        obstacle = obstacle_to_cache(context.model)
        self.cached = obstacle is None
        if obstacle is not None:
            warnings.warn(
                f"engine 'local' recomputes every token, which is slow: {obstacle}", RuntimeWarning, stacklevel=3
            )

    def generate(
        self, prompts: Sequence[Prompt], *, samples: int, sampling: Sampling, seed: int, stream: str, version: int
    ) -> list[list[Completion]]:
        if self.context is None:
            raise RuntimeError("engine 'local' was closed")
        if not prompts or samples == 0:
            return [[] for _ in prompts]
        model = self.context.model
        check_fits(model, prompts, sampling)
        queue = _queue(prompts, samples=samples, seed=seed, stream=stream)
        with evaluating(model), torch.no_grad():
            replies = self._decode(model, queue, sampling)
        text_B = self.context.tokenizer.batch_decode(replies.token_ids, skip_special_tokens=True)
        groups: list[list[Completion]] = [[None] * samples for _ in prompts]  # type: ignore[list-item]
        for b, (p, sample) in enumerate(queue.place_B):
            groups[p][sample] = Completion(
                prompt_id=prompts[p].id,
                sample=sample,
                token_ids=tuple(replies.token_ids[b]),
                text=text_B[b],
                logp_sampler=tuple(replies.logp[b]),
                stop=StopReason.EOS if replies.ended[b] else StopReason.LENGTH,
                version=version,
            )
        return groups

    def _decode(self, model: Any, queue: _Queue, sampling: Sampling) -> _Replies:
        assert self.context is not None
        slots = min(self.slots, len(queue.place_B))
        limit = max(map(len, queue.prompt_U)) + sampling.max_tokens
        rows = (
            CachedRows(model, slots, limit) if self.cached else RecomputedRows(model, slots, limit, self.prefill_tokens)
        )
        return _Batch(model, rows, queue, sampling, self.context.stop_ids, slots, self.prefill_tokens).run()

    def close(self) -> None:
        self.context = None


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


def check_fits(model: Any, prompts: Sequence[Prompt], sampling: Sampling) -> None:
    """Raise up front when a reply could outgrow the positions that the model knows."""
    if sampling.max_tokens < 1:
        raise ConfigError(f"rollout.max_tokens: must be at least 1, is {sampling.max_tokens}")
    empty = next((prompt for prompt in prompts if not prompt.token_ids), None)
    if empty is not None:
        raise DataError(f"prompt {empty.id}: has no tokens; a reply needs at least one to start from")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    positions = position_limit(model)
    if positions is not None and longest + sampling.max_tokens > positions:
        raise ConfigError(
            f"rollout.max_tokens: the longest prompt has {longest} tokens, and with {sampling.max_tokens} more it exceeds "
            f"the model's {positions} positions; set it to at most {positions - longest}, or use shorter prompts"
        )


def position_limit(model: Any) -> int | None:
    """The longest sequence for which a token's logits do not depend on what else is in the batch."""
    config = model.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # longrope switches all frequencies, also those already in the cache, once any row passes its original length.
    if limit is not None and rope.get("rope_type") == "longrope":
        return min(limit, rope.get("original_max_position_embeddings") or limit)
    return limit


# --- The queue: every reply to draw, replies of the same prompt together ---


@dataclass(frozen=True, kw_only=True)
class _Queue:
    prompt_U: list[tuple[int, ...]]
    """Distinct prompts, longest first: neighbours are of similar length, so that little is padded when prefilling."""
    prompt_of_B: list[int]
    """Which of them each request continues; never decreasing."""
    place_B: list[tuple[int, int]]
    """Where the reply belongs: (index of the prompt in the call, sample)."""
    key_B: list[int]
    """The random stream of each request."""


def _queue(prompts: Sequence[Prompt], *, samples: int, seed: int, stream: str) -> _Queue:
    distinct = sorted({prompt.token_ids for prompt in prompts}, key=lambda ids: (-len(ids), ids))
    index = {ids: u for u, ids in enumerate(distinct)}
    order = sorted(range(len(prompts)), key=lambda p: index[prompts[p].token_ids])
    place_B = [(p, sample) for p in order for sample in range(samples)]
    return _Queue(
        prompt_U=distinct,
        prompt_of_B=[index[prompts[p].token_ids] for p, _ in place_B],
        place_B=place_B,
        key_B=[stream_key(seed, stream, prompts[p].id, sample) for p, sample in place_B],
    )


@dataclass(frozen=True, kw_only=True)
class _Replies:
    """What was drawn, in queue order."""

    token_ids: list[list[int]]
    logp: list[list[float]]
    ended: list[bool]


# --- The loop ---


class _Batch:
    """The live rows and their bookkeeping; all per-row numbers are columns of one tensor, so that a row moves at once.

    A row is admitted with all but the last token of its prompt stored. That token is then its first input, so the first
    reply token comes out of the same step as all others."""

    def __init__(
        self,
        model: Any,
        rows: Rows,
        queue: _Queue,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        slots: int,
        prefill_tokens: int,
    ) -> None:
        self.rows, self.queue, self.sampling = rows, queue, sampling
        self.slots, self.prefill_tokens = slots, prefill_tokens
        device, requests = model.device, len(queue.place_B)
        # request, input token, its position, tokens drawn so far, random stream
        self.state = torch.zeros(5, slots, dtype=torch.int64, device=device)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        lengths = [len(queue.prompt_U[u]) - 1 for u in queue.prompt_of_B]
        last = [queue.prompt_U[u][-1] for u in queue.prompt_of_B]
        fresh = [list(range(requests)), last, lengths, [0] * requests, queue.key_B]
        self.fresh_B = torch.tensor(fresh, dtype=torch.int64, device=device)
        width = min(sampling.max_tokens, BLOCK)
        self.token_BT = torch.zeros(requests, width, dtype=torch.int32, device=device)
        self.logp_BT = torch.zeros(requests, width, dtype=torch.float32, device=device)
        self.length_B = torch.zeros(requests, dtype=torch.int64, device=device)
        self.ended_B = torch.zeros(requests, dtype=torch.bool, device=device)
        self.live = 0
        self.admitted = 0
        self.prefilled = 0
        self.first_prompt = 0
        self.columns = 0
        """Columns that the next step reads: one more than the furthest position of a live row."""
        self.drawn = 0
        """The most tokens that a live row has drawn."""

    def run(self) -> _Replies:
        while self.live or self.admitted < len(self.queue.place_B):
            self._admit()
            self._step()
        return self._replies()

    def _admit(self) -> None:
        """Waiting requests enter, a few at a time: an admission costs about as much for one row as for ten."""
        waiting = len(self.queue.place_B) - self.admitted
        if self.slots - self.live < min(waiting, max(1, self.slots // 16)):
            return
        while waiting and self.live < self.slots:
            if self.queue.prompt_of_B[self.admitted] >= self.prefilled:
                self._prefill()
            ready = bisect_left(self.queue.prompt_of_B, self.prefilled) - self.admitted
            count = min(self.slots - self.live, ready)
            fresh_A = self.fresh_B[:, self.admitted : self.admitted + count]
            prompts = self.queue.prompt_of_B[self.admitted : self.admitted + count]
            self.columns = max(self.columns, len(self.queue.prompt_U[prompts[0]]))
            stored_A = torch.tensor([u - self.first_prompt for u in prompts], device=self.state.device)
            self.rows.admit(self.live, stored_A, self.columns)
            self.state[:, self.live : self.live + count] = fresh_A
            self.live += count
            self.admitted += count
            waiting -= count

    def _prefill(self) -> None:
        """Compute the next prompts of the queue together, as many as the token budget allows."""
        self.first_prompt = self.prefilled
        width = len(self.queue.prompt_U[self.first_prompt])
        count = max(1, self.prefill_tokens // width)
        self.prefilled = min(self.first_prompt + count, len(self.queue.prompt_U))
        self.rows.prefill([ids[:-1] for ids in self.queue.prompt_U[self.first_prompt : self.prefilled]])

    def _step(self) -> None:
        request_R, input_R, position_R, drawn_R, key_R = self.state[:, : self.live]
        logits_RV = self.rows.step(input_R, position_R, self.columns)
        token_R, logp_R = draw(logits_RV, self.sampling, uniform(key_R, drawn_R))
        self._widen()
        self.token_BT[request_R, drawn_R] = token_R.to(torch.int32)
        self.logp_BT[request_R, drawn_R] = logp_R
        input_R.copy_(token_R)
        self.state[2:4, : self.live] += 1
        self.columns += 1
        self.drawn += 1
        ended_R = (token_R[:, None] == self.stop_ids).any(1)
        over_R = ended_R | (drawn_R >= self.sampling.max_tokens)
        if over_R.any():
            self._retire(over_R, ended_R)

    def _widen(self) -> None:
        """Room for one more token per reply, doubling, so that a high limit costs memory only when it is reached."""
        width = self.token_BT.shape[1]
        if self.drawn < width:
            return
        more = min(width, self.sampling.max_tokens - width)
        self.token_BT = torch.nn.functional.pad(self.token_BT, (0, more))
        self.logp_BT = torch.nn.functional.pad(self.logp_BT, (0, more))

    def _retire(self, over_R: Tensor, ended_R: Tensor) -> None:
        """Note the finished rows and fill their holes with the last live rows."""
        request_R, drawn_R = self.state[0, : self.live], self.state[3, : self.live]
        self.length_B[request_R[over_R]] = drawn_R[over_R]
        self.ended_B[request_R[over_R]] = ended_R[over_R]
        left = int((~over_R).sum())
        hole = over_R[:left].nonzero().squeeze(1)
        if len(hole):
            source = (~over_R[left:]).nonzero().squeeze(1) + left
            self.state[:, hole] = self.state[:, source]
            self.rows.move(source, hole, self.columns - 1)
        self.live = left
        if left:
            furthest, self.drawn = self.state[2:4, :left].amax(1).tolist()
            self.columns = furthest + 1
        else:
            self.columns = self.drawn = 0

    def _replies(self) -> _Replies:
        if self.logp_BT.isnan().any():
            raise NumericalError("sampling: the model's logits are not numbers (NaN); its weights have diverged")
        length_B = self.length_B.tolist()
        token_BT, logp_BT = self.token_BT.cpu().numpy(), self.logp_BT.cpu().numpy()
        return _Replies(
            token_ids=[token_BT[b, :n].tolist() for b, n in enumerate(length_B)],
            logp=[logp_BT[b, :n].tolist() for b, n in enumerate(length_B)],
            ended=self.ended_B.tolist(),
        )


# --- Drawing a token ---


def uniform(key_R: Tensor, index_R: Tensor) -> Tensor:
    """Element `index` of the SplitMix64 sequence seeded with `key`, as a float64 in (0, 1).

    Counter-based, so a reply's numbers do not depend on its neighbours; integer arithmetic, so they are the same on
    every device."""
    z = key_R + (index_R + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    # 52 bits: with 53, adding a half could round up to 1.
    return (_shifted(z, 12).to(torch.float64) + 0.5) * 2.0**-52


def _signed(word: int) -> int:
    return word - (1 << 64)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits_RV: Tensor, sampling: Sampling, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution, and its log-probability."""
    if sampling.temperature == 0:
        token_R = logits_RV.argmax(-1)
        return token_R, torch.zeros_like(token_R, dtype=torch.float32)
    logp_RV = torch.log_softmax(_kept(logits_RV.float() / sampling.temperature, sampling), dim=-1)
    cumulative_RV = logp_RV.exp().to(torch.float64).cumsum(-1)
    # The first entry that reaches a threshold above 0: never a token of probability 0.
    threshold_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    # NaN logits would point past the end; the clamp keeps that an error that can be reported.
    token_R1 = torch.searchsorted(cumulative_RV, threshold_R1).clamp_(max=logits_RV.shape[1] - 1)
    return token_R1.squeeze(1), logp_RV.gather(1, token_R1).squeeze(1)


def _kept(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p of what is left: the others become impossible. Top-p keeps the token that crosses the mark."""
    if 0 < sampling.top_k < logits_RV.shape[1]:
        least_R1 = logits_RV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    if sampling.top_p < 1:
        sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
        p_RV = sorted_RV.softmax(-1, dtype=torch.float64)
        drop_RV = p_RV.cumsum(-1) - p_RV >= sampling.top_p
        drop_RV[:, 0] = False
        logits_RV = logits_RV.masked_fill(drop_RV.scatter(1, order_RV, drop_RV), -torch.inf)
    return logits_RV


# --- What is stored of a row, and the forward pass ---


class Rows(Protocol):
    """What the model has read of every slot. The first rows are the live ones; column = position."""

    def prefill(self, prompt_U: list[tuple[int, ...]]) -> None:
        """Read prompts, all together, and hold them until the next call."""

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        """Rows `first ...` become copies of held prompts, each named by its place in the last `prefill`."""

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Rows `target` become copies of rows `source`."""

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> Tensor:
        """Read one more token per live row and give the logits after it."""


def padded(prompt_U: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Token ids, padded on the right: in a causal model no earlier position sees the padding."""
    width = max(map(len, prompt_U))
    return torch.tensor([ids + (0,) * (width - len(ids)) for ids in prompt_U], dtype=torch.int64, device=device)


class CachedRows:
    """Keys and values of every row, so that a step computes one token per row."""

    def __init__(self, model: Any, slots: int, limit: int) -> None:
        self.model = model
        self.cache = _KeyValueCache(slots, limit)
        self.held = DynamicCache()
        self.kinds = attention_kinds(model.config)
        assert self.kinds is not None
        self.column_C = torch.arange(limit, device=model.device)
        self.options = _forward_options(model)
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.prefill_options = {**self.options, "logits_to_keep": 1} if keeps else self.options

    def prefill(self, prompt_U: list[tuple[int, ...]]) -> None:
        # Without a configuration every layer keeps all columns, sliding ones too; the model makes the masks itself.
        self.held = DynamicCache()
        if len(prompt_U[0]):
            ids_UT = padded(prompt_U, self.model.device)
            self.model(input_ids=ids_UT, past_key_values=self.held, use_cache=True, **self.prefill_options)

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        self.cache.reserve(columns)
        layers: list[Any] = self.held.layers
        for layer, held in enumerate(layers):
            self.cache.put(layer, first, held.keys[prompt_A], held.values[prompt_A])

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        self.cache.move(source, target, columns)

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> Tensor:
        self.cache.aim(position_R, columns)
        output = self.model(
            input_ids=input_R[:, None],
            position_ids=position_R[:, None],
            attention_mask=self._mask(position_R, columns),
            past_key_values=self.cache,
            use_cache=True,
            **self.options,
        )
        return output.logits[:, -1]

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


class RecomputedRows:
    """Only the token ids of every row: a step computes the whole row. Right for any causal model, and slow."""

    def __init__(self, model: Any, slots: int, limit: int, forward_tokens: int) -> None:
        self.model = model
        self.forward_tokens = forward_tokens
        self.ids = torch.zeros(slots, limit, dtype=torch.int64, device=model.device)
        self.held_UT = self.ids[:0]
        self.options = _forward_options(model)

    def prefill(self, prompt_U: list[tuple[int, ...]]) -> None:
        self.held_UT = padded(prompt_U, self.model.device)

    def admit(self, first: int, prompt_A: Tensor, columns: int) -> None:
        self.ids[first : first + len(prompt_A), : self.held_UT.shape[1]] = self.held_UT[prompt_A]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        self.ids[target] = self.ids[source]

    def step(self, input_R: Tensor, position_R: Tensor, columns: int) -> Tensor:
        self.ids[torch.arange(len(input_R), device=input_R.device), position_R] = input_R
        # No mask and no positions are given: the padding is on the right, where no causal model looks.
        rows = max(1, self.forward_tokens // columns)
        logits = [
            self.model(input_ids=ids[:, :columns], use_cache=False, **self.options).logits.take_along_dim(
                position[:, None, None], dim=1
            )
            for ids, position in zip(self.ids[: len(input_R)].split(rows), position_R.split(rows), strict=True)
        ]
        return torch.cat(logits)[:, 0]


def _forward_options(model: Any) -> dict[str, Any]:
    """Router logits are for the learner's balancing loss, which cannot be computed from a prepared mask."""
    return {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}


# --- Which models the cache is right for ---


def attention_kinds(config: Any) -> dict[str, int | None] | None:
    """Window of each kind of attention layer (None: unlimited), or None if some layer is of another kind."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) or None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def obstacle_to_cache(model: Any) -> str | None:
    """Why `CachedRows` would be wrong for this model, or None. Declared properties first, then a trial."""
    name = type(model).__name__
    if attention_kinds(model.config) is None:
        return f"{name} has layers other than full and sliding-window attention"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not take a prepared attention mask"
    if model.config._attn_implementation not in ("eager", "sdpa"):
        return f"attention {model.config._attn_implementation!r} does not take a prepared mask; 'sdpa' does"
    try:
        error = _trial(model)
    except Exception as problem:  # any failure inside foreign model code means the same: do not use the cache
        return f"{name} cannot use the engine's cache ({type(problem).__name__}: {problem})".splitlines()[0]
    precise = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    if not error <= (1e-3 if precise else 0.1):
        return f"{name} gives other logits with the engine's cache (off by {error:.2g} of their spread)"
    return None


@torch.no_grad()
def _trial(model: Any) -> float:
    """Decode four rows of different lengths with the cache and compare with plain forward passes.

    The error is relative to the spread of the logits; the third quartile, since in a mixture of experts a near-tie in
    the router may send a single token elsewhere."""
    vocabulary = model.get_input_embeddings().num_embeddings
    steps, lengths = 3, (9, 7, 4, 2)
    sequences = [tuple((7 * i + 3 * j + 1) % vocabulary for j in range(n + steps)) for i, n in enumerate(lengths)]
    with evaluating(model):
        rows = CachedRows(model, len(lengths), max(lengths) + steps)
        rows.prefill([ids[:n] for ids, n in zip(sequences, lengths, strict=True)])
        rows.admit(0, torch.arange(len(lengths), device=model.device), max(lengths))
        plain = [model(input_ids=padded([ids], model.device), **rows.options).logits[0].float() for ids in sequences]
        errors = []
        for step in range(steps):
            position = [n + step for n in lengths]
            token_R = torch.tensor([ids[p] for ids, p in zip(sequences, position, strict=True)], device=model.device)
            position_R = torch.tensor(position, device=model.device)
            cached_RV = rows.step(token_R, position_R, max(position) + 1).float()
            expected_RV = torch.stack([logits[p] for logits, p in zip(plain, position, strict=True)])
            errors.append((cached_RV - expected_RV).abs().amax(-1) / expected_RV.std(-1))
    return float(torch.cat(errors).quantile(0.75))

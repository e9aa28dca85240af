"""Sampling in process, with the learner's own weights: nothing is copied and nothing has to be synchronised.

In: a transformers causal language model, prompts, a `Sampling`. Out: for each prompt its replies in sample order.
Invariant: every reply is drawn from `softmax(logits / temperature)` (after top-k and top-p) of the unmodified model with
its own random stream, and `logp_sampler` is the log-probability under that distribution. Which replies share a batch
changes speed and floating-point rounding, nothing else.

How it is fast: each distinct prompt is computed once and its keys and values are copied to its replies; a finished reply
leaves the batch at once and a waiting one takes its place; when none waits, the batch shrinks; attention reads only the
columns that are filled. Live rows are always the first `R` rows of the cache, so no step computes a dead row. On a GPU
most models are decoded by `rollout/paged/` instead.

Shape suffixes beside those of `types.py`: `R` live rows, `C` filled columns, `A` rows being admitted, `U` distinct
prompts in the order of the queue.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gspo.errors import ConfigError, DataError, NumericalError
from gspo.model.load import position_limit
from gspo.model.memory import out_of_memory, release_memory
from gspo.model.routing import Routers
from gspo.rollout.engine import DecodeStats, EngineContext
from gspo.rollout.local.batch import PagedBatch
from gspo.rollout.local.decoder import obstacle_to_pages
from gspo.rollout.local.queue import Queue, Replies, make_queue
from gspo.rollout.local.sampling import draw, uniform, with_greedy
from gspo.rollout.local.states import BLOCK, DecodeState, KVCacheState, RecomputeState, evaluating, obstacle_to_cache
from gspo.types import Completion, Prompt, Routes, Sampling, StopReason


def build(context: EngineContext, *, slots: int = 256, prefill_tokens: int = 8192) -> LocalEngine:
    """`slots` replies are decoded together; prompts are computed in batches of about `prefill_tokens` tokens."""
    for name, value in (("slots", slots), ("prefill_tokens", prefill_tokens)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"rollout.engine_options.{name}: must be a whole number, at least 1, not {value!r}")
    return LocalEngine(context, slots=slots, prefill_tokens=prefill_tokens)


class LocalEngine:
    """Draws replies from `context.model`. Holds no memory between calls: learning needs it."""

    def __init__(self, context: EngineContext, *, slots: int, prefill_tokens: int) -> None:
        self.context: EngineContext | None = context
        self.decoded = DecodeStats()
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.paged = context.model.device.type == "cuda" and _can_page(context.model)
        if not self.paged:
            _ = self.cached  # says at once if it will be slow

    @cached_property
    def cached(self) -> bool:
        """Whether rows keep keys and values, where they are not in pages; if not, a message says why."""
        assert self.context is not None
        obstacle = obstacle_to_cache(self.context.model)
        if obstacle is not None:
            warnings.warn(
                f"engine 'local' recomputes every token, which is slow: {obstacle}", RuntimeWarning, stacklevel=5
            )
        return obstacle is None

    @property
    def reports_routes(self) -> bool:
        return self.context is not None and self.context.routers is not None

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        stream: str,
        version: int,
        routes: bool = False,
    ) -> list[list[Completion]]:
        if self.context is None:
            raise RuntimeError("engine 'local' was closed")
        if not prompts or samples == 0:
            return [[] for _ in prompts]
        model = self.context.model
        check_fits(model, prompts, sampling)
        queue = make_queue(prompts, samples=samples, seed=seed, stream=stream, greedy_last=sampling.greedy_last)
        with evaluating(model), torch.no_grad():
            replies = self._fitting(model, queue, sampling, self.context.routers if routes else None)
        self.decoded += replies.decoded
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
                routes=replies.routes[b],
            )
        return groups

    def _fitting(self, model: Any, queue: Queue, sampling: Sampling, routers: Routers | None) -> Replies:
        """When memory runs out, all are drawn again with fewer at a time, now and later: the same replies, up to rounding."""
        while True:
            try:
                return self._decode(model, queue, sampling, routers)
            except RuntimeError as error:
                together = min(self.slots, len(queue.place_B))
                if not out_of_memory(error) or together == 1:
                    raise
            self.slots = together // 2
            release_memory()
            warnings.warn(
                f"engine 'local': out of memory; from now on at most {self.slots} replies at a time (rollout.engine_options.slots)",
                RuntimeWarning,
                stacklevel=3,
            )

    def _decode(self, model: Any, queue: Queue, sampling: Sampling, routers: Routers | None) -> Replies:
        assert self.context is not None
        slots = min(self.slots, len(queue.place_B))
        limit = max(map(len, queue.prompt_U)) + sampling.max_tokens
        options: dict[str, int] = {"slots": slots, "prefill_tokens": self.prefill_tokens}
        if self.paged and not torch.is_autocast_enabled(model.device.type):
            replies = PagedBatch(model, queue, sampling, self.context.stop_ids, routers=routers, **options).run()
            torch.cuda.empty_cache()
            return replies
        rows = (
            KVCacheState(model, slots, limit, routers)
            if self.cached
            else RecomputeState(model, slots, limit, self.prefill_tokens, routers)
        )
        routes = _Routes(routers, queue) if routers else None
        return _Batch(model, rows, queue, sampling, self.context.stop_ids, slots, self.prefill_tokens, routes).run()

    def close(self) -> None:
        self.context = None


def _can_page(model: Any) -> bool:
    """Whether the model is decoded with pages and graphs; if not, a message says why."""
    obstacle = obstacle_to_pages(model)
    if obstacle is not None:
        warnings.warn(
            f"engine 'local' decodes without CUDA graphs, which is slower: {obstacle}", RuntimeWarning, stacklevel=4
        )
    return obstacle is None


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


class _Routes:
    """The experts of every token: those of a prompt once, those of a reply as it grows. A reply's first entry is of the
    last prompt token, its first input."""

    def __init__(self, routers: Routers, queue: Queue) -> None:
        self.routers, self.queue = routers, queue
        self.prompt_U: list[Tensor] = []
        self.reply_BTLK: Tensor | None = None

    def prefilled(self, routes_UTLK: Tensor | None, prompt_U: Sequence[tuple[int, ...]]) -> None:
        empty = torch.zeros(0, self.routers.layers, self.routers.top_k, dtype=self.routers.compact)
        for u, ids in enumerate(prompt_U):
            self.prompt_U.append(empty if routes_UTLK is None else routes_UTLK[u, : len(ids)].cpu())

    def drawn(self, routes_RLK: Tensor, request_R: Tensor, drawn_R: Tensor, width: int) -> None:
        if self.reply_BTLK is None:
            self.reply_BTLK = routes_RLK.new_zeros(len(self.queue.place_B), width, *routes_RLK.shape[1:])
        if width > self.reply_BTLK.shape[1]:
            more = self.reply_BTLK.new_zeros(
                len(self.reply_BTLK), width - self.reply_BTLK.shape[1], *routes_RLK.shape[1:]
            )
            self.reply_BTLK = torch.cat([self.reply_BTLK, more], dim=1)
        self.reply_BTLK[request_R, drawn_R] = routes_RLK

    def packed(self, length_B: Sequence[int]) -> list[Routes | None]:
        assert self.reply_BTLK is not None
        reply_BTLK = self.reply_BTLK.cpu()
        return [
            self.routers.pack(torch.cat([self.prompt_U[u], reply_BTLK[b, :length]]))
            for b, (u, length) in enumerate(zip(self.queue.prompt_of_B, length_B, strict=True))
        ]


# --- The loop ---


class _Batch:
    """The live rows and their bookkeeping; all per-row numbers are columns of one tensor, so that a row moves at once.

    A row is admitted with all but the last token of its prompt stored. That token is then its first input, so the first
    reply token comes out of the same step as all others."""

    def __init__(
        self,
        model: Any,
        rows: DecodeState,
        queue: Queue,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        slots: int,
        prefill_tokens: int,
        routes: _Routes | None,
    ) -> None:
        self.rows, self.queue, self.sampling, self.routes = rows, queue, sampling, routes
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
        self.steps = self.computed = 0
        """Steps so far, and their rows."""

    def run(self) -> Replies:
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
        prompts = [ids[:-1] for ids in self.queue.prompt_U[self.first_prompt : self.prefilled]]
        routes_UTLK = self.rows.prefill(prompts)
        if self.routes:
            self.routes.prefilled(routes_UTLK, prompts)

    def _step(self) -> None:
        request_R, input_R, position_R, drawn_R, key_R = self.state[:, : self.live]
        logits_RV, routes_RLK = self.rows.step(input_R, position_R, self.columns)
        token_R, logp_R = draw(logits_RV, self.sampling, uniform(key_R, drawn_R))
        token_R, logp_R = with_greedy(logits_RV, self.sampling, key_R, token_R, logp_R)
        self._widen()
        self.token_BT[request_R, drawn_R] = token_R.to(torch.int32)
        self.logp_BT[request_R, drawn_R] = logp_R
        if self.routes and routes_RLK is not None:
            self.routes.drawn(routes_RLK, request_R, drawn_R, self.token_BT.shape[1])
        input_R.copy_(token_R)
        self.state[2:4, : self.live] += 1
        self.columns += 1
        self.drawn += 1
        self.steps += 1
        self.computed += self.live
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

    def _replies(self) -> Replies:
        if self.logp_BT.isnan().any():
            raise NumericalError("sampling: the model's logits are not numbers (NaN); its weights have diverged")
        length_B = self.length_B.tolist()
        token_BT, logp_BT = self.token_BT.cpu().numpy(), self.logp_BT.cpu().numpy()
        return Replies(
            token_ids=[token_BT[b, :n].tolist() for b, n in enumerate(length_B)],
            logp=[logp_BT[b, :n].tolist() for b, n in enumerate(length_B)],
            ended=self.ended_B.tolist(),
            routes=self.routes.packed(length_B) if self.routes else [None] * len(length_B),
            decoded=DecodeStats(steps=self.steps, rows=self.computed),
        )

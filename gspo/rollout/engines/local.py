"""In-process rollouts from the learner's own weights: no copy of the weights and no weight synchronization.

In: a transformers causal language model, prompts, a `Sampling`. Out: the completions of each prompt in sample order.
Invariant: every completion is sampled from `softmax(logits / temperature)` (after `min_tokens`, top-k and top-p) of the
unmodified model with its own random stream, and `logp_sampler` is the log-prob under that distribution. The composition
of a batch affects speed and floating-point rounding, nothing else.

Why it is fast: each distinct prompt is prefilled once and its KV cache is copied to its completions. A finished
completion leaves the batch immediately and a waiting one takes its place; when none waits, the batch shrinks.
Attention reads only the filled columns. Live rows are always the first `R` rows of the cache, so no step computes an
idle row. On a GPU, most models are decoded by `rollout/local/paged.py` instead, with a paged KV cache and CUDA graphs.

Shape suffixes, in addition to those of `types.py`: `R` live rows, `C` filled columns, `A` rows being admitted, `U`
distinct prompts in queue order.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gspo.activity import activity
from gspo.errors import ConfigError
from gspo.model.load import position_limit
from gspo.model.out_of_memory import out_of_memory, release_memory
from gspo.model.routing import Routers
from gspo.rollout.engine import (
    Controls,
    DecodeStats,
    EngineContext,
    EngineTraits,
    ExtendOptions,
    Extension,
    GenerateOptions,
    check_fits,
    continued,
    controls_for,
    eval_mode,
)
from gspo.rollout.local.decoder import obstacle_to_keeping as obstacle_to_paged_keeping
from gspo.rollout.local.decoder import obstacle_to_paging
from gspo.rollout.local.paged import PagedBatch
from gspo.rollout.local.prefixes import PrefixStore
from gspo.rollout.local.sampling import (
    DecodeResult,
    DeviceControls,
    PrefixReuse,
    Queue,
    extension_queue,
    last_tokens,
    make_queue,
    nan_error,
    sample_from_logits,
    tail_of,
    uniform,
    with_greedy,
)
from gspo.rollout.local.states import (
    BLOCK,
    DecodeState,
    RecomputeState,
    cache_state,
    obstacle_to_cache,
    obstacle_to_keeping,
)
from gspo.types import Completion, Prompt, Routes

TRAITS = EngineTraits(
    shares_weights=True,
    data_parallel=True,
    extends=True,
    accepts_quantized=True,
    memory_options=("rollout.engine_options.slots",),
)

# Fields of `_Batch.state`: request, input token, its position, number of tokens sampled, random stream, whether the row
# gets the end of its thinking, its limit on tokens.
_REQUEST, _INPUT, _POSITION, _SAMPLED, _KEY, _FORCED, _LIMIT = _FIELDS = range(7)
KEEP_GB = 4.0
"""Default of the memory for the KV cache of conversations between their turns."""
STOP_EVERY = 8
"""Steps between searches for stop strings. A completion is sampled for up to as many tokens in vain."""


def build(
    context: EngineContext, *, slots: int = 256, prefill_tokens: int = 8192, keep_gb: float = KEEP_GB
) -> LocalEngine:
    """`slots` completions are decoded together; prompts are prefilled in batches of about `prefill_tokens` tokens.
    Between the turns of conversations, their KV cache is kept, up to `keep_gb` in all; `0` keeps nothing."""
    for name, value in (("slots", slots), ("prefill_tokens", prefill_tokens)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"rollout.engine_options.{name}: must be a whole number, at least 1, not {value!r}")
    if isinstance(keep_gb, bool) or not isinstance(keep_gb, int | float) or not 0 <= keep_gb < float("inf"):
        raise ConfigError(f"rollout.engine_options.keep_gb: must be a number, at least 0, not {keep_gb!r}")
    return LocalEngine(context, slots=slots, prefill_tokens=prefill_tokens, keep_gb=keep_gb)


class LocalEngine:
    """Samples completions from `context.model`. Between calls it holds no memory, because the learner needs it, except
    what it keeps of conversations that have not ended."""

    about = ""

    def __init__(self, context: EngineContext, *, slots: int, prefill_tokens: int, keep_gb: float = KEEP_GB) -> None:
        self.context: EngineContext | None = context
        self.decoded = DecodeStats()
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.prefixes = PrefixStore(int(keep_gb * 1e9))
        self.position_limit = position_limit(context.model)
        self.paged = context.model.device.type == "cuda" and _can_page(context)
        if not self.paged:
            _ = self.cached  # warn when the engine is built, not in the middle of a run

    @cached_property
    def cached(self) -> bool:
        """Whether a KV cache can be used when it is not paged. If not, a warning says why."""
        assert self.context is not None
        obstacle = obstacle_to_cache(self.context.model)
        if obstacle is not None:
            warnings.warn(
                f"engine 'local' recomputes every token, which is slow: {obstacle}", RuntimeWarning, stacklevel=5
            )
        return obstacle is None

    @cached_property
    def keeps(self) -> bool:
        """Whether the KV cache of a conversation can be kept between its turns. If not, a warning says why."""
        assert self.context is not None
        if not self.paged and not self.cached:
            return False
        model = self.context.model
        obstacle = (obstacle_to_paged_keeping if self.paged else obstacle_to_keeping)(model)
        if obstacle is not None:
            warnings.warn(
                f"engine 'local' prefills conversations again in each turn, which is slower: {obstacle}",
                RuntimeWarning,
                stacklevel=5,
            )
        return obstacle is None

    @property
    def reports_routes(self) -> bool:
        return self.context is not None and self.context.routers is not None

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        if self.context is None:
            raise RuntimeError("engine 'local' was closed")
        samples, sampling, version = options.samples, options.sampling, options.version
        if not prompts or samples == 0:
            return [[] for _ in prompts]
        check_fits(self.position_limit, prompts, sampling)
        controls = controls_for(self.context, sampling)
        queue = make_queue(prompts, samples=samples, sampling=sampling, seed=options.seed, stream=options.stream)
        if any(queue.conversation_B):
            self.prefixes.begin(version)
        groups: list[list[Completion]] = [[None] * samples for _ in prompts]  # type: ignore[list-item]
        for (p, sample), fields in self._sample(queue, controls, routes=options.routes):
            groups[p][sample] = Completion(prompt_id=prompts[p].id, sample=sample, version=version, **fields)
        return groups

    def extend(self, extensions: Sequence[Extension], options: ExtendOptions) -> list[list[Completion]]:
        if self.context is None:
            raise RuntimeError("engine 'local' was closed")
        groups = [list(extension.completions) for extension in extensions]
        controls = controls_for(self.context, options.sampling)
        queue = extension_queue(extensions, controls, seed=options.seed)
        if not queue.place_B:
            return groups
        check_fits(self.position_limit, [extension.prompt for extension in extensions], options.sampling)
        for (p, i), fields in self._sample(queue, controls, routes=options.routes):
            groups[p][i] = continued(groups[p][i], [(options.version, len(groups[p][i].token_ids))], fields)
        return groups

    def _sample(
        self, queue: Queue, controls: Controls, *, routes: bool
    ) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        """The completions of a queue: where each belongs, and its fields."""
        assert self.context is not None
        model = self.context.model
        with eval_mode(model), torch.no_grad():
            result = self._decode_within_memory(model, queue, controls, self.context.routers if routes else None)
        self.decoded += result.decoded
        text_B = self.context.texts(result.token_ids)
        ended = zip(result.token_ids, result.logp, result.ends, strict=True)
        fields_B = [controls.fields(ids, logp, end) for ids, logp, end in ended]
        sampled = zip(queue.place_B, text_B, result.routes, fields_B, strict=True)
        return [(place, {"text": text, "routes": route, **fields}) for place, text, route, fields in sampled]

    def _decode_within_memory(
        self, model: Any, queue: Queue, controls: Controls, routers: Routers | None
    ) -> DecodeResult:
        """If generation runs out of memory, restart it with half as many slots and keep that limit for the rest of the
        run. The completions are the same, up to rounding. Before that, drop what is kept of conversations."""
        # Under autocast, a paged engine decodes without its paged KV cache, which the trial of `keeps` was about.
        tried = not self.paged or self._pages(model)
        wants = any(queue.conversation_B) and self.prefixes.limit > 0 and tried and self.keeps
        while True:
            reuse = PrefixReuse(queue, self.prefixes if wants else None, routed=routers is not None)
            try:
                return self._decode(model, queue, controls, routers, reuse)
            except RuntimeError as error:
                concurrent = min(self.slots, len(queue.place_B))
                if not out_of_memory(error) or (concurrent == 1 and not wants):
                    raise
            # Outside of `except`: the error's traceback would keep the tensors of the failed attempt alive.
            del reuse
            self.prefixes.clear()
            release_memory()
            if wants:
                wants = False
                continue
            self.slots = concurrent // 2
            warnings.warn(
                f"engine 'local': out of memory; for the rest of the run it samples at most {self.slots} completions "
                "at a time; lower rollout.engine_options.slots to avoid the restart",
                RuntimeWarning,
                stacklevel=3,
            )

    def _decode(
        self,
        model: Any,
        queue: Queue,
        controls: Controls,
        routers: Routers | None,
        reuse: PrefixReuse | None = None,
    ) -> DecodeResult:
        slots = min(self.slots, len(queue.place_B))
        limit = queue.positions
        reuse = reuse or PrefixReuse(queue)
        options: dict[str, Any] = {"slots": slots, "prefill_tokens": self.prefill_tokens, "reuse": reuse}
        if self._pages(model):
            result = PagedBatch(model, queue, controls, routers=routers, **options).run()
            torch.cuda.empty_cache()  # the learner needs the memory of the KV cache
            return result
        state = (
            cache_state(model, slots, limit, routers)
            if self.cached
            else RecomputeState(model, slots, limit, self.prefill_tokens, routers)
        )
        routes = _RouteLog(routers, queue) if routers else None
        return _Batch(model, state, queue, controls, routes=routes, **options).run()

    def _pages(self, model: Any) -> bool:
        """Whether the paged KV cache is used now."""
        # The kernels of the paged path round as the model does without autocast.
        return self.paged and not torch.is_autocast_enabled(model.device.type)

    def sync(self, version: int) -> None:
        """Nothing to send: the weights are the learner's own. What others have computed is of no use."""
        self.prefixes.begin(version)

    def end_conversations(self, conversations: Sequence[str]) -> None:
        if not len(self.prefixes):
            return
        self.prefixes.end(conversations)
        if self.paged and not len(self.prefixes):
            torch.cuda.empty_cache()  # the learner needs the memory

    def close(self) -> None:
        self.prefixes.clear()
        self.context = None


def _can_page(context: EngineContext) -> bool:
    """Whether the model can be decoded with a paged KV cache and CUDA graphs. If not, a warning says why."""
    # Fused projections copy weights, and CUDA graphs need them at fixed addresses.
    layers = "ranks.sampling_weights gathers the weights layer by layer"
    obstacle = obstacle_to_paging(context.model) if context.whole_weights else layers
    if obstacle is not None:
        warnings.warn(
            f"engine 'local' decodes without CUDA graphs, which is slower: {obstacle}", RuntimeWarning, stacklevel=4
        )
    return obstacle is None


class _RouteLog:
    """The experts of every token: of a prompt once, of a completion as it grows. The first entry of a completion
    belongs to the last prompt token, which is its first input. Tokens from before this call count as prompt."""

    def __init__(self, routers: Routers, queue: Queue) -> None:
        self.routers = routers
        self.queue = queue
        self.prompt_U: list[Tensor] = []
        self.completion_BTLK: Tensor | None = None

    def add_prompts(self, routes_UTLK: Tensor | None, reuse: PrefixReuse, prompts: Sequence[int]) -> None:
        """`routes_UTLK`: the experts of what was computed of these prompts."""
        empty = torch.zeros(0, self.routers.layers, self.routers.top_k, dtype=self.routers.compact)
        for i, u in enumerate(prompts):
            new = empty if routes_UTLK is None else routes_UTLK[i, : reuse.computed(u)].cpu()
            self.prompt_U.append(reuse.routes(u, new))

    def add_step(self, routes_RLK: Tensor, request_R: Tensor, sampled_R: Tensor, width: int) -> None:
        if self.completion_BTLK is None:
            self.completion_BTLK = routes_RLK.new_zeros(len(self.queue.place_B), width, *routes_RLK.shape[1:])
        if width > self.completion_BTLK.shape[1]:
            more = self.completion_BTLK.new_zeros(
                len(self.completion_BTLK), width - self.completion_BTLK.shape[1], *routes_RLK.shape[1:]
            )
            self.completion_BTLK = torch.cat([self.completion_BTLK, more], dim=1)
        self.completion_BTLK[request_R, sampled_R] = routes_RLK

    def pack(self, length_B: Sequence[int]) -> list[Routes | None]:
        assert self.completion_BTLK is not None
        self.completion_BTLK = self.completion_BTLK.cpu()
        return [self.routers.pack(self.of(b, length)) for b, length in enumerate(length_B)]

    def of(self, request: int, length: int) -> Tensor:
        """The experts of a prompt and its completion of this length, but for the last token, which no forward has
        read."""
        assert self.completion_BTLK is not None
        own = self.completion_BTLK[request, self.queue.start_B[request] : length].cpu()
        return torch.cat([self.prompt_U[self.queue.prompt_of_B[request]], own])


# --- The decoding loop ---


class _Batch:
    """The live rows and their bookkeeping. The state of a row is one column of one tensor, so that it moves in one
    copy.

    A row is admitted with all but the last token of its prompt in the cache. That token is its first input, so the
    first token of a completion comes from the same kind of step as all others."""

    def __init__(
        self,
        model: Any,
        decode_state: DecodeState,
        queue: Queue,
        controls: Controls,
        *,
        slots: int,
        prefill_tokens: int,
        reuse: PrefixReuse,
        routes: _RouteLog | None,
    ) -> None:
        self.decode_state = decode_state
        self.queue = queue
        self.reuse = reuse
        self.controls = controls
        self.sampling = controls.sampling
        self.routes = routes
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.dtype = model.dtype
        device = model.device
        requests = len(queue.place_B)
        self.state = torch.zeros(len(_FIELDS), slots, dtype=torch.int64, device=device)
        self.on_device = DeviceControls(controls, device)
        lengths = [len(queue.prompt_U[u]) - 1 for u in queue.prompt_of_B]
        last = [queue.prompt_U[u][-1] for u in queue.prompt_of_B]
        fresh = [list(range(requests)), last, lengths, queue.start_B, queue.key_B, queue.forced_B, queue.limit_B]
        # All requests at once: one copy to the device instead of one per admission.
        self.fresh_B = torch.tensor(fresh, dtype=torch.int64, device=device)
        self.widest = max(queue.limit_B)
        width = min(self.widest, max(BLOCK, max(queue.start_B) + 1))
        # int32 holds every token id, at half the memory.
        self.token_BT = torch.zeros(requests, width, dtype=torch.int32, device=device)
        self.logp_BT = torch.zeros(requests, width, dtype=torch.float32, device=device)
        for b, start in enumerate(queue.start_B):
            if start:
                self.token_BT[b, :start] = torch.tensor(queue.tokens(b), dtype=torch.int32, device=device)
        self.length_B = torch.zeros(requests, dtype=torch.int64, device=device)
        self.cut_B = list(queue.forced_B)
        self.live = 0
        self.admitted = 0
        self.prefilled = 0
        self.first_prompt = 0
        self.columns = 0
        """Columns that the next step reads: the largest position of a live row, plus one."""
        self.most_sampled = 0
        """The largest number of tokens that a live row has sampled."""
        self.steps = 0
        self.rows_computed = 0
        """Rows of all steps so far."""
        self.prefill_computed = 0
        """Prompt tokens that were computed by prefill."""
        self.prefill_reused = 0
        """Prompt tokens that earlier calls had computed."""

    def run(self) -> DecodeResult:
        with activity("sampling", total=len(self.queue.place_B), unit="completions") as doing:
            while self.live or self.admitted < len(self.queue.place_B):
                self._admit()
                self._step()
                doing.done, doing.tokens = self.admitted - self.live, self.rows_computed
            return self._result()

    def _admit(self) -> None:
        """Admit waiting requests, a few at a time: admitting one costs about as much as admitting ten."""
        waiting = len(self.queue.place_B) - self.admitted
        if self.slots - self.live < min(waiting, max(1, self.slots // 16)):
            return
        while waiting and self.live < self.slots:
            if self.queue.prompt_of_B[self.admitted] >= self.prefilled:
                self._prefill()
            # `prompt_of_B` never decreases, so the requests of the prefilled prompts are a prefix of the queue.
            ready = bisect_left(self.queue.prompt_of_B, self.prefilled) - self.admitted
            count = min(self.slots - self.live, ready)
            fresh_A = self.fresh_B[:, self.admitted : self.admitted + count]
            prompts = self.queue.prompt_of_B[self.admitted : self.admitted + count]
            # Prompts are sorted by length, so the first is the longest.
            self.columns = max(self.columns, len(self.queue.prompt_U[prompts[0]]))
            prompt_A = torch.tensor([u - self.first_prompt for u in prompts], device=self.state.device)
            self.decode_state.admit(self.live, prompt_A, self.columns)
            self.state[:, self.live : self.live + count] = fresh_A
            self.most_sampled = max(self.most_sampled, *self.queue.start_B[self.admitted : self.admitted + count])
            self.live += count
            self.admitted += count
            waiting -= count

    def _prefill(self) -> None:
        """Prefill the next prompts of the queue together, as many as the token budget allows."""
        self.first_prompt = self.prefilled
        chosen = self.reuse.fitting(range(self.first_prompt, len(self.queue.prompt_U)), self.prefill_tokens)
        self.prefilled += len(chosen)
        prompts = [self.queue.prompt_U[u][:-1] for u in chosen]
        routes_UTLK = self.decode_state.prefill(prompts, [self.reuse.prefix(u) for u in chosen])
        if self.routes:
            self.routes.add_prompts(routes_UTLK, self.reuse, chosen)
        self.prefill_computed += sum(map(self.reuse.computed, chosen))
        self.prefill_reused += sum(map(self.reuse.reused, chosen))
        for u in chosen:
            self.reuse.drop(u)  # the decoding state has its own copy

    def _step(self) -> None:
        request_R, input_R, position_R, sampled_R, key_R, forced_R, limit_R = self.state[:, : self.live]
        logits_RV, routes_RLK = self.decode_state.step(input_R, position_R, self.columns)
        self.on_device.exclude_ends(logits_RV, sampled_R)
        token_R, logp_R = sample_from_logits(logits_RV, self.sampling, uniform(key_R, sampled_R))
        token_R, logp_R = with_greedy(logits_RV, self.sampling, key_R, token_R, logp_R)
        token_R = self.on_device.force(token_R, sampled_R, forced_R)
        self._widen()
        self.token_BT[request_R, sampled_R] = token_R.to(torch.int32)
        self.logp_BT[request_R, sampled_R] = logp_R
        if self.routes and routes_RLK is not None:
            self.routes.add_step(routes_RLK, request_R, sampled_R, self.token_BT.shape[1])
        # In place: `input_R` is a view of the state.
        input_R.copy_(token_R)
        # Both fields in one operation. `sampled_R` is a view of the second, so it counts this token from here on.
        self.state[_POSITION : _SAMPLED + 1, : self.live] += 1
        self.columns += 1
        self.most_sampled += 1
        self.steps += 1
        self.rows_computed += self.live
        finished_R = (token_R[:, None] == self.on_device.stop_ids).any(1) | (sampled_R >= limit_R)
        if self.sampling.thinking_budget:
            self._end_thinking(finished_R)
        if self.sampling.stop and self.steps % STOP_EVERY == 0:
            finished_R |= self._find_stops()
        # Without stop strings and thinking budget, the one point of a step at which the host waits for the device.
        if finished_R.any():
            self._retire(finished_R)

    def _end_thinking(self, finished_R: Tensor) -> None:
        """Decide for rows that have just spent their thinking budget whether its end is inserted."""
        budget = self.sampling.thinking_budget
        spent = ((self.state[_SAMPLED, : self.live] == budget) & ~finished_R).nonzero().squeeze(1)
        if not len(spent):
            return
        request_A = self.state[_REQUEST, spent]
        unclosed_A = self.controls.unclosed(self.token_BT[request_A, :budget].tolist())
        self.state[_FORCED, spent] = torch.tensor(unclosed_A, dtype=torch.int64, device=self.state.device)
        for request, unclosed in zip(request_A.tolist(), unclosed_A, strict=True):
            self.cut_B[request] = unclosed

    def _find_stops(self) -> Tensor:
        """Whether each live row has sampled a stop string since the last search."""
        request_R, sampled_R = self.state[_REQUEST, : self.live], self.state[_SAMPLED, : self.live]
        tokens = last_tokens(self.token_BT[request_R], sampled_R, self.controls.window + STOP_EVERY).tolist()
        counts = zip(tokens, request_R.tolist(), sampled_R.tolist(), strict=True)
        tails = [tail_of(ids, count, STOP_EVERY, cut=self.cut_B[request]) for ids, request, count in counts]
        found = [index is not None for index in self.controls.stop_indices(tails)]
        return torch.tensor(found, device=self.state.device)

    def _widen(self) -> None:
        """Make room for one more token. The width doubles, so that a high limit costs memory only when it is
        reached."""
        width = self.token_BT.shape[1]
        if self.most_sampled < width:
            return
        more = min(width, self.widest - width)
        self.token_BT = torch.nn.functional.pad(self.token_BT, (0, more))
        self.logp_BT = torch.nn.functional.pad(self.logp_BT, (0, more))

    def _retire(self, finished_R: Tensor) -> None:
        """Record the finished rows and fill their holes with the last live rows."""
        request_R = self.state[_REQUEST, : self.live]
        sampled_R = self.state[_SAMPLED, : self.live]
        self.length_B[request_R[finished_R]] = sampled_R[finished_R]
        if self.reuse.store is not None:
            self._keep(finished_R)
        remaining = int((~finished_R).sum())
        hole = finished_R[:remaining].nonzero().squeeze(1)
        if len(hole):
            source = (~finished_R[remaining:]).nonzero().squeeze(1) + remaining
            self.state[:, hole] = self.state[:, source]
            # Only the columns that have been written.
            self.decode_state.move(source, hole, self.columns - 1)
        self.live = remaining
        if remaining:
            last_position, self.most_sampled = self.state[_POSITION : _SAMPLED + 1, :remaining].amax(1).tolist()
            self.columns = last_position + 1
        else:
            self.columns = 0
            self.most_sampled = 0

    def _keep(self, finished_R: Tensor) -> None:
        """Keep the cache of the finished rows that a later turn may continue from."""
        row_A = finished_R.nonzero().squeeze(1)
        # The input of the next step, which has no keys and values yet, is at the row's position.
        read_A = self.state[_POSITION, row_A].tolist()
        for row, request, read in zip(row_A.tolist(), self.state[_REQUEST, row_A].tolist(), read_A, strict=True):
            if self.reuse.keeps(request):
                self.reuse.put(request, self.decode_state.read(row, read))

    def _describe(self, token_BT: Any) -> None:
        """Name the tokens of what was kept."""
        for b, n in enumerate(self.length_B.tolist()):
            if self.reuse.keeps(b):
                self.reuse.describe(b, token_BT[b, :n].tolist(), self.routes.of(b, n) if self.routes else None)

    def _result(self) -> DecodeResult:
        # Once for all steps; a check in each would cost more.
        if self.logp_BT.isnan().any():
            raise nan_error(self.dtype)
        token_BT = self.token_BT.cpu().numpy()
        logp_BT = self.logp_BT.cpu().numpy()
        ends = self.controls.ends([token_BT[b, :n].tolist() for b, n in enumerate(self.length_B.tolist())], self.cut_B)
        length_B = [end.length for end in ends]
        self._describe(token_BT)
        return DecodeResult(
            token_ids=[token_BT[b, :n].tolist() for b, n in enumerate(length_B)],
            logp=[logp_BT[b, :n].tolist() for b, n in enumerate(length_B)],
            ends=ends,
            routes=self.routes.pack(length_B) if self.routes else [None] * len(length_B),
            decoded=DecodeStats(
                steps=self.steps,
                rows=self.rows_computed,
                prefilled=self.prefill_computed,
                reused=self.prefill_reused,
            ),
        )

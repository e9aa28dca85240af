"""Sampling requests with their random streams, and sampling one token per row from them.

In: the prompts of one call; later the logits of each step. Out: a `Queue` of requests, which an engine admits in its
order; what they reuse of earlier turns of their conversations (`PrefixReuse`); tokens and their log-probs under the
distribution they were sampled from. Invariant: a token depends only on its own logits, the stream of its request and
the position in that stream. So the order of requests and the composition of a batch affect speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.errors import FLOAT16_HINT, NumericalError
from gspo.rollout.engine import Controls, DecodeStats, End, Extension, Tail, ends_thinking, stream_key
from gspo.rollout.local.prefixes import KeptPrefix, Pairs, PrefixStore
from gspo.types import Prompt, Routes, Sampling, StopReason

MOST_READ = 8
"""Tokens that prompts attend to when they are prefilled together, for each token that may be computed."""
GREEDY = -1
"""The stream key of a row that is decoded greedily. Keys of random streams are never negative."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The requests of one call. The prompt of a completion that is continued includes its tokens so far."""

    prompt_U: list[tuple[int, ...]]
    """Distinct prompts, longest first. Neighbors have similar lengths, so prefill pads little."""
    prompt_of_B: list[int]
    """Index into `prompt_U` of each request's prompt; never decreasing."""
    place_B: list[tuple[int, int]]
    """Where the completion belongs: (index of the prompt in the call, sample)."""
    key_B: list[int]
    """The random stream of each request; `GREEDY` for greedy decoding."""
    start_B: list[int]
    """How many tokens each completion has already: they are the last ones of its prompt."""
    limit_B: list[int]
    """The number of tokens at which each completion is cut, or is over."""
    forced_B: list[bool]
    """Whether the end of its thinking is inserted, or was, as far as its tokens so far decide that."""
    conversation_B: list[str]
    """The conversation that each completion is a turn of; empty if none follows."""

    @property
    def positions(self) -> int:
        """Enough positions for every request."""
        ends = zip(self.prompt_of_B, self.start_B, self.limit_B, strict=True)
        return max(len(self.prompt_U[u]) - start + limit for u, start, limit in ends)

    def tokens(self, request: int) -> tuple[int, ...]:
        """The tokens that a completion has already."""
        prompt = self.prompt_U[self.prompt_of_B[request]]
        return prompt[len(prompt) - self.start_B[request] :]


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A completion to sample."""

    prompt: tuple[int, ...]
    """With the tokens of the completion that exist."""
    place: tuple[int, int]
    key: int
    start: int
    limit: int
    forced: bool
    conversation: str = ""


def make_queue(prompts: Sequence[Prompt], *, samples: int, sampling: Sampling, seed: int, stream: str) -> Queue:
    """`samples` requests for every prompt."""

    def key(p: int, sample: int) -> int:
        greedy = sampling.greedy_last and sample == samples - 1
        return GREEDY if greedy else stream_key(seed, stream, prompts[p].id, sample)

    return _queue(
        [
            _Request(
                prompt=prompt.token_ids,
                place=(p, sample),
                key=key(p, sample),
                start=0,
                limit=sampling.max_tokens,
                forced=False,
                conversation=prompt.conversation,
            )
            for p, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
    )


def extension_queue(extensions: Sequence[Extension], controls: Controls, *, seed: int) -> Queue:
    """A request for every completion that was cut."""
    return _queue(
        [
            _Request(
                prompt=extension.prompt.token_ids + c.token_ids,
                place=(p, i),
                key=stream_key(seed, extension.stream, extension.prompt.id, c.sample),
                start=len(c.token_ids),
                limit=min(controls.sampling.max_tokens, len(c.token_ids) + extension.tokens),
                forced=ends_thinking(controls, c),
            )
            for p, extension in enumerate(extensions)
            for i, c in enumerate(extension.completions)
            if c.stop is StopReason.CUT
        ]
    )


def _queue(requests: Sequence[_Request]) -> Queue:
    # The ids break ties, because the order of a set is arbitrary.
    distinct = sorted({r.prompt for r in requests}, key=lambda ids: (-len(ids), ids))
    index = {ids: u for u, ids in enumerate(distinct)}
    ordered = sorted(requests, key=lambda r: index[r.prompt])
    return Queue(
        prompt_U=distinct,
        prompt_of_B=[index[r.prompt] for r in ordered],
        place_B=[r.place for r in ordered],
        key_B=[r.key for r in ordered],
        start_B=[r.start for r in ordered],
        limit_B=[r.limit for r in ordered],
        forced_B=[r.forced for r in ordered],
        conversation_B=[r.conversation for r in ordered],
    )


class PrefixReuse:
    """What the turns of one call reuse of earlier ones, and keep for later ones."""

    def __init__(self, queue: Queue, store: PrefixStore | None = None, *, routed: bool = False) -> None:
        """Without a store, nothing is reused or kept."""
        self.store = store
        self._queue = queue
        self._prefix_U: list[KeptPrefix | None] = [None] * len(queue.prompt_U)
        for u, conversation in zip(queue.prompt_of_B, queue.conversation_B, strict=True):
            if store is None or not conversation:
                continue
            # The last prompt token is the first input of decoding, which computes its keys and values.
            found = store.take(conversation, queue.prompt_U[u][:-1], routed=routed)
            before = self._prefix_U[u]
            # Conversations that are the same so far share a prompt.
            if found is not None and (before is None or len(found.token_ids) > len(before.token_ids)):
                self._prefix_U[u] = found

    def prefix(self, u: int) -> KeptPrefix | None:
        """The prefix of a prompt that need not be computed."""
        return self._prefix_U[u]

    def reused(self, u: int) -> int:
        """Its number of tokens."""
        prefix = self._prefix_U[u]
        return 0 if prefix is None else len(prefix.token_ids)

    def computed(self, u: int) -> int:
        """The number of tokens of a prompt that prefill computes."""
        return len(self._queue.prompt_U[u]) - 1 - self.reused(u)

    def fitting(self, candidates: Iterable[int], tokens: int) -> list[int]:
        """The first of these prompts that can be prefilled together, padded to at most `tokens` tokens; at least
        one."""
        chosen: list[int] = []
        widest = longest = 1
        for u in candidates:
            widest = max(widest, self.computed(u) + 1)
            longest = max(longest, len(self._queue.prompt_U[u]))
            # The keys and values that they attend to are gathered, which takes memory, too.
            if chosen and max(widest, longest / MOST_READ) * (len(chosen) + 1) > tokens:
                break
            chosen.append(u)
        return chosen

    def routes(self, u: int, computed: Tensor) -> Tensor:
        """The experts of a prompt, [tokens, L, K], from those of what was computed: those of its prefix are from the
        turn that computed them."""
        prefix = self._prefix_U[u]
        return computed if prefix is None or prefix.routes is None else torch.cat([prefix.routes, computed])

    def drop(self, u: int) -> None:
        """Free the prefix of a prompt whose completions have all been admitted."""
        self._prefix_U[u] = None

    def keeps(self, request: int) -> bool:
        """Whether a later call may continue from the completion of a request."""
        return self.store is not None and bool(self._queue.conversation_B[request])

    def put(self, request: int, pairs: Pairs) -> None:
        """Keep the keys and values of a request that has finished."""
        assert self.store is not None
        self.store.put(self._queue.conversation_B[request], pairs)

    def describe(self, request: int, token_ids: Sequence[int], routes: Tensor | None) -> None:
        """Name what was kept of a request: it has sampled `token_ids`, and `routes` are the experts of the tokens that
        the model has read. It has not read the last one."""
        assert self.store is not None
        queue = self._queue
        ids = (*queue.prompt_U[queue.prompt_of_B[request]], *token_ids)[:-1]
        self.store.describe(queue.conversation_B[request], ids, routes)


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """The sampled completions, in queue order."""

    token_ids: list[list[int]]
    logp: list[list[float]]
    ends: list[End]
    """Where each completion ends. `token_ids` and `logp` end there, too. Tokens that were inserted to end its thinking
    have a meaningless number in `logp`, and so have tokens from before this call."""
    routes: Sequence[Routes | None]
    decoded: DecodeStats


class DeviceControls:
    """The controls that act on a step of all rows, without the host. `column_R` is the position in the completion."""

    def __init__(self, controls: Controls, device: torch.device) -> None:
        self.stop_ids = torch.tensor(controls.stop_ids, dtype=torch.int64, device=device)
        self.min_tokens = controls.sampling.min_tokens
        self.budget = controls.sampling.thinking_budget
        self.forced_ids = torch.tensor(controls.forced_ids, dtype=torch.int64, device=device)

    def exclude_ends(self, logits_RV: Tensor, column_R: Tensor) -> None:
        """Give end tokens probability 0 at the first `min_tokens` positions, in place."""
        if self.min_tokens:
            early_R1 = (column_R < self.min_tokens)[:, None]
            end_RE = logits_RV.index_select(1, self.stop_ids).masked_fill(early_R1, -torch.inf)
            logits_RV.index_copy_(1, self.stop_ids, end_RE)

    def force(self, token_R: Tensor, column_R: Tensor, forced_R: Tensor) -> Tensor:
        """The sampled tokens, or after the thinking budget those that end thinking in the rows where `forced_R` is
        set."""
        if not self.budget:
            return token_R
        index_R = column_R - self.budget
        inside_R = (forced_R > 0) & (index_R >= 0) & (index_R < len(self.forced_ids))
        return torch.where(inside_R, self.forced_ids[index_R.clamp(0, len(self.forced_ids) - 1)], token_R)


def last_tokens(token_RT: Tensor, count_R: Tensor, width: int) -> Tensor:
    """The last `width` of the `count` tokens of each row; the first column comes again where a row has fewer."""
    column_RW = count_R[:, None] - torch.arange(width, 0, -1, device=count_R.device)
    return token_RT.gather(1, column_RW.clamp(min=0))


def tail_of(tokens: Sequence[int], count: int, new: int, *, cut: bool) -> Tail:
    """The row of `last_tokens` of a completion with `count` tokens, of which the last `new` may end it."""
    ids = tokens[max(0, len(tokens) - count) :]
    return Tail(ids=ids, start=count - len(ids), first=max(0, len(ids) - new), cut=cut)


def uniform(key_R: Tensor, index_R: Tensor) -> Tensor:
    """Element `index` of the SplitMix64 sequence seeded with `key`, as a float64 in (0, 1).

    The generator is counter-based, so the numbers of a completion do not depend on the rest of the batch. It uses
    integer arithmetic, so they are the same on every device."""
    # Signed integers wrap around in torch, with the same bits as the unsigned ones of the reference implementation.
    z = key_R + (index_R + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    # 52 bits, not 53: with 53, adding a half could round up to 1.
    return (_shifted(z, 12).to(torch.float64) + 0.5) * 2.0**-52


def _signed(word: int) -> int:
    return word - (1 << 64)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift. torch's `>>` is arithmetic: it copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sample_from_logits(logits_RV: Tensor, sampling: Sampling, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution; tokens and their log-probs."""
    if sampling.temperature == 0:
        return _greedy(logits_RV)
    logp_RV = torch.log_softmax(_filter(logits_RV.float() / sampling.temperature, sampling), dim=-1)
    # float64: over a large vocabulary, a float32 sum would lose the mass of unlikely tokens.
    cumulative_RV = logp_RV.exp().to(torch.float64).cumsum(-1)
    # The threshold is above 0, so the first entry that reaches it never has probability 0.
    threshold_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    # NaN logits would give an index past the end. The clamp avoids a device-side assert; the caller then reports the
    # NaN.
    token_R1 = torch.searchsorted(cumulative_RV, threshold_R1).clamp_(max=logits_RV.shape[1] - 1)
    return token_R1.squeeze(1), logp_RV.gather(1, token_R1).squeeze(1)


def nan_error(dtype: torch.dtype) -> NumericalError:
    """The error for log-probs that are NaN, by the precision of the model."""
    hint = FLOAT16_HINT if dtype == torch.float16 else ""
    return NumericalError(f"sampling: the model's logits are not numbers (NaN); its weights have diverged{hint}")


def with_greedy(
    logits_RV: Tensor, sampling: Sampling, key_R: Tensor, token_R: Tensor, logp_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The sampled tokens, except for rows whose key is `GREEDY`: they get the most likely token."""
    if not sampling.greedy_last:
        return token_R, logp_R
    greedy_R = key_R == GREEDY
    greedy_token_R, greedy_logp_R = _greedy(logits_RV)
    return torch.where(greedy_R, greedy_token_R, token_R), torch.where(greedy_R, greedy_logp_R, logp_R)


def _greedy(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token. Its log-prob is 0: at temperature 0 the distribution has a single token."""
    token_R = logits_RV.argmax(-1)
    return token_R, torch.zeros_like(token_R, dtype=torch.float32)


def _filter(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """Apply top-k, then top-p to the remaining tokens. Top-p keeps the token that crosses the threshold."""
    if 0 < sampling.top_k < logits_RV.shape[1]:
        # By value, so that ties with the last token are kept and the result does not depend on their order.
        least_R1 = logits_RV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    if sampling.top_p < 1:
        sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
        p_RV = sorted_RV.softmax(-1, dtype=torch.float64)
        drop_RV = p_RV.cumsum(-1) - p_RV >= sampling.top_p
        drop_RV[:, 0] = False  # the most likely token always stays, also at top_p = 0
        logits_RV = logits_RV.masked_fill(drop_RV.scatter(1, order_RV, drop_RV), -torch.inf)
    return logits_RV

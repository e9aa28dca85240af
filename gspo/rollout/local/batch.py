"""The decoding loop on a GPU: the host hands out rows and pages, the device does the rest.

In: a queue of requests. Out: their replies. Invariant: which rows are together changes rounding, nothing else; the order of
events is decided by the replies alone, never by timing.

A step is captured as a graph once per batch size and then replayed: forward, draw and bookkeeping are one launch. The host
looks at the rows one step behind, so the device never waits for it; a row that has ended idles for the one step that it
takes to be noticed. Then the next request takes its slot. Prompts are read once; their full pages are shared by all their
replies, the last, partly filled one is copied. When none waits, live rows are moved together and smaller graphs take over.
If pages run out, the youngest reply is put back and drawn again later, from the same random stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.errors import NumericalError
from gspo.model.routing import Routers
from gspo.rollout.engine import DecodeStats
from gspo.rollout.local.blocks import PAGE, BlockAllocator, pages_for
from gspo.rollout.local.cuda_graphs import CudaGraphs
from gspo.rollout.local.decoder import Decoder, bytes_per_page
from gspo.rollout.local.queue import Queue, Replies
from gspo.rollout.local.slots import DRAWN, LIVE, make_slots
from gspo.types import Routes, Sampling

AHEAD = 16
"""Rows get pages for so many tokens at a time."""
SIZES = (8, 32, 64, 128, 256, 512)
"""Batch sizes that the end of a queue shrinks to: few, since each is captured anew."""
SHARE = 0.8
"""Of the free memory, what pages may take; the rest is for activations."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What the host knows of a slot."""

    request: int
    pages: list[int]
    position: int
    """Of its first input."""
    since: int
    """The first step that it takes part in."""


@dataclass(frozen=True, kw_only=True)
class _Entering:
    """Rows that enter together."""

    rows: list[tuple[int, _Row]] = field(default_factory=list)
    """With their slots."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy, from and to."""
    read: list[int] = field(default_factory=list)
    """Pages of prompts that nobody waits for any more, once they are copied."""


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """Replies that were noticed together."""

    requests: list[int]
    lengths: list[int]
    token: Tensor
    logp: Tensor
    routes: Tensor | None


class PagedBatch:
    """Draws the replies of one queue; everything it holds is freed with it."""

    def __init__(
        self,
        model: Any,
        queue: Queue,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        *,
        slots: int,
        prefill_tokens: int,
        routers: Routers | None = None,
        pages: int | None = None,
    ) -> None:
        self.queue, self.sampling, self.stop_ids = queue, sampling, stop_ids
        self.prefill_tokens, self.device, self.routers = prefill_tokens, model.device, routers
        self.width = pages_for(max(map(len, queue.prompt_U)) + sampling.max_tokens)
        routed = (routers.layers, routers.top_k, routers.compact) if routers else None
        self.slots = make_slots(slots, self.width, sampling.max_tokens, model.device, routed)
        count = pages or self._affordable(model, slots)
        self.pages = BlockAllocator(count)
        self.decoder = Decoder(model, self.slots, count, routers)
        self.stops = torch.tensor(stop_ids, dtype=torch.int64, device=model.device)
        self.launch = CudaGraphs(self._step) if model.device.type == "cuda" else self._step
        self.rows: list[_Row | None] = [None] * slots
        self.waiting = list(range(len(queue.place_B)))[::-1]
        """Requests, the next one last."""
        self.wanted = Counter(queue.prompt_of_B)
        """How many of them continue each prompt."""
        self.held: dict[int, list[int]] = {}
        """Pages of the prompts that were read for them."""
        self.prompt_routes: dict[int, Tensor] = {}
        self.read_by: dict[int, Tensor] = {}
        """Experts of the prompt, for each request that was admitted: read again, they might be others."""
        self.short = False
        """Pages have run out: none enters before another has ended."""
        self.steps = 0
        self.computed = 0
        """Rows of all steps so far."""
        self.bucket = slots
        self.unseen: list[tuple[int, Tensor, Any]] = []
        """Steps that the host has not looked at: number, which rows were live after it, when that can be read."""
        self.ended: list[_Ended] = []

    def _affordable(self, model: Any, slots: int) -> int:
        """Pages for every slot at its longest and for the prompts that are held, or as many as fit into memory."""
        wanted = 2 + slots * self.width + 2 * (pages_for(self.prefill_tokens) + self.width)
        if model.device.type != "cuda":
            return wanted
        torch.cuda.empty_cache()
        narrowed = self.sampling.top_p < 1 or self.sampling.top_k > 0
        logits = slots * model.get_input_embeddings().num_embeddings * (40 if narrowed else 8)
        room = int(SHARE * (torch.cuda.mem_get_info(model.device)[0] - logits))
        # In sixteenths, so that a little more or less free memory does not change which replies are drawn together.
        parts = min(16, 16 * room // (bytes_per_page(model) * wanted))
        return max(2 + 2 * self.width, wanted * parts // 16)

    def run(self) -> Replies:
        """Every reply of the queue."""
        try:
            while self.waiting or any(self.rows):
                self._admit()
                self._extend()
                self.launch(self.bucket)
                self.unseen.append((self.steps, *_fetched(self.slots.state[LIVE])))
                self.steps += 1
                self.computed += self.bucket
                self._poll_finished(behind=1)
                self._compact()
            return self._replies()
        finally:
            # It refers back to this, and a graph that is left to the garbage collector may go at a bad moment.
            del self.launch

    def _step(self, rows: int) -> None:
        """One token for each of the first rows, on the device alone."""
        slots, kernels = self.slots.first(rows), self.decoder.kernels
        logits_RV, routes_RLK = self.decoder.logits(rows)
        if slots.routes_STLK is not None and routes_RLK is not None:
            index = slots.state[DRAWN].view(-1, 1, 1, 1).expand(-1, 1, *routes_RLK.shape[1:])
            slots.routes_STLK.scatter_(1, index, routes_RLK[:, None])
        token_R, logp_R = kernels.drawn(slots, logits_RV, self.sampling)
        kernels.advanced(slots, token_R, logp_R, self.stops, self.sampling.max_tokens)

    # --- Rows that enter ---

    def _admit(self) -> None:
        """Waiting requests enter, a few at a time: an admission costs about as much for one row as for ten."""
        free = [s for s in range(self.bucket) if self.rows[s] is None]
        if self.short or len(free) < min(len(self.waiting), max(1, self.bucket // 16)):
            return
        entering = _Entering()
        for s in free:
            if not self.waiting or not self._enters(s, entering):
                break
        if entering.rows:
            self._write(entering)

    def _enters(self, s: int, entering: _Entering) -> bool:
        """Whether there is room for the next request; then it has slot `s` and pages for its first tokens."""
        request = self.waiting[-1]
        u = self.queue.prompt_of_B[request]
        if u not in self.held and not self._prefill():
            return False
        position = len(self.queue.prompt_U[u]) - 1
        shared, partial = self.held[u][: position // PAGE], self.held[u][position // PAGE :]
        own = self.pages.take(self._need(position) - len(shared))
        if own is None:
            return False
        self.pages.share(shared)
        entering.copies.extend(zip(partial, own, strict=False))
        row = _Row(request=request, pages=[*shared, *own], position=position, since=self.steps)
        entering.rows.append((s, row))
        self.rows[s] = row
        if u in self.prompt_routes:
            self.read_by[request] = self.prompt_routes[u]
        self.waiting.pop()
        self.wanted[u] -= 1
        if not self.wanted[u]:
            entering.read.extend(self.held.pop(u))
        return True

    def _need(self, position: int) -> int:
        """Pages that a row at this position needs until pages are looked at again."""
        return pages_for(min(position + AHEAD + 1, self.width * PAGE))

    def _prefill(self) -> bool:
        """Read the next prompts of the queue together, as many as tokens and pages allow; one must be, if none is live."""
        first = self.queue.prompt_of_B[self.waiting[-1]]
        widest = len(self.queue.prompt_U[first])
        most = max(1, min(self.prefill_tokens // widest, pages_for(self.prefill_tokens)))
        chosen: list[int] = []
        for u in range(first, min(first + most, len(self.queue.prompt_U))):
            if u in self.held or not self.wanted[u]:
                continue
            room = self.pages.free - pages_for(len(self.queue.prompt_U[u]) - 1)
            # A row needs room too: not the last page goes to a prompt.
            if room < self.width:
                break
            taken = self.pages.take(pages_for(len(self.queue.prompt_U[u]) - 1))
            assert taken is not None
            self.held[u] = taken
            chosen.append(u)
        if chosen:
            prompts = [self.queue.prompt_U[u][:-1] for u in chosen]
            self._note(chosen, prompts, self.decoder.prefill(prompts, [self.held[u] for u in chosen]))
        return first in self.held

    def _note(self, chosen: list[int], prompts: list[tuple[int, ...]], routes_UTLK: Tensor | None) -> None:
        if self.routers is None:
            return
        empty = torch.zeros(0, self.routers.layers, self.routers.top_k, dtype=self.routers.compact)
        for i, (u, ids) in enumerate(zip(chosen, prompts, strict=True)):
            self.prompt_routes[u] = empty if routes_UTLK is None else routes_UTLK[i, : len(ids)].cpu()

    def _write(self, entering: _Entering) -> None:
        """Tell the device of rows that enter."""
        told = []
        for _, row in entering.rows:
            last = self.queue.prompt_U[self.queue.prompt_of_B[row.request]][-1]
            state = [last, row.position, 0, self.queue.key_B[row.request], 1]
            told.append([*state, *row.pages, *[0] * (self.width - len(row.pages))])
        at, told_A = self._sent([s for s, _ in entering.rows]), self._sent(told)
        self.slots.state[:, at] = told_A[:, :5].T
        self.slots.table_SW[at] = told_A[:, 5:].to(torch.int32)
        if entering.copies:
            source, target = self._sent(entering.copies).unbind(1)
            self.decoder.copy(source, target)
        self.pages.release(entering.read)

    # --- Rows that grow ---

    def _extend(self) -> None:
        """Pages for the next tokens of every row."""
        if self.steps % AHEAD:
            return
        grown: list[tuple[int, int, int]] = []
        for s in range(len(self.rows)):
            while (row := self.rows[s]) is not None:  # it may itself be put back
                more = self._need(row.position + self.steps - row.since) - len(row.pages)
                taken = self.pages.take(max(0, more))
                if taken is not None:
                    grown += [(s, len(row.pages) + i, page) for i, page in enumerate(taken)]
                    row.pages.extend(taken)
                    break
                self._preempt()
        grown = [(s, i, page) for s, i, page in grown if (row := self.rows[s]) is not None and page in row.pages]
        if grown:
            s_, index, page = self._sent(grown).unbind(1)
            self.slots.table_SW[s_, index] = page.to(torch.int32)

    def _preempt(self) -> None:
        """Forget prompts that only waiting requests need; if there are none, put the youngest reply back."""
        self.short = True
        if self.held:
            for pages in self.held.values():
                self.pages.release(pages)
            self.held.clear()
            return
        live = [(row.since, s) for s, row in enumerate(self.rows) if row is not None]
        assert len(live) > 1, "the pages must hold one row at its longest"
        s = max(live)[1]
        row = self.rows[s]
        assert row is not None
        self.pages.release(row.pages)
        self.rows[s] = None
        self.waiting.append(row.request)
        self.wanted[self.queue.prompt_of_B[row.request]] += 1
        self.slots.state[LIVE, s] = 0

    # --- Rows that end ---

    def _poll_finished(self, *, behind: int) -> None:
        """Look at what steps left: rows that ended hand in their replies and their pages."""
        while len(self.unseen) > behind:
            step, flags, event = self.unseen.pop(0)
            if event is not None:
                event.synchronize()
            over = [int(s) for s in np.flatnonzero(flags.numpy() == 0)]
            # A row that entered after this step has nothing to do with what was in its slot.
            over = [s for s in over if (row := self.rows[s]) is not None and row.since <= step]
            if over:
                self._finish(over, step)

    def _finish(self, over: list[int], step: int) -> None:
        rows = [row for s in over if (row := self.rows[s]) is not None]
        lengths = [step - row.since + 1 for row in rows]
        at, longest, routes = self._sent(over), max(lengths), self.slots.routes_STLK
        self.ended.append(
            _Ended(
                requests=[row.request for row in rows],
                lengths=lengths,
                token=_home(self.slots.token_ST[at, :longest]),
                logp=_home(self.slots.logp_ST[at, :longest]),
                routes=None if routes is None else _home(routes[at, :longest]),
            )
        )
        for s, row in zip(over, rows, strict=True):
            self.pages.release(row.pages)
            self.rows[s] = None
        self.short = False

    def _compact(self) -> None:
        """When none waits, gather the live rows at the front, so that a smaller step does."""
        if self.waiting or self._bucket_for() >= self.bucket:
            return
        self._poll_finished(behind=0)
        bucket = self._bucket_for()
        holes = [s for s in range(bucket) if self.rows[s] is None]
        moved = [s for s in range(bucket, self.bucket) if self.rows[s] is not None]
        if moved:
            targets = holes[: len(moved)]
            self.slots.move(self._sent(moved), self._sent(targets))
            for s, t in zip(moved, targets, strict=True):
                self.rows[s], self.rows[t] = None, self.rows[s]
        # Holes and what lies beyond idle; a hole may hold a row that was ended by no step.
        self.bucket = bucket

    def _bucket_for(self) -> int:
        live = sum(row is not None for row in self.rows)
        return min([size for size in SIZES if size >= live and size < self.bucket], default=self.bucket)

    def _replies(self) -> Replies:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        count = len(self.queue.place_B)
        token: list[list[int]] = [[] for _ in range(count)]
        logp: list[list[float]] = [[] for _ in range(count)]
        routes: list[Routes | None] = [None] * count
        for ended in self.ended:
            if ended.logp.isnan().any():
                raise NumericalError("sampling: the model's logits are not numbers (NaN); its weights have diverged")
            token_AT, logp_AT, routes_ATLK = ended.token.numpy(), ended.logp.numpy(), ended.routes
            for i, (b, n) in enumerate(zip(ended.requests, ended.lengths, strict=True)):
                token[b], logp[b] = token_AT[i, :n].tolist(), logp_AT[i, :n].tolist()
                if self.routers is not None and routes_ATLK is not None:
                    routes[b] = self.routers.pack(torch.cat([self.read_by[b], routes_ATLK[i, :n]]))
        stopped = [ids[-1] in self.stop_ids for ids in token]
        decoded = DecodeStats(steps=self.steps, rows=self.computed)
        return Replies(token_ids=token, logp=logp, ended=stopped, routes=routes, decoded=decoded)

    def _sent(self, numbers: Sequence[Any]) -> Tensor:
        """Whole numbers, on the device, without waiting for it."""
        made = torch.tensor(numbers, dtype=torch.int64)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made


def _home(x: Tensor) -> Tensor:
    """On the host, by the time that the device has been waited for."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _fetched(flags: Tensor) -> tuple[Tensor, Any]:
    """A copy on the host, and the event after which it can be read; None: at once."""
    if flags.device.type != "cuda":
        return flags.clone(), None
    host, event = _home(flags), torch.cuda.Event()
    event.record()
    return host, event

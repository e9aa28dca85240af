"""The decoding loop on a GPU: continuous batching with a paged KV cache and CUDA graphs.

In: a queue of requests. Out: their completions. Invariant: the composition of a batch affects rounding and nothing
else. The order of events depends on the completions alone, never on timing.

A decoding step is captured as a CUDA graph once per batch size and then replayed: forward, sampling and bookkeeping
are one launch. The host polls for finished rows one step behind, so the device never waits for it; a finished row
idles for that one step, then the next request takes its slot. Each prompt is prefilled once. Its completions share
its full KV cache blocks and copy the last, partly filled one. When no request waits, live rows are compacted and
smaller CUDA graphs take over. When blocks run out, the youngest completion is preempted and sampled again later, from
the same random stream.

Two controls need the text, so the host takes part. Stop strings are searched every `STOP_EVERY` steps, in tokens that
are copied while the next step runs; what was sampled after a stop string is cut off. A row that has spent its thinking
budget idles until the host has decoded it, and then continues, with the end of its thinking if that is missing.

A completion that is continued is a request whose prompt includes its tokens so far. The device knows one limit on
tokens. If a request has a lower one, the host ends its row when it has reached it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.activity import Activity, activity
from gspo.model.routing import Routers
from gspo.rollout.engine import Controls, DecodeStats
from gspo.rollout.local.blocks import BLOCK_SIZE, BlockAllocator, blocks_for
from gspo.rollout.local.cuda_graphs import CudaGraphs
from gspo.rollout.local.decoder import Decoder, bytes_per_block, linear_groups
from gspo.rollout.local.projections import bytes_of_copies
from gspo.rollout.local.sampling import (
    DecodeResult,
    DeviceControls,
    PrefixReuse,
    Queue,
    last_tokens,
    nan_error,
    tail_of,
)
from gspo.rollout.local.slots import FIELDS, FORCED, LIVE, SAMPLED, make_slots
from gspo.types import Routes

LOOKAHEAD = 16
"""Tokens for which a row gets KV cache blocks at a time, so that the host allocates only every so many steps."""
BATCH_SIZES = (8, 32, 64, 128, 256, 512)
"""Batch sizes that the batch shrinks to at the end of a queue. They are few because each needs a CUDA graph of its
own."""
STOP_EVERY = 16
"""Steps between searches for stop strings."""
MEMORY_SHARE = 0.8
"""Share of the free memory that the KV cache may take. The rest is for activations."""


@dataclass(kw_only=True, eq=False)
class _Row:
    """The host's view of an occupied slot."""

    request: int
    blocks: list[int]
    position: int
    """Position of the input token that precedes its completion."""
    since: int
    """The step in which its first token was sampled: for a row that has idled, later by as many steps, and for a
    completion that is continued, earlier by its number of tokens."""
    limit: int
    """The number of tokens at which it is cut, or is over."""
    flagged: int
    """The first step whose live flag is about this row."""
    cut: bool = False
    """Whether the end of its thinking was inserted."""

    def length(self, steps: int) -> int:
        """Its number of tokens after this many steps of the batch."""
        return steps - self.since


@dataclass(frozen=True, kw_only=True)
class _Admission:
    """Requests that are admitted together."""

    rows: list[tuple[int, _Row]] = field(default_factory=list)
    """Slot and row of each."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy: source and target."""
    unused: list[int] = field(default_factory=list)
    """Blocks of prompts that no waiting request needs. They are freed after the copies."""


@dataclass(frozen=True, kw_only=True)
class _FinishedRows:
    """Completions that were polled together. The tensors are on their way to the host until the device synchronizes."""

    requests: list[int]
    lengths: list[int]
    cut: list[bool]
    token: Tensor
    logp: Tensor
    routes: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A search for stop strings."""

    rows: list[_Row | None]
    """By slot, when it began."""
    tokens: Tensor
    """For each slot the number of tokens, and the last of them."""
    event: Any
    """After which `tokens` can be read; None if at once."""


class PagedBatch:
    """Samples the completions of one queue. All memory that it holds is freed with it."""

    def __init__(
        self,
        model: Any,
        queue: Queue,
        controls: Controls,
        *,
        slots: int,
        prefill_tokens: int,
        routers: Routers | None = None,
        blocks: int | None = None,
        reuse: PrefixReuse | None = None,
    ) -> None:
        self.queue = queue
        self.reuse = reuse or PrefixReuse(queue)
        self.controls = controls
        self.sampling = sampling = controls.sampling
        self.prefill_tokens = prefill_tokens
        self.device = model.device
        self.routers = routers
        self.width = blocks_for(queue.positions)
        routed = (routers.layers, routers.top_k, routers.compact) if routers else None
        self.slots = make_slots(slots, self.width, sampling.max_tokens, model.device, routed)
        budget, copies = self._block_budget(model, slots)
        count = blocks or budget
        self.blocks = BlockAllocator(count)
        self.decoder = Decoder(model, self.slots, count, routers, copies=copies)
        self.on_device = DeviceControls(controls, model.device)
        self.launch = CudaGraphs(self._step) if model.device.type == "cuda" else self._step
        self.rows: list[_Row | None] = [None] * slots
        self.waiting = list(range(len(queue.place_B)))[::-1]
        """Requests without a slot, the next one last."""
        self.requests_left = Counter(queue.prompt_of_B)
        """Number of waiting requests of each prompt."""
        self.prompt_blocks: dict[int, list[int]] = {}
        """KV cache blocks of the prompts that were prefilled for waiting requests."""
        self.prompt_routes: dict[int, Tensor] = {}
        self.request_prompt_routes: dict[int, Tensor] = {}
        """Experts of the prompt, for each admitted request. They are kept per request because a second prefill of the
        prompt may choose other experts."""
        self.out_of_blocks = False
        """Blocks have run out: no request is admitted before a row finishes."""
        self.steps = 0
        self.rows_computed = 0
        """Rows of all steps so far, idle ones included."""
        self.prefilled = 0
        """Prompt tokens that were computed by prefill."""
        self.reused = 0
        """Prompt tokens that earlier calls had computed."""
        self.bucket = slots
        self.unpolled: list[tuple[int, Tensor, Any]] = []
        """Steps that the host has not polled: number, live flags after it, and the event after which they can be
        read."""
        self.limited = min(queue.limit_B) < sampling.max_tokens
        """Whether a request has a lower limit on tokens than the device knows."""
        self.search: _Search | None = None
        """The search for stop strings that the host has not read."""
        self.finished: list[_FinishedRows] = []

    def _block_budget(self, model: Any, slots: int) -> tuple[int, bool]:
        """Blocks for all slots at full length and for prefilled prompts, or as many as fit into memory; and whether
        copies of weights fit next to them all."""
        wanted = 2 + slots * self.width + 2 * (blocks_for(self.prefill_tokens) + self.width)
        if model.device.type != "cuda":
            return wanted, True
        # Memory that torch has cached but does not use counts as taken in `mem_get_info`.
        torch.cuda.empty_cache()
        filtered = self.sampling.top_p < 1 or self.sampling.top_k > 0
        # Bytes per logit: top-k and top-p sort the logits and sum them in float64.
        logits = slots * model.get_input_embeddings().num_embeddings * (40 if filtered else 8)
        room = int(MEMORY_SHARE * (torch.cuda.mem_get_info(model.device)[0] - logits))
        # Rounded to sixteenths, so that small changes in free memory do not change which completions share a batch.
        needed = bytes_per_block(model) * wanted
        parts = min(16, 16 * room // needed)
        # Sequences that decode together are worth more than fused projections, and both more than kept prefixes.
        fused = needed + bytes_of_copies(linear_groups(model))
        if self.reuse.store is not None:
            self.reuse.store.give_way(room - (fused if room >= fused else needed))
        return max(2 + 2 * self.width, wanted * parts // 16), room >= fused

    def run(self) -> DecodeResult:
        """Sample every completion of the queue."""
        try:
            with activity("sampling", total=len(self.queue.place_B), unit="completions") as doing:
                return self._run(doing)
        finally:
            # `launch` and this object refer to each other. Left to the garbage collector, a CUDA graph could be
            # destroyed at a bad moment, for example while another is being captured.
            del self.launch

    def _run(self, doing: Activity) -> DecodeResult:
        while self.waiting or any(self.rows):
            self._admit()
            self._extend()
            # The whole bucket, idle rows included: a CUDA graph has a fixed number of rows.
            self.launch(self.bucket)
            self.unpolled.append((self.steps, *_copy_to_host(self.slots.state[LIVE])))
            self.steps += 1
            self.rows_computed += self.bucket
            if self.sampling.stop:
                self._find_stops()
            # One step behind: the flags of the current step are still on their way to the host.
            self._poll_finished(behind=1)
            self._cut()
            self._compact()
            if not self.steps % LOOKAHEAD:
                self._count(doing)
        return self._result()

    def _count(self, doing: Activity) -> None:
        """Report what has been sampled so far."""
        lengths = [length for rows in self.finished for length in rows.lengths]
        doing.done = len(lengths)
        doing.tokens = sum(lengths) + sum(row.length(self.steps) for row in self.rows if row is not None)

    def _step(self, rows: int) -> None:
        """Sample one token for each of the first `rows` rows, without the host."""
        slots = self.slots.first(rows)
        kernels = self.decoder.kernels
        logits_RV, routes_RLK = self.decoder.logits(rows)
        if slots.routes_STLK is not None and routes_RLK is not None:
            index = slots.state[SAMPLED].view(-1, 1, 1, 1).expand(-1, 1, *routes_RLK.shape[1:])
            slots.routes_STLK.scatter_(1, index, routes_RLK[:, None])
        self.on_device.exclude_ends(logits_RV, slots.state[SAMPLED])
        token_R, logp_R = kernels.sample_tokens(slots, logits_RV, self.sampling)
        token_R = self.on_device.force(token_R, slots.state[SAMPLED], slots.state[FORCED])
        kernels.advance(slots, token_R, logp_R, self.on_device.stop_ids, self.sampling.max_tokens)
        if self.sampling.thinking_budget:
            # A row idles when it has spent its budget. In the step after `_end_thinking` its count is past that.
            slots.state[LIVE] *= slots.state[SAMPLED] != self.sampling.thinking_budget

    # --- Admission ---

    def _admit(self) -> None:
        """Admit waiting requests, a few at a time: admitting one costs about as much as admitting ten."""
        free = [s for s in range(self.bucket) if self.rows[s] is None]
        # Wait until a sixteenth of the slots is free.
        if self.out_of_blocks or len(free) < min(len(self.waiting), max(1, self.bucket // 16)):
            return
        admission = _Admission()
        for s in free:
            if not self.waiting or not self._admit_next(s, admission):
                break
        if admission.rows:
            self._write_slots(admission)

    def _admit_next(self, s: int, admission: _Admission) -> bool:
        """Admit the next request into slot `s`, with blocks for its first tokens; False if there is no room."""
        request = self.waiting[-1]
        u = self.queue.prompt_of_B[request]
        if u not in self.prompt_blocks and not self._prefill():
            return False
        # The last prompt token is the first input of decoding, so prefill leaves it out.
        position = len(self.queue.prompt_U[u]) - 1
        full = position // BLOCK_SIZE
        shared, partial = self.prompt_blocks[u][:full], self.prompt_blocks[u][full:]
        own = self.blocks.allocate(self._blocks_needed(position) - len(shared))
        if own is None:
            return False
        self.blocks.share(shared)
        # The completion writes its own tokens into the partly filled block, so it gets a copy.
        admission.copies.extend(zip(partial, own, strict=False))
        start = self.queue.start_B[request]
        row = _Row(
            request=request,
            blocks=[*shared, *own],
            position=position - start,
            since=self.steps - start,
            limit=self.queue.limit_B[request],
            flagged=self.steps,
            cut=self.queue.forced_B[request],
        )
        admission.rows.append((s, row))
        self.rows[s] = row
        if u in self.prompt_routes:
            self.request_prompt_routes[request] = self.prompt_routes[u]
        self.waiting.pop()
        self.requests_left[u] -= 1
        if not self.requests_left[u]:
            admission.unused.extend(self.prompt_blocks.pop(u))
            self.reuse.drop(u)
        return True

    def _blocks_needed(self, position: int) -> int:
        """Blocks that a row at this position needs until blocks are allocated again."""
        return blocks_for(min(position + LOOKAHEAD + 1, self.width * BLOCK_SIZE))

    def _prefill(self) -> bool:
        """Prefill the next prompts of the queue together, as many as tokens and blocks allow; False if the first does
        not fit. It always fits when no row is live."""
        first = self.queue.prompt_of_B[self.waiting[-1]]
        most = min(first + blocks_for(self.prefill_tokens), len(self.queue.prompt_U))
        chosen: list[int] = []
        for u in self.reuse.fitting(range(first, most), self.prefill_tokens):
            if u in self.prompt_blocks or not self.requests_left[u]:
                continue
            room = self.blocks.available - blocks_for(len(self.queue.prompt_U[u]) - 1)
            # Prompts must leave room for one row at full length, or nothing could be decoded.
            if room < self.width:
                break
            blocks = self.blocks.allocate(blocks_for(len(self.queue.prompt_U[u]) - 1))
            assert blocks is not None
            self.prompt_blocks[u] = blocks
            chosen.append(u)
        if chosen:
            prompts = [self.queue.prompt_U[u][:-1] for u in chosen]
            blocks_U = [self.prompt_blocks[u] for u in chosen]
            prefix_U = [self.reuse.prefix(u) for u in chosen]
            self._record_prompt_routes(
                chosen,
                self.decoder.prefill_rest(prompts, blocks_U, prefix_U)
                if any(prefix_U)
                else self.decoder.prefill(prompts, blocks_U),
            )
            self.prefilled += sum(map(self.reuse.computed, chosen))
            self.reused += sum(map(self.reuse.reused, chosen))
        return first in self.prompt_blocks

    def _record_prompt_routes(self, chosen: list[int], routes_UTLK: Tensor | None) -> None:
        if self.routers is None:
            return
        empty = torch.zeros(0, self.routers.layers, self.routers.top_k, dtype=self.routers.compact)
        for i, u in enumerate(chosen):
            new = empty if routes_UTLK is None else routes_UTLK[i, : self.reuse.computed(u)].cpu()
            self.prompt_routes[u] = self.reuse.routes(u, new)

    def _write_slots(self, admission: _Admission) -> None:
        """Write the admitted rows to the device."""
        fields = []
        for s, row in admission.rows:
            last = self.queue.prompt_U[self.queue.prompt_of_B[row.request]][-1]
            start = self.queue.start_B[row.request]
            state = [last, row.position + start, start, self.queue.key_B[row.request], 1, int(row.cut)]
            fields.append([*state, *row.blocks, *[0] * (self.width - len(row.blocks))])
            if start:
                tokens = self._to_device(self.queue.tokens(row.request))
                self.slots.token_ST[s, :start] = tokens.to(torch.int32)
        at = self._to_device([s for s, _ in admission.rows])
        fields_A = self._to_device(fields)
        self.slots.state[:, at] = fields_A[:, : len(FIELDS)].T
        self.slots.table_SW[at] = fields_A[:, len(FIELDS) :].to(torch.int32)
        if admission.copies:
            source, target = self._to_device(admission.copies).unbind(1)
            self.decoder.copy(source, target)
        # After the copies were queued: the device runs them before anything that could reuse the blocks.
        self.blocks.free(admission.unused)

    # --- Growth and preemption ---

    def _extend(self) -> None:
        """Allocate blocks for the next tokens of every row."""
        if self.steps % LOOKAHEAD:
            return
        grown: list[tuple[int, int, int]] = []
        for s in range(len(self.rows)):
            while (row := self.rows[s]) is not None:  # this row itself may be preempted
                more = self._blocks_needed(row.position + row.length(self.steps)) - len(row.blocks)
                blocks = self.blocks.allocate(max(0, more))
                if blocks is not None:
                    grown += [(s, len(row.blocks) + i, block) for i, block in enumerate(blocks)]
                    row.blocks.extend(blocks)
                    break
                self._preempt()
        # A row that got blocks above may have been preempted for a later one.
        grown = [(s, i, block) for s, i, block in grown if (row := self.rows[s]) is not None and block in row.blocks]
        if grown:
            s_, index, block_ = self._to_device(grown).unbind(1)
            self.slots.table_SW[s_, index] = block_.to(torch.int32)

    def _preempt(self) -> None:
        """Drop prompts that only waiting requests need; if there are none, preempt the youngest completion."""
        self.out_of_blocks = True
        if self.prompt_blocks:
            for blocks in self.prompt_blocks.values():
                self.blocks.free(blocks)
            self.prompt_blocks.clear()
            return
        live = [(row.since, s) for s, row in enumerate(self.rows) if row is not None]
        assert len(live) > 1, "the KV cache must hold one row at full length"
        s = max(live)[1]  # the youngest has the fewest tokens to sample again
        row = self.rows[s]
        assert row is not None
        self.blocks.free(row.blocks)
        self.rows[s] = None
        self.waiting.append(row.request)
        self.requests_left[self.queue.prompt_of_B[row.request]] += 1
        # On the device the row must stop at once: its blocks may belong to another row in the next step.
        self.slots.state[LIVE, s] = 0

    # --- Finishing ---

    def _poll_finished(self, *, behind: int) -> None:
        """Collect the rows that finished in all steps but the last `behind`, and free their blocks."""
        while len(self.unpolled) > behind:
            step, flags, event = self.unpolled.pop(0)
            if event is not None:
                event.synchronize()
            idle = [int(s) for s in np.flatnonzero(flags.numpy() == 0)]
            # A row that was admitted after this step is live: the flag is that of its predecessor in the slot.
            finished = {
                s: row.length(step + 1) for s in idle if (row := self.rows[s]) is not None and row.flagged <= step
            }
            if self.sampling.thinking_budget:
                spent = [s for s, length in finished.items() if length == self.sampling.thinking_budget]
                for s in self._end_thinking(spent):
                    del finished[s]
            if finished:
                self._finish(finished)

    def _cut(self) -> None:
        """Finish the rows that have reached a limit of their own, below the one that the device knows."""
        if self.limited and any(row is not None and self._reached(row) for row in self.rows):
            # Rows that have ended by themselves finish first.
            self._poll_finished(behind=0)
            cut = {s: row.limit for s, row in enumerate(self.rows) if row is not None and self._reached(row)}
            if cut:
                # Immediately, because the blocks may belong to another row in the next step.
                self.slots.state[LIVE, self._to_device(list(cut))] = 0
                self._finish(cut)

    def _reached(self, row: _Row) -> bool:
        return row.length(self.steps) >= row.limit

    def _end_thinking(self, spent: list[int]) -> list[int]:
        """Let rows continue that idle because they have spent their thinking budget; their slots. The others have
        finished with the last token of the budget."""
        if not spent:
            return []
        # Waits for the device, once per completion.
        ids_A = self.slots.token_ST[self._to_device(spent), : self.sampling.thinking_budget].tolist()
        resumed: list[tuple[int, int]] = []
        for s, ids, unclosed in zip(spent, ids_A, self.controls.unclosed(ids_A), strict=True):
            row = self.rows[s]
            if row is None or ids[-1] in self.controls.stop_ids:
                continue
            row.cut = unclosed
            row.since = self.steps - self.sampling.thinking_budget
            # Steps that the host has not polled yet show it as idle.
            row.flagged = self.steps
            resumed.append((s, int(unclosed)))
        if resumed:
            slot_A, forced_A = self._to_device(resumed).unbind(1)
            self.slots.state[FORCED, slot_A] = forced_A
            self.slots.state[LIVE, slot_A] = 1
        return [s for s, _ in resumed]

    def _find_stops(self) -> None:
        """Finish the rows in which the last search has found a stop string, and start the next search."""
        search, self.search = self.search, None
        if search is not None:
            self._read_search(search)
        if self.steps % STOP_EVERY:
            return
        count_S = self.slots.state[SAMPLED]
        token_SW = last_tokens(self.slots.token_ST, count_S, self.controls.window + STOP_EVERY)
        tokens, event = _copy_to_host(torch.cat([count_S[:, None], token_SW], dim=1))
        self.search = _Search(rows=list(self.rows), tokens=tokens, event=event)

    def _read_search(self, search: _Search) -> None:
        if search.event is not None:
            search.event.synchronize()
        # Rows may have finished, moved to other slots or been preempted since.
        slot = {row: s for s, row in enumerate(self.rows) if row is not None}
        rows = [(i, row) for i, row in enumerate(search.rows) if row is not None and row in slot]
        tokens = search.tokens.tolist()
        tails = [tail_of(tokens[i][1:], tokens[i][0], STOP_EVERY, cut=row.cut) for i, row in rows]
        found = zip(rows, self.controls.stop_indices(tails), strict=True)
        finished = {slot[row]: tokens[i][0] for (i, row), index in found if index is not None}
        if finished:
            # At once: the blocks may belong to another row in the next step.
            self.slots.state[LIVE, self._to_device(list(finished))] = 0
            self._finish(finished)

    def _finish(self, finished: dict[int, int]) -> None:
        """Collect the rows in these slots, with their numbers of tokens."""
        rows = [row for s in finished if (row := self.rows[s]) is not None]
        lengths = list(finished.values())
        at = self._to_device(list(finished))
        longest = max(lengths)
        routes = self.slots.routes_STLK
        self.finished.append(
            _FinishedRows(
                requests=[row.request for row in rows],
                lengths=lengths,
                cut=[row.cut for row in rows],
                token=_to_host(self.slots.token_ST[at, :longest]),
                logp=_to_host(self.slots.logp_ST[at, :longest]),
                routes=None if routes is None else _to_host(routes[at, :longest]),
            )
        )
        for s, row, length in zip(finished, rows, lengths, strict=True):
            if self.reuse.keeps(row.request):
                # Queued before anything that could write to the blocks again.
                self.reuse.put(row.request, self.decoder.read(row.blocks, row.position + length))
            self.blocks.free(row.blocks)
            self.rows[s] = None
        self.out_of_blocks = False

    def _compact(self) -> None:
        """When no request waits, move the live rows to the front, so that a smaller batch suffices."""
        if self.waiting or self._bucket_for() >= self.bucket:
            return
        self._poll_finished(behind=0)  # rows must not move while a step that the host has not polled refers to them
        bucket = self._bucket_for()
        holes = [s for s in range(bucket) if self.rows[s] is None]
        moved = [s for s in range(bucket, self.bucket) if self.rows[s] is not None]
        if moved:
            targets = holes[: len(moved)]
            self.slots.move(self._to_device(moved), self._to_device(targets))
            for s, t in zip(moved, targets, strict=True):
                self.rows[s], self.rows[t] = None, self.rows[s]
        # The remaining holes idle. A hole may hold a preempted row, which no step has finished.
        self.bucket = bucket

    def _bucket_for(self) -> int:
        """The smallest batch size that holds the live rows."""
        live = sum(row is not None for row in self.rows)
        return min([size for size in BATCH_SIZES if size >= live and size < self.bucket], default=self.bucket)

    def _result(self) -> DecodeResult:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        count = len(self.queue.place_B)
        token: list[list[int]] = [[] for _ in range(count)]
        logp: list[list[float]] = [[] for _ in range(count)]
        cut = [False] * count
        for rows in self.finished:
            # Checked at the end, because a check in each step would make the device wait for the host.
            if rows.logp.isnan().any():
                raise nan_error(self.decoder.model.dtype)
            token_AT = rows.token.numpy()
            logp_AT = rows.logp.numpy()
            for i, (b, n) in enumerate(zip(rows.requests, rows.lengths, strict=True)):
                token[b] = token_AT[i, :n].tolist()
                logp[b] = logp_AT[i, :n].tolist()
                cut[b] = rows.cut[i]
                if self.reuse.keeps(b):
                    self.reuse.describe(b, token[b], self._routes_of(rows, i, n))
        ends = self.controls.ends(token, cut)
        return DecodeResult(
            token_ids=[ids[: end.length] for ids, end in zip(token, ends, strict=True)],
            logp=[values[: end.length] for values, end in zip(logp, ends, strict=True)],
            ends=ends,
            routes=self._routes([end.length for end in ends]),
            decoded=DecodeStats(
                steps=self.steps, rows=self.rows_computed, prefilled=self.prefilled, reused=self.reused
            ),
        )

    def _routes(self, length_B: list[int]) -> list[Routes | None]:
        """The experts of each completion and its prompt; None if they are not recorded."""
        routes: list[Routes | None] = [None] * len(length_B)
        for rows in self.finished:
            for i, b in enumerate(rows.requests):
                own = self._routes_of(rows, i, length_B[b])
                routes[b] = None if own is None or self.routers is None else self.routers.pack(own)
        return routes

    def _routes_of(self, rows: _FinishedRows, i: int, length: int) -> Tensor | None:
        """The experts of a prompt and its completion of this length, but for the last token, which no forward has
        read."""
        if rows.routes is None:
            return None
        b = rows.requests[i]
        return torch.cat([self.request_prompt_routes[b], rows.routes[i, self.queue.start_B[b] : length]])

    def _to_device(self, numbers: Sequence[Any]) -> Tensor:
        """Copy integers to the device without waiting for it."""
        host = torch.tensor(numbers, dtype=torch.int64)
        # From pageable memory, a copy would wait for the device.
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


def _to_host(x: Tensor) -> Tensor:
    """Start a copy to the host. It may be read after the device has been synchronized."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _copy_to_host(flags: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the host; the copy, and the event after which it may be read (None if it may be read at once)."""
    if flags.device.type != "cuda":
        return flags.clone(), None
    host = _to_host(flags)
    event = torch.cuda.Event()
    event.record()
    return host, event

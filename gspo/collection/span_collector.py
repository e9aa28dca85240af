"""Collects batches in turns, with newer weights in every turn (`rollout.span_tokens`).

In: the weights after each step. Out: a `CollectResult` per step, as from `Ahead`. Invariant: a turn counts once all of
it is done: its completions, and the scores of the batches that it finishes. A checkpoint has the completions after
whole turns, so a resume repeats a turn with the same requests and gets the same tokens.

`rollout/spans.py` says which batch is sampled in which turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gspo.activity import activity
from gspo.clock import Clock
from gspo.collection.collector import Ahead, SamplingTime
from gspo.context import RunContext
from gspo.learner.checkpoint import TrainerState
from gspo.objectives.samples import keeps_group
from gspo.record.ledger import Ledger
from gspo.rollout.engine import DecodeStats, ExtendOptions
from gspo.rollout.gather import CollectResult, Gatherer, RolloutState, with_unique_ids
from gspo.rollout.in_flight import Entry, InFlight, OpenBatch, Ticket
from gspo.rollout.sampling_process import SamplingProcess
from gspo.rollout.spans import Schedule, after, due, extended, extensions, kept, opened, sampled_tokens
from gspo.types import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """The batches to sample with the same weights, those of the earliest step first."""

    weights: int
    version: int
    batches: tuple[tuple[Ticket, OpenBatch], ...]


class InTurns(Ahead):
    """Collects batches in a thread, each in several turns."""

    def __init__(
        self,
        context: RunContext,
        sampler: SamplingProcess,
        ledger: Ledger,
        state: TrainerState,
        restored: InFlight | None = None,
    ) -> None:
        rollout = context.config.rollout
        self._schedule = Schedule(
            max_lag=rollout.max_lag,
            span_tokens=rollout.span_tokens,
            max_tokens=rollout.max_tokens,
            drop=rollout.over_lag == "drop",
        )
        self._open: dict[int, OpenBatch] = {}
        """The batches that some turns have sampled, by step."""
        super().__init__(context, sampler, ledger, state, restored)

    def _restore(self, plan: InFlight) -> None:
        self._open |= {entry.ticket.step: entry.part for entry in plan.entries if entry.part is not None}
        super()._restore(plan)

    def _entry(self, ticket: Ticket, batch: CollectResult | None) -> Entry:
        return Entry(ticket=ticket, batch=batch, last=self._schedule.last(ticket), part=self._open.get(ticket.step))

    # ---- the thread

    def _collect_all(self) -> None:
        while (turn := self._next_turn()) is not None:
            self._sample(turn)

    def _next_turn(self) -> _Turn | None:
        """Wait for the weights of the next turn; None once sampling ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._may_sample())
            weights = self._next_weights()
            if self._closing or weights is None:
                return None
            versions = {ticket.weights: ticket.version for ticket in self._plan}
            batches = self._batches(weights)
        return _Turn(weights=weights, version=versions[weights], batches=tuple(batches))

    def _next_weights(self) -> int | None:
        waiting = (due(t, self._open.get(t.step)) for t in self._tickets if t.step <= self._last_step)
        return min(waiting, default=None)

    def _batches(self, weights: int) -> list[tuple[Ticket, OpenBatch]]:
        """The batches that have a turn with these weights; some begin with it."""
        batches = []
        end = self._buffer.end
        for ticket in self._tickets:
            batch = self._open.get(ticket.step)
            if due(ticket, batch) == weights and ticket.step <= self._last_step:
                batches.append((ticket, batch or self._begin(end, ticket)))
                batch = batches[-1][1]
            if batch is None:
                break
            end = after(batch)
        return batches

    def _begin(self, start: RolloutState, ticket: Ticket) -> OpenBatch:
        rollout = self._context.config.rollout
        batch = opened(start, self._prompts(start.cursor, rollout.prompts), ticket, samples=rollout.group_size)
        self._ledger.issued(batch.batch, ticket)
        self._times[batch.batch] = SamplingTime(clock=self._clock(batch.batch), start=self._seconds)
        return batch

    def _prompts(self, cursor: int, count: int) -> list[Prompt]:
        taken = self._context.order.take(cursor, count)
        return with_unique_ids([self._context.problems.train[i] for i in taken.indices])

    def _sample(self, turn: _Turn) -> None:
        """Sample a turn, and score the batches that it finishes."""
        config, clock, start = self._context.config, Clock(), self._seconds
        engine = self._sampler.after_step(turn.weights)
        requests = [
            request
            for ticket, batch in turn.batches
            for request in extensions(
                batch,
                self._prompts(batch.cursor, len(batch.completions)),
                self._schedule.tokens(ticket, turn.weights),
            )
        ]
        before = engine.decoded
        steps = f"{turn.batches[0][0].step} to {turn.batches[-1][0].step}"
        with clock.measure("rollout"), activity(f"a turn of the batches of steps {steps}"):
            options = ExtendOptions(
                sampling=config.rollout.sampling, seed=config.seed, version=turn.version, routes=True
            )
            groups = iter(engine.extend(requests, options))
        decoded = engine.decoded - before
        tokens = 0
        left: list[tuple[Ticket, OpenBatch]] = []
        results: list[CollectResult] = []
        for ticket, batch in turn.batches:
            grown = extended(batch, [next(groups) for _ in batch.completions])
            tokens += sampled_tokens(grown) - sampled_tokens(batch)
            if turn.weights != self._schedule.last(ticket):
                left.append((ticket, grown))
                continue
            # What a turn costs is counted once, for the first batch that it finishes.
            spent = DecodeStats() if results else decoded
            results.append(replace(self._finish(grown, ticket, spent, clock), weights=ticket.weights))
        results = [replace(result, decoded_tokens=tokens) for result in results]
        self._commit(turn, left, results, start)

    def _finish(self, batch: OpenBatch, ticket: Ticket, decoded: DecodeStats, turn: Clock) -> CollectResult:
        """Score a batch whose completions are over. `turn` has measured its last turn."""
        context = self._context
        gatherer = Gatherer(
            want=context.config.rollout.prompts,
            budget=1,  # `config` refuses refills, so the first request is the only one
            start=RolloutState(batch=batch.batch - 1, cursor=batch.cursor),
            keep=partial(keeps_group, context.objective),
            patience=len(context.problems.train),
            max_unscored=context.config.reward.max_unscored_fraction,
        )
        times = self._times.get(batch.batch)
        clock = self._clock(batch.batch) if times is None else times.clock
        clock.add("rollout", turn.seconds["rollout"])
        self._reached(batch.batch, "sampled")
        for request in gatherer:
            taken = context.order.take(request.cursor, request.count)
            prompts = self._prompts(request.cursor, request.count)
            split = [kept(prompt, group) for prompt, group in zip(prompts, batch.completions, strict=True)]
            pairs = [(prompt, over) for prompt, (over, _) in zip(prompts, split, strict=True) if over]
            with clock.measure("reward"):
                scores = context.rewards.score(pairs)
            scored = zip(pairs, scores, strict=True)
            gatherer.add([Group(prompt=p, completions=c, scores=s) for (p, c), s in scored], taken)
        result = gatherer.result(ticket.version, DecodeStats(), decoded)
        # The metrics of dropped completions count prompts without any; they are not missing for another reason.
        return replace(
            result,
            wanted=result.wanted and result.wanted - (len(split) - len(pairs)),
            dropped=tuple(dropped for _, group in split for dropped in group),
        )

    def _commit(
        self,
        turn: _Turn,
        left: Sequence[tuple[Ticket, OpenBatch]],
        results: Sequence[CollectResult],
        start: float,
    ) -> None:
        """A turn is done: from here on, checkpoints continue after it."""
        with self._changed:
            if self._closing:
                return
            now = self._seconds
            # First what may fail: a checkpoint has all of a turn or nothing.
            for _, batch in left:
                self._ledger.cut(batch, turn.weights)
            for result in results:
                self._ledger.collected(result)
            for ticket, batch in turn.batches:
                self._open.pop(ticket.step, None)
                if (times := self._times.get(batch.batch)) is not None:
                    times.turns.append((turn.weights, start, now))
            for ticket, batch in left:
                self._open[ticket.step] = batch
            for result in results:
                if (times := self._times.get(result.batch)) is not None:
                    times.end, times.version = now, self._context.optimizer.updates
                self._tickets.popleft()
                self._buffer.put(result)
            self._forget()
            self._changed.notify_all()

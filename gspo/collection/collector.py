"""Who collects the batch of a step: the training loop itself, or a thread that samples ahead of it.

    lag 0   InTurn       collect, train, collect, train
    lag k   Ahead        a thread collects from a sampling process while the loop trains (`rollout.max_lag = k`)
            InTurns      the same in turns, with newer weights in each (`rollout.span_tokens`, `span_collector.py`)

In: the weights after each step. Out: a `CollectResult` per step. Invariant: the batch of step t is sampled from the
weights after step t - 1 - k, or from those that sampling started with, whatever takes longer. So results do not depend
on timing, and no batch is older than k steps when it is trained on: the weights of a step give room for exactly one
more batch. A batch is kept until a step has trained on it. A stopped run saves the batches that it has, and from which
weights the others come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from gspo.activity import activity
from gspo.clock import Clock
from gspo.context import RunContext
from gspo.errors import EngineError, LagError
from gspo.learner.checkpoint import TrainerState
from gspo.record.ledger import Ledger
from gspo.rollout.buffer import RolloutBuffer
from gspo.rollout.engine import Engine
from gspo.rollout.gather import CollectResult
from gspo.rollout.in_flight import Entry, InFlight, Ticket, older_weights, with_columns
from gspo.rollout.sampling_process import SamplingProcess
from gspo.step import collect

STAGES = {"rollout": "sampled", "reward": "scored"}
"""What the ledger calls the phases of `collect`."""


class Collector(Protocol):
    """Collects the batches of a run, from one state on."""

    def collect(self, clock: Clock) -> None:
        """Return once the batch of the next step is there. May be interrupted. The clock measures the phases of the
        step that this takes."""
        ...

    def take(self) -> CollectResult:
        """The batch of the next step, once it is there."""
        ...

    def trained(self, state: TrainerState) -> None:
        """A step has trained on the batch that was taken last, and the weights are those of `state`."""
        ...

    def in_flight(self, step: int) -> InFlight | None:
        """What the checkpoint of `step` must keep of the next batches; None if nothing."""
        ...

    def timings(self) -> dict[str, float]:
        """When the batch that was taken last was sampled and trained on."""
        ...

    def close(self) -> None:
        """End sampling. May be called twice."""
        ...


class InTurn:
    """Collects a batch when a step needs it, from the learner's current weights."""

    def __init__(self, context: RunContext, state: TrainerState) -> None:
        self._context = context
        # Room for one batch: collect and learn take turns, and every batch is on-policy.
        self._buffer = RolloutBuffer(capacity=1, start=state.rollout)

    def collect(self, clock: Clock) -> None:
        while not self._buffer.full:
            self._buffer.put(collect(self._context, self._buffer.end, clock=clock))

    def take(self) -> CollectResult:
        collected = self._buffer.take()
        assert collected.version == self._context.optimizer.updates, "the policy changed after it sampled this batch"
        return collected

    def trained(self, state: TrainerState) -> None:
        pass

    def in_flight(self, step: int) -> None:
        return None

    def timings(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


@dataclass(kw_only=True)
class SamplingTime:
    """When a batch was sampled, in seconds since the collector started, and between which weights."""

    clock: Clock
    start: float
    end: float = 0.0
    version: int = 0
    """The version of the learner's weights when it was collected."""
    turns: list[tuple[int, float, float]] = field(default_factory=list)
    """With `rollout.span_tokens`: its turns, by the step after which their weights were taken, with start and end."""


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """The batch that a step trains on."""

    batch: CollectResult
    at: float
    """When it was taken, in seconds since the collector started."""
    version: int
    """The version of the learner's weights then."""


class Ahead:
    """Collects batches in a thread, from a sampling process that it owns."""

    def __init__(
        self,
        context: RunContext,
        sampler: SamplingProcess,
        ledger: Ledger,
        state: TrainerState,
        restored: InFlight | None = None,
    ) -> None:
        """`restored`: what a checkpoint has kept of the next steps."""
        rollout, config = context.config.rollout, context.config
        self._context = context
        self._sampler = sampler
        self._ledger = ledger
        self._max_lag = rollout.max_lag
        # No batch is sampled that no step will train on. A token budget may end the run earlier.
        self._last_step = 2 * config.steps if config.tokens else config.steps
        self._changed = threading.Condition()
        self._buffer = RolloutBuffer(capacity=self._max_lag + 1, start=state.rollout)
        self._tickets: deque[Ticket] = deque()
        """The steps whose batches are not collected yet, in order."""
        self._plan: deque[Ticket] = deque()
        """The steps whose batches are not trained on yet."""
        self._times: dict[int, SamplingTime] = {}
        self._kept: set[int] = set()
        """The steps whose weights the sampling process can load."""
        self._step = state.step
        self._taken: _Taken | None = None
        self._last: dict[str, float] = {}
        self._error: BaseException | None = None
        self._closing = False
        self._began = time.monotonic()
        sampler.start()
        self._publish(state.step)
        ledger.resumed(state.rollout.batch, state.step)
        if restored is not None:
            self._restore(restored)
        for step in range(state.step + 1 + len(self._plan), state.step + 2 + self._max_lag):
            self._issue(Ticket(step=step, weights=state.step, version=state.updates))
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    def collect(self, clock: Clock) -> None:
        # The thread is the owner of this wait. Each of its own waits has a deadline, but for the one for weights: there
        # it waits for this thread, so both would wait forever.
        with clock.measure("wait"), activity("waiting for a batch"), self._changed:
            while not len(self._buffer) and self._error is None:
                if not self._may_sample():
                    raise EngineError(f"step {self._step + 1}: its batch waits for weights that no step has left")
                self._changed.wait(timeout=1.0)
                if not self._thread.is_alive() and self._error is None and not len(self._buffer):
                    raise EngineError("the thread that collects batches has ended; resume the run")
            if not len(self._buffer):
                assert self._error is not None
                raise self._error

    def take(self) -> CollectResult:
        with self._changed:
            collected = next(iter(self._buffer))
            self._taken = _Taken(batch=collected, at=self._seconds, version=self._context.optimizer.updates)
        self._check_age(collected)
        return collected

    def trained(self, state: TrainerState) -> None:
        assert self._taken is not None
        collected = self._taken.batch
        self._last = self._measure(self._taken)
        with self._changed:
            self._buffer.take()
            self._plan.popleft()
            self._step = state.step
            # There will be new weights, so one more batch may be sampled.
            self._issue(Ticket(step=state.step + 1 + self._max_lag, weights=state.step, version=state.updates))
            # From here on a checkpoint of this step has the whole plan, also if a disk is full below.
            self._ledger.trained(collected.batch, state.step)
            self._publish(state.step)
            self._forget()
            self._changed.notify_all()

    def in_flight(self, step: int) -> InFlight | None:
        with self._changed:
            assert step == self._step, f"the plan is that of step {self._step}, not {step}"
            batches: list[CollectResult | None] = list(self._buffer)
            batches += [None] * (len(self._plan) - len(batches))
            entries = tuple(self._entry(t, b) for t, b in zip(self._plan, batches, strict=True))
            # Read now: once the batch is collected, nothing else keeps them.
            older = {weights: self._sampler.kept_weights(weights) for weights in older_weights(entries, step)}
            return InFlight(entries=entries, older=older)

    def timings(self) -> dict[str, float]:
        return self._last

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._sampler.stop()
        # Briefly: a thread that is scoring notices it later, and does nothing more then.
        self._thread.join(timeout=2)

    def _check_age(self, batch: CollectResult) -> None:
        """Raise `LagError` if a completion is older than `rollout.max_lag` allows."""
        assert batch.weights is not None
        lag = self._step - batch.weights
        if not 0 <= lag <= self._max_lag:
            raise LagError(
                f"step {self._step + 1}: its batch was sampled from the weights of step {batch.weights}, "
                f"{lag} steps ago, and rollout.max_lag is {self._max_lag}"
            )
        # An engine says for each completion which weights have sampled it, so this does not rely on the schedule.
        for completion in (c for group in batch.rollouts.groups for c in group.completions):
            if completion.version < batch.version:
                raise LagError(
                    f"step {self._step + 1}: a completion of {completion.prompt_id} was sampled from version "
                    f"{completion.version} of the weights, and rollout.max_lag = {self._max_lag} allows version "
                    f"{batch.version} and later ones"
                )

    # ---- weights and tickets

    def _publish(self, step: int) -> None:
        self._sampler.publish(step)
        self._kept.add(step)

    def _issue(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)
        self._plan.append(ticket)

    def _entry(self, ticket: Ticket, batch: CollectResult | None) -> Entry:
        """What a checkpoint keeps of a step."""
        return Entry(ticket=ticket, batch=batch)

    def _forget(self) -> None:
        """Delete the weights that no batch will be sampled from."""
        needed = {weights for ticket in self._tickets for weights in self._entry(ticket, None).needed}
        for step in self._kept - needed:
            self._sampler.forget(step)
        self._kept &= needed

    def _restore(self, plan: InFlight) -> None:
        for older, weights in plan.older.items():
            self._sampler.keep(older, weights)
            self._kept.add(older)
        for entry in plan.entries:
            self._plan.append(entry.ticket)
            if entry.batch is None:
                self._tickets.append(entry.ticket)
            else:
                batch = with_columns(entry.batch, self._context.problems.train)
                self._buffer.put(batch)
                self._ledger.collected(batch, restored=True)

    # ---- the thread

    def _run(self) -> None:
        try:
            self._collect_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _collect_all(self) -> None:
        """Collect batches until sampling ends."""
        while (ticket := self._next_ticket()) is not None:
            self._collect(ticket)

    def _next_ticket(self) -> Ticket | None:
        """Wait for the next batch that may be sampled; None once sampling ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._may_sample())
            return None if self._closing else self._tickets[0]

    def _may_sample(self) -> bool:
        """Whether there are weights for what is to be sampled next, or is being sampled."""
        return self._next_weights() in self._kept

    def _next_weights(self) -> int | None:
        """The step after which the weights are taken of what is sampled next; None if every batch is collected."""
        tickets = [ticket for ticket in self._tickets if ticket.step <= self._last_step]
        return tickets[0].weights if tickets else None

    def _collect(self, ticket: Ticket) -> None:
        start = self._buffer.end
        batch = start.batch + 1
        clock = self._clock(batch)
        times = SamplingTime(clock=clock, start=self._seconds)
        self._ledger.issued(batch, ticket)
        engine: Engine = self._sampler.after_step(ticket.weights)
        if self._context.conversations is not None:
            engine = self._context.conversations.over(engine)
        context = replace(self._context, engine=engine)
        with activity(f"batch {batch}"):
            result = collect(context, start, clock=clock, version=ticket.version)
        times.end = self._seconds
        times.version = self._context.optimizer.updates
        with self._changed:
            if self._closing:
                return
            self._ledger.collected(result)
            self._tickets.popleft()
            self._times[batch] = times
            self._buffer.put(replace(result, weights=ticket.weights))
            self._forget()
            self._changed.notify_all()

    def _clock(self, batch: int) -> Clock:
        """A clock that tells the ledger which phase of a batch has ended."""
        return _StageClock(lambda state: self._reached(batch, state))

    def _reached(self, batch: int, state: str) -> None:
        with self._changed:
            if not self._closing:
                self._ledger.reached(batch, state)

    def _measure(self, taken: _Taken) -> dict[str, float]:
        """Where the time of a batch went, and how its age came about."""
        times = {"lag/learn_start_s": taken.at, "lag/learn_end_s": self._seconds}
        own = self._times.pop(taken.batch.batch, None)
        if own is None:  # a checkpoint has kept the batch: another process has sampled it
            return times
        return times | {
            "lag/sample_start_s": own.start,
            "lag/sample_end_s": own.end,
            "lag/rollout_s": own.clock.seconds.get("rollout", 0.0),
            "lag/reward_s": own.clock.seconds.get("reward", 0.0),
            "lag/in_flight_updates": own.version - taken.batch.version,
            "lag/in_queue_updates": taken.version - own.version,
            **{f"lag/turn/{weights}/start_s": start for weights, start, _ in own.turns},
            **{f"lag/turn/{weights}/end_s": end for weights, _, end in own.turns},
        }

    @property
    def _seconds(self) -> float:
        """Since sampling began."""
        return time.monotonic() - self._began


class _StageClock(Clock):
    """A clock that says when a phase has ended."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        super().__init__()
        self._ended = ended

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        with super().measure(name):
            yield
        if name in STAGES:
            self._ended(STAGES[name])

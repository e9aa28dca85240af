"""Batches that are sampled in turns, with newer weights in every turn (`rollout.span_tokens`).

    weights of step      3         4         5         6
    batch of step 6    [turn 1]  [turn 2]
    batch of step 7              [turn 1]  [turn 2]              max_lag = 2: turns with the weights of steps
    batch of step 8                        [turn 1]  [turn 2]    t - 3 and t - 2 for the batch of step t

In: the tickets of batches, and completions that were cut. Out: in which turns a batch is sampled, what a turn asks of
the engine, and what is left open after it. Invariant: the length of a turn is counted in tokens, never in seconds. So
which weights sample which token depends on the completions alone, and delays change nothing.

A turn is one call of the engine for all batches that are open. Every completion gets at most `span_tokens` tokens.
Those that are not over are cut, and continue in the next turn, with the weights of the next step. In the last turn of a
batch, its completions are sampled to their end, or dropped with `rollout.over_lag = "drop"`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo.rollout.engine import Extension, begun
from gspo.rollout.gather import DroppedCompletion, RolloutState
from gspo.rollout.in_flight import OpenBatch, Ticket
from gspo.types import Completion, Prompt, StopReason


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """In which turns the batches of a run are sampled."""

    max_lag: int
    span_tokens: int
    max_tokens: int
    drop: bool = False
    """Whether completions that have not ended after the last turn are dropped."""

    @property
    def turns(self) -> int:
        """How many turns a batch has. As few as its longest completion can need, and one for each step of the lag at
        most: the last turn runs while the learner trains on the batch before."""
        return min(self.max_lag, math.ceil(self.max_tokens / self.span_tokens))

    def last(self, ticket: Ticket) -> int:
        """The step after which the weights are taken that finish a batch."""
        # The batches at the start of a run have the same first weights, and fewer turns.
        return max(ticket.weights, ticket.step - self.max_lag + self.turns - 2)

    def tokens(self, ticket: Ticket, weights: int) -> int:
        """How many tokens a completion gets in the turn with these weights."""
        last = self.last(ticket)
        if weights < last:
            return self.span_tokens
        # A batch with fewer turns, at the start of a run, allows as many tokens as any other.
        return self.span_tokens * (self.turns - (last - ticket.weights)) if self.drop else self.max_tokens


def due(ticket: Ticket, batch: OpenBatch | None) -> int:
    """The step after which the weights of the next turn of a batch are taken."""
    return ticket.weights if batch is None else batch.weights


def opened(start: RolloutState, prompts: Sequence[Prompt], ticket: Ticket, *, samples: int) -> OpenBatch:
    """The batch after `start`, before its first turn."""
    return OpenBatch(
        batch=start.batch + 1,
        cursor=start.cursor,
        weights=ticket.weights,
        completions=tuple(begun(prompt, samples, ticket.version) for prompt in prompts),
    )


def after(batch: OpenBatch) -> RolloutState:
    """Where sampling stands after an open batch, which takes all of its prompts in one request."""
    return RolloutState(batch=batch.batch, cursor=batch.cursor + len(batch.completions))


def stream(batch: OpenBatch) -> str:
    """The random streams of a batch, as `collect` names them."""
    return f"train/{batch.batch}/{batch.cursor}"


def extensions(batch: OpenBatch, prompts: Sequence[Prompt], tokens: int) -> list[Extension]:
    """What a turn asks of the engine for a batch."""
    return [
        Extension(prompt=prompt, completions=completions, stream=stream(batch), tokens=tokens)
        for prompt, completions in zip(prompts, batch.completions, strict=True)
    ]


def extended(batch: OpenBatch, completions: Sequence[Sequence[Completion]]) -> OpenBatch:
    """A batch after a turn."""
    return replace(batch, weights=batch.weights + 1, completions=tuple(map(tuple, completions)))


def kept(prompt: Prompt, completions: Sequence[Completion]) -> tuple[list[Completion], list[DroppedCompletion]]:
    """The completions of a prompt that have ended, and those that are dropped."""
    over = [c for c in completions if c.stop is not StopReason.CUT]
    dropped = [
        DroppedCompletion(prompt_id=prompt.id, sample=c.sample, tokens=c.sampled_count)
        for c in completions
        if c.stop is StopReason.CUT
    ]
    return over, dropped


def sampled_tokens(batch: OpenBatch) -> int:
    """How many tokens of a batch were sampled so far."""
    return sum(c.sampled_count for group in batch.completions for c in group)


def cut_count(batch: OpenBatch) -> int:
    """How many completions of a batch are not over."""
    return sum(c.stop is StopReason.CUT for group in batch.completions for c in group)

"""Every number of a replay.

In: a batch at the weights of one of its optimiser steps, and the objectives to put to it. Out: `ReplayNumbers`. Invariant: all
rows are of the same replies, weights and forward; row 0 is the run's own, and everything is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.context import LearnContext
from gspo.learner.batch import TrainBatch, selection_seed
from gspo.learner.forward import plan_logprobs
from gspo.objectives.objective import Objective
from gspo.objectives.samples import trainable
from gspo.objectives.sequences import Sequences
from gspo.types import Group
from gspo.view.replay.candidates import Candidate
from gspo.view.replay.coefficients import Coefficients, RatioSides, View, coefficients
from gspo.view.replay.gradients import Direction, Gram, gram
from gspo.view.replay.sweep import Sweep, swept, value_in_force


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply of the mini-batch."""

    prompt_id: str
    sample: int
    reward: float | None
    tokens: int
    log_ratio: float
    """Mean over its tokens of log pi/pi_old at the weights looked at."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One objective on the mini-batch."""

    label: str
    note: str
    loss: float
    loss_policy: float
    loss_kl: float
    loss_entropy: float
    grad_norm: float
    cosine: float | None
    """Between its gradient and the run's; None: one of them is 0."""
    clipped_tokens: RatioSides
    clipped_replies: RatioSides
    effective_replies: float
    """(sum |w|)^2 / sum w^2 over the replies' weights; 0: all weights are 0."""
    replies: int
    """Replies of the mini-batch that it counts."""
    tokens: int
    weights: tuple[float | None, ...]
    """Of each reply, -sum_t dL/dlogp_t; None: it does not count the reply."""
    token_weights: tuple[tuple[float, float] | None, ...]
    """The lowest and highest -dL/dlogp_t among a reply's tokens."""
    advantages: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The run's objective with one setting changed."""

    value: float
    clipped_tokens: RatioSides
    clipped_replies: RatioSides
    loss: float
    grad_norm: float
    cosine: float | None
    effective_replies: float


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A sweep's numbers."""

    setting: str
    own: float | None
    """The run's value; None: off or unset."""
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class ReplayNumbers:
    """What a replay found at one mini-batch."""

    mini_batch: int
    """From 1."""
    mini_batches: int
    rows: tuple[Row, ...]
    cosines: tuple[tuple[float | None, ...], ...]
    standard_error: float
    """Of the cosines; 0: exact."""
    sweeps: tuple[SweepResult, ...]
    replies: tuple[Reply, ...]
    tokens: int
    token_log_std: float
    """Standard deviation of log pi/pi_old over the mini-batch's tokens."""
    sequence_log_std: float
    """The same of its mean over a reply."""
    grad_norm_in_run: float
    """Of row 0, with the run's load-balancing loss: what the optimiser must find."""
    balanced: bool
    """Whether the run has such a loss; rows are without it."""


def look(
    learner: LearnContext,
    groups: Sequence[Group],
    batch: TrainBatch,
    index: int,
    *,
    step: int,
    found: Sequence[Candidate],
    sweeps: Sequence[Sweep],
    reference: Any,
) -> ReplayNumbers:
    """Put every objective to optimiser step `index`, at the weights as they are. Rows come closest to the run's first."""
    view = _view(learner, groups, batch, index, step, reference)
    own, rows = found[0].objective, sorted(view.rows)
    every = [c.objective for c in found] + [o for sweep in sweeps for o in swept(own, sweep)]
    made = [coefficients(objective, view) for objective in every]
    distinct, at = _distinct(made)
    inner = gram(learner.policy, batch, index, [Direction(logp_N=c.logp_N, entropy_N=c.entropy_N) for c in distinct])
    measured = [
        _Measured(made=m, inner=inner, mine=i, run=at[0], sequences=view.tokens.sequences)
        for m, i in zip(made, at, strict=True)
    ]
    order = [0, *sorted(range(1, len(found)), key=lambda i: _distance(measured[i].cosine))]
    return ReplayNumbers(
        mini_batch=index + 1,
        mini_batches=len(batch.plan.updates),
        rows=tuple(_row(found[i], measured[i], rows) for i in order),
        cosines=tuple(tuple(inner.cosine(at[i], at[j]) for j in order) for i in order),
        standard_error=inner.standard_error,
        sweeps=_sweeps(own, sweeps, measured[len(found) :]),
        grad_norm_in_run=inner.norm_in_run(at[0]),
        balanced=inner.balance is not None,
        **_moved(view, rows),
    )  # fmt: skip


def _distance(cosine: float | None) -> float:
    """What rows are sorted by; those without a gradient come last."""
    return math.inf if cosine is None else -cosine


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """An objective's coefficients, and its gradient among the others."""

    made: Coefficients
    inner: Gram
    mine: int
    run: int
    sequences: Sequences

    @property
    def norm(self) -> float:
        return self.inner.norm(self.mine)

    @property
    def cosine(self) -> float | None:
        return self.inner.cosine(self.mine, self.run)

    @property
    def weights(self) -> list[float]:
        weight_B: list[float] = self.made.weight_B(self.sequences).tolist()
        return weight_B


def _moved(view: View, rows: Sequence[int]) -> dict[str, Any]:
    """The mini-batch's replies, and how far the policy has moved on them."""
    sequences, log_ratio_N = view.tokens.sequences, (view.tokens.logp_N - view.tokens.logp_old_N).detach()
    in_rows = torch.zeros(sequences.count, dtype=torch.bool, device=log_ratio_N.device)
    in_rows[rows] = True
    mine_N, log_ratio_B = log_ratio_N[sequences.expand(in_rows)], sequences.mean(log_ratio_N)[rows]
    return {
        "replies": tuple(_reply(view, i, r) for i, r in zip(rows, log_ratio_B.tolist(), strict=True)),
        "tokens": len(mine_N),
        "token_log_std": float(mine_N.std(correction=0)),
        "sequence_log_std": float(log_ratio_B.std(correction=0)),
    }


def _view(learner: LearnContext, groups: Sequence[Group], batch: TrainBatch, index: int, step: int, reference: Any) -> View:  # fmt: skip
    config, policy, tokens = learner.config, learner.policy, batch.tokens
    logp_N, entropy_N = plan_logprobs(policy.model, batch.plan, batch.temperature, policy.device, update=index, routed=batch.routing.learning)  # fmt: skip
    logp_ref_N = tokens.logp_ref_N
    if reference is not None and logp_ref_N is None:
        logp_ref_N = plan_logprobs(reference, batch.plan, batch.temperature, policy.device)[0]
    return View(
        tokens=replace(tokens, logp_N=logp_N, entropy_N=entropy_N, logp_ref_N=logp_ref_N),
        replies=trainable(groups, learner.objective, max_tokens=config.rollout.max_tokens),
        rows=frozenset(row for micro in batch.plan.updates[index] for row in micro.rows),
        max_tokens=config.rollout.max_tokens,
        seed=selection_seed(batch, index),
    )


def _distinct(made: Sequence[Coefficients]) -> tuple[list[Coefficients], list[int]]:
    """Objectives that give every token the same coefficient share a gradient (a sweep often does)."""
    found: list[Coefficients] = []
    at = []
    for one in made:
        twin = next((i for i, other in enumerate(found) if _equal(one.logp_N, other.logp_N) and _equal(one.entropy_N, other.entropy_N)), None)  # fmt: skip
        if twin is None:
            found.append(one)
        at.append(len(found) - 1 if twin is None else twin)
    return found, at


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _row(candidate: Candidate, measured: _Measured, rows: Sequence[int]) -> Row:
    made, weight_B = measured.made, measured.weights
    counted_B, advantage_B = made.counted_B.tolist(), made.advantage_B.tolist()
    spread = _token_weights(made, measured.sequences)
    return Row(
        label=candidate.label,
        note=candidate.note,
        loss=made.loss,
        loss_policy=made.policy,
        loss_kl=made.kl,
        loss_entropy=made.entropy,
        grad_norm=measured.norm,
        cosine=measured.cosine,
        clipped_tokens=made.clipped_tokens,
        clipped_replies=made.clipped_replies,
        effective_replies=effective(weight_B),
        replies=sum(counted_B),
        tokens=made.tokens,
        weights=tuple(weight_B[i] if counted_B[i] else None for i in rows),
        token_weights=tuple(spread[i] if counted_B[i] else None for i in rows),
        advantages=tuple(advantage_B[i] if counted_B[i] else None for i in rows),
    )


def _token_weights(made: Coefficients, sequences: Sequences) -> list[tuple[float, float]]:
    """Lowest and highest -dL/dlogp of each sequence."""
    weight_N = -made.logp_N
    start_B = torch.zeros(sequences.count, dtype=weight_N.dtype, device=weight_N.device)
    low_B, high_B = (start_B.scatter_reduce(0, sequences.index_N, weight_N, how, include_self=False) for how in ("amin", "amax"))  # fmt: skip
    return list(zip(low_B.tolist(), high_B.tolist(), strict=True))


def effective(weights: Sequence[float]) -> float:
    """(sum |w|)^2 / sum w^2: how many replies of equal weight would be worth as much."""
    square = sum(w * w for w in weights)
    return sum(map(abs, weights)) ** 2 / square if square else 0.0


def _sweeps(own: Objective, sweeps: Sequence[Sweep], measured: Sequence[_Measured]) -> tuple[SweepResult, ...]:
    done, left = [], iter(measured)
    for sweep in sweeps:
        points = tuple(_point(value, next(left)) for value in sweep.values)
        done.append(SweepResult(setting=sweep.setting, own=value_in_force(own, sweep.setting), points=points))
    return tuple(done)


def _point(value: float, measured: _Measured) -> Point:
    return Point(
        value=value,
        clipped_tokens=measured.made.clipped_tokens,
        clipped_replies=measured.made.clipped_replies,
        loss=measured.made.loss,
        grad_norm=measured.norm,
        cosine=measured.cosine,
        effective_replies=effective(measured.weights),
    )


def _reply(view: View, row: int, log_ratio: float) -> Reply:
    reply = view.replies[row]
    return Reply(
        prompt_id=reply.completion.prompt_id,
        sample=reply.completion.sample,
        reward=reply.score.reward,
        tokens=len(reply.completion.token_ids),
        log_ratio=log_ratio,
    )

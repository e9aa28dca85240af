"""The numbers of a replay.

In: a batch at the weights of one of its optimizer steps, and the objectives to evaluate on it. Out: `ReplayNumbers`.
Invariant: all rows share the same completions, weights and forward pass; row 0 is the run's own, the baseline of the
others.
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
from gspo.objectives.samples import train_samples
from gspo.objectives.sequences import Sequences
from gspo.types import Group
from gspo.view.replay.candidates import Candidate
from gspo.view.replay.coefficients import Coefficients, MiniBatchView, RatioSides, coefficients
from gspo.view.replay.gradients import Direction, Gram, gram
from gspo.view.replay.sweep import Sweep, swept, value_in_run


@dataclass(frozen=True, kw_only=True)
class CompletionNumbers:
    """A completion of the mini-batch."""

    prompt_id: str
    sample: int
    reward: float | None
    tokens: int
    log_ratio: float
    """Mean of log pi/pi_old over its tokens."""


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
    """Between its gradient and the run's; `None` if one of them is 0."""
    clipped_tokens: RatioSides
    clipped_completions: RatioSides
    """Completions with at least one clipped token."""
    effective_completions: float
    """Effective number of completions, (sum |w|)^2 / sum w^2 over their weights; `0` if all weights are 0."""
    completions: int
    """Number of completions of the mini-batch that it trains on."""
    tokens: int
    weights: tuple[float | None, ...]
    """Of each completion, -sum_t dL/dlogp_t; `None` if the objective does not train on it."""
    token_weights: tuple[tuple[float, float] | None, ...]
    """Minimum and maximum of -dL/dlogp_t over a completion's tokens."""
    advantages: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The run's objective with one setting changed."""

    value: float
    clipped_tokens: RatioSides
    clipped_completions: RatioSides
    loss: float
    grad_norm: float
    cosine: float | None
    effective_completions: float


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The numbers of a sweep."""

    setting: str
    own: float | None
    """The run's value; `None` if it is disabled or unset."""
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class ReplayNumbers:
    """The numbers of a replay at one mini-batch."""

    mini_batch: int
    """Counted from 1."""
    mini_batches: int
    rows: tuple[Row, ...]
    cosines: tuple[tuple[float | None, ...], ...]
    standard_error: float
    """Of the cosines; `0` if exact."""
    sweeps: tuple[SweepResult, ...]
    completions: tuple[CompletionNumbers, ...]
    tokens: int
    token_log_std: float
    """Standard deviation of log pi/pi_old over the mini-batch's tokens."""
    sequence_log_std: float
    """Standard deviation over completions of its mean per completion."""
    grad_norm_in_run: float
    """Gradient norm of row 0 including the run's load-balancing loss, which must equal the optimizer's."""
    balanced: bool
    """Whether the run has a load-balancing loss. The rows exclude it."""


def measure(
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
    """Evaluate every objective at optimizer step `index`, at the current weights. Rows are sorted by cosine."""
    view = _view(learner, groups, batch, index, step, reference)
    own = found[0].objective
    rows = sorted(view.rows)
    objectives = [c.objective for c in found] + [o for sweep in sweeps for o in swept(own, sweep)]
    by_objective = [coefficients(objective, view) for objective in objectives]
    # Backward passes are the expensive part, and objectives often agree on a batch.
    distinct, at = _distinct(by_objective)
    inner = gram(learner.policy, batch, index, [Direction(logp_N=c.logp_N, entropy_N=c.entropy_N) for c in distinct])
    results = [
        _ObjectiveResult(coefficients=c, inner=inner, index=i, run=at[0], sequences=view.tokens.sequences)
        for c, i in zip(by_objective, at, strict=True)
    ]
    # The run's own row stays first: it is the baseline.
    order = [0, *sorted(range(1, len(found)), key=lambda i: _distance(results[i].cosine))]
    return ReplayNumbers(
        mini_batch=index + 1,
        mini_batches=len(batch.plan.updates),
        rows=tuple(_row(found[i], results[i], rows) for i in order),
        cosines=tuple(tuple(inner.cosine(at[i], at[j]) for j in order) for i in order),
        standard_error=inner.standard_error,
        sweeps=_sweeps(own, sweeps, results[len(found) :]),
        grad_norm_in_run=inner.norm_in_run(at[0]),
        balanced=inner.balance is not None,
        **_completion_numbers(view, rows),
    )


def _distance(cosine: float | None) -> float:
    """Sort key of the rows; those with gradient 0 come last."""
    return math.inf if cosine is None else -cosine


@dataclass(frozen=True, kw_only=True)
class _ObjectiveResult:
    """An objective's coefficients and its place in the Gram matrix."""

    coefficients: Coefficients
    inner: Gram
    index: int
    run: int
    sequences: Sequences

    @property
    def norm(self) -> float:
        return self.inner.norm(self.index)

    @property
    def cosine(self) -> float | None:
        return self.inner.cosine(self.index, self.run)

    @property
    def weights(self) -> list[float]:
        weight_B: list[float] = self.coefficients.weight_B(self.sequences).tolist()
        return weight_B


def _completion_numbers(view: MiniBatchView, rows: Sequence[int]) -> dict[str, Any]:
    """The mini-batch's completions and the spread of their log-ratios."""
    sequences = view.tokens.sequences
    log_ratio_N = (view.tokens.logp_N - view.tokens.logp_old_N).detach()
    in_rows = torch.zeros(sequences.count, dtype=torch.bool, device=log_ratio_N.device)
    in_rows[rows] = True
    mini_batch_N = log_ratio_N[sequences.expand(in_rows)]
    log_ratio_B = sequences.mean(log_ratio_N)[rows]
    return {
        "completions": tuple(_completion(view, i, r) for i, r in zip(rows, log_ratio_B.tolist(), strict=True)),
        "tokens": len(mini_batch_N),
        # Population, as in the metrics of a run. It is also defined for a mini-batch of one completion.
        "token_log_std": float(mini_batch_N.std(correction=0)),
        "sequence_log_std": float(log_ratio_B.std(correction=0)),
    }


def _view(
    learner: LearnContext, groups: Sequence[Group], batch: TrainBatch, index: int, step: int, reference: Any
) -> MiniBatchView:
    config = learner.config
    policy = learner.policy
    tokens = batch.tokens
    logp_N, entropy_N = plan_logprobs(
        policy.model, batch.plan, batch.temperature, policy.device, update=index, routed=batch.routing.learning
    )
    logp_ref_N = tokens.logp_ref_N
    # The run's own KL penalty has already needed these log-probs; other objectives may need them without it.
    if reference is not None and logp_ref_N is None:
        logp_ref_N = plan_logprobs(reference, batch.plan, batch.temperature, policy.device)[0]
    return MiniBatchView(
        tokens=replace(tokens, logp_N=logp_N, entropy_N=entropy_N, logp_ref_N=logp_ref_N),
        samples=train_samples(groups, learner.objective, max_tokens=config.rollout.max_tokens),
        rows=frozenset(row for micro in batch.plan.updates[index] for row in micro.sequence_ids),
        max_tokens=config.rollout.max_tokens,
        seed=selection_seed(batch, index),
    )


def _distinct(by_objective: Sequence[Coefficients]) -> tuple[list[Coefficients], list[int]]:
    """Distinct coefficients, and the index of each objective's among them.

    Objectives with the same coefficient at every token share a gradient. In a sweep this is common and saves backwards.
    """
    distinct: list[Coefficients] = []
    at = []
    for one in by_objective:
        twin = next((i for i, other in enumerate(distinct) if _same_gradient(one, other)), None)
        if twin is None:
            distinct.append(one)
        at.append(len(distinct) - 1 if twin is None else twin)
    return distinct, at


def _same_gradient(one: Coefficients, other: Coefficients) -> bool:
    return _equal(one.logp_N, other.logp_N) and _equal(one.entropy_N, other.entropy_N)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    # Bitwise: coefficients that are nearly the same still have two gradients, and a sweep shows the difference.
    return a is b if a is None or b is None else torch.equal(a, b)


def _row(candidate: Candidate, result: _ObjectiveResult, rows: Sequence[int]) -> Row:
    coeff = result.coefficients
    weight_B = result.weights
    trainable_B = coeff.trainable_B.tolist()
    advantage_B = coeff.advantage_B.tolist()
    token_weight_B = _token_weights(coeff, result.sequences)
    return Row(
        label=candidate.label,
        note=candidate.note,
        loss=coeff.loss,
        loss_policy=coeff.policy,
        loss_kl=coeff.kl,
        loss_entropy=coeff.entropy,
        grad_norm=result.norm,
        cosine=result.cosine,
        clipped_tokens=coeff.clipped_tokens,
        clipped_completions=coeff.clipped_completions,
        effective_completions=effective_count(weight_B),
        completions=sum(trainable_B),
        tokens=coeff.tokens,
        weights=tuple(weight_B[i] if trainable_B[i] else None for i in rows),
        token_weights=tuple(token_weight_B[i] if trainable_B[i] else None for i in rows),
        advantages=tuple(advantage_B[i] if trainable_B[i] else None for i in rows),
    )


def _token_weights(coefficients: Coefficients, sequences: Sequences) -> list[tuple[float, float]]:
    """Minimum and maximum of -dL/dlogp of each sequence."""
    weight_N = -coefficients.logp_N
    zeros_B = torch.zeros(sequences.count, dtype=weight_N.dtype, device=weight_N.device)
    # include_self=False: otherwise the zeros would be part of the minimum.
    low_B = zeros_B.scatter_reduce(0, sequences.index_N, weight_N, "amin", include_self=False)
    high_B = zeros_B.scatter_reduce(0, sequences.index_N, weight_N, "amax", include_self=False)
    return list(zip(low_B.tolist(), high_B.tolist(), strict=True))


def effective_count(weights: Sequence[float]) -> float:
    """Effective number of weights, (sum |w|)^2 / sum w^2: `n` if all are equal, 1 if one dominates."""
    square = sum(w * w for w in weights)
    return sum(map(abs, weights)) ** 2 / square if square else 0.0


def _sweeps(own: Objective, sweeps: Sequence[Sweep], results: Sequence[_ObjectiveResult]) -> tuple[SweepResult, ...]:
    finished = []
    remaining = iter(results)
    for sweep in sweeps:
        points = tuple(_point(value, next(remaining)) for value in sweep.values)
        finished.append(SweepResult(setting=sweep.setting, own=value_in_run(own, sweep.setting), points=points))
    return tuple(finished)


def _point(value: float, result: _ObjectiveResult) -> Point:
    return Point(
        value=value,
        clipped_tokens=result.coefficients.clipped_tokens,
        clipped_completions=result.coefficients.clipped_completions,
        loss=result.coefficients.loss,
        grad_norm=result.norm,
        cosine=result.cosine,
        effective_completions=effective_count(result.weights),
    )


def _completion(view: MiniBatchView, row: int, log_ratio: float) -> CompletionNumbers:
    sample = view.samples[row]
    return CompletionNumbers(
        prompt_id=sample.completion.prompt_id,
        sample=sample.completion.sample,
        reward=sample.score.reward,
        tokens=sample.completion.sampled_count,
        log_ratio=log_ratio,
    )

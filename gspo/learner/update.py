"""Stage 8: one optimiser step over a planned batch.

In: a `Batch` (plan and packed tokens) and which of its optimiser steps. Out: the loss and what the optimiser did; the
batch remembers what the learning forwards found.
Invariant: token weights, and tokens singled out, are fixed over the whole optimiser step before its first micro-batch
runs; losses of micro-batches add up. So cutting differently changes nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gspo.learner.forward import completion_logprobs, plan_logprobs
from gspo.learner.optimizer import Optimizer, Update
from gspo.learner.plan import MicroBatch, Plan
from gspo.learner.routing_replay import NoRouting
from gspo.model.load import Policy
from gspo.model.memory import out_of_memory, release_memory
from gspo.objectives.loss import Loss, loss_of, select
from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Sequences, Tokens
from gspo.objectives.trust_region import CovarianceRegion


@dataclass(frozen=True, kw_only=True)
class CachedForward:
    """The forward of the first micro-batch, run before its turn: it gave old log-probabilities, and its graph is kept."""

    of: MicroBatch
    logp_N: Tensor
    entropy_N: Tensor


@dataclass(kw_only=True)
class Batch:
    """A rollout batch in learning."""

    plan: Plan
    tokens: Tokens
    """All its reply tokens; sequence i is row i of the plan."""
    temperature: float
    routing: NoRouting = field(default_factory=NoRouting)
    """What a mixture of experts does with its routers in learning forwards."""
    ahead: CachedForward | None = None
    logp_N: Tensor = field(init=False)
    """The learning policy's log-probabilities at the moment each token was used."""
    ratio_N: Tensor = field(init=False)
    clipped_N: Tensor = field(init=False)
    halvings: int = 0
    """How often micro-batches had to be cut in two to fit into memory, at most."""

    def __post_init__(self) -> None:
        self.logp_N = self.tokens.logp_old_N.clone()
        self.ratio_N = torch.ones_like(self.logp_N)
        self.clipped_N = torch.zeros_like(self.logp_N, dtype=torch.bool)


def old_logprobs(
    policy: Policy, objective: Objective, plan: Plan, temperature: float, routing: NoRouting, *, keep: bool
) -> tuple[Tensor, Tensor, CachedForward | None]:
    """(logp_N, entropy_N) under the weights as they are. The first update will have the same weights, so with `keep` its
    first micro-batch is computed once for both, last of all, so that no other forward runs beside its graph."""
    first, device = plan.steps[0][0], policy.device
    keep &= not isinstance(objective.trust_region, CovarianceRegion)  # it looks at the whole step first
    rest = replace(plan, steps=(plan.steps[0][1:], *plan.steps[1:])) if keep and routing.repeats else plan
    logp_N, entropy_N = plan_logprobs(policy.model, rest, temperature, device, routed=routing.old)
    if rest is plan:
        return logp_N, entropy_N, None
    micro, ahead = first.to(device), None
    try:
        with routing.old(micro):
            found = completion_logprobs(policy.model, micro, temperature, entropy_gradient=bool(objective.entropy))
        ahead = CachedForward(of=first, logp_N=found[0], entropy_N=found[1])
    except Exception as error:
        if not out_of_memory(error):
            raise
    if ahead is None:
        release_memory()
        found = plan_logprobs(policy.model, replace(plan, steps=((first,),)), temperature, device, routed=routing.old)
        return logp_N + found[0], entropy_N + found[1], None
    logp_N[micro.at_N], entropy_N[micro.at_N] = ahead.logp_N.detach(), ahead.entropy_N.detach()
    return logp_N, entropy_N, ahead


def update(
    policy: Policy, optimizer: Optimizer, objective: Objective, batch: Batch, index: int, *, seed: int
) -> tuple[Loss, Update]:
    """Run optimiser step `index` of the plan: add the micro-batches' gradients up, then update once. What does not fit into
    memory is cut in two and begun anew, with the same gradient."""
    halvings = 0
    while True:
        try:
            loss = _gradients(policy, objective, batch, index, seed)
            break
        except Exception as error:
            smaller = batch.plan.halved(index) if out_of_memory(error) else None
            if smaller is None:
                raise
            batch.plan, batch.ahead, halvings = smaller, None, halvings + 1
            policy.model.zero_grad(set_to_none=True)
            release_memory()
    batch.halvings = max(batch.halvings, halvings)
    return loss, optimizer.step(loss_finite=math.isfinite(float(loss.total)))


def _gradients(policy: Policy, objective: Objective, batch: Batch, index: int, seed: int) -> Loss:
    """The gradient of one optimiser step, on the model; the batch remembers what the forwards found."""
    micro_batches = batch.plan.steps[index]
    weight_N = step_weights(objective, batch.plan, micro_batches).to(policy.device)
    selected_N = _select(policy, objective, batch, index, seed)
    losses = []
    for cpu_batch in micro_batches:
        micro, known = cpu_batch.to(policy.device), batch.ahead
        batch.ahead = None
        known = known if known is not None and known.of is cpu_batch else None
        with batch.routing.learning(micro) if known is None else nullcontext() as seen:
            if known is None:
                logp_N, entropy_N = completion_logprobs(
                    policy.model, micro, batch.temperature, entropy_gradient=bool(objective.entropy)
                )
            else:
                logp_N, entropy_N = known.logp_N, known.entropy_N
            tokens = _learning(batch.tokens, micro, logp_N, entropy_N, selected_N)
            loss = loss_of(objective, tokens, weight_N[micro.at_N])
            (loss.total + batch.routing.balance_loss(micro, seen, index)).backward()
        batch.logp_N[micro.at_N] = logp_N.detach()
        batch.ratio_N[micro.at_N] = loss.surrogate.ratio_N
        batch.clipped_N[micro.at_N] = loss.surrogate.clipped_N
        losses.append(loss)
    return _sum(losses)


def step_weights(objective: Objective, plan: Plan, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """The weight of each packed token in this optimiser step; 0 for tokens of the others."""
    rows = [row for micro in micro_batches for row in micro.rows]
    weight_B = torch.zeros(len(plan.rows), dtype=torch.float64)
    weight_B[rows] = objective.aggregate(plan.lengths(rows))
    return weight_B[plan.sequence_N].float()


def _select(policy: Policy, objective: Objective, batch: Batch, index: int, seed: int) -> Tensor | None:
    """Objectives that single tokens out by the step's statistics need a forward over all of the step first."""
    if not isinstance(objective.trust_region, CovarianceRegion):
        return None
    at_N = torch.cat([micro.at_N for micro in batch.plan.steps[index]]).sort().values.to(policy.device)
    logp_N, _ = plan_logprobs(
        policy.model, batch.plan, batch.temperature, policy.device, step=index, routed=batch.routing.learning
    )
    chosen = select(objective, replace(_take(batch.tokens, at_N), logp_N=logp_N[at_N]), seed)
    assert chosen is not None
    return torch.zeros_like(batch.clipped_N).index_put((at_N,), chosen)


def _learning(
    tokens: Tokens, micro: MicroBatch, logp_N: Tensor, entropy_N: Tensor, selected_N: Tensor | None
) -> Tokens:
    return replace(
        _take(tokens, micro.at_N),
        logp_N=logp_N,
        entropy_N=entropy_N,
        selected_N=None if selected_N is None else selected_N[micro.at_N],
        sequences=Sequences(micro.row_N, len(micro.rows)),
    )


def _take(tokens: Tokens, at_N: Tensor) -> Tokens:
    values: dict[str, Any] = {k: v[at_N] for k, v in vars(tokens).items() if isinstance(v, Tensor)}
    return replace(tokens, **values, sequences=Sequences(tokens.sequences.index_N[at_N], tokens.sequences.count))


def _sum(losses: Sequence[Loss]) -> Loss:
    parts = {
        k: torch.stack([getattr(x, k).detach() for x in losses]).sum() for k in ("total", "policy", "kl", "entropy")
    }
    return Loss(**parts, surrogate=losses[-1].surrogate)

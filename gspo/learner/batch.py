"""A rollout batch, ready to train on: plan, packed tokens with their log-probs and advantages, routing.

In: the samples of a step. Out: a `TrainBatch`. Invariant: everything here is computed with the weights before the first
optimizer step, and does not change while the batch is trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gspo.learner.forward import TrainForward, plan_logprobs
from gspo.learner.old_logprobs import CachedForward, OldLogprobs, from_sampler, recomputed
from gspo.learner.plan import Plan, make_plan
from gspo.learner.routing_replay import NoRouting, route
from gspo.model.adapter import switched_off
from gspo.model.micro_batch import MicroBatch, TokenSequence
from gspo.model.packed_forward import reads_packed
from gspo.objectives.credit import token_advantages
from gspo.objectives.loss import select
from gspo.objectives.objective import Objective
from gspo.objectives.samples import TrainSample
from gspo.objectives.sequences import Sequences, Tokens
from gspo.rollout.engine import engine_traits

if TYPE_CHECKING:
    from gspo.context import LearnContext


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """A rollout batch that is being trained on."""

    plan: Plan
    samples: tuple[TrainSample, ...]
    """Sequence i of the plan and of `tokens`."""
    tokens: Tokens
    """All completion tokens, packed. `logp_N` is the old policy's."""
    reward_B: Tensor
    """The rewards that the advantages are computed from: shaped, and minus the KL penalty with `kl_in = "reward"`."""
    old: OldLogprobs
    temperature: float
    """The sampling temperature. Log-probs use it too."""
    routing: NoRouting
    """How an MoE model routes in training forwards."""
    rounding_N: Tensor | None
    """log pi_old - log mu if the engine sampled with the learner's own weights, so that only rounding makes them
    differ; None otherwise."""
    seed: str
    """Seed of objectives that select tokens at random."""

    @property
    def cached(self) -> CachedForward | None:
        """The forward of the first micro-batch; None if computing the old log-probs has not run it."""
        return self.old.cached


def prepare(context: LearnContext, samples: Sequence[TrainSample], *, step: int, reuse_forward: bool) -> TrainBatch:
    """Plan the batch and compute everything that is fixed before the first update. With `reuse_forward`, the first
    training forward also gives the old log-probs."""
    config = context.config
    plan = plan_batch(context, samples, step)
    routing = _routing(context, plan, samples)
    # The reference first: the old forward may leave a graph in memory.
    logp_ref_N = _reference_logprobs(context, plan) if context.reference else None
    old = _old_logprobs(context, plan, samples, routing, reuse_forward=reuse_forward)
    tokens = Tokens(
        logp_N=old.logp_N,
        logp_old_N=old.logp_N,
        logp_sampler_N=old.logp_sampler_N,
        logp_ref_N=logp_ref_N,
        advantage_N=torch.zeros_like(old.logp_N),
        sequences=Sequences(plan.sequence_N.to(context.policy.device), len(samples)),
    )
    reward_B, advantage_N = token_advantages(context.objective, tokens, samples)
    return TrainBatch(
        plan=plan,
        samples=tuple(samples),
        tokens=replace(tokens, advantage_N=advantage_N),
        reward_B=reward_B,
        old=old,
        temperature=config.rollout.temperature,
        routing=routing,
        rounding_N=_rounding(context, samples, old),
        seed=f"{config.seed}/select/{step}",
    )


def plan_batch(context: LearnContext, samples: Sequence[TrainSample], step: int) -> Plan:
    """Split the samples into optimizer steps and micro-batches."""
    config = context.config
    models = [model for model in (context.policy.model, context.reference) if model is not None]
    return make_plan(
        [TokenSequence(prompt_ids=s.prompt.token_ids, completion_ids=s.completion.token_ids) for s in samples],
        [s.group for s in samples],
        mini_batches=config.learner.mini_batches,
        token_budget=config.learner.micro_batch_tokens,
        pad_id=context.policy.pad_id,
        seed=f"{config.seed}/mini-batches/{step}",
        packed=all(reads_packed(model) for model in models),
    )


def token_weights(objective: Objective, plan: Plan, index: int) -> Tensor:
    """The weight of each packed token in optimizer step `index`; 0 for tokens of the others."""
    rows = [row for micro in plan.updates[index] for row in micro.rows]
    # Computed for the whole optimizer step, in float64: micro-batching must not change a weight.
    weight_B = torch.zeros(len(plan.rows), dtype=torch.float64)
    weight_B[rows] = objective.aggregate(plan.lengths(rows))
    return weight_B[plan.sequence_N].float()


def select_tokens(context: LearnContext, batch: TrainBatch, index: int) -> Tensor | None:
    """The tokens that the objective selects in optimizer step `index`; None if it uses all.

    The choice depends on statistics of the whole step, so it needs a forward over all of it first."""
    objective, policy = context.objective, context.policy
    if not objective.selects_tokens:
        return None
    at_N = torch.cat([micro.at_N for micro in batch.plan.updates[index]]).sort().values.to(policy.device)
    logp_N, _ = plan_logprobs(
        policy.model,
        batch.plan,
        batch.temperature,
        policy.device,
        update=index,
        routed=batch.routing.learning,
    )
    chosen = select(objective, replace(batch.tokens.take(at_N), logp_N=logp_N[at_N]), selection_seed(batch, index))
    assert chosen is not None
    return torch.zeros_like(logp_N, dtype=torch.bool).index_put((at_N,), chosen)


def micro_tokens(batch: TrainBatch, micro: MicroBatch, out: TrainForward, selected_N: Tensor | None) -> Tokens:
    """The tokens of a micro-batch as the objective sees them: with gradient, whole sequences numbered from 0."""
    return replace(
        batch.tokens.take(micro.at_N),
        logp_N=out.logp_N,
        entropy_N=out.entropy_N,
        selected_N=None if selected_N is None else selected_N[micro.at_N],
        sequences=replace(batch.tokens.sequences, index_N=micro.row_N, count=len(micro.rows)),
    )


def selection_seed(batch: TrainBatch, index: int) -> int:
    """The seed of `select_tokens` in an optimizer step."""
    return int.from_bytes(hashlib.blake2b(f"{batch.seed}/{index}".encode(), digest_size=7).digest(), "big")


def _routing(context: LearnContext, plan: Plan, samples: Sequence[TrainSample]) -> NoRouting:
    settings, policy = context.config.routing, context.policy
    return route(
        policy.routers,
        plan,
        [s.completion.routes for s in samples],
        replay=settings.replay,
        balance=settings.balance_loss,
        device=policy.device,
    )


def _reference_logprobs(context: LearnContext, plan: Plan) -> Tensor:
    """Log-probs under the reference. If that is the policy's own model, its adapters are disabled."""
    own = context.reference is context.policy.model
    with switched_off(context.reference) if own else nullcontext():
        return plan_logprobs(context.reference, plan, context.config.rollout.temperature, context.policy.device)[0]


def _old_logprobs(
    context: LearnContext, plan: Plan, samples: Sequence[TrainSample], routing: NoRouting, *, reuse_forward: bool
) -> OldLogprobs:
    policy, objective = context.policy, context.objective
    temperature = context.config.rollout.temperature
    sampled = [logp for s in samples for logp in s.completion.logp_sampler]
    sampler_N = torch.tensor(sampled, dtype=torch.float32, device=policy.device)
    if context.config.learner.old_logp == "sampler":
        return from_sampler(policy, plan, temperature, sampler_N, objective)
    return recomputed(policy, plan, temperature, sampler_N, objective, routing, reuse_forward=reuse_forward)


def _rounding(context: LearnContext, samples: Sequence[TrainSample], old: OldLogprobs) -> Tensor | None:
    """The rounding noise. Known if the completions were sampled from the full distribution of the current weights."""
    config, now = context.config, context.optimizer.updates
    rollout = config.rollout
    same_weights = engine_traits(rollout.engine).shares_weights and all(s.completion.version == now for s in samples)
    full_distribution = rollout.top_p == 1 and not rollout.top_k
    # If the sampler's log-probs are the old ones, their difference is 0 and says nothing about rounding.
    computed = config.learner.old_logp == "recompute"
    return old.log_rho_M if same_weights and full_distribution and computed else None

"""A rollout batch, ready to train on: plan, packed tokens with their log-probs and advantages, routing.

In: the samples of a step. Out: a `TrainBatch`. Invariant: everything here is computed with the weights before the first
optimizer step, and does not change while the batch is trained on.

The old policy's log-probs are the denominator of importance ratios. `learner.old_logp` chooses their source:

    recompute   a learner forward over all tokens. Exact for every engine.
    sampler     the engine's log-probs, which saves that forward. The GSPO paper suggests it, because sequence ratios
                tolerate more noise. The learner still computes the first mini-batch, to measure the mismatch. Engine
                noise that exceeds the clip range before any update is an error, or with `learner.allow_mismatch` a
                warning, never silently trained on. The old policy's experts of an MoE model are the engine's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gspo.errors import MismatchError
from gspo.learner.forward import (
    CachedForward,
    NoRouting,
    RoutingReplay,
    TrainForward,
    completion_logprobs,
    plan_logprobs,
)
from gspo.learner.plan import Plan, make_plan, update_count
from gspo.learner.routing_replay import RecordedRouting
from gspo.model.adapter import adapters_disabled
from gspo.model.micro_batch import MicroBatch, TokenSequence
from gspo.model.out_of_memory import out_of_memory, release_memory
from gspo.model.packed_forward import supports_packing
from gspo.objectives.advantage import token_advantages
from gspo.objectives.loss import select
from gspo.objectives.objective import Objective
from gspo.objectives.rounding import Noise, root_mean_square, rounding_noise
from gspo.objectives.samples import TrainSample
from gspo.objectives.sequences import Sequences, Tokens
from gspo.rollout.engine import engine_traits

if TYPE_CHECKING:
    from gspo.config import RoutingConfig
    from gspo.context import LearnContext
    from gspo.model.load import Policy
    from gspo.types import Completion, Prompt, Routes


@dataclass(frozen=True, kw_only=True)
class OldLogprobs:
    """The old policy's log-probs of a batch."""

    logp_N: Tensor
    logp_sampler_N: Tensor
    entropy_M: Tensor
    """Entropy of the old policy at the tokens that the learner has computed."""
    log_rho_M: Tensor
    """log pi_old - log mu at these tokens, with pi_old from the learner's forward and mu from the engine."""
    cached: CachedForward | None = None
    """The forward of the first micro-batch, for the first update; None if computing the log-probs has not run it."""
    noise: Noise | None = None
    """With the engine's log-probs as the old ones: the noise that they add to ratios, in the first mini-batch."""
    excess: str = ""
    """Why that noise is too large, if `learner.allow_mismatch` accepted it; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """A rollout batch that is being trained on."""

    plan: Plan
    samples: tuple[TrainSample, ...]
    """Sequence i of the plan and of `tokens`."""
    tokens: Tokens
    """All sampled tokens, packed. `logp_N` is the old policy's."""
    reward_B: Tensor
    """The rewards that the advantages are computed from: shaped, and minus the KL penalty with `kl_in = "reward"`."""
    old: OldLogprobs
    temperature: float
    """The sampling temperature. Log-probs use it too."""
    routing: RoutingReplay
    """How an MoE model routes in training forwards."""
    rounding_N: Tensor | None
    """log pi_old - log mu if the engine sampled with the learner's own weights, so that only rounding makes them
    differ; None otherwise."""
    seed: str
    """Seed of objectives that select tokens at random."""


def prepare_batch(
    context: LearnContext, samples: Sequence[TrainSample], *, step: int, reuse_forward: bool
) -> TrainBatch:
    """Plan the batch and compute everything that is fixed before the first update. With `reuse_forward`, the first
    training forward also gives the old log-probs."""
    config = context.config
    plan = plan_batch(context, samples, step)
    routing = batch_routing(context.policy, config.routing, plan, [s.completion.routes for s in samples])
    # The reference first: the old forward may leave a graph in memory.
    logp_ref_N = _reference_logprobs(context, plan) if context.reference else None
    old = _old_logprobs(context, plan, samples, routing, reuse_forward=reuse_forward)
    tokens = Tokens(
        logp_N=old.logp_N,
        logp_old_N=old.logp_N,
        logp_sampler_N=old.logp_sampler_N,
        logp_ref_N=logp_ref_N,
        # Filled in below: a KL penalty in the reward needs the log-probs of the tokens first.
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


def token_sequence(prompt: Prompt, completion: Completion, policy: Policy, min_tokens: int) -> TokenSequence:
    """A completion as the learner reads it: its tokens, and what could not be sampled in their place."""
    return TokenSequence(
        prompt_ids=prompt.token_ids,
        completion_ids=completion.token_ids,
        sampled=completion.sampled,
        excluded_ids=policy.stop_ids,
        excluded_for=min_tokens,
    )


def plan_batch(context: LearnContext, samples: Sequence[TrainSample], step: int) -> Plan:
    """Split the samples into optimizer steps and micro-batches."""
    config = context.config
    models = [model for model in (context.policy.model, context.reference) if model is not None]
    return make_plan(
        [token_sequence(s.prompt, s.completion, context.policy, config.rollout.min_tokens) for s in samples],
        [s.group for s in samples],
        mini_batches=update_count(
            config.learner.mini_batches, len(samples), full=config.rollout.prompts * config.rollout.group_size
        ),
        token_budget=config.learner.micro_batch_tokens,
        pad_id=context.policy.pad_id,
        seed=f"{config.seed}/mini-batches/{step}",
        packed=all(supports_packing(model) for model in models),
    )


def loss_weights(objective: Objective, plan: Plan, update_index: int) -> Tensor:
    """The weight of each packed token in the loss of optimizer step `update_index`; 0 for tokens of the others."""
    chosen = [s for micro in plan.updates[update_index] for s in micro.sequence_ids]
    # Computed for the whole optimizer step, in float64: micro-batching must not change a weight.
    weight_B = torch.zeros(len(plan.sequences), dtype=torch.float64)
    weight_B[chosen] = objective.aggregate(plan.lengths(chosen))
    return weight_B[plan.sequence_N].float()


def token_selection(context: LearnContext, batch: TrainBatch, update_index: int) -> Tensor | None:
    """The tokens that the objective selects in optimizer step `update_index`; None if it uses all.

    The choice depends on statistics of the whole step, so it needs a forward over all of it first."""
    objective, policy = context.objective, context.policy
    if not objective.trust_region.selects_tokens:
        return None
    # In packed order, so that a selection at random does not depend on the order of micro-batches.
    at_N = torch.cat([micro.at_N for micro in batch.plan.updates[update_index]]).sort().values.to(policy.device)
    logp_N, _ = plan_logprobs(
        policy.model,
        batch.plan,
        batch.temperature,
        policy.device,
        update=update_index,
        routed=batch.routing.learning,
    )
    tokens = replace(batch.tokens.take(at_N), logp_N=logp_N[at_N])
    chosen = select(objective, tokens, selection_seed(batch, update_index))
    assert chosen is not None
    return torch.zeros_like(logp_N, dtype=torch.bool).index_put((at_N,), chosen)


def micro_tokens(batch: TrainBatch, micro: MicroBatch, out: TrainForward, selected_N: Tensor | None) -> Tokens:
    """The tokens of a micro-batch as the objective sees them: with gradient, whole sequences numbered from 0."""
    return replace(
        batch.tokens.take(micro.at_N),
        logp_N=out.logp_N,
        entropy_N=out.entropy_N,
        selected_N=None if selected_N is None else selected_N[micro.at_N],
        sequences=replace(batch.tokens.sequences, index_N=micro.sequence_N, count=len(micro.sequence_ids)),
    )


def selection_seed(batch: TrainBatch, update_index: int) -> int:
    """The seed of `token_selection` in an optimizer step."""
    # Not `hash`, which differs between processes. Seven bytes always fit into torch's 64-bit seed.
    return int.from_bytes(hashlib.blake2b(f"{batch.seed}/{update_index}".encode(), digest_size=7).digest(), "big")


def batch_routing(
    policy: Policy, settings: RoutingConfig, plan: Plan, reported: Sequence[Routes | None]
) -> RoutingReplay:
    """The routing of a batch. `reported` are the engine's experts of each sequence."""
    if policy.routers is None:
        return NoRouting()
    return RecordedRouting(
        policy.routers,
        plan,
        reported,
        replay=settings.replay,
        balance=settings.balance_loss,
        device=policy.device,
    )


def _reference_logprobs(context: LearnContext, plan: Plan) -> Tensor:
    """Log-probs under the reference. If that is the policy's own model, its adapters are disabled."""
    own = context.reference is context.policy.model
    with adapters_disabled(context.reference) if own else nullcontext():
        return plan_logprobs(context.reference, plan, context.config.rollout.temperature, context.policy.device)[0]


def _rounding(context: LearnContext, samples: Sequence[TrainSample], old: OldLogprobs) -> Tensor | None:
    """The rounding noise. Known if the completions were sampled from the full distribution of the current weights."""
    config, now = context.config, context.optimizer.updates
    rollout = config.rollout
    same_weights = engine_traits(rollout.engine).shares_weights and all(s.completion.version == now for s in samples)
    full_distribution = rollout.top_p == 1 and not rollout.top_k
    # If the sampler's log-probs are the old ones, their difference is 0 and says nothing about rounding.
    computed = config.learner.old_logp == "recompute"
    return old.log_rho_M if same_weights and full_distribution and computed else None


# ---- old log-probs


def _old_logprobs(
    context: LearnContext, plan: Plan, samples: Sequence[TrainSample], routing: RoutingReplay, *, reuse_forward: bool
) -> OldLogprobs:
    sampled = [logp for s in samples for logp in s.completion.logp_sampler]
    sampler_N = torch.tensor(sampled, dtype=torch.float32, device=context.policy.device)
    if context.config.learner.old_logp == "sampler":
        return _from_sampler(context, plan, sampler_N, routing)
    logp_N, entropy_N, cached = _old_forward(context, plan, routing, reuse_forward=reuse_forward)
    return OldLogprobs(
        logp_N=logp_N, logp_sampler_N=sampler_N, entropy_M=entropy_N, log_rho_M=logp_N - sampler_N, cached=cached
    )


def _old_forward(
    context: LearnContext, plan: Plan, routing: RoutingReplay, *, reuse_forward: bool
) -> tuple[Tensor, Tensor, CachedForward | None]:
    """(logp_N, entropy_N) under the current weights. The first update has the same weights, so with `reuse_forward` its
    first micro-batch is computed once for both."""
    objective, model, device = context.objective, context.policy.model, context.policy.device
    temperature = context.config.rollout.temperature
    first = plan.updates[0][0]
    # An objective that selects tokens needs a forward over the whole update first, so it cannot reuse this one.
    reuse = reuse_forward and routing.repeats and not objective.trust_region.selects_tokens
    rest = replace(plan, updates=(plan.updates[0][1:], *plan.updates[1:])) if reuse else plan
    logp_N, entropy_N = plan_logprobs(model, rest, temperature, device, routed=routing.old)
    if not reuse:
        return logp_N, entropy_N, None
    # The micro-batch with the graph comes last, so that no other forward runs while the graph occupies memory.
    micro = first.to(device)
    outputs = None
    try:
        with routing.old(micro):
            outputs = completion_logprobs(model, micro, temperature, entropy_gradient=bool(objective.entropy))
    except Exception as error:
        if not out_of_memory(error):
            raise
    if outputs is None:
        # Outside the handler: the traceback of the error holds the tensors that did not fit.
        release_memory()
        alone = replace(plan, updates=((first,),))
        first_logp_N, first_entropy_N = plan_logprobs(model, alone, temperature, device, routed=routing.old)
        # Each of the two is 0 at the tokens of the other, so the sum is exact.
        return logp_N + first_logp_N, entropy_N + first_entropy_N, None
    logp_N[micro.at_N] = outputs[0].detach()
    entropy_N[micro.at_N] = outputs[1].detach()
    return logp_N, entropy_N, CachedForward(first, *outputs)


def _from_sampler(context: LearnContext, plan: Plan, sampler_N: Tensor, routing: RoutingReplay) -> OldLogprobs:
    """Old log-probs from the engine. Raises `MismatchError` if they are too far from the learner's, unless
    `learner.allow_mismatch` is set."""
    policy, temperature = context.policy, context.config.rollout.temperature
    # The first mini-batch is a sample of the mismatch; all of them would cost the forward that this setting saves.
    logp_N, entropy_N = plan_logprobs(policy.model, plan, temperature, policy.device, update=0, routed=routing.old)
    routing.old_from_sampler()
    at_M = torch.cat([micro.at_N for micro in plan.updates[0]]).sort().values.to(policy.device)
    tokens = Tokens(
        logp_N=logp_N[at_M],
        logp_old_N=sampler_N[at_M],
        logp_sampler_N=sampler_N[at_M],
        advantage_N=torch.zeros_like(logp_N[at_M]),
        sequences=Sequences(plan.sequence_N.to(policy.device)[at_M], len(plan.sequences)),
    )
    excess = _excess_mismatch(context.objective, tokens)
    if excess and not context.config.learner.allow_mismatch:
        raise MismatchError(
            f'{excess}; set learner.old_logp = "recompute", or learner.allow_mismatch = true to train on it anyway'
        )
    log_rho_M = tokens.logp_N - tokens.logp_old_N
    return OldLogprobs(
        logp_N=sampler_N,
        logp_sampler_N=sampler_N,
        entropy_M=entropy_N[at_M],
        log_rho_M=log_rho_M,
        noise=rounding_noise(context.objective, tokens.sequences, log_rho_M),
        excess=excess,
    )


def _excess_mismatch(objective: Objective, tokens: Tokens) -> str:
    """Why the mismatch is too large for the objective: the root mean square of its log-ratio before any update is
    beyond what its trust region tolerates. Empty if it is not."""
    region = objective.trust_region
    length_N = tokens.sequences.expand(tokens.sequences.length_B)
    noise = root_mean_square(region.bounded(objective.ratio(tokens).double(), length_N))
    if region.noise_limit is None or noise <= region.noise_limit:  # NaN is not below the limit
        return ""
    bound = "its clip range" if region.clip_range else "the log-ratio that its weight tolerates"
    return (
        f'learner.old_logp: with "sampler" the ratios of {objective.name} are off by {noise:.2g} before any update '
        f"(root mean square of the log-ratio between learner and engine), more than {bound} of "
        f"{region.noise_limit:.2g}: the engine's rounding acts as if the policy had changed"
    )

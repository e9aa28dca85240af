"""One training step: `collect()` samples and scores, `learn()` updates the policy. Read this file first.

Each line of the two functions is one stage, and each stage is one file:

    data/problems.py -> rollout/ -> reward/ -> objective/ (counted, advantage, ratio, trust_region, aggregate) -> policy/

Invariant: `collect` changes nothing but the data cursor; `learn` depends only on the groups it is given and the weights.
How a batch is cut into micro-batches decides memory and speed, nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo.clock import Clock
from gspo.config import Config
from gspo.data.problems import Problems, PromptOrder
from gspo.learner.forward import plan_logprobs
from gspo.learner.old_logprobs import OldLogprobs, from_sampler, recomputed
from gspo.learner.optimizer import Optimizer, Update
from gspo.learner.packing import reads_packed
from gspo.learner.plan import Plan, Positions, Row, make_plan
from gspo.learner.routing_replay import NoRouting, RoutingStats, route
from gspo.learner.update import Batch, update
from gspo.model.adapter import switched_off
from gspo.model.load import Policy
from gspo.objectives.adaptive_clip import AdaptiveClip
from gspo.objectives.advantage import apply_rule, batch_whitened, whitened_returns
from gspo.objectives.loss import Loss
from gspo.objectives.objective import Objective
from gspo.objectives.penalty import KL_ESTIMATORS
from gspo.objectives.samples import TrainSample, counted, keeps
from gspo.objectives.sequences import Sequences, Tokens
from gspo.reward.reward import RewardPool
from gspo.rollout.engine import DecodeStats, Engine
from gspo.rollout.gather import RolloutBatch, distinct, gather
from gspo.types import Completion, Group, Prompt, Score


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What the learning half of a step works with."""

    config: Config
    objective: Objective
    policy: Policy
    reference: Any
    """The frozen reference model, or the policy's own, which stands for itself without its adapters; None without a KL penalty."""
    optimizer: Optimizer


@dataclass(frozen=True, kw_only=True)
class RunContext(Learner):
    """Everything a step works with, built once by `trainer.py`."""

    problems: Problems
    order: PromptOrder
    engine: Engine
    rewards: RewardPool
    adaptive_clip: AdaptiveClip | None = None
    """Adapts the objective's clip range from step to step; None: the range stays."""


@dataclass(frozen=True, kw_only=True)
class CollectResult:
    """The rollout half of a step."""

    gathered: RolloutBatch
    cursor: int
    """Where the data order stands now."""
    decoded: DecodeStats | None = None
    """What sampling cost; None: the engine does not know."""

    @property
    def tokens(self) -> int:
        """Tokens of all replies that were sampled, discarded ones too."""
        return sum(len(c.token_ids) for group in self.gathered.sampled for c in group.completions)


@dataclass(frozen=True, kw_only=True)
class LearnResult:
    """The learning half of a step: packed tokens of all optimiser steps, and what each of them did."""

    counted: tuple[TrainSample, ...]
    """The replies that were learned from; sequence i of `tokens`."""
    reward_B: Tensor
    """The rewards that entered the advantages: shaped, and less a KL penalty that belongs to the reward."""
    advantage_B: Tensor
    """Per reply; the mean where tokens differ."""
    tokens: Tokens
    """`logp_N` is the learning policy's at the moment each token was used."""
    entropy_M: Tensor
    """Entropy of the old policy at the tokens that the learner has computed before learning: all, or a mini-batch's."""
    log_rho_M: Tensor
    """log pi_old - log mu at these tokens: how far the sampling engine is from the learner."""
    ratio_N: Tensor
    clipped_N: Tensor
    losses: tuple[Loss, ...]
    updates: tuple[Update, ...]
    positions: Positions
    """What one pass over the batch computes."""
    routed: RoutingStats | None = None
    """What the routers did; None for a dense model."""
    halvings: int = 0
    """How often micro-batches had to be cut in two to fit into memory."""
    rounding_N: Tensor | None = None
    """log pi_old - log mu where the engine sampled with the learner's own weights, so that only rounding can part them."""


def collect(parts: RunContext, *, step: int, cursor: int, clock: Clock) -> CollectResult:
    """Draw prompts, sample a group of replies for each, score them, keep the groups worth learning from."""
    position, before = cursor, parts.engine.decoded

    def draw(count: int) -> list[Group]:
        nonlocal position
        prompts = distinct([parts.problems.train[i] for i in parts.order.take(position, count)])
        with clock.measure("rollout"):
            replies_P = _sample(parts, prompts, stream=f"train/{step}/{position}")
        with clock.measure("reward"):
            scores_P = parts.rewards.score(list(zip(prompts, replies_P, strict=True)))
        position += count
        return _groups(prompts, replies_P, scores_P)

    rollout, keep = parts.config.rollout, partial(keeps, parts.objective)
    gathered = gather(draw, want=rollout.prompts, keep=keep, budget=rollout.refill_budget)
    after = parts.engine.decoded
    return CollectResult(gathered=gathered, cursor=position, decoded=after - before if after and before else None)


def learn(
    parts: Learner,
    groups: Sequence[Group],
    *,
    step: int,
    before_update: Callable[[Batch, int], None] | None = None,
) -> LearnResult | None:
    """Turn groups into `mini_batches` optimiser steps; None when there is no reply to learn from.

    `before_update` may look at the batch, and at the weights that an optimiser step is about to use, and use the model."""
    config, objective, policy = parts.config, parts.objective, parts.policy
    replies = counted(groups, objective, max_tokens=config.rollout.max_tokens)
    if not replies:
        return None
    plan, temperature = _plan(parts, replies, step), config.rollout.temperature
    routing = _routing(parts, plan, replies)
    logp_ref_N = _reference_logprobs(parts, plan) if parts.reference else None
    old = _old_policy(parts, plan, replies, routing, keep=before_update is None)
    tokens = _pack(parts, plan, replies, old, logp_ref_N)
    reward_B, advantage_N = advantages(objective, tokens, replies)
    tokens = replace(tokens, advantage_N=advantage_N)
    batch = Batch(plan=plan, tokens=tokens, temperature=temperature, routing=routing, ahead=old.ahead)
    rounding_N = _rounding(parts, replies, old)
    done = []
    for index in range(len(plan.steps)):
        if before_update is not None:
            before_update(batch, index)
        seed = selection_seed(config.seed, step, index)
        done.append(update(policy, parts.optimizer, objective, batch, index, seed=seed))
    return LearnResult(
        counted=tuple(replies),
        reward_B=reward_B,
        advantage_B=tokens.sequences.mean(advantage_N).cpu(),
        tokens=replace(tokens, logp_N=batch.logp_N),
        entropy_M=old.entropy_M,
        log_rho_M=old.log_rho_M,
        ratio_N=batch.ratio_N,
        clipped_N=batch.clipped_N,
        losses=tuple(loss for loss, _ in done),
        updates=tuple(u for _, u in done),
        routed=routing.outcome(policy.model),
        positions=plan.positions,
        halvings=batch.halvings,
        rounding_N=rounding_N,
    )


def _sample(parts: RunContext, prompts: Sequence[Prompt], *, stream: str) -> list[list[Completion]]:
    r = parts.config.rollout
    seed, version = parts.config.seed, parts.optimizer.updates
    return parts.engine.generate(
        prompts, samples=r.replies, sampling=r.sampling, seed=seed, stream=stream, version=version, routes=True
    )


def _groups(
    prompts: Sequence[Prompt], replies_P: Sequence[Sequence[Completion]], scores_P: Sequence[Sequence[Score]]
) -> list[Group]:
    return [Group(prompt=p, completions=c, scores=s) for p, c, s in zip(prompts, replies_P, scores_P, strict=True)]


def _plan(parts: Learner, replies: Sequence[TrainSample], step: int) -> Plan:
    return make_plan(
        [Row(prompt_ids=r.prompt.token_ids, completion_ids=r.completion.token_ids) for r in replies],
        [r.group for r in replies],
        mini_batches=parts.config.learner.mini_batches,
        token_budget=parts.config.learner.micro_batch_tokens,
        pad_id=parts.policy.pad_id,
        seed=f"{parts.config.seed}/mini-batches/{step}",
        packed=all(reads_packed(model) for model in (parts.policy.model, parts.reference) if model is not None),
    )


def _routing(parts: Learner, plan: Plan, replies: Sequence[TrainSample]) -> NoRouting:
    """How the routers of a mixture of experts are to be treated in this batch, and what the sampler's chose."""
    settings, policy = parts.config.routing, parts.policy
    sampled = [r.completion.routes for r in replies]
    return route(policy.routers, plan, sampled, replay=settings.replay, balance=settings.balance_loss, device=policy.device)  # fmt: skip


def _old_policy(
    parts: Learner, plan: Plan, replies: Sequence[TrainSample], routing: NoRouting, *, keep: bool
) -> OldLogprobs:
    policy, objective, temperature = parts.policy, parts.objective, parts.config.rollout.temperature
    sampled = [logp for r in replies for logp in r.completion.logp_sampler]
    sampler_N = torch.tensor(sampled, dtype=torch.float32, device=policy.device)
    if parts.config.learner.old_logp == "sampler":
        return from_sampler(policy, plan, temperature, sampler_N, objective)
    return recomputed(policy, plan, temperature, sampler_N, objective, routing, keep=keep)


def _pack(
    parts: Learner, plan: Plan, replies: Sequence[TrainSample], old: OldLogprobs, logp_ref_N: Tensor | None
) -> Tokens:
    device = parts.policy.device
    return Tokens(
        logp_N=old.logp_N,
        logp_old_N=old.logp_N,
        logp_sampler_N=old.logp_sampler_N,
        logp_ref_N=logp_ref_N,
        advantage_N=torch.zeros_like(old.logp_N),
        sequences=Sequences(plan.sequence_N.to(device), len(replies)),
    )


def _rounding(parts: Learner, replies: Sequence[TrainSample], old: OldLogprobs) -> Tensor | None:
    """Known for replies that were drawn in process, from the whole distribution of the weights that are about to learn."""
    rollout, now = parts.config.rollout, parts.optimizer.updates
    whole = rollout.engine == "local" and rollout.top_p == 1 and not rollout.top_k
    whole &= parts.config.learner.old_logp == "recompute"  # else the two are the same numbers
    return old.log_rho_M if whole and all(r.completion.version == now for r in replies) else None


def _reference_logprobs(parts: Learner, plan: Plan) -> Tensor:
    """The reference's; where that is the policy itself, it is the policy without its adapters."""
    own = parts.reference is parts.policy.model
    with switched_off(parts.reference) if own else nullcontext():
        return plan_logprobs(parts.reference, plan, parts.config.rollout.temperature, parts.policy.device)[0]


def advantages(objective: Objective, tokens: Tokens, replies: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """Rewards, less the KL penalty where that belongs to the reward (detached), and the advantage of every token."""
    sequences, penalty_N = tokens.sequences, torch.zeros_like(tokens.logp_old_N)
    if objective.kl and objective.kl_in == "reward":
        penalty_N = objective.kl * KL_ESTIMATORS[objective.estimator](tokens)
    shaped_B = torch.tensor([r.reward for r in replies], dtype=torch.float64)
    reward_B = shaped_B - sequences.sum(penalty_N.double()).cpu()
    if objective.advantage is batch_whitened:
        return reward_B, whitened_returns(shaped_B, penalty_N, sequences).float()
    advantage_B = apply_rule(objective.advantage, reward_B, [r.group for r in replies]).float()
    return reward_B, sequences.expand(advantage_B.to(penalty_N.device))


def selection_seed(run_seed: int, step: int, index: int) -> int:
    """Seeds the choice of objectives that single tokens out at random in an optimiser step."""
    digest = hashlib.blake2b(f"{run_seed}/select/{step}/{index}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")

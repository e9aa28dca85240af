"""A rollout batch, ready to train on: plan, packed tokens with their log-probs and advantages, routing.

In: the samples of a step. Out: a `TrainBatch`. Invariant: everything here is computed with the weights before the first
optimizer step. What is known does not change while the batch is trained on.

The old policy's log-probs are the denominator of importance ratios. `learner.old_logp` chooses their source:

    recompute   a learner forward over all tokens. Exact for every engine. The training forwards of the first optimizer
                step have the old weights, so they give its old log-probs, and only later steps need a forward before.
    sampler     the engine's log-probs, which saves that forward. The GSPO paper suggests it, because sequence ratios
                tolerate more noise. The learner still computes the first mini-batch, to measure the mismatch. Engine
                noise that exceeds the clip range before any update is an error, or with `learner.allow_mismatch` a
                warning, never silently trained on. The old policy's experts of an MoE model are the engine's. With
                `rollout.max_lag`, ratios start from the older weights that sampled; there is no noise to measure then.
    interpolate an estimate of `recompute`, without a forward before training. The training forwards of the first
                optimizer step give its old log-probs. In later ones, log pi_old is between the sampler's log-prob and
                the current one, by the versions of the three policies (A-3PO, arXiv:2512.06547).

A completion whose advantages are all exactly 0 (most often one of a uniform group) has no gradient. No forward computes
it, unless the objective or the balance loss needs it. It stays in its update and in every denominator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gspo.errors import MismatchError
from gspo.learner.forward import NoRouting, RoutingReplay, TrainForward, plan_logprobs
from gspo.learner.plan import Plan, make_plan, update_count
from gspo.learner.routing_replay import RecordedRouting
from gspo.model.adapter import adapters_disabled
from gspo.model.micro_batch import MicroBatch, TokenSequence
from gspo.model.packed_forward import supports_packing
from gspo.objectives.advantage import token_advantages
from gspo.objectives.loss import select
from gspo.objectives.objective import Objective
from gspo.objectives.rounding import Noise, root_mean_square, rounding_noise
from gspo.objectives.samples import TrainSample
from gspo.objectives.sequences import Sequences, Tokens
from gspo.ranks.group import ONE, Ranks
from gspo.rollout.engine import engine_traits

if TYPE_CHECKING:
    from gspo.config import RoutingConfig
    from gspo.context import LearnContext
    from gspo.model.load import Policy
    from gspo.types import Completion, Prompt, Routes


@dataclass(frozen=True, kw_only=True)
class OldLogprobs:
    """The old policy's log-probs of a batch, and what the learner's forwards with the old weights have computed."""

    logp_N: Tensor
    """The denominators of importance ratios."""
    logp_sampler_N: Tensor
    learner_N: Tensor
    """Log-probs by the learner's forward: `logp_N` itself, unless the engine's log-probs are the old ones."""
    entropy_N: Tensor
    computed_N: Tensor
    """At which tokens the learner has computed these two."""
    by_training: bool = False
    """Whether the training forwards of the first optimizer step fill in its tokens."""
    age_N: Tensor | None = None
    """With interpolation: how many updates before the old policy the one was that sampled each token."""
    version: int = 0
    """The version of the old policy."""
    noise: Noise | None = None
    """With the engine's log-probs as the old ones: the noise that they add to ratios, in the first mini-batch."""
    excess: str = ""
    """Why that noise is too large, if `learner.allow_mismatch` accepted it; empty otherwise."""

    def fill(self, at_N: Tensor, logp_N: Tensor, entropy_N: Tensor) -> None:
        """Set the values of some tokens. A forward that is repeated, after memory ran out, sets them again."""
        self.logp_N[at_N] = logp_N.detach()
        self.entropy_N[at_N] = entropy_N.detach()
        self.computed_N[at_N] = True

    def interpolate(self, at_N: Tensor, logp_N: Tensor, version: int) -> None:
        """Estimate the values of some tokens from those of the policy of this version.

        log pi_old = log mu + a (log pi - log mu), where a is the share of the updates from mu to pi that lie before
        pi_old (arXiv:2512.06547)."""
        assert self.age_N is not None
        age_N, since = self.age_N[at_N], version - self.version
        if not since:  # pi is pi_old, and the formula below would round it
            self.logp_N[at_N] = logp_N.detach()
            return
        sampler_N = self.logp_sampler_N[at_N]
        self.logp_N[at_N] = sampler_N + age_N / (age_N + since) * (logp_N.detach() - sampler_N)

    def exchange(self, ranks: Ranks, own_at_N: Tensor, at_N: Tensor) -> None:
        """Get the values of the tokens `at_N`, of which this rank has filled in `own_at_N`, from all ranks."""
        values = torch.zeros(2, len(self.logp_N), dtype=self.logp_N.dtype, device=self.logp_N.device)
        values[:, own_at_N] = torch.stack([self.logp_N, self.entropy_N])[:, own_at_N]
        logp_N, entropy_N = ranks.sum_micro_batches(values)
        self.fill(at_N, logp_N[at_N], entropy_N[at_N])

    @property
    def entropy_M(self) -> Tensor:
        """Entropy of the old policy at the tokens that the learner has computed."""
        return self.entropy_N[self.computed_N]

    @property
    def log_rho_M(self) -> Tensor:
        """log pi_old - log mu at these tokens, with pi_old from the learner's forward and mu from the engine."""
        return (self.learner_N - self.logp_sampler_N)[self.computed_N]


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
    only_rounding: bool
    """Whether the engine sampled with the learner's own weights, so that only rounding separates pi_old from mu."""
    seed: str
    """Seed of objectives that select tokens at random."""


def prepare_batch(
    context: LearnContext, samples: Sequence[TrainSample], *, step: int, complete: bool = False
) -> TrainBatch:
    """Plan the batch and compute what must be known before the first update. With `complete`, that is all of the old
    log-probs, also those that training would give, or that only other objectives need."""
    config = context.config
    tokens = _packed_tokens(context, samples)
    uncomputed = frozenset() if complete or _computes_all(context) else _zero_advantages(context, tokens, samples)
    plan = plan_batch(context, samples, step, uncomputed)
    routing = batch_routing(context.policy, config.routing, plan, [s.completion.routes for s in samples], context.ranks)
    logp_ref_N = _reference_logprobs(context, plan) if context.reference else None
    old = _old_logprobs(context, plan, tokens, routing, _ages(context, samples), complete=complete)
    tokens = replace(tokens, logp_N=old.logp_N, logp_old_N=old.logp_N, logp_ref_N=logp_ref_N)
    reward_B, advantage_N = token_advantages(context.objective, tokens, samples)
    return TrainBatch(
        plan=plan,
        samples=tuple(samples),
        tokens=replace(tokens, advantage_N=advantage_N),
        reward_B=reward_B,
        old=old,
        temperature=config.rollout.temperature,
        routing=routing,
        only_rounding=_only_rounding(context, samples),
        seed=f"{config.seed}/select/{step}",
    )


def token_sequence(prompt: Prompt, completion: Completion, policy: Policy, min_tokens: int) -> TokenSequence:
    """A completion as the learner reads it: its tokens, and what could not be sampled in their place."""
    return TokenSequence(
        prompt_ids=prompt.token_ids,
        completion_ids=completion.token_ids,
        sampled=completion.sampled,
        branches=completion.branches,
        excluded_ids=policy.stop_ids,
        excluded_for=min_tokens,
    )


def _packed_tokens(context: LearnContext, samples: Sequence[TrainSample]) -> Tokens:
    """The sampled tokens with the engine's log-probs. Everything else is unknown, which is NaN."""
    device = context.policy.device
    counts = torch.tensor([s.completion.sampled_count for s in samples])
    sequence_N = torch.repeat_interleave(torch.arange(len(samples)), counts)
    sampled = [logp for s in samples for logp in s.completion.logp_sampler]
    sampler_N = torch.tensor(sampled, dtype=torch.float32, device=device)
    unknown_N = torch.full_like(sampler_N, torch.nan)
    return Tokens(
        logp_N=unknown_N,
        logp_old_N=unknown_N,
        logp_sampler_N=sampler_N,
        advantage_N=unknown_N,
        sequences=Sequences(sequence_N.to(device), len(samples)),
        turn_N=_turns(samples, device),
    )


def _turns(samples: Sequence[TrainSample], device: torch.device) -> Tensor | None:
    """The turn of each sampled token; None if no completion has turns."""
    if not any(s.completion.conversation for s in samples):
        return None
    numbers: list[int] = []
    for sample in samples:
        completion = sample.completion
        before = len(numbers)
        for number, turn in enumerate(completion.conversation.turns if completion.conversation else ()):
            own = completion.sampled[turn.start : turn.end]
            numbers += [number] * (sum(own) if completion.sampled else turn.end - turn.start)
        numbers += [0] * (before + completion.sampled_count - len(numbers))
    return torch.tensor(numbers, device=device)


def _computes_all(context: LearnContext) -> bool:
    """Whether completions matter for the gradient even if their advantages are 0."""
    config = context.config
    # The load-balancing loss is over all tokens of the update, and the effective sample size over all completions.
    uses_all = bool(config.routing.balance_loss) or config.learner.ess_scaling != "off"
    return context.objective.needs_zero_advantage or uses_all


def _zero_advantages(context: LearnContext, tokens: Tokens, samples: Sequence[TrainSample]) -> frozenset[int]:
    """The samples whose tokens all have an advantage of exactly 0.

    Only for objectives whose advantages do not depend on log-probs, which are not known yet."""
    _, advantage_N = token_advantages(context.objective, tokens, samples)
    count_B = tokens.sequences.sum((advantage_N != 0).double())
    return frozenset((count_B == 0).nonzero().flatten().tolist())


def plan_batch(
    context: LearnContext, samples: Sequence[TrainSample], step: int, uncomputed: Collection[int] = ()
) -> Plan:
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
        uncomputed=uncomputed,
        ranks=context.ranks,
    )


def loss_weights(objective: Objective, plan: Plan, update_index: int) -> Tensor:
    """The weight of each packed token in the loss of optimizer step `update_index`; 0 for tokens of the others."""
    chosen = list(plan.sequence_ids[update_index])
    # Computed for the whole optimizer step, in float64: micro-batching must not change a weight. Sequences that are not
    # computed count, too.
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
    at_N = batch.plan.at_N(update_index).to(policy.device)
    logp_N, _ = plan_logprobs(
        policy.model,
        batch.plan,
        batch.temperature,
        policy.device,
        update=update_index,
        routed=batch.routing.learning,
        ranks=context.ranks,
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
    policy: Policy, settings: RoutingConfig, plan: Plan, reported: Sequence[Routes | None], ranks: Ranks = ONE
) -> RoutingReplay:
    """The routing of a batch. `reported` are the engine's experts of each sequence."""
    if policy.routers is None:
        return NoRouting()
    return RecordedRouting(
        policy.routers,
        plan.own,
        reported,
        replay=settings.replay,
        balance=settings.balance_loss,
        device=policy.device,
        ranks=ranks,
    )


def _reference_logprobs(context: LearnContext, plan: Plan) -> Tensor:
    """Log-probs under the reference. If that is the policy's own model, its adapters are disabled."""
    own = context.reference is context.policy.model
    with adapters_disabled(context.reference) if own else nullcontext():
        return plan_logprobs(
            context.reference, plan, context.config.rollout.temperature, context.policy.device, ranks=context.ranks
        )[0]


def _only_rounding(context: LearnContext, samples: Sequence[TrainSample]) -> bool:
    """Whether the completions were sampled from the full distribution of the current weights."""
    config, now = context.config, context.optimizer.updates
    rollout = config.rollout
    same_weights = engine_traits(rollout.engine).shares_weights and all(
        segment.version == now for s in samples for segment in s.completion.segments
    )
    full_distribution = rollout.top_p == 1 and not rollout.top_k
    # If the sampler's log-probs are the old ones, their difference is 0 and says nothing about rounding.
    computed = config.learner.old_logp == "recompute"
    return same_weights and full_distribution and computed


# ---- old log-probs


def _ages(context: LearnContext, samples: Sequence[TrainSample]) -> Tensor:
    """How many updates ago each token was sampled."""
    parts = [part for s in samples for part in s.completion.sampled_by_version]
    version_P, count_P = torch.tensor(parts, device=context.policy.device).unbind(1)
    return (context.optimizer.updates - version_P).float().repeat_interleave(count_P)


def _old_logprobs(
    context: LearnContext, plan: Plan, tokens: Tokens, routing: RoutingReplay, age_N: Tensor, *, complete: bool
) -> OldLogprobs:
    policy, sampler_N = context.policy, tokens.logp_sampler_N
    assert sampler_N is not None
    if context.config.learner.old_logp == "sampler":
        return _from_sampler(context, plan, sampler_N, routing, current=not age_N.any())
    by_training = not complete and routing.repeats and not needs_old_logprobs(context.objective)
    interpolated = context.config.learner.old_logp == "interpolate"
    # The first optimizer step has the old weights, later ones may be interpolated.
    needed = [i for i in range(len(plan.updates)) if complete or not (by_training if i == 0 else interpolated)]
    before = plan.part(needed)
    logp_N, entropy_N = plan_logprobs(
        policy.model,
        before,
        context.config.rollout.temperature,
        policy.device,
        routed=routing.old,
        ranks=context.ranks,
    )
    logp_N = torch.where(before.computed_N.to(policy.device), logp_N, torch.nan)
    # With `complete`, other objectives need all of them, but those of later steps are interpolated when it trains.
    exact = plan.part(needed[:1]) if interpolated else before
    computed_N = exact.computed_N.to(policy.device)
    return OldLogprobs(
        logp_N=logp_N,
        logp_sampler_N=sampler_N,
        learner_N=logp_N,
        entropy_N=entropy_N,
        computed_N=computed_N,
        by_training=by_training,
        age_N=age_N if interpolated else None,
        version=context.optimizer.updates,
    )


def needs_old_logprobs(objective: Objective) -> bool:
    """Whether an objective uses old log-probs before the training forwards: to select tokens, or for advantages."""
    return objective.trust_region.selects_tokens or bool(objective.kl and objective.kl_in == "reward")


def _from_sampler(
    context: LearnContext, plan: Plan, sampler_N: Tensor, routing: RoutingReplay, *, current: bool
) -> OldLogprobs:
    """Old log-probs from the engine. Raises `MismatchError` if they are too far from the learner's, unless
    `learner.allow_mismatch` is set, or older weights than the current ones explain it."""
    policy, temperature = context.policy, context.config.rollout.temperature
    # One mini-batch is a sample of the mismatch; all of them would cost the forward that this setting saves.
    first = plan.part([i for i, chosen in enumerate(plan.computed_ids) if chosen][:1])
    logp_N, entropy_N = plan_logprobs(
        policy.model, first, temperature, policy.device, routed=routing.old, ranks=context.ranks
    )
    routing.old_from_sampler()
    computed_N = first.computed_N.to(policy.device)
    tokens = Tokens(
        logp_N=logp_N[computed_N],
        logp_old_N=sampler_N[computed_N],
        logp_sampler_N=sampler_N[computed_N],
        advantage_N=torch.zeros_like(logp_N[computed_N]),
        sequences=Sequences(plan.sequence_N.to(policy.device)[computed_N], len(plan.sequences)),
    )
    noise, excess = None, ""
    if first.updates and current:
        noise = rounding_noise(context.objective, tokens.sequences, tokens.logp_N - tokens.logp_old_N)
        excess = _excess_mismatch(context.objective, tokens)
    if excess and not context.config.learner.allow_mismatch:
        raise MismatchError(
            f'{excess}; set learner.old_logp = "recompute", or learner.allow_mismatch = true to train on it anyway'
        )
    return OldLogprobs(
        logp_N=sampler_N,
        logp_sampler_N=sampler_N,
        learner_N=logp_N,
        entropy_N=entropy_N,
        computed_N=computed_N,
        noise=noise,
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
        f"{region.noise_limit:.2g}: this difference acts as if the policy had changed"
    )

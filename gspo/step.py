r"""One training step: `collect()` samples and scores groups, `learn()` trains on them. Read this file first.

    prompts      data/order.py                problems in seeded order, sources by weight
       |
    completions  rollout/engine.py            G completions per prompt           \
       |                                                                          |
    scores       reward/reward.py             verifiers in worker processes        >  collect()
       |                                                                          |
    groups       rollout/gather.py            until enough can be trained on     /
       |         rollout/buffer.py            batches in flight, between the two halves
    samples      objectives/samples.py        which completions count            \
       |                                                                          |
    batch        learner/batch.py             plan, old and reference log-probs,  |
       |                                      advantages                           >  learn()
    gradients    learner/forward.py           forward per micro-batch             |
       |         objectives/loss.py           ratio, trust region, aggregate      |
    update       learner/optimizer.py         AdamW                              /

`collect` leaves the policy as it is and returns where sampling stands after the batch. `learn` depends on the groups,
the step and the state of the learner alone. `loop.py` passes batches from one to the other through
`rollout/buffer.py`. How a batch is split into micro-batches decides memory and speed, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gspo.clock import Clock
from gspo.context import LearnContext, RunContext
from gspo.learner.batch import TrainBatch, loss_weights, micro_tokens, prepare_batch, token_selection
from gspo.learner.forward import attempts, micro_batches, training_forward
from gspo.learner.result import GradientResult, GradientStats, LearnResult, LearnStats
from gspo.objectives.loss import loss_of
from gspo.objectives.samples import keeps_group, train_samples
from gspo.rollout.engine import GenerateOptions
from gspo.rollout.gather import CollectResult, Gatherer, RolloutState, sample_groups, with_unique_ids
from gspo.types import Group


def collect(context: RunContext, start: RolloutState, *, clock: Clock, version: int | None = None) -> CollectResult:
    """Sample a group of completions for each prompt, score them, and keep the groups worth training on.

    `version` is that of the weights that the engine samples from; None if they are the learner's current ones."""
    engine, rollout = context.engine, context.config.rollout
    version = context.optimizer.updates if version is None else version
    decoded_before = engine.decoded
    gatherer = Gatherer(
        want=rollout.prompts,
        budget=rollout.refill_budget,
        start=start,
        keep=partial(keeps_group, context.objective),
        patience=len(context.problems.train),  # a whole pass over the data
        max_unscored=context.config.reward.max_unscored_fraction,
    )
    for request in gatherer:
        taken = context.order.take(request.cursor, request.count, request.difficulty)
        groups = sample_groups(
            engine,
            context.rewards,
            with_unique_ids([context.problems.train[i] for i in taken.indices]),
            GenerateOptions(
                samples=rollout.group_size,
                sampling=rollout.sampling,
                seed=context.config.seed,
                stream=f"train/{gatherer.batch}/{request.cursor}",
                version=version,  # an engine with its own copy of the weights receives them first
                routes=True,  # the experts of an MoE model, for routing replay; a dense model has none
            ),
            clock=clock,
        )
        gatherer.add(groups, taken)
    return gatherer.result(version, decoded_before, engine.decoded)


def learn(
    context: LearnContext,
    groups: Sequence[Group],
    *,
    step: int,
    before_update: Callable[[TrainBatch, int], None] | None = None,
    complete: bool = False,
) -> LearnResult | None:
    """Train on groups in `learner.mini_batches` optimizer steps, fewer if the batch is short; None if no completion can
    be trained on.

    `before_update` may read the batch and use the model before each optimizer step. With `complete`, completions whose
    advantages are 0 are computed, too."""
    objective, optimizer = context.objective, context.optimizer
    samples = train_samples(groups, objective, max_tokens=context.config.rollout.max_tokens)
    if not samples:
        return None
    batch = prepare_batch(context, samples, step=step, complete=complete)
    stats = LearnStats(batch, context.ranks)
    for update_index in range(len(batch.plan.updates)):
        if before_update is not None:
            before_update(batch, update_index)
        for attempt in attempts(context, batch, update_index):
            with attempt:  # repeated with half the micro-batch size if memory runs out, half the loss scale on overflow
                attempt.result = accumulate_gradients(context, attempt.batch, update_index)
        batch, result = attempt.batch, attempt.result  # of the attempt that succeeded
        update = optimizer.step(loss_finite=result.finite, log_weight_B=result.log_weight_B(batch.tokens))
        stats.add(result, update, attempt.halvings)
    return stats.result(batch, context.policy.model)


def accumulate_gradients(context: LearnContext, batch: TrainBatch, update_index: int) -> GradientResult:
    """Add up the gradient of optimizer step `update_index` over its micro-batches."""
    objective, optimizer, device = context.objective, context.optimizer, context.policy.device
    weight_N = loss_weights(objective, batch.plan, update_index).to(device)  # fixed before micro-batching
    selected_N = token_selection(context, batch, update_index)  # only objectives that single out tokens
    stats = GradientStats()
    for micro in micro_batches(context, batch, update_index):
        # The backward pass stays inside: gradient checkpointing repeats the forward, with the same experts.
        with training_forward(context, batch, micro, update_index) as out:
            tokens = micro_tokens(batch, micro, out, selected_N)
            loss = loss_of(objective, tokens, weight_N[micro.at_N])
            optimizer.scale_loss(loss.total + out.balance_loss()).backward()  # only MoE models have a balance loss
        stats.add(micro, out.logp_N, loss)
    return stats.result(context.ranks, batch, update_index)  # of all ranks

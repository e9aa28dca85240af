"""Recompute a step of a run: the weights before it, its batch, its updates.

In: a `Source` and a step. Out: the recomputed step and how well it agrees with the run; `before_update` is called at
the weights of each optimizer step. Invariant: `learn` depends only on the groups and the weights, so training on the
recorded completions from any checkpoint gives the weights of any later step; every recomputed step is compared with its
record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gspo.build import optimizer_for, policy_for, run_adaptive_clip, run_objective, saved_model, tokenizer_for
from gspo.config import ModelConfig
from gspo.context import LearnContext
from gspo.errors import CheckpointError, ConfigError, DataError, MemoryLimitError
from gspo.learner import checkpoint
from gspo.learner.batch import TrainBatch, prepare_batch
from gspo.learner.result import LearnResult
from gspo.model.load import has_weights
from gspo.model.out_of_memory import out_of_memory
from gspo.objectives.adaptive_clip import with_scaled_range
from gspo.step import learn
from gspo.view.replay.agreement import Agreement, agreement
from gspo.view.replay.records import StepRecord, read_step
from gspo.view.replay.source import Source

UpdateHook = Callable[[LearnContext, StepRecord, TrainBatch, int], None]
"""Called before every optimizer step of the replayed step."""

NO_REFERENCE = "the run kept no reference model (checkpoint.keep = 0 keeps the initial checkpoint)"


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A recomputed step."""

    step: int
    start: int
    """The checkpoint it started from."""
    learned: LearnResult
    agreements: tuple[Agreement, ...]
    """Of all recomputed steps; the last is the replayed one."""


def rebuild(
    source: Source,
    step: int,
    start: int,
    *,
    device: str | None,
    before_update: UpdateHook,
    say: Callable[[str], None],
) -> ReplayedStep:
    """Recompute a step, from the checkpoint `start` on."""
    state, learner = _load(source, start, device)
    adaptive = run_adaptive_clip(source.config)[0]
    base = learner.objective
    scale = state.clip_scale
    agreements = []
    for now in range(start + 1, step + 1):
        if start + 1 < step:
            say(f"recomputing step {now} ({now - start} of {step - start})")
        rollback = source.rollback_at(now)
        if adaptive:
            learner = replace(learner, objective=adaptive.scaled(base, scale))
        elif rollback is not None and rollback.clip_factor != 1:
            learner = replace(learner, objective=with_scaled_range(base, rollback.clip_factor))
        recorded = _read_step(source, now, learner)
        # A resume may have changed the learner's settings and the end of the schedule: use those of this step.
        learner.optimizer.config = source.learner_at(now)
        learner.optimizer.total_updates = source.steps_planned(now) * source.config.learner.mini_batches
        learned = _learn(source, learner, recorded, now, before_update if now == step else None)
        compared = agreement(
            now,
            learner.objective,
            recorded,
            learned,
            source.metrics(now),
            source.ledger.get(now),
            _has_weights_of(source, now, learner),
        )
        agreements.append(compared)
        # A run adapts its clip range only after steps that trained.
        if adaptive and learned:
            scale = adaptive.next_scale(base, scale, learned.tokens)
    if learned is None:
        raise ConfigError(
            f"{source.path}: step {step} has no trainable completion, so there is nothing to compare; choose another "
            "--step"
        )
    return ReplayedStep(step=step, start=start, learned=learned, agreements=tuple(agreements))


def _has_weights_of(source: Source, step: int, learner: LearnContext) -> bool | None:
    """Whether the weights are those of the checkpoint of this step; `None` if it has none."""
    path = source.checkpoints.get(step)
    # A run that is still training may delete or replace it.
    if path is None or checkpoint.damage(path):
        return None
    return has_weights(learner.policy, saved_model(source.config.model, path, "cpu"))


def _learn(
    source: Source, learner: LearnContext, recorded: StepRecord, step: int, hook: UpdateHook | None
) -> LearnResult | None:
    complete: TrainBatch | None = None

    def before_update(batch: TrainBatch, index: int) -> None:
        nonlocal complete
        # Other objectives need old log-probs that the run's own updates do not, so they get a batch of their own. It is
        # made before the first update, at the weights of the old policy.
        complete = complete or prepare_batch(learner, batch.samples, step=step, complete=True)
        assert hook is not None
        hook(learner, recorded, complete, index)

    try:
        return learn(
            learner,
            recorded.rollouts.groups,
            step=step,
            before_update=before_update if hook else None,
            complete=recorded.complete,
        )
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"{source.path}: {str(error).splitlines()[0]}; name fewer --objectives, or use --device cpu"
        ) from error


def _read_step(source: Source, step: int, learner: LearnContext) -> StepRecord:
    config = source.config
    file = source.rollouts(step)
    recorded = read_step(
        file,
        learner.policy.tokenizer,
        chat={name: source.chat for name, source in config.data.sources.items()},
        objective=learner.objective,
        routes=config.routing.replay == "sampler",
    )
    # An index outside the embedding would be an opaque indexing error, or a device-side assert on a GPU.
    vocabulary = learner.policy.model.get_input_embeddings().weight.shape[0]
    ids = [i for g in recorded.rollouts.sampled for c in g.completions for i in c.token_ids]
    if not all(0 <= i < vocabulary for i in ids):
        raise DataError(
            f"{file}: contains tokens outside the model's vocabulary; the file is damaged, or the checkpoint belongs "
            "to another model"
        )
    return recorded


def _load(source: Source, start: int, device: str | None) -> tuple[checkpoint.TrainerState, LearnContext]:
    path = source.checkpoints[start]
    config = source.config
    objective = run_objective(config)
    problem = checkpoint.damage(path)
    if problem:
        others = ", ".join(str(c) for c in source.checkpoints if c != start)
        raise CheckpointError(f"{problem}; replay a step after another checkpoint ({others or 'there is none'})")
    state = checkpoint.read_state(path)
    model = saved_model(config.model, path, device)
    policy = policy_for(config, tokenizer_for(config, model), model)
    optimizer = optimizer_for(config, policy)
    # With the moments: the update of the first recomputed step depends on them.
    checkpoint.restore(path, optimizer, state.updates)
    reference = None
    if objective.kl:
        reference, why_not = load_reference(source, device)
        if reference is None:
            raise ConfigError(f"{source.path}: the run's objective has a KL penalty, but {why_not}")
    return state, LearnContext(
        config=config, objective=objective, policy=policy, reference=reference, optimizer=optimizer
    )


def reference_model(source: Source, device: str | None) -> ModelConfig | None:
    """Model settings of the initial policy; `None` if the run did not keep it."""
    config = source.config.model
    saved = source.path / "reference"
    if saved.is_dir():
        config = saved_model(config, saved, device)
    # Checkpoint 0 is the initial policy.
    elif 0 in source.checkpoints:
        config = saved_model(config, source.checkpoints[0], device)
    # The run did not start from a model on disk: it built one, or fine-tuned it first.
    elif config.build or source.config.cold_start.steps:
        return None
    # Nothing is trained here, so there is no backward pass for which checkpointing would save memory.
    return dataclasses.replace(config, device=device or config.device, gradient_checkpointing=False)


def load_reference(source: Source, device: str | None) -> tuple[Any, str]:
    """The initial policy, or `None` and the reason why it cannot be loaded."""
    config = reference_model(source, device)
    if config is None:
        return None, NO_REFERENCE
    try:
        model = policy_for(source.config, tokenizer_for(source.config, config), config, routers=False).model
    except ConfigError as error:
        return None, f"the reference model cannot be loaded: {error}"
    return model.requires_grad_(False), ""

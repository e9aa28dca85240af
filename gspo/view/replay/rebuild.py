"""A step of a run, taken again: the weights before it, its batch, its updates.

In: a `Source` and a step. Out: what `look` saw at the weights of each optimiser step, and how exactly the run was met.
Invariant: `learn` depends on the groups and the weights alone, so from any checkpoint the recorded replies lead to the
weights of any later step; every step on the way is compared with its record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.build import run_adaptive_clip, run_objective
from gspo.config import ModelConfig
from gspo.context import LearnContext
from gspo.errors import CheckpointError, ConfigError, DataError, MemoryLimitError
from gspo.learner import checkpoint
from gspo.learner.batch import TrainBatch
from gspo.learner.optimizer import Optimizer
from gspo.learner.result import LearnResult
from gspo.model.load import load_policy, load_tokenizer
from gspo.model.memory import out_of_memory
from gspo.step import learn
from gspo.view.replay.agreement import Agreement, agreement
from gspo.view.replay.records import StepRecord, read_step
from gspo.view.replay.source import Source

UpdateHook = Callable[[LearnContext, StepRecord, TrainBatch, int], None]
"""Called before every optimiser step of the replayed step."""

NO_REFERENCE = "the run has kept no reference model (checkpoint.keep = 0 keeps the one it began with)"


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A step that was taken again."""

    step: int
    start: int
    """The checkpoint it began from."""
    learned: LearnResult
    agreements: tuple[Agreement, ...]
    """Of the steps from the checkpoint on; the last is the replayed one."""


def rebuild(source: Source, step: int, start: int, *, device: str | None, look: UpdateHook, say: Callable[[str], None]) -> ReplayedStep:  # fmt: skip
    """Take a step again, from the checkpoint `start` on."""
    state, learner = _load(source, start, device)
    auto, row, scale = run_adaptive_clip(source.config)[0], learner.objective, state.clip_scale
    agreements = []
    for now in range(start + 1, step + 1):
        if start + 1 < step:
            say(f"learning from the replies of step {now} again ({now - start} of {step - start})")
        learner = replace(learner, objective=auto.scaled(row, scale) if auto else row)
        recorded = _recorded(source, now, learner)
        learner.optimizer.config = source.learner_at(now)
        learner.optimizer.total_updates = source.steps_planned(now) * source.config.learner.mini_batches
        learned = _learn(source, learner, recorded, now, look if now == step else None)
        agreements.append(agreement(now, learner.objective, recorded, learned, source.metrics(now)))
        if auto and learned:
            scale = auto.next_scale(row, scale, learned.tokens)
    if learned is None:
        raise ConfigError(f"{source.path}: step {step} had no reply to learn from, so there is nothing to compare; choose another --step")  # fmt: skip
    return ReplayedStep(step=step, start=start, learned=learned, agreements=tuple(agreements))


def _learn(
    source: Source, learner: LearnContext, recorded: StepRecord, step: int, look: UpdateHook | None
) -> LearnResult | None:
    def before_update(batch: TrainBatch, index: int) -> None:
        if look:
            look(learner, recorded, batch, index)

    try:
        return learn(learner, recorded.gathered.groups, step=step, before_update=before_update)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise MemoryLimitError(f"{source.path}: {str(error).splitlines()[0]}; name fewer --objectives, or use --device cpu") from error  # fmt: skip


def _recorded(source: Source, step: int, learner: LearnContext) -> StepRecord:
    config, file = source.config, source.rollouts(step)
    recorded = read_step(
        file,
        learner.policy.tokenizer,
        chat=config.data.chat,
        objective=learner.objective,
        routes=config.routing.replay == "sampler",
    )
    known = learner.policy.model.get_input_embeddings().weight.shape[0]
    ids = [i for g in recorded.gathered.sampled for c in g.completions for i in c.token_ids]
    if not all(0 <= i < known for i in ids):
        raise DataError(f"{file}: holds tokens that the model does not have; the file is damaged, or the checkpoint is of another model")  # fmt: skip
    return recorded


def _load(source: Source, start: int, device: str | None) -> tuple[checkpoint.TrainerState, LearnContext]:
    path, config, objective = source.checkpoints[start], source.config, run_objective(source.config)
    problem = checkpoint.damage(path)
    if problem:
        others = [c for c in source.checkpoints if c != start]
        raise CheckpointError(f"{problem}; replay a step after another checkpoint ({', '.join(map(str, others)) or 'there is none'})")  # fmt: skip
    state = checkpoint.read_state(path)
    model = kept_model(config.model, path, device)
    policy = load_policy(model, load_tokenizer(model), seed=config.seed, routing=config.routing)
    optimizer = Optimizer(policy.model, config.learner, config.steps * config.learner.mini_batches)
    checkpoint.restore(path, optimizer, state.updates)
    reference = None
    if objective.kl:
        reference, why_not = load_reference(source, device)
        if reference is None:
            raise ConfigError(f"{source.path}: the run's objective has a KL penalty, and {why_not}")
    return state, LearnContext(
        config=config, objective=objective, policy=policy, reference=reference, optimizer=optimizer
    )


def kept_model(config: ModelConfig, path: Path, device: str | None) -> ModelConfig:
    """The run's settings for a model that is kept at `path`."""
    return dataclasses.replace(config, path=str(path), build="", build_options={}, device=device or config.device)


def reference_model(source: Source, device: str | None) -> ModelConfig | None:
    """Where the policy is as RL found it; None: the run has not kept it."""
    config, kept = source.config.model, source.path / "reference"
    if kept.is_dir():
        config = kept_model(config, kept, device)
    elif 0 in source.checkpoints:
        config = kept_model(config, source.checkpoints[0], device)
    elif config.build or source.config.cold_start.steps:
        return None
    return dataclasses.replace(config, device=device or config.device, gradient_checkpointing=False)


def load_reference(source: Source, device: str | None) -> tuple[Any, str]:
    """The policy as RL found it, or None and why it cannot be had."""
    config = reference_model(source, device)
    if config is None:
        return None, NO_REFERENCE
    try:
        model = load_policy(config, load_tokenizer(config), seed=source.config.seed).model
    except ConfigError as error:
        return None, f"the reference model cannot be loaded: {error}"
    return model.requires_grad_(False), ""

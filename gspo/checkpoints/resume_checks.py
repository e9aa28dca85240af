"""Whether a checkpoint and a config belong to the same run: fingerprints, and which settings may change on resume.

In: the components of a run and the state of a checkpoint. Out: the initial state of a run, which carries what
identifies it; the settings that changed. Invariant: a resume that would not continue the same run raises a
`ConfigError` that names what differs, before anything in the run directory changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.config import Config, differing, flat
from gspo.context import RunContext
from gspo.data.difficulty import Difficulty
from gspo.data.problems import Problems
from gspo.errors import ConfigError
from gspo.learner.checkpoint import TrainerState
from gspo.learner.optimizer import TUNABLE
from gspo.model.adapter import adapted
from gspo.model.source import weights_fingerprint
from gspo.objectives.custom import fingerprint as objective_fingerprint
from gspo.objectives.objective import Objective
from gspo.record import run_format
from gspo.reward.traits import reward_traits
from gspo.rollout.gather import RolloutState

MAY_CHANGE = (
    "name",
    "run_dir",
    "steps",
    "tokens",
    "log.",
    "checkpoint.",
    "alarms.",
    "ranks.",
    "eval.metric",
    "eval.patience",
    "eval.min_gain",
    "model.device",
    "model.threads",
    "rollout.sampler_device",
    "rollout.sampler_timeout_s",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.max_unscored_fraction",
    "learner.micro_batch_tokens",
    "learner.context_parallel",
    "learner.max_skipped",
    "learner.old_logp",
    "learner.allow_mismatch",
    *(f"learner.{name}" for name in TUNABLE),
)
"""Settings and sections that may change on resume. Most do not affect the training result. The others fix a run that
could not continue otherwise: `learner.old_logp` for an engine that drifts from the learner, the optimizer settings for
updates that diverge. The objective, the batch and the data are fixed: changing them would make it a different run."""

_REWARD_OPTIONS = "reward.options."


def initial_state(context: RunContext) -> TrainerState:
    """The state of a run before its first step, with the fingerprints and settings that identify the run."""
    config = context.config
    # A resume reads the original weights again if they are the base of adapters or the reference of a KL penalty.
    # Their fingerprint proves that they are still the same. Other runs need only their own checkpoints.
    needs_base_weights = adapted(context.policy.model) or (context.objective.kl and not config.cold_start.steps)
    return TrainerState(
        rollout=RolloutState(difficulty=_unknown_difficulty(context)),
        problems=fingerprint(context.problems),
        model=weights_fingerprint(config.model) if needs_base_weights else "",
        objective=objective_fingerprint(config.objective.name),
        settings=flat(config),
    )


def _unknown_difficulty(context: RunContext) -> Difficulty | None:
    data = context.config.data
    if data.sampling == "uniform":
        return None
    return Difficulty.unknown(problems=len(context.problems.train), sources=len(data.sources))


def fingerprint(problems: Problems) -> str:
    """A digest of every problem: its prompt, position and columns."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in problems.everything:
        digest.update(json.dumps([prompt.id, prompt.token_ids, dict(prompt.columns)]).encode())
    return digest.hexdigest()


def check_data_and_model(saved: TrainerState, now: TrainerState, config: Config) -> None:
    """Raise if the problems, the original weights or a custom objective are not those the run began with."""
    if saved.objective != now.objective:
        raise ConfigError(
            f"objective.name: the file of {config.objective.name} is not the one the run began with; "
            "restore it, or start a new run"
        )
    if saved.problems != now.problems:
        raise ConfigError(
            "data: the problems are not those the run began with (rows, order, template, tokenizer or the version "
            "of gspo changed); restore them, or start a new run"
        )
    before, after = saved.rollout.difficulty, now.rollout.difficulty
    if before and after and (len(before.judged), len(before.skipped)) != (len(after.judged), len(after.skipped)):
        raise ConfigError(
            "data.sampling: the checkpoint has measured another number of problems or sources than the run has; "
            "restore its difficulty.tensors, or start a new run"
        )
    if saved.model != now.model and saved.model:
        changed = (
            f"model.build: {config.model.build}/config.json is not the one the run began with; restore it"
            if config.model.build
            else f"model.path: the weights in {config.model.path} are not those the run began with; restore them"
        )
        raise ConfigError(f"{changed}, or start a new run")


def changed_settings(saved: TrainerState, now: TrainerState) -> dict[str, list[Any]]:
    """The settings that differ, as [old, new]. Where a run is and when it ends are not compared."""
    # A setting that did not exist when the checkpoint was saved had the effect of its default.
    before, after = flat(Config()) | dict(saved.settings), now.settings
    keys = [key for key in differing([before, after]) if key not in ("steps", "run_dir")]
    return {key: [before.get(key), after.get(key)] for key in keys}


def changed_objective(run: Path, now: Objective) -> str | None:
    """What a version of gspo after the run's own does otherwise with its objective; None if nothing."""
    before = run_format.read(run).objective
    text = now.ratio.changed_from.get(before.ratio if before else "")
    if text is None:
        return None
    return (
        f"objective.name: {now.name!r} of the version that began the run {text}. To keep the run as it was, resume "
        "with that version of gspo"
    )


def change_texts(changed: Mapping[str, list[Any]]) -> dict[str, str]:
    """Each changed setting in words."""
    return {key: f"{key}: {before!r} then, {after!r} now" for key, (before, after) in changed.items()}


def may_change(key: str) -> bool:
    """Whether a resume may change a setting."""
    spec, _, option = key.removeprefix(_REWARD_OPTIONS).rpartition(".")
    of_reward = key.startswith(_REWARD_OPTIONS) and option in reward_traits(spec).may_change
    return of_reward or key.startswith(MAY_CHANGE)


def check_may_change(changed: Mapping[str, list[Any]], run: Path) -> None:
    """Raise if a setting has changed that is not in `MAY_CHANGE`, nor in the `may_change` of a reward."""
    refused = [text for key, text in change_texts(changed).items() if not may_change(key)]
    if refused:
        raise ConfigError(
            f"{run}/config.toml: a resume cannot change {'; '.join(refused)}; restore it, or start a new run"
        )

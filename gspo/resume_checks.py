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
from gspo.data.problems import Problems
from gspo.errors import ConfigError
from gspo.learner.checkpoint import TrainerState
from gspo.learner.optimizer import TUNABLE
from gspo.model.adapter import adapted
from gspo.model.source import weights_fingerprint
from gspo.objectives.custom import fingerprint as objective_fingerprint

MAY_CHANGE = (
    "name",
    "run_dir",
    "steps",
    "tokens",
    "log.",
    "checkpoint.",
    "alarms.",
    "model.device",
    "model.threads",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.max_unscored_fraction",
    "learner.micro_batch_tokens",
    "learner.max_skipped",
    "learner.old_logp",
    "learner.allow_mismatch",
    *(f"learner.{name}" for name in TUNABLE),
)
"""Settings and sections that may change on resume. Most do not affect the training result. The others fix a run that
could not continue otherwise: `learner.old_logp` for an engine that drifts from the learner, the optimizer settings for
updates that diverge. The objective, the batch and the data are fixed: changing them would make it a different run."""


def initial_state(context: RunContext) -> TrainerState:
    """The state of a run before its first step, with the fingerprints and settings that identify the run."""
    config = context.config
    # A resume reads the original weights again if they are the base of adapters or the reference of a KL penalty.
    # Their fingerprint proves that they are still the same. Other runs need only their own checkpoints.
    needs_base_weights = adapted(context.policy.model) or (context.objective.kl and not config.cold_start.steps)
    return TrainerState(
        problems=fingerprint(context.problems),
        model=weights_fingerprint(config.model) if needs_base_weights else "",
        objective=objective_fingerprint(config.objective.name),
        settings=flat(config),
    )


def fingerprint(problems: Problems) -> str:
    """A digest of every problem: its prompt, position and columns."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in (*problems.train, *problems.held_out):
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
    if saved.model != now.model and saved.model:
        raise ConfigError(
            f"model.path: the weights in {config.model.path} are not those the run began with; "
            "restore them, or start a new run"
        )


def changed_settings(saved: TrainerState, now: TrainerState) -> dict[str, list[Any]]:
    """The settings that differ, as [old, new]. Where a run is and when it ends are not compared."""
    # A setting that came after the run began had the effect of its default.
    before, after = {**flat(Config()), **saved.settings}, now.settings
    keys = [key for key in differing([before, after]) if key not in ("steps", "run_dir")]
    return {key: [before.get(key), after.get(key)] for key in keys}


def change_texts(changed: Mapping[str, list[Any]]) -> dict[str, str]:
    """Each changed setting in words."""
    return {key: f"{key}: {before!r} then, {after!r} now" for key, (before, after) in changed.items()}


def check_may_change(changed: Mapping[str, list[Any]], run: Path) -> None:
    """Raise if a setting has changed that is not in `MAY_CHANGE`."""
    refused = [text for key, text in change_texts(changed).items() if not key.startswith(MAY_CHANGE)]
    if refused:
        raise ConfigError(
            f"{run}/config.toml: a resume cannot change {'; '.join(refused)}; restore it, or start a new run"
        )

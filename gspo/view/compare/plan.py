"""The runs of a comparison, their settings and their progress.

In: a recipe, shared overrides, arms and seeds. Out: `Job`s. Invariant: every arm's settings are validated before
anything runs; progress is read from the run directory; a run with other settings is never modified.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import config as settings
from gspo.config import Config, LogConfig, differing, flat
from gspo.errors import ConfigError, GspoError
from gspo.view.compare.arms import Arm
from gspo.view.compare.curves import Run, read_run
from gspo.view.compare.record import log_path, run_path, start_path

RESERVED = {"objective.name": "--objectives", "run_dir": "--out", "seed": "--seeds", "tokens": "--tokens N"}
"""Settings that a comparison sets itself, and the option to use instead."""
CHECKPOINT = "checkpoints/000000"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the comparison."""

    label: str
    path: Path
    config: Config
    log: Path
    config_file: Path

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        run = read_run(self.path)
        # A cold start is complete only with the checkpoint that its arms start from.
        return run is not None and run.finished and (bool(self.config.steps) or (self.path / CHECKPOINT).is_dir())

    @property
    def started(self) -> bool:
        """Whether there is a run to resume."""
        return (self.path / "config.toml").is_file()

    @property
    def done(self) -> float:
        """Completed fraction of the run."""
        run = read_run(self.path)
        if run is None or not run.rows or not self.config.steps:
            return float(self.finished)
        return min(1.0, run.tokens / self.config.tokens if self.config.tokens else run.step / self.config.steps)


# ------------------------------------------------------------------------------------------------- settings


def shared_config(recipe: Path, overrides: Sequence[str]) -> Config:
    """The recipe with the overrides that apply to all arms."""
    from gspo.build import with_dtype

    for text in overrides:
        key = text.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in RESERVED:
            raise ConfigError(f"--{key}: a comparison sets it itself; use {RESERVED[key]}")
    # The recipe's own objective may not have these settings; each arm checks them against its objective.
    shared = [o for o in overrides if not o.removeprefix("--").startswith("objective.")]
    config = with_dtype(settings.anchored(settings.load(recipe, shared)))
    if not config.steps:
        raise ConfigError("steps: nothing to compare with steps = 0; set the number of training steps")
    return config


def arm_configs(recipe: Path, overrides: Sequence[str], arms: Sequence[Arm]) -> dict[str, Config]:
    """The settings of each arm by label, validated as `gspo train` does."""
    tree = settings.read_toml(recipe)
    configs = {arm.label: _arm_config(copy.deepcopy(tree), overrides, arm) for arm in arms}
    seen: dict[str, Any] = {}
    for label, config in configs.items():
        effective = _effective_settings(config)
        # Two such arms would train the same runs twice.
        same = [other for other, theirs in seen.items() if theirs == effective]
        if same:
            raise ConfigError(f"--objectives: {same[0]!r} and {label!r} have the same settings; leave one out")
        seen[label] = effective
    return configs


def _arm_config(tree: dict[str, Any], overrides: Sequence[str], arm: Arm) -> Config:
    from gspo.build import run_objective, with_dtype
    from gspo.data.sources import check_file
    from gspo.reward.source_rewards import locate, source_rewards
    from gspo.rollout.engine import engine_names

    try:
        # `shared_config` has already reported old names.
        config = settings.override(tree, [*overrides, *arm.overrides], where="recipe", report_old_names=False)
        settings.check(config)
        config = with_dtype(settings.anchored(config))
        run_objective(config)
        if config.rollout.engine not in engine_names():
            raise ConfigError(
                f"rollout.engine: no engine {config.rollout.engine!r}; choose one of: {', '.join(engine_names())}"
            )
        locate(source_rewards(config), config.reward.options)
        # Now, because a comparison may run for days before its last arm starts.
        for path in config.data_files:
            check_file(path)
    except GspoError as error:
        raise ConfigError(f"arm {arm.label!r}: {error}") from None
    return config


def _effective_settings(config: Config) -> tuple[Any, ...]:
    """Equal for arms that behave identically, such as `gspo` and `gspo+kl=0`."""
    from gspo.build import run_objective
    from gspo.objectives.objective import settings_of

    objective = dataclasses.replace(run_objective(config), given=frozenset())
    values = settings_of(objective)
    # `auto:SHARE` (an adaptive clip range) is not a value of the objective, so it is compared as written.
    adaptive = {k: v for k, v in config.objective.settings.items() if values.get(k) != v}
    return objective, adaptive, dataclasses.replace(config, objective=settings.ObjectiveConfig())


def needs_start(config: Config) -> bool:
    """Whether arms need a cold start; otherwise they all start from `model.path`."""
    return bool(config.cold_start.steps or config.model.build)


# ------------------------------------------------------------------------------------------------- jobs


def start_job(out: Path, shared: Config, seed: int) -> Job:
    """The cold start of a seed: a run without training steps."""
    path = start_path(out, seed)
    # A cold start has no training steps to log.
    log = LogConfig(rollouts=shared.log.rollouts, evaluations=shared.log.evaluations)
    config = dataclasses.replace(shared, run_dir=str(path), seed=seed, steps=0, tokens=0, log=log)
    return _job(out, f"start, seed {seed}", path, config)


def arm_job(out: Path, label: str, config: Config, seed: int, tokens: int) -> Job:
    """A run of an arm, from the seed's cold start if there is one."""
    path = run_path(out, label, seed)
    if needs_start(config):
        start = str(start_path(out, seed) / CHECKPOINT)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=start, build="", build_options={}),
            cold_start=dataclasses.replace(config.cold_start, steps=0),
        )
    # The setting `name` allows 64 letters, digits, dots, underscores and hyphens.
    name = path.name.replace("+", "-").replace("=", "-")[-64:]
    config = dataclasses.replace(config, name=name, run_dir=str(path), seed=seed, tokens=tokens)
    return _job(out, f"{label}, seed {seed}", path, config)


def _job(out: Path, label: str, path: Path, config: Config) -> Job:
    settings.check(config)
    log = log_path(out, path)
    return Job(label=label, path=path, config=config, log=log, config_file=out / "configs" / f"{log.stem}.toml")


def measured_budget(shared: Config, starts: Sequence[Run]) -> int:
    """Tokens that the recipe's steps sample at the cold starts' completion length; `0` if that was not measured."""
    lengths = [length for run in starts for length in run.values("eval/length_mean")[:1]]
    if not lengths:
        return 0
    # Measured once for all arms, because an arm that learns to write longer must not get more tokens.
    return round(shared.steps * shared.rollout.prompts * shared.rollout.group_size * statistics.fmean(lengths))


def check_same_settings(job: Job) -> None:
    """Refuse a run that was started with other settings."""
    if not job.started:
        return
    file = job.path / "config.toml"
    there = flat(settings.anchored(settings.from_tree(settings.read_toml(file), where=str(file))))
    wanted = flat(job.config)
    keys = [k for k in differing([there, wanted]) if k != "run_dir" and not _moved(k, there, wanted)]
    if keys:
        changes = "; ".join(f"{k} is {there.get(k)!r} there and would be {wanted.get(k)!r}" for k in keys[:6])
        more = f"; and {len(keys) - 6} more" if len(keys) > 6 else ""
        raise ConfigError(
            f"{job.path}: this run was started with other settings: {changes}{more}; choose another --out, or restore "
            "those settings"
        )


def _moved(key: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether `model.path` is the same cold start in a comparison directory that was moved."""
    start = Path(str(wanted.get(key))).parts[-4:]
    # The last four parts: start/seed-S/checkpoints/000000.
    return key == "model.path" and start[:1] == ("start",) and Path(str(there.get(key))).parts[-4:] == start


def remove_empty_run(path: Path) -> None:
    """Remove a run directory that was killed before its settings were written, if it holds nothing else."""
    if not path.is_dir() or (path / "config.toml").exists():
        return
    leftovers = {p.relative_to(path).as_posix() for p in path.rglob("*")}
    # Only what a run creates before its settings: anything else may be somebody's data.
    files = ("environment.json", "run.json", "config.toml")
    if leftovers <= {".lock", "rollouts", "checkpoints", *files, *(f".tmp-{name}" for name in files)}:
        shutil.rmtree(path)

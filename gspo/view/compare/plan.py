"""Which runs a comparison is made of, with what settings, and how far each is.

In: a recipe, shared overrides, arms and seeds. Out: `Job`s. Invariant: every arm's settings are checked before anything
runs; whether a run is finished is read from its own directory; a run that was made with other settings is never touched.
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
from gspo.config import Config, differing, flat
from gspo.errors import ConfigError, GspoError
from gspo.view.compare.arms import Arm
from gspo.view.compare.curves import Run, read_run
from gspo.view.compare.record import log_path, run_path, start_path

OWN = {"objective.name": "--objectives", "run_dir": "--out", "seed": "--seeds", "tokens": "--tokens N"}
"""Settings that a comparison sets itself, and what to use instead."""
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
        """Whether the run has nothing left to do."""
        run = read_run(self.path)
        return run is not None and run.finished and (bool(self.config.steps) or (self.path / CHECKPOINT).is_dir())

    @property
    def begun(self) -> bool:
        """Whether there is a run to go on with."""
        return (self.path / "config.toml").is_file()

    @property
    def done(self) -> float:
        """The share of the run that is done."""
        run = read_run(self.path)
        if run is None or not run.rows or not self.config.steps:
            return float(self.finished)
        return min(1.0, run.tokens / self.config.tokens if self.config.tokens else run.step / self.config.steps)


# ------------------------------------------------------------------------------------------------- settings


def shared_config(recipe: Path, overrides: Sequence[str]) -> Config:
    """The recipe with the overrides for all arms, but for those of the objective, which a row may not have."""
    for text in overrides:
        key = text.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in OWN:
            raise ConfigError(f"--{key}: a comparison sets it itself; use {OWN[key]}")
    shared = [o for o in overrides if not o.removeprefix("--").startswith("objective.")]
    config = settings.anchored(settings.load(recipe, shared))
    if not config.steps:
        raise ConfigError("steps: there is nothing to compare with steps = 0; set how many training steps to take")
    return config


def arm_configs(recipe: Path, overrides: Sequence[str], arms: Sequence[Arm]) -> dict[str, Config]:
    """The settings of each arm by label, checked as `gspo train` would."""
    tree = settings.read_toml(recipe)
    configs = {arm.label: _arm_config(copy.deepcopy(tree), overrides, arm) for arm in arms}
    seen: dict[str, Any] = {}
    for label, config in configs.items():
        meaning = _meaning(config)
        same = [other for other, its in seen.items() if its == meaning]
        if same:
            raise ConfigError(f"--objectives: {same[0]!r} and {label!r} come to the same settings; leave one out")
        seen[label] = meaning
    return configs


def _arm_config(tree: dict[str, Any], overrides: Sequence[str], arm: Arm) -> Config:
    from gspo.build import run_objective
    from gspo.data.sources import check_file
    from gspo.reward.function import find_sources
    from gspo.rollout.engine import engine_names

    try:
        config = settings.override(tree, [*overrides, *arm.overrides], where="recipe")
        settings.check(config)
        config = settings.anchored(config)
        run_objective(config)
        if config.rollout.engine not in engine_names():
            raise ConfigError(f"rollout.engine: no engine {config.rollout.engine!r}; there are: {', '.join(engine_names())}")  # fmt: skip
        find_sources(config.reward.functions, config.reward.options, (config.data.task, config.data.task_options) if config.data.task else None)  # fmt: skip
        for path in filter(None, (config.data.path, config.data.held_out_path)):
            check_file(path)
    except GspoError as error:
        raise ConfigError(f"arm {arm.label!r}: {error}") from None
    return config


def _meaning(config: Config) -> tuple[Any, ...]:
    """Equal for arms that would do the same: `gspo` and `gspo+kl=0`."""
    from gspo.build import run_objective
    from gspo.objectives.objective import settings_of

    objective = dataclasses.replace(run_objective(config), given=frozenset())
    values = settings_of(objective)
    beside = {k: v for k, v in config.objective.settings.items() if values.get(k) != v}  # a range that adapts
    return objective, beside, dataclasses.replace(config, objective=settings.ObjectiveConfig())


def needs_start(config: Config) -> bool:
    """Whether arms need a model made for them; else they all start from `model.path`."""
    return bool(config.cold_start.steps or config.model.build)


# ------------------------------------------------------------------------------------------------- jobs


def start_job(out: Path, shared: Config, seed: int) -> Job:
    """The cold start of a seed: a run without a training step."""
    path = start_path(out, seed)
    log = dataclasses.replace(shared.log, sinks=())
    config = dataclasses.replace(shared, run_dir=str(path), seed=seed, steps=0, tokens=0, log=log)
    return _job(out, f"start, seed {seed}", path, config)


def arm_job(out: Path, label: str, config: Config, seed: int, tokens: int) -> Job:
    """A run of an arm, from the seed's cold start where there is one."""
    path = run_path(out, label, seed)
    if needs_start(config):
        start = str(start_path(out, seed) / CHECKPOINT)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=start, build="", build_options={}),
            cold_start=dataclasses.replace(config.cold_start, steps=0),
        )
    config = dataclasses.replace(config, name=path.name.replace("+", "-").replace("=", "-")[-64:], run_dir=str(path), seed=seed, tokens=tokens)  # fmt: skip
    return _job(out, f"{label}, seed {seed}", path, config)


def _job(out: Path, label: str, path: Path, config: Config) -> Job:
    settings.check(config)
    log = log_path(out, path)
    return Job(label=label, path=path, config=config, log=log, config_file=out / "configs" / f"{log.stem}.toml")


def measured_budget(shared: Config, starts: Sequence[Run]) -> int:
    """Tokens that the recipe's steps would sample at the reply length of the cold starts; 0 if that was not measured."""
    lengths = [length for run in starts for length in run.values("eval/length_mean")[:1]]
    if not lengths:
        return 0
    return round(shared.steps * shared.rollout.prompts * shared.rollout.replies * statistics.fmean(lengths))


def check_same(job: Job) -> None:
    """Refuse a run that was made with other settings."""
    if not job.begun:
        return
    file = job.path / "config.toml"
    there = flat(settings.anchored(settings.from_tree(settings.read_toml(file), where=str(file))))
    wanted = flat(job.config)
    keys = [k for k in differing([there, wanted]) if k != "run_dir" and not _moved(k, there, wanted)]
    if keys:
        shown = "; ".join(f"{k} is {there.get(k)!r} there and would be {wanted.get(k)!r}" for k in keys[:6])
        more = f"; and {len(keys) - 6} more" if len(keys) > 6 else ""
        raise ConfigError(f"{job.path}: this run was made with other settings: {shown}{more}; choose another --out, or go back to those settings")  # fmt: skip


def _moved(key: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """The same cold start, in a comparison directory that is now called by another path."""
    start = Path(str(wanted.get(key))).parts[-4:]
    return key == "model.path" and start[:1] == ("start",) and Path(str(there.get(key))).parts[-4:] == start


def clear_unborn(path: Path) -> None:
    """Remove what a run leaves that was killed before it had written its settings, and nothing else."""
    if not path.is_dir() or (path / "config.toml").exists():
        return
    left = {p.relative_to(path).as_posix() for p in path.rglob("*")}
    if left <= {".lock", "rollouts", "checkpoints", ".tmp-config.toml"}:
        shutil.rmtree(path)

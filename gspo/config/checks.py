"""Reject values and combinations of settings that cannot work, before anything is loaded.

In: a `Config`. Out: nothing, or a `ConfigError` that names the key and the fix.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gspo.config.schema import (
    TINY_MODELS,
    Config,
    LearnerConfig,
    LogConfig,
    NotWith,
    OnlyWith,
    ProblemsConfig,
    Range,
    markers,
    sections,
)
from gspo.config.toml import flat, get
from gspo.errors import ConfigError
from gspo.redact import holds_secret


def check(config: Config) -> None:
    """Raise a `ConfigError` for settings that cannot work."""
    # Secrets come first: a later message may quote the value of a setting.
    _check_secrets(config)
    _check_ranges(config)
    _check_data(config)
    _check_effects(config)
    _check_sampling(config)
    _check_updates(config)
    _check_model(config)
    _check_rewards(config)
    _check_environment(config)
    _check_controls(config)
    _check_sinks(config)


def check_without_problems(config: Config) -> None:
    """The same for settings under which a model only samples, so that they name no problems and no rewards."""
    _check_secrets(config)
    _check_ranges(config)
    _check_effects(config)
    _check_sampling(config)
    _check_model(config)


def _check_data(config: Config) -> None:
    data = config.data
    for key, section in problem_sections(config):
        named = [name for name in ("path", "hub", "task") if getattr(section, name)]
        if len(named) != 1:
            raise ConfigError(
                f"{key}: set exactly one of {key}.path, {key}.hub, {key}.task (now set: {', '.join(named) or 'none'})"
            )
    alone = [name for name in ("path", "hub", "task", "held_out_path") if data.mix and getattr(data, name)]
    if alone:
        raise ConfigError(f"data.{alone[0]}: has no effect with data.mix; move it into a table [data.mix.NAME]")
    both = sorted(data.mix.keys() & config.eval.sets.keys())
    if both:
        raise ConfigError(
            f"eval.sets.{both[0]}: a source in data.mix has this name, and the metrics of both would be "
            f"eval/{both[0]}/accuracy; rename one of them"
        )


def problem_sections(config: Config) -> Iterator[tuple[str, ProblemsConfig]]:
    """The sources of training problems and the evaluation sets, by their dotted keys."""
    if not config.data.mix:
        yield "data", config.data
    yield from ((f"data.mix.{name}", source) for name, source in config.data.mix.items())
    yield from ((f"eval.sets.{name}", one) for name, one in config.eval.sets.items())


def _check_sampling(config: Config) -> None:
    """Check where a completion may end. Engines check what depends on the tokenizer."""
    rollout = config.rollout
    for text in rollout.stop:
        if not text:
            raise ConfigError("rollout.stop: contains an empty string, which every text contains; remove it")
        # What decoding writes for an incomplete character, so it comes and goes while a completion grows.
        if "\ufffd" in text:
            raise ConfigError(f"rollout.stop: {text!r} contains U+FFFD, which stands for invalid bytes; remove it")
    if rollout.min_tokens > rollout.max_tokens:
        raise ConfigError(
            f"rollout.min_tokens: {rollout.min_tokens} is more than rollout.max_tokens = {rollout.max_tokens}; lower "
            "it, or raise rollout.max_tokens"
        )
    _check_spans(config)
    if not rollout.thinking_budget:
        return
    if rollout.thinking_budget >= rollout.max_tokens:
        raise ConfigError(
            f"rollout.thinking_budget: {rollout.thinking_budget} leaves no token for an answer below "
            f"rollout.max_tokens = {rollout.max_tokens}; lower it, or raise rollout.max_tokens"
        )
    if not rollout.thinking_end.strip():
        raise ConfigError('rollout.thinking_end: is empty; write the text that ends thinking, such as "</think>"')
    ends = next((text for text in rollout.stop if text in rollout.thinking_end), None)
    if ends is not None:
        raise ConfigError(
            f"rollout.stop: {ends!r} is part of rollout.thinking_end, so a completion would end with its thinking; "
            "remove it, or set rollout.thinking_budget = 0"
        )


def _check_spans(config: Config) -> None:
    """Check what completions that are cut and continued need."""
    rollout = config.rollout
    if not rollout.span_tokens:
        return
    if rollout.max_lag < 2:
        raise ConfigError(
            f"rollout.span_tokens: with rollout.max_lag = {rollout.max_lag} there is no second turn before a batch is "
            "trained on; set rollout.max_lag to at least 2, or span_tokens = 0"
        )
    if rollout.span_tokens >= rollout.max_tokens:
        raise ConfigError(
            f"rollout.span_tokens: {rollout.span_tokens} is not less than rollout.max_tokens = {rollout.max_tokens}, "
            "so no completion would be cut; lower it, or set it to 0"
        )
    if rollout.over_lag == "drop" and rollout.span_tokens * rollout.max_lag >= rollout.max_tokens:
        raise ConfigError(
            f'rollout.over_lag: "drop" has no effect: {rollout.max_lag} turns of {rollout.span_tokens} tokens are '
            f'enough for rollout.max_tokens = {rollout.max_tokens}; set it to "wait", or lower rollout.span_tokens'
        )
    if config.data.sampling == "difficulty":
        raise ConfigError(
            'rollout.span_tokens: data.sampling = "difficulty" chooses problems by the batch before, which is still '
            'being sampled; set data.sampling = "uniform", or span_tokens = 0'
        )


def _check_updates(config: Config) -> None:
    """Check the settings that depend on how many optimizer steps a rollout batch gets."""
    routing = config.routing
    mini_batches = config.learner.mini_batches
    if routing.replay == "old" and mini_batches == 1:
        raise ConfigError(
            'routing.replay: "old" has no effect with learner.mini_batches = 1, where the policy forward pass is also '
            'the old one; set more mini-batches, or "off"'
        )
    if (routing.replay != "off" or routing.balance_loss) and not routing.record:
        raise ConfigError("routing.record: replay and the balance loss need it; set it to true")
    old_logp = config.learner.old_logp
    # Ratios to a sampler with older weights differ from 1 in a single update, too.
    matters = old_logp == "sampler" and config.rollout.max_lag
    if old_logp != "recompute" and mini_batches == 1 and not matters:
        raise ConfigError(
            f'learner.old_logp: "{old_logp}" saves nothing with learner.mini_batches = 1, because one mini-batch is '
            'always recomputed; set more mini-batches, or "recompute"'
        )
    if old_logp == "interpolate" and not config.rollout.max_lag:
        raise ConfigError(
            'learner.old_logp: "interpolate" is between the versions of policies that differ only with '
            'rollout.max_lag; set that, or "recompute"'
        )
    if old_logp != "sampler" and config.learner.allow_mismatch:
        raise ConfigError(f'learner.allow_mismatch: has no effect with learner.old_logp = "{old_logp}"; leave it out')
    completions = config.rollout.prompts * config.rollout.group_size
    if mini_batches > completions:
        raise ConfigError(
            f"learner.mini_batches: {mini_batches} optimizer steps cannot share the {completions} completions of a "
            f"step (rollout.prompts x rollout.group_size); set it to {completions} or less"
        )
    if config.tokens and not config.steps:
        raise ConfigError("tokens: has no effect with steps = 0; set steps, which plans the learning-rate schedule")


def _check_model(config: Config) -> None:
    if bool(config.model.path) == bool(config.model.build):
        raise ConfigError("model: set either model.path (a directory, hub name or .gguf) or model.build, not both")
    if config.model.quantize and not config.model.lora.rank:
        raise ConfigError('model.quantize: 4-bit weights cannot be trained; set model.lora.rank, or quantize = ""')
    if config.model.trust_remote_code and config.model.build:
        raise ConfigError("model.trust_remote_code: has no effect with model.build; leave it out")
    # A directory gives the shape of a real model, whose time and memory with adapters is worth measuring.
    if config.model.lora.rank and config.model.build in TINY_MODELS:
        raise ConfigError(
            "model.lora.rank: a model built from scratch has random base weights, which adapters would leave "
            "untrained; set model.path, or set the rank to 0"
        )
    if config.cold_start.steps:
        _check_demonstrations(config)


def _check_demonstrations(config: Config) -> None:
    if config.environment.name:
        return  # the environment demonstrates conversations itself
    sources = config.data.sources
    having = [name for name, source in sources.items() if source.solution_field]
    if not having and not any(source.task for source in sources.values()):
        raise ConfigError(
            "cold_start.steps: there are no demonstrations; set data.solution_field to the field of the data that "
            "holds them, or data.task, or steps = 0"
        )
    if having and any(source.task for source in sources.values()):
        raise ConfigError(
            f"data.mix.{having[0]}.solution_field: the cold start trains on the demonstrations of generated tasks or "
            "on those of the data, not on both; remove it, or set cold_start.steps = 0"
        )


def _check_rewards(config: Config) -> None:
    functions = config.reward.functions
    for key, section in problem_sections(config):
        own = "reward.functions" if section is config.data else f"{key}.reward"
        if not (functions or section.task or config.environment.name or getattr(section, "reward", ())):
            raise ConfigError(f'{own}: name at least one, for example ["math_answer"] or ["my.py:score"]')
    _check_weights("reward.weights", config.reward.weights, functions)
    for name, source in config.data.mix.items():
        _check_weights(f"data.mix.{name}.reward_weights", source.reward_weights, source.reward)
    named = config.reward_functions
    for key in config.reward.options:
        if key not in named:
            raise ConfigError(f"reward.options.{key}: not among reward.functions {list(named)}")


def _check_environment(config: Config) -> None:
    """Check what a conversation with an environment cannot have."""
    if not config.environment.name:
        return
    for key in ("min_tokens", "thinking_budget", "span_tokens"):
        if getattr(config.rollout, key):
            raise ConfigError(f"rollout.{key}: is not supported with environment.name; set it to 0")
    for key, section in problem_sections(config):
        if getattr(section, "reward", ()):
            raise ConfigError(f"{key}.reward: not supported with environment.name; use reward.functions")
        if section.chat != config.data.chat:
            raise ConfigError(f"{key}.chat: with environment.name it must be the same for all problems")
    if config.environment.turn_tokens > config.rollout.max_tokens:
        raise ConfigError(
            f"environment.turn_tokens: {config.environment.turn_tokens} is more than rollout.max_tokens = "
            f"{config.rollout.max_tokens}, which limits the whole conversation; lower it"
        )


def _check_weights(key: str, weights: Sequence[float], functions: Sequence[str]) -> None:
    if weights and len(weights) != len(functions):
        raise ConfigError(f"{key}: {len(weights)} weights for {len(functions)} functions; give one for each")
    if weights and not any(weights):
        raise ConfigError(f"{key}: all are 0, so every completion would score 0; set at least one to another value")


def _check_controls(config: Config) -> None:
    """Check what may roll a run back, end it early or keep its best checkpoint."""
    both = next((name for name in config.alarms.rollback if name in config.alarms.stop), None)
    if both:
        raise ConfigError(f"alarms.rollback: {both!r} is also in alarms.stop, which would win; leave it out of one")
    for key in ("stop", "rollback"):
        if "held-out drop" in getattr(config.alarms, key) and not config.eval.every:
            raise ConfigError(
                f"alarms.{key}: 'held-out drop' is never raised without eval.every; set it, or leave it out"
            )
    if config.eval.metric == "accuracy":
        return
    if not (config.checkpoint.keep_best or config.eval.patience):
        raise ConfigError("eval.metric: has no effect without checkpoint.keep_best or eval.patience; leave it out")
    if config.eval.metric == "accuracy_greedy" and not config.eval.greedy:
        raise ConfigError(f'eval.metric: "{config.eval.metric}" is measured only with eval.greedy = true; set it')


def check_number_of_ranks(config: Config, count: int) -> None:
    """Refuse settings that do not work on this number of ranks. A launcher asks before it starts any."""
    context = config.learner.context_parallel
    if count % context:
        raise ConfigError(
            f"learner.context_parallel: {count} rank{'s' * (count > 1)} cannot form groups of {context}; start "
            f"a multiple of {context} ranks (gspo train --nproc N), or set it to 1"
        )
    if count == 1:
        return
    learner, default = config.learner, LearnerConfig()
    for key in ("optimizer", "optimizer_offload"):
        if getattr(learner, key) != getattr(default, key):
            raise ConfigError(
                f"learner.{key}: works in a single process only. Of {count} ranks, each has 1/{count} of the optimizer "
                "state; leave it out. A run that was started with it resumes in a single process"
            )


# Not SLURM_NTASKS: `sbatch` sets that for the whole job, also if the script starts a single process.
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""The world size, as set by torchrun and accelerate, Open MPI, MPICH and Slurm's `srun`."""


def check_single_process(ranks: Any = None) -> None:
    """Raise if a launcher started several processes that do not work together as the `ranks` of one run: each of them
    would do the same on its own."""
    for name in () if ranks is not None and ranks.several else _LAUNCHERS:
        world = os.environ.get(name, "1")
        if world.isdecimal() and int(world) > 1:
            raise ConfigError(
                f"{name} = {world}: started as one of {world} processes, and each would do the same; only gspo train "
                "runs in several processes, started with --nproc or torchrun; start a single process, or unset "
                f"{name}"
            )


def _check_secrets(config: Config) -> None:
    # A resume needs every setting unredacted, so run directories and reports contain them verbatim.
    for key, value in flat(config).items():
        if holds_secret(str(value)):
            raise ConfigError(
                f"{key}: holds what looks like a key, a token or a password, and settings are written into the run "
                "directory; put it into an environment variable and read it from there"
            )


def _check_sinks(config: Config) -> None:
    log, default = config.log, LogConfig()
    trackers = {"wandb", "trackio", "mlflow"}
    takers = {"project": trackers, "entity": {"wandb"}, "group": trackers, "tags": trackers, "report": trackers}
    for name, able in takers.items():
        if log.sinks and getattr(log, name) != getattr(default, name) and able.isdisjoint(log.sinks):
            raise ConfigError(
                f"log.{name}: has no effect with log.sinks = {list(log.sinks)}; add {' or '.join(sorted(able))}, or "
                "leave it out"
            )


def _check_effects(config: Config) -> None:
    """Reject settings that were changed but have no effect, given the other settings."""
    for prefix, section in sections(config):
        for name, marker in markers(section):
            if isinstance(marker, Range):
                continue
            key, value = _condition(config, prefix, section, marker.key)
            if isinstance(marker, OnlyWith) and not value:
                condition = f"without {key}"
            elif isinstance(marker, NotWith) and (value if marker.value is None else value == marker.value):
                condition = f"with {key}" + (f' = "{marker.value}"' if marker.value else "")
            else:
                continue
            # A default that has no effect is not the user's mistake.
            if getattr(section, name) != getattr(type(section)(), name):
                raise ConfigError(f"{prefix}{name}: has no effect {condition}; leave it out")


def _condition(config: Config, prefix: str, section: Any, key: str) -> tuple[str, Any]:
    """The setting that a marker names. In a source or an evaluation set, a key of `[data]` is its own key."""
    if isinstance(section, ProblemsConfig):
        name = key.removeprefix("data.")
        return prefix + name, getattr(section, name)
    return key, get(config, key)


def _check_ranges(config: Config) -> None:
    for prefix, section in sections(config):
        for f in dataclasses.fields(section):
            value = getattr(section, f.name)
            # Before the ranges: comparisons with NaN are all false.
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{prefix}{f.name}: must be a finite number, not {value}")
    # The name becomes part of a path.
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.name):
        raise ConfigError(f"name: use 1 to 64 letters, digits, '.', '_' and '-', not {config.name!r}")
    for prefix, section in sections(config):
        for name, marker in markers(section):
            # A setting that accepts a number or a word (`rollout.refill_budget`) has a range for the number.
            if isinstance(marker, Range) and not isinstance(getattr(section, name), str):
                _check_range(prefix + name, getattr(section, name), marker)


def _check_range(key: str, value: float, allowed: Range) -> None:
    if allowed.exclusive and not value > allowed.low:
        raise ConfigError(f"{key}: must be above {allowed.low:g}, not {value}")
    if not allowed.low <= value <= allowed.high:
        bounds = f"at least {allowed.low:g}"
        if math.isfinite(allowed.high):
            # Seven digits are enough for every other bound, but would round this one.
            high = "2^63 - 1" if allowed.high == 2**63 - 1 else f"{allowed.high:.7g}"
            bounds = f"between {allowed.low:g} and {high}"
        raise ConfigError(f"{key}: must be {bounds}, not {value}")

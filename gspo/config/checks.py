"""Values and combinations of settings that cannot work, refused before anything is loaded.

In: a `Config`. Out: nothing, or a `ConfigError` that names the key and the fix.
"""

from __future__ import annotations

import math
import os
import re

from gspo.config.schema import Config, NotWith, OnlyWith, Range, help_texts, markers
from gspo.config.toml import flat, get
from gspo.errors import ConfigError
from gspo.redact import holds_secret


def check(config: Config) -> None:
    """Refuse values that cannot work, before anything is loaded."""
    _check_secrets(config)
    _check_ranges(config)
    sources = [n for n in ("path", "hub", "task") if getattr(config.data, n)]
    if len(sources) != 1:
        raise ConfigError(
            f"data: set exactly one of data.path, data.hub, data.task (now set: {', '.join(sources) or 'none'})"
        )
    _check_effects(config)
    routing = config.routing
    if routing.replay == "old" and config.learner.mini_batches == 1:
        raise ConfigError('routing.replay: "old" has no effect with learner.mini_batches = 1, where the learning forward is the old one; set more, or "off"')  # fmt: skip
    if (routing.replay != "off" or routing.balance_loss) and not routing.record:
        raise ConfigError("routing.record: replay and the balance loss need it; set it to true")
    if config.learner.old_logp == "sampler" and config.learner.mini_batches == 1:
        raise ConfigError('learner.old_logp: "sampler" saves nothing with learner.mini_batches = 1, because one mini-batch is always compared; set more, or "recompute"')  # fmt: skip
    completions = config.rollout.prompts * config.rollout.replies
    if config.learner.mini_batches > completions:
        raise ConfigError(
            f"learner.mini_batches: {config.learner.mini_batches} optimizer steps cannot share the {completions} completions of a "
            f"step (rollout.prompts x rollout.replies); set it to {completions} or less"
        )
    if config.tokens and not config.steps:
        raise ConfigError("tokens: has no effect with steps = 0; set steps, which plans the learning-rate schedule")
    if bool(config.model.path) == bool(config.model.build):
        raise ConfigError("model: set either model.path (a directory, hub name or .gguf) or model.build, not both")
    if config.model.quantize and not config.model.lora.rank:
        raise ConfigError('model.quantize: weights in 4 bits cannot be trained; set model.lora.rank, or quantize = ""')
    if config.model.quantize and config.rollout.engine == "vllm":
        raise ConfigError('model.quantize: weights in 4 bits cannot be sent to vLLM; set rollout.engine = "local", or quantize = ""')  # fmt: skip
    if config.model.lora.rank and config.model.build:
        raise ConfigError("model.lora.rank: a model built from scratch has nothing worth keeping beside adapters; give model.path, or set it to 0")  # fmt: skip
    if config.cold_start.steps and not config.data.task:
        raise ConfigError("cold_start.steps: only generated tasks have demonstrations; set data.task or steps = 0")
    if not config.reward.functions and not config.data.task:
        raise ConfigError('reward.functions: name at least one, for example ["math_answer"] or ["my.py:score"]')
    weights, functions = config.reward.weights, config.reward.functions
    if weights and len(weights) != len(functions):
        raise ConfigError(f"reward.weights: {len(weights)} weights for {len(functions)} functions; give one for each")
    if weights and not any(weights):
        raise ConfigError("reward.weights: all are 0, so every reply would score 0; give one a weight")
    for key in config.reward.options:
        if key not in functions:
            raise ConfigError(f"reward.options.{key}: not among reward.functions {list(functions)}")


_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where torchrun and accelerate, Open MPI, MPICH and Slurm's `srun` tell a process how many there are."""


def check_single_process() -> None:
    """Refuse to be one of several processes: each would train the whole run by itself, and all alike."""
    for name in _LAUNCHERS:
        world = os.environ.get(name, "1")
        if world.isdecimal() and int(world) > 1:
            raise ConfigError(
                f"{name} = {world}: started as one of {world} processes (torchrun, accelerate, mpirun or srun), but training "
                f"across processes is not supported yet, and each would do the same; start gspo by itself, or unset {name}"
            )


def _check_secrets(config: Config) -> None:
    """Settings are written into run directories and reports as they are, because a resume needs them."""
    for key, value in flat(config).items():
        if holds_secret(str(value)):
            raise ConfigError(f"{key}: holds what looks like a key, a token or a password, and settings are written into the run directory; put it into an environment variable and read it from there")  # fmt: skip


def _check_effects(config: Config) -> None:
    """Refuse settings that were changed but do not act, given the others."""
    for key, marker in markers():
        if isinstance(marker, OnlyWith) and not get(config, marker.key):
            why = f"without {marker.key}"
        elif isinstance(marker, NotWith) and _holds(config, marker):
            why = f"with {marker.key}" + (f' = "{marker.value}"' if marker.value else "")
        else:
            continue
        if get(config, key) != get(Config(), key):
            raise ConfigError(f"{key}: has no effect {why}; leave it out")


def _holds(config: Config, marker: NotWith) -> bool:
    value = get(config, marker.key)
    return bool(value) if marker.value is None else value == marker.value


def _check_ranges(config: Config) -> None:
    for key, kind, _, _ in help_texts():
        if kind == "float" and not math.isfinite(get(config, key)):
            raise ConfigError(f"{key}: must be a finite number, not {get(config, key)}")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.name):
        raise ConfigError(f"name: use 1 to 64 letters, digits, '.', '_' and '-', not {config.name!r}")
    for key, marker in markers():
        if isinstance(marker, Range):
            _check_range(key, get(config, key), marker)


def _check_range(key: str, value: float, allowed: Range) -> None:
    if allowed.exclusive and not value > allowed.low:
        raise ConfigError(f"{key}: must be above {allowed.low:g}, not {value}")
    if not allowed.low <= value <= allowed.high:
        bounds = f"at least {allowed.low:g}"
        if math.isfinite(allowed.high):
            bounds = f"between {allowed.low:g} and {'2^63 - 1' if allowed.high == 2**63 - 1 else f'{allowed.high:.7g}'}"
        raise ConfigError(f"{key}: must be {bounds}, not {value}")

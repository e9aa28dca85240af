"""Every setting of a run: nested frozen dataclasses, read from a TOML recipe and `--section.key=value` overrides.

In: a recipe path and override strings. Out: a `Config`, or a `ConfigError` of one line that names the key and the
remedy. Invariant: files and overrides go through the same check, an unknown key is an error, and the string under a
field is its help text, so `gspo train --help` and `docs/settings.md` cannot drift from the code.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gspo.errors import ConfigError
from gspo.observe.alarms import NAMES as ALARMS
from gspo.observe.redact import holds_secret
from gspo.types import Sampling

MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = 0
    """Train low-rank adapters of this rank beside the linear layers, and leave the model's own weights as they are; 0: train those."""
    alpha: int = 0
    """The adapters' output is scaled by `alpha / rank`; 0: twice the rank."""
    targets: tuple[str, ...] = ()
    """Layers that get adapters, by the last part of their names (`q_proj`, `down_proj`); empty: every linear layer but the output layer."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """Directory, hub name or `.gguf` file of the model to train; or the directory of a saved LoRA adapter, which names its model."""
    build: Literal["", "tiny_moe", "tiny_dense"] = ""
    """Build a small model from scratch instead of loading one: for the demo, for tests, for trying a task."""
    build_options: Mapping[str, Any] = field(default_factory=dict)
    """Other sizes for a built model, by the names of its Qwen3 config: `{num_hidden_layers = 8, num_experts = 64}`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights. Log-probabilities are float32 either way."""
    device: str = "auto"
    """`auto` takes the GPU if there is one."""
    threads: int = 0
    """CPU threads; 0 chooses: one for tiny models, which run many times faster that way, else `OMP_NUM_THREADS` or all cores."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models you trust like your own code."""
    quantize: Literal["", "nf4"] = ""
    """`nf4`: keep the linear layers' own weights in 4 bits while adapters are trained beside them (QLoRA). Needs `model.lora.rank`."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class ColdStartConfig:
    steps: int = 0
    """At most this many supervised steps on the task's own demonstrations before RL; 0: none."""
    batch: int = 64
    """Demonstrations per step."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    stop_accuracy: float = 0.3
    """Stop as soon as sampled accuracy on fresh problems reaches this: enough to learn from, room to climb."""
    check_every: int = 10
    """Steps between accuracy checks."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = ""
    """Training problems: a .jsonl, .json, .csv or .parquet file (also .gz of the first three)."""
    hub: str = ""
    """Or a data set by hub name, through `datasets`."""
    hub_config: str = ""
    """Configuration of the hub data set, for example `main`."""
    split: str = "train"
    """Split of the hub data set."""
    task: str = ""
    """Or a generated task: `addition`, `sorting`, `countdown`, `word_problems`, or `reasoning_gym:NAME`."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the generated task, for example `digits = 3`."""
    task_size: int = 20000
    """How many training problems to generate."""
    prompt_field: str = "prompt"
    """Field with the problem: text or chat messages."""
    prompt_template: str = ""
    """Or the problem as text made of several fields, each by its name in braces: `{Body} {Question}`."""
    answer_field: str = "answer"
    """Field with the expected answer; rewards receive it as `answer`. Empty: the data has none."""
    answer_after: str = ""
    """Keep only what follows the last occurrence of this mark in the answer field (`####` for GSM8K)."""
    instruction: str = ""
    """Text put after each problem, for example how to state the answer."""
    system: str = ""
    """System message put before each problem (needs a chat template)."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Wrap text prompts as a user message in the tokenizer's chat template; auto: if it has one."""
    held_out: int = 256
    """Problems set aside for evaluation: taken from the training data by seed, unless `held_out_path` is given."""
    held_out_path: str = ""
    """A file of held-out problems, with the same fields."""
    max_prompt_tokens: int = 1024
    """A longer prompt is a bad row."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a bad row does: stop before anything expensive starts, or be left out and counted."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: str = "local"
    """Sampling engine: the name of a file in `gspo/rollout/engines`."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine; see its file."""
    prompts: int = 32
    """Prompts per step."""
    replies: int = 8
    """Replies per prompt (G)."""
    max_tokens: int = 256
    """Token limit of a reply."""
    temperature: float = 1.0
    """Sampling temperature; the learner's log-probabilities use it too."""
    top_p: float = 1.0
    """Nucleus sampling. Below 1 the sampler's distribution is not the learner's: expect a mismatch."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0: all. The same caution."""
    refill_budget: int = 3
    """With `keep = "mixed"`: sample at most this many batches of prompts per step to replace uniform groups."""

    @property
    def sampling(self) -> Sampling:
        """How replies are drawn, in training and in evaluation."""
        return Sampling(max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    functions: tuple[str, ...] = ()
    """Reward functions: names of files in `gspo/reward/rewards`, or `file.py:function`."""
    weights: tuple[float, ...] = ()
    """One weight per function; empty: all 1."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword options per function: `options.exact_answer = {marker = "####"}`."""
    correct_above: float = 0.5
    """A reply counts as correct when the first function gives more than this."""
    timeout_s: float = 10.0
    """Deadline of one call; the worker is killed when it passes. Replies of a call that has used half of it are also tried alone, so keep it at several times what a call takes."""
    memory_mb: int = 2048
    """Megabytes that a worker process and what it starts may hold beyond what loading the functions took; it is killed when it holds more. 0: no limit."""
    workers: int = 2
    """Worker processes; a few more are lent while calls hang."""
    max_unscored_fraction: float = 0.5
    """Stop the run, with a checkpoint, when more than this share of a step's replies cannot be scored."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    name: str = "gspo"
    """A row of `gspo objectives`. Overriding it on the command line drops the settings the recipe gave its own row."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The row's settings, written beside the name: `clip_low`, `kl`, `keep`, ... (`gspo objectives` lists them)."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    replay: Literal["off", "old", "sampler"] = "off"
    """Which experts a mixture-of-experts model uses in learning: its own choice; what it chose for the old log-probabilities (R2); what the sampling engine chose, for the old log-probabilities too (R3)."""
    record: bool = True
    """Count, for the `routing/` metrics, the experts that change. Costs one or two bytes per token, layer and expert chosen."""
    balance_loss: float = 0.0
    """Coefficient of the auxiliary load-balancing loss (Switch), on the routers' own choice; 0: none."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    mini_batches: int = 4
    """Optimiser steps per rollout batch."""
    micro_batch_tokens: int = 16384
    """Tokens per forward and backward: replies, and the prompt of each group once; for models that cannot read packed rows, with padding. Changes memory and speed, never the gradient."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    warmup_updates: int = 0
    """Optimiser steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after warm-up, over all steps of the run."""
    final_fraction: float = 0.1
    """Share of the peak rate at the end of a linear or cosine schedule."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    old_logp: Literal["recompute", "sampler"] = "recompute"
    """Where ratios start from: log-probabilities that the learner computes, or those that the sampling engine reported, which saves a forward (all but one in `mini_batches`) and is refused when they differ by more than the clip range."""
    spike: float = 8.0
    """Skip an optimiser step whose gradient norm is this many standard deviations (in log space, over the last 128) above the mean; 0: never."""
    max_skipped: int = 5
    """Stop after this many optimiser steps in a row that were skipped: non-finite loss or gradient, or a spike."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int = 10
    """Steps between evaluations on held-out problems (also before the first and after the last step); 0: never."""
    samples: int = 1
    """Sampled replies per held-out problem."""
    greedy: bool = True
    """Also measure greedy accuracy."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 20
    """Steps between checkpoints; the last step and a stop always write one."""
    keep: int = 2
    """How many of the newest to keep; 0: all."""


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    steps: int = 5
    """An alarm (nothing trained, uniform rewards, entropy collapse, length pinned, repetition, reward jump, tricks in programs, rounding noise) needs its sign in this many steps in a row; the alarm "held-out falls" needs it in two evaluations, "engine apart" in one step after this many."""
    stop: tuple[str, ...] = ()
    """Alarms that stop the run, with a checkpoint; the others are only events and messages."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    rollouts: bool = True
    """Write every reply with its tokens and log-probabilities to `rollouts/`."""
    sinks: tuple[str, ...] = ()
    """Also send metrics to: `tensorboard`, `wandb`, `trackio`."""


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "run"
    """Name of the run; part of its directory's name."""
    run_dir: str = ""
    """Directory of the run; empty: `runs/NAME-DATE-TIME`."""
    seed: int = 0
    """Seed of everything random: data order, sampling, a built model's weights."""
    steps: int = 100
    """Training steps (rollout batches); 0: only the cold start and an evaluation."""
    tokens: int = 0
    """End after the step in which this many reply tokens have been sampled in all, not after `steps`, which still sets the learning-rate schedule (twice `steps` is the most); 0: off."""
    model: ModelConfig = field(default_factory=ModelConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    log: LogConfig = field(default_factory=LogConfig)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply `a.b=c` overrides (a leading `--` is allowed)."""
    path = find_recipe(path)
    config = override(read_toml(path), overrides, where=str(path))
    check(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; a byte-order mark is allowed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # also a number of too many digits, or tables within tables without end
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def override(tree: dict[str, Any], overrides: Sequence[str], *, where: str) -> Config:
    """A `Config` from tables with overrides put in; an error says which of the two it came from."""
    config = from_tree(tree, where=where)
    if not overrides:
        return config
    pairs = [_split_override(text) for text in overrides]
    if dict(pairs).get("objective.name", config.objective.name) != config.objective.name:
        tree["objective"] = {}  # another row has other settings: those of the recipe's row do not carry over
    for key, value in pairs:
        _set(tree, key, value)
    return from_tree(tree, where="command line")


def find_recipe(path: str | Path) -> Path:
    """A recipe by path, or by the bare name of one that is shipped (`demo`)."""
    given = Path(path)
    shipped = recipe_dir() / (given.name if given.suffix == ".toml" else f"{given.name}.toml")
    if given.is_file():
        return given
    if given.parent in (Path("."), Path("recipes")) and shipped.is_file():
        return shipped
    names = ", ".join(sorted(p.stem for p in recipe_dir().glob("*.toml")))
    raise ConfigError(f"{given}: no such recipe; give the path of a .toml file or one of the shipped names: {names}")


def recipe_dir() -> Path:
    """Shipped recipes: inside the installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / "recipes"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "recipes"


def from_tree(tree: Mapping[str, Any], *, where: str) -> Config:
    """Build a `Config` from nested tables, naming `where` and the key in every error."""
    return _build(Config, tree, where=where, prefix="")


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
    for name in config.alarms.stop:
        if name not in ALARMS:
            raise ConfigError(f"alarms.stop: no alarm {name!r}; there are: {', '.join(ALARMS)}")
    known = {"tensorboard", "wandb", "trackio"}
    for sink in config.log.sinks:
        if sink not in known:
            raise ConfigError(f"log.sinks: unknown sink {sink!r}; known: {', '.join(sorted(known))}")


def anchored(config: Config) -> Config:
    """The same settings with absolute paths, so that a run can be resumed and evaluated from another directory.

    Files that must be there are taken to be relative to the current directory. `model.path` and options of rewards and of the
    engine may be something else than a path (a hub name, a URL): they are, unless there is such a file or directory."""
    data, reward = config.data, config.reward
    specs = {spec: _anchored_function(spec) for spec in reward.functions}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=_absolute_if_there(config.model.path)),
        data=dataclasses.replace(data, path=_absolute(data.path), held_out_path=_absolute(data.held_out_path)),
        rollout=dataclasses.replace(config.rollout, engine_options=_anchored_options(config.rollout.engine_options)),
        reward=dataclasses.replace(
            reward,
            functions=tuple(specs.values()),
            options={
                specs.get(spec, spec): _anchored_options(options) if isinstance(options, Mapping) else options
                for spec, options in reward.options.items()
            },
        ),
    )


def _anchored_function(spec: str) -> str:
    file, colon, function = spec.rpartition(":")
    return f"{_absolute(file)}:{function}" if colon else spec


def _anchored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    paths = {k: v for k, v in options.items() if isinstance(v, str) and os.sep in v}
    return {**options, **{k: _absolute_if_there(v) for k, v in paths.items()}}


def _absolute_if_there(path: str) -> str:
    try:
        return _absolute(path) if path and Path(path).expanduser().exists() else path
    except (OSError, RuntimeError):  # too long for a name, no such user
        return path


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


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
    """Settings that were changed but act only together with another one."""
    data = config.data
    silent = {
        "model.build_options": (not config.model.build, "without model.build"),
        "model.lora.alpha": (not config.model.lora.rank, "without model.lora.rank"),
        "model.lora.targets": (not config.model.lora.rank, "without model.lora.rank"),
        "data.hub_config": (not data.hub, "without data.hub"),
        "data.split": (not data.hub, "without data.hub"),
        "data.task_options": (not data.task, "without data.task"),
        "data.task_size": (not data.task, "without data.task"),
        "data.prompt_field": (bool(data.task), "with a generated task"),
        "data.prompt_template": (bool(data.task), "with a generated task"),
        "data.answer_field": (bool(data.task), "with a generated task"),
        "learner.final_fraction": (config.learner.schedule == "constant", 'with learner.schedule = "constant"'),
    }
    for key, (ineffective, why) in silent.items():
        if ineffective and get(config, key) != get(Config(), key):
            raise ConfigError(f"{key}: has no effect {why}; leave it out")


def _check_ranges(config: Config) -> None:
    for key, kind, _, _ in help_texts():
        if kind == "float" and not math.isfinite(get(config, key)):
            raise ConfigError(f"{key}: must be a finite number, not {get(config, key)}")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.name):
        raise ConfigError(f"name: use 1 to 64 letters, digits, '.', '_' and '-', not {config.name!r}")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed: must be between 0 and 2^63 - 1, not {config.seed}")
    if config.model.threads > MOST_THREADS:
        raise ConfigError(f"model.threads: must be at most {MOST_THREADS}, not {config.model.threads}")
    at_least = {
        "steps": 0, "tokens": 0, "routing.balance_loss": 0, "model.threads": 0, "model.lora.rank": 0, "model.lora.alpha": 0, "cold_start.steps": 0, "cold_start.batch": 1, "cold_start.check_every": 1,
        "data.held_out": 0, "data.task_size": 1, "data.max_prompt_tokens": 1, "rollout.prompts": 1,
        "rollout.replies": 1, "rollout.max_tokens": 1, "rollout.top_k": 0, "rollout.refill_budget": 1,
        "reward.workers": 1, "reward.memory_mb": 0, "learner.mini_batches": 1, "learner.micro_batch_tokens": 1, "learner.warmup_updates": 0,
        "learner.learning_rate": 0, "learner.weight_decay": 0, "learner.max_skipped": 1, "eval.every": 0,
        "eval.samples": 1, "alarms.steps": 1, "learner.spike": 0, "checkpoint.every": 1, "checkpoint.keep": 0, "cold_start.learning_rate": 0,
    }  # fmt: skip
    for key, least in at_least.items():
        if not get(config, key) >= least:
            raise ConfigError(f"{key}: must be at least {least}, not {get(config, key)}")
    between = {
        "rollout.top_p": 1.0, "learner.final_fraction": 1.0, "reward.max_unscored_fraction": 1.0,
        "cold_start.stop_accuracy": 1.0, "learner.beta1": 0.9999999, "learner.beta2": 0.9999999,
    }  # fmt: skip
    for key, most in between.items():
        if not 0 <= get(config, key) <= most:
            raise ConfigError(f"{key}: must be between 0 and {most}, not {get(config, key)}")
    for key in ("rollout.temperature", "learner.max_grad_norm", "reward.timeout_s", "rollout.top_p"):
        if not 0 < get(config, key) < float("inf"):
            raise ConfigError(f"{key}: must be a positive number, not {get(config, key)}")


def get(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def flat(config: Config) -> dict[str, Any]:
    """Every setting by dotted key, as TOML would give it back."""
    return flatten(tomllib.loads(to_toml(config)))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return values


def from_flat(values: Mapping[str, Any], *, where: str) -> Config:
    """A `Config` from settings by dotted key, as `flat` gives them; those that are missing have their defaults."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        _set(tree, key, value)
    return from_tree(tree, where=where)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that are not the same in all of them; a missing key is not the same as any value."""
    keys = sorted({key for values in settings for key in values})
    return [k for k in keys if any(k not in s or s[k] != settings[0].get(k) for s in settings)]


def to_toml(config: Config) -> str:
    """The resolved config as TOML; `from_tree` reads it back to an equal `Config`."""
    lines: list[str] = []
    _write_table(config, (), lines)
    return "\n".join(lines).strip() + "\n"


def help_texts() -> Iterator[tuple[str, str, Any, str]]:
    """Every setting as (dotted key, type, default, help), in the order of this file."""
    yield from _help(Config, "")


# ------------------------------------------------------------------------------------------------- reading


def _build(cls: type, tree: Mapping[str, Any], *, where: str, prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        if cls is ObjectiveConfig and key != "name":
            settings.update(value if key == "settings" and isinstance(value, Mapping) else {key: value})
        elif key not in names:
            raise ConfigError(f"{where}: unknown setting {prefix}{key}{_did_you_mean(key, prefix, names)}")
        elif dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}: {prefix}{key} is a section; set one of its keys, e.g. {_example(hints[key], prefix + key)}"
                )
            values[key] = _build(hints[key], value, where=where, prefix=f"{prefix}{key}.")
        else:
            values[key] = _convert(value, hints[key], where=where, key=prefix + key)
    if settings:
        values["settings"] = settings
    return cls(**values)


def _example(cls: type, key: str) -> str:
    return f"{key}.{dataclasses.fields(cls)[0].name}"


def _did_you_mean(key: str, prefix: str, names: Sequence[str]) -> str:
    everywhere = [k for k, *_ in help_texts()]
    elsewhere = [k for k in everywhere if k.rsplit(".", 1)[-1] == key]
    close = elsewhere or [prefix + n for n in difflib.get_close_matches(key, names, n=1)]
    close = close or difflib.get_close_matches(prefix + key, everywhere, n=1, cutoff=0.8)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known here: {', '.join(names)}"


def _convert(value: Any, hint: Any, *, where: str, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{where}: {key} must be one of {', '.join(map(repr, args))}, not {value!r}")
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(v, args[0], where=where, key=key) for v in items)
    if origin in (types.UnionType, typing.Union):
        raise AssertionError(f"unsupported setting type {hint}")
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    if getattr(origin, "__name__", "") == "Mapping" and isinstance(value, Mapping):
        return dict(value)
    wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, "a table")
    raise ConfigError(f"{where}: {key} must be {wanted}, not {value!r}")


def _split_override(text: str) -> tuple[str, Any]:
    key, sign, raw = text.removeprefix("--").partition("=")
    if not sign or not key:
        raise ConfigError(f"command line: {text!r} is not an override; write --section.key=value")
    return key.replace("-", "_"), _parse(raw, key.replace("-", "_"))


def _parse(raw: str, key: str) -> Any:
    hint = _hint_of(key)
    if hint is str or typing.get_origin(hint) is Literal:
        return raw
    a_list = typing.get_origin(hint) is tuple
    for text in (raw, f"[{raw}]") if a_list else (raw,):
        try:
            return tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            continue
    return [part.strip() for part in raw.split(",")] if a_list else raw


def _hint_of(key: str) -> Any:
    cls: Any = Config
    for part in key.split("."):
        if not dataclasses.is_dataclass(cls):
            return None
        cls = typing.get_type_hints(cls).get(part)
    return cls


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"command line: {key}: {part} is not a section")
        tree = child
    tree[last] = value


# ------------------------------------------------------------------------------------------------- writing


def _write_table(value: Any, path: tuple[str, ...], lines: list[str]) -> None:
    items = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, ObjectiveConfig):
        items = {"name": value.name, **value.settings}
    sections = {k: v for k, v in items.items() if dataclasses.is_dataclass(v)}
    if path:
        lines += ["", f"[{'.'.join(path)}]"]
    lines += [f"{_toml_key(k)} = {_toml(v)}" for k, v in items.items() if k not in sections]
    for key, section in sections.items():
        _write_table(section, (*path, key), lines)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    raise ConfigError(f"cannot write {value!r} to a config file")


# ------------------------------------------------------------------------------------------------- help


def _help(cls: type, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _help(typing.cast(type, hints[f.name]), f"{prefix}{f.name}.")
        else:
            default = getattr(cls(), f.name)
            yield prefix + f.name, _type_name(hints[f.name]), default, docs.get(f.name, "")


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(f'"{a}"' for a in args)
    if origin is tuple:
        return f"list of {args[0].__name__}"
    return "table" if origin else hint.__name__


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field -> the string under it, for any dataclass whose source is at hand."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[node.target.id] = inspect.cleandoc(ast.literal_eval(doc.value))
    return docs

"""Every setting of a run, as nested frozen dataclasses.

Invariant: the string under a field is its help text, so `gspo train --help` and `docs/settings.md` cannot drift from the code.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from gspo.types import Sampling


@dataclass(frozen=True)
class Range:
    """The values that a number may have."""

    low: float
    high: float = math.inf
    exclusive: bool = False
    """Whether `low` itself is not allowed."""


@dataclass(frozen=True)
class OnlyWith:
    """The setting acts only if another one is set."""

    key: str


@dataclass(frozen=True)
class NotWith:
    """The setting does not act if another one is set, or has this value."""

    key: str
    value: str | None = None


Count = Annotated[int, Range(low=1)]
NonNegative = Annotated[int, Range(low=0)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Positive = Annotated[float, Range(low=0, exclusive=True)]
Fraction = Annotated[float, Range(low=0, high=1)]
Decay = Annotated[float, Range(low=0, high=0.9999999)]
Seed = Annotated[int, Range(low=0, high=2**63 - 1)]
AlarmName = Literal[
    "nothing trained",
    "uniform rewards",
    "entropy collapse",
    "length pinned",
    "repetition",
    "reward jump",
    "held-out falls",
    "tricks in programs",
    "engine apart",
    "rounding noise",
]
Sink = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: NonNegative = 0
    """Train low-rank adapters of this rank beside the linear layers, and leave the model's own weights as they are; 0: train those."""
    alpha: Annotated[NonNegative, OnlyWith("model.lora.rank")] = 0
    """The adapters' output is scaled by `alpha / rank`; 0: twice the rank."""
    targets: Annotated[tuple[str, ...], OnlyWith("model.lora.rank")] = ()
    """Layers that get adapters, by the last part of their names (`q_proj`, `down_proj`); empty: every linear layer but the output layer."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """Directory, hub name or `.gguf` file of the model to train; or the directory of a saved LoRA adapter, which names its model."""
    build: Literal["", "tiny_moe", "tiny_dense"] = ""
    """Build a small model from scratch instead of loading one: for the demo, for tests, for trying a task."""
    build_options: Annotated[Mapping[str, Any], OnlyWith("model.build")] = field(default_factory=dict)
    """Other sizes for a built model, by the names of its Qwen3 config: `{num_hidden_layers = 8, num_experts = 64}`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights. Log-probabilities are float32 either way."""
    device: str = "auto"
    """`auto` takes the GPU if there is one."""
    threads: Annotated[int, Range(low=0, high=1024)] = 0
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
    steps: NonNegative = 0
    """At most this many supervised steps on the task's own demonstrations before RL; 0: none."""
    batch: Count = 64
    """Demonstrations per step."""
    learning_rate: NonNegativeFloat = 3e-3
    """Peak learning rate of AdamW."""
    stop_accuracy: Fraction = 0.3
    """Stop as soon as sampled accuracy on fresh problems reaches this: enough to learn from, room to climb."""
    check_every: Count = 10
    """Steps between accuracy checks."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = ""
    """Training problems: a .jsonl, .json, .csv or .parquet file (also .gz of the first three)."""
    hub: str = ""
    """Or a data set by hub name, through `datasets`."""
    hub_config: Annotated[str, OnlyWith("data.hub")] = ""
    """Configuration of the hub data set, for example `main`."""
    split: Annotated[str, OnlyWith("data.hub")] = "train"
    """Split of the hub data set."""
    task: str = ""
    """Or a generated task: `addition`, `sorting`, `countdown`, `word_problems`, or `reasoning_gym:NAME`."""
    task_options: Annotated[Mapping[str, Any], OnlyWith("data.task")] = field(default_factory=dict)
    """Options of the generated task, for example `digits = 3`."""
    task_size: Annotated[Count, OnlyWith("data.task")] = 20000
    """How many training problems to generate."""
    prompt_field: Annotated[str, NotWith("data.task")] = "prompt"
    """Field with the problem: text or chat messages."""
    prompt_template: Annotated[str, NotWith("data.task")] = ""
    """Or the problem as text made of several fields, each by its name in braces: `{Body} {Question}`."""
    answer_field: Annotated[str, NotWith("data.task")] = "answer"
    """Field with the expected answer; rewards receive it as `answer`. Empty: the data has none."""
    answer_after: str = ""
    """Keep only what follows the last occurrence of this mark in the answer field (`####` for GSM8K)."""
    instruction: str = ""
    """Text put after each problem, for example how to state the answer."""
    system: str = ""
    """System message put before each problem (needs a chat template)."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Wrap text prompts as a user message in the tokenizer's chat template; auto: if it has one."""
    held_out: NonNegative = 256
    """Problems set aside for evaluation: taken from the training data by seed, unless `held_out_path` is given."""
    held_out_path: str = ""
    """A file of held-out problems, with the same fields."""
    max_prompt_tokens: Count = 1024
    """A longer prompt is a bad row."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a bad row does: stop before anything expensive starts, or be left out and counted."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: str = "local"
    """Sampling engine: the name of a file in `gspo/rollout/engines`."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine; see its file."""
    prompts: Count = 32
    """Prompts per step."""
    replies: Count = 8
    """Replies per prompt (G)."""
    max_tokens: Count = 256
    """Token limit of a reply."""
    temperature: Positive = 1.0
    """Sampling temperature; the learner's log-probabilities use it too."""
    top_p: Annotated[float, Range(low=0, high=1, exclusive=True)] = 1.0
    """Nucleus sampling. Below 1 the sampler's distribution is not the learner's: expect a mismatch."""
    top_k: NonNegative = 0
    """Sample among the k likeliest tokens; 0: all. The same caution."""
    refill_budget: Count = 3
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
    timeout_s: Positive = 10.0
    """Deadline of one call; the worker is killed when it passes. Replies of a call that has used half of it are also tried alone, so keep it at several times what a call takes."""
    memory_mb: NonNegative = 2048
    """Megabytes that a worker process and what it starts may hold beyond what loading the functions took; it is killed when it holds more. 0: no limit."""
    workers: Count = 2
    """Worker processes; a few more are lent while calls hang."""
    max_unscored_fraction: Fraction = 0.5
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
    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the auxiliary load-balancing loss (Switch), on the routers' own choice; 0: none."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    mini_batches: Count = 4
    """Optimiser steps per rollout batch."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward and backward: replies, and the prompt of each group once; for models that cannot read packed rows, with padding. Changes memory and speed, never the gradient."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate of AdamW."""
    warmup_updates: NonNegative = 0
    """Optimiser steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after warm-up, over all steps of the run."""
    final_fraction: Annotated[Fraction, NotWith("learner.schedule", "constant")] = 0.1
    """Share of the peak rate at the end of a linear or cosine schedule."""
    beta1: Decay = 0.9
    """AdamW's first-moment decay."""
    beta2: Decay = 0.95
    """AdamW's second-moment decay."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    old_logp: Literal["recompute", "sampler"] = "recompute"
    """Where ratios start from: log-probabilities that the learner computes, or those that the sampling engine reported, which saves a forward (all but one in `mini_batches`) and is refused when they differ by more than the clip range."""
    spike: NonNegativeFloat = 8.0
    """Skip an optimiser step whose gradient norm is this many standard deviations (in log space, over the last 128) above the mean; 0: never."""
    max_skipped: Count = 5
    """Stop after this many optimiser steps in a row that were skipped: non-finite loss or gradient, or a spike."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: NonNegative = 10
    """Steps between evaluations on held-out problems (also before the first and after the last step); 0: never."""
    samples: Count = 1
    """Sampled replies per held-out problem."""
    greedy: bool = True
    """Also measure greedy accuracy."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Count = 20
    """Steps between checkpoints; the last step and a stop always write one."""
    keep: NonNegative = 2
    """How many of the newest to keep; 0: all."""


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    steps: Count = 5
    """An alarm (nothing trained, uniform rewards, entropy collapse, length pinned, repetition, reward jump, tricks in programs, rounding noise) needs its sign in this many steps in a row; the alarm "held-out falls" needs it in two evaluations, "engine apart" in one step after this many."""
    stop: tuple[AlarmName, ...] = ()
    """Alarms that stop the run, with a checkpoint; the others are only events and messages."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    rollouts: bool = True
    """Write every reply with its tokens and log-probabilities to `rollouts/`."""
    sinks: tuple[Sink, ...] = ()
    """Also send metrics to: `tensorboard`, `wandb`, `trackio`."""


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "run"
    """Name of the run; part of its directory's name."""
    run_dir: str = ""
    """Directory of the run; empty: `runs/NAME-DATE-TIME`."""
    seed: Seed = 0
    """Seed of everything random: data order, sampling, a built model's weights."""
    steps: NonNegative = 100
    """Training steps (rollout batches); 0: only the cold start and an evaluation."""
    tokens: NonNegative = 0
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


def markers() -> Iterator[tuple[str, Any]]:
    """Every (dotted key, marker) of the settings that have one: `Range`, `OnlyWith`, `NotWith`."""
    yield from _markers(Config, "")


def help_texts() -> Iterator[tuple[str, str, Any, str]]:
    """Every setting as (dotted key, type, default, help), in the order of this file."""
    yield from _help(Config, "")


def _help(cls: type, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _help(typing.cast(type, hints[f.name]), f"{prefix}{f.name}.")
        else:
            default = getattr(cls(), f.name)
            yield prefix + f.name, _type_name(hints[f.name]), default, docs.get(f.name, "")


def _markers(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    plain, annotated = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    for name, hint in annotated.items():
        if dataclasses.is_dataclass(plain[name]):
            yield from _markers(typing.cast(type, plain[name]), f"{prefix}{name}.")
        yield from ((prefix + name, marker) for marker in getattr(hint, "__metadata__", ()))


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(f'"{a}"' for a in args)
    if origin is tuple:
        return f"list of {'str' if typing.get_origin(args[0]) is Literal else args[0].__name__}"
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

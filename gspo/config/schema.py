"""Every setting of a run, as nested frozen dataclasses.

Out: `Config` and its sections, with the type, default, allowed range and help text of every key.
Invariant: the string under a field is its help text, so `gspo train --help` and `docs/settings.md` match the code.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from gspo.field_types import field_types
from gspo.types import Sampling


@dataclass(frozen=True)
class Range:
    """Allowed range of a number."""

    low: float
    high: float = math.inf
    exclusive: bool = False
    """Whether `low` itself is excluded."""


@dataclass(frozen=True)
class OnlyWith:
    """The setting has an effect only if another one is set."""

    key: str


@dataclass(frozen=True)
class NotWith:
    """The setting has no effect if another one is set, or has this value."""

    key: str
    value: str | None = None


Count = Annotated[int, Range(low=1)]
NonNegative = Annotated[int, Range(low=0)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Positive = Annotated[float, Range(low=0, exclusive=True)]
Fraction = Annotated[float, Range(low=0, high=1)]
Factor = Annotated[float, Range(low=0, high=1, exclusive=True)]
# AdamW's bias correction divides by 1 - beta**step, so a decay must stay below 1, also in float32.
Decay = Annotated[float, Range(low=0, high=0.9999999)]
# The largest integer of TOML.
Seed = Annotated[int, Range(low=0, high=2**63 - 1)]
PolicyAlarm = Literal[
    "no trainable samples",
    "uniform rewards",
    "entropy collapse",
    "truncation",
    "repetition",
    "reward jump",
    "held-out drop",
    "tricks in programs",
]
AlarmName = Literal[PolicyAlarm, "engine mismatch", "rounding noise"]
# Only alarms about the policy: other weights change neither the engine nor the precision.
RollbackName = Literal[PolicyAlarm, "skipped updates"]
Sink = Literal["tensorboard", "wandb", "trackio", "mlflow"]
TINY_MODELS = ("tiny_dense", "tiny_moe")
"""Small models that `model.build` knows by name."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: NonNegative = 0
    """Rank of the LoRA adapters to train on the linear layers; the base weights stay frozen. `0` trains the full
    model."""
    alpha: Annotated[NonNegative, OnlyWith("model.lora.rank")] = 0
    """LoRA alpha: the adapter output is scaled by `alpha / rank`. `0` uses twice the rank."""
    targets: Annotated[tuple[str, ...], OnlyWith("model.lora.rank")] = ()
    """Layers that get adapters, by the last part of their names (`q_proj`, `down_proj`). An empty list targets every
    linear layer except the LM head."""
    experts: Annotated[bool, OnlyWith("model.lora.rank")] = False
    """Also train adapters for the experts of an MoE model that stores all experts of a layer in one tensor. Each
    forward pass computes the adapted weights of a whole layer, which costs time and the memory of one layer."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """Model to train: a directory, a hub name or a `.gguf` file, or the directory of a saved LoRA adapter, which names
    its base model."""
    build: str = ""
    """Build a model from scratch instead of loading one. `tiny_dense` and `tiny_moe` are small Qwen3 models for the
    demo, for tests and for trying out a task. A directory with a `config.json` gives a model of that shape with random
    weights, initialized on the device: to measure speed and memory without downloading weights."""
    build_options: Annotated[Mapping[str, Any], OnlyWith("model.build")] = field(default_factory=dict)
    """Overrides for the built model's config: `{num_hidden_layers = 8, num_experts = 64}`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. Log-probs and the optimizer are always float32. `auto` is `float16` on a GPU and
    `float32` on a CPU; the run directory has the one that was chosen. `float16` rounds eight times finer than
    `bfloat16` but holds nothing above 65504, so its loss is scaled automatically (docs/precision.md)."""
    device: str = "auto"
    """Device of the model. `auto` uses the GPU if there is one."""
    threads: Annotated[int, Range(low=0, high=1024)] = 0
    """CPU threads. `0` uses one thread for tiny models, which run many times faster that way, and otherwise
    `OMP_NUM_THREADS` or all cores."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory and takes about a third more time."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Train with decoder layers that `torch.compile` has compiled. `auto` compiles on a GPU, except models below 50
    million parameters, for which compiling takes longer than it saves."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Enable it only for models that you trust as much as your own
    code."""
    quantize: Literal["", "nf4"] = ""
    """`nf4` stores the base weights of the linear layers in 4 bits while LoRA adapters are trained (QLoRA). Requires
    `model.lora.rank`."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class ColdStartConfig:
    steps: NonNegative = 0
    """Maximum number of supervised fine-tuning steps on demonstrations before RL: those of the generated task, or of
    the data (`data.solution_field`). `0` disables the cold start."""
    batch: Count = 64
    """Demonstrations per step."""
    learning_rate: NonNegativeFloat = 3e-3
    """Peak learning rate of AdamW."""
    stop_accuracy: Fraction = 0.3
    """Stop as soon as sampled accuracy on problems that the cold start does not train on reaches this value. RL then
    has correct completions to reinforce and room to improve."""
    check_every: Count = 10
    """Steps between accuracy checks."""


@dataclass(frozen=True, kw_only=True)
class ProblemsConfig:
    """Where problems come from and how they are read: what `[data]`, a source of a mixture and an evaluation set
    share."""

    path: str = ""
    """File with the problems: .jsonl, .json, .csv or .parquet. The first three may be gzipped (.gz)."""
    hub: str = ""
    """Problems from a Hugging Face dataset, by its hub name."""
    hub_config: Annotated[str, OnlyWith("data.hub")] = ""
    """Configuration of the hub dataset, for example `main`."""
    split: Annotated[str, OnlyWith("data.hub")] = "train"
    """Split of the hub dataset."""
    task: str = ""
    """Problems from a generated task: `addition`, `sorting`, `countdown`, `word_problems`, `calculation`,
    `secret_number` or `reasoning_gym:NAME`."""
    task_options: Annotated[Mapping[str, Any], OnlyWith("data.task")] = field(default_factory=dict)
    """Options of the generated task, for example `digits = 3`."""
    prompt_field: Annotated[str, NotWith("data.task")] = "prompt"
    """Field that contains the problem, as text or as chat messages."""
    prompt_template: Annotated[str, NotWith("data.task")] = ""
    """Template that builds the prompt from several fields, each by its name in braces: `{Body} {Question}`. Replaces
    `prompt_field`."""
    answer_field: Annotated[str, NotWith("data.task")] = "answer"
    """Field that contains the expected answer. Reward functions receive it as `answer`. Leave it empty if the data has
    no answers."""
    answer_after: str = ""
    """Keep only the text after the last occurrence of this marker in the answer field (`####` for GSM8K)."""
    instruction: str = ""
    """Text appended to each problem, for example instructions for stating the answer."""
    system: str = ""
    """System message that precedes each problem. Requires a chat template."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Wrap text prompts as a user message in the tokenizer's chat template. `auto` does so if the tokenizer has one."""
    max_prompt_tokens: Count = 1024
    """Maximum prompt length in tokens. A problem with a longer prompt is a bad row."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a bad row. `error` stops the run before training. `skip` drops the row and counts it."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig(ProblemsConfig):
    """A source of training problems."""

    task_size: Annotated[Count, OnlyWith("data.task")] = 20000
    """Number of training problems to generate."""
    solution_field: Annotated[str, NotWith("data.task")] = ""
    """Field that contains a demonstration, for the cold start (`cold_start.steps`): a correct completion, as text or as
    a list with one assistant message. It may be `answer_field`, with `answer_after`. Rows without one are allowed."""
    held_out: NonNegative = 256
    """Number of held-out problems for evaluation. They are split off the training data by seed, unless `held_out_path`
    is set."""
    held_out_path: str = ""
    """File with the held-out problems, with the same fields as the training data."""


@dataclass(frozen=True, kw_only=True)
class MixConfig(SourceConfig):
    """One source of a mixture."""

    weight: Positive = 1.0
    """Share of the prompts that come from this source, relative to the weights of the other sources."""
    reward: tuple[str, ...] = ()
    """Reward functions for the problems of this source. An empty list uses `reward.functions`, or a generated task's
    own verifier if that is empty too."""
    reward_weights: tuple[float, ...] = ()
    """One weight per function in `reward`. An empty list gives every function weight 1."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    mix: Mapping[str, MixConfig] = field(default_factory=dict)
    """Several sources instead of one: a table `[data.mix.NAME]` for each. A table takes the keys of `[data]`, and
    `[data]` gives defaults for the keys that say how problems are read."""
    sampling: Literal["uniform", "difficulty"] = "uniform"
    """How often a problem is sampled. `uniform` visits every problem once per epoch. `difficulty` skips a visited
    problem with a probability that grows as its measured pass rate approaches 0 or 1."""
    difficulty_floor: Annotated[float, Range(low=0, high=1, exclusive=True), NotWith("data.sampling", "uniform")] = 0.1
    """Lowest probability that a visited problem is sampled."""

    @property
    def sources(self) -> Mapping[str, SourceConfig]:
        """The sources of training problems by name; the name is empty if `[data]` itself is the only source."""
        return self.mix or {"": self}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: str = "local"
    """Sampling engine: `local`, `vllm` or `scripted` (a file in `gspo/rollout/engines`; docs/engines.md)."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, for example `{slots = 512}` for `local` (docs/engines.md)."""
    prompts: Count = 32
    """Prompts per step."""
    group_size: Count = 8
    """Completions per prompt: the group size G."""
    max_tokens: Count = 256
    """Maximum number of tokens in a completion."""
    temperature: Positive = 1.0
    """Sampling temperature. The learner computes its log-probs at the same temperature."""
    top_p: Annotated[float, Range(low=0, high=1, exclusive=True)] = 1.0
    """Nucleus sampling. Below 1 the sampler's distribution differs from the learner's, which appears as a mismatch."""
    top_k: NonNegative = 0
    """Sample from the k most likely tokens, with the same mismatch as `top_p`. `0` disables it."""
    stop: tuple[str, ...] = ()
    """Stop strings, for example `["</answer>"]`. A completion ends with the token that completes one of them; the
    string stays in the text, and its tokens are trained on. Special tokens count by their names (`<|im_end|>`)."""
    min_tokens: NonNegative = 0
    """Number of tokens before which no end token and no stop string can end a completion. End tokens get probability 0
    there, in the engine and in the learner's log-probs. `0` disables it."""
    thinking_budget: NonNegative = 0
    """Maximum number of tokens before `thinking_end`. A completion whose text does not contain it by then gets it
    inserted and is continued. The inserted tokens count toward `max_tokens` and are not trained on. `0` disables it."""
    thinking_end: Annotated[str, OnlyWith("rollout.thinking_budget")] = "</think>"
    """Text that ends the thinking of a completion. Whitespace around it (`</think>\\n\\n`) is inserted with it, and is
    not needed to recognize an end that the model wrote."""
    refill_budget: Annotated[int | Literal["full"], Range(low=1)] = 3
    """Maximum number of prompt batches to sample per step when `keep = "mixed"` replaces uniform groups. `"full"`
    samples until the batch has `prompts` groups. It gives up after a whole pass over the training problems without a
    group to keep: the step then trains on the groups it has, and without any the run stops. A batch that stays short is
    reported."""

    max_lag: NonNegative = 0
    """Training steps by which the weights that sample a batch may be older than those that train on it. `0` samples
    and trains in turns. With `k`, sampling runs in a process of its own at the same time as training: the batch of step
    t is always sampled from the weights after step t - 1 - k, or from the first ones, whatever takes longer
    (docs/asynchronous.md)."""
    span_tokens: Annotated[NonNegative, OnlyWith("rollout.max_lag")] = 0
    """With `max_lag` of at least 2: sample a batch in turns, each with the weights of the next step. A completion gets
    at most this many tokens in each turn but the last, and is continued by the newer weights. So long completions share
    their turns with the next batches, and their later tokens are younger. The length of a turn is counted in tokens,
    so results do not depend on timing (docs/asynchronous.md). `0` samples every batch from a single version."""
    over_lag: Annotated[Literal["wait", "drop"], OnlyWith("rollout.span_tokens")] = "wait"
    """What happens to completions that are not over after the tokens of all turns. `wait` samples them to their end in
    the last turn, and the learner waits for them. `drop` gives them up, so the last turn is as short as the others. The
    batch is then biased to short completions, and to problems that have them (`lag/dropped_fraction`)."""
    sampler_device: Annotated[str, OnlyWith("rollout.max_lag")] = ""
    """Device of the sampling process, for example `cuda:1`. If empty, the learner's device (`model.device`), which then
    holds two copies of the weights."""
    sampler_timeout_s: Annotated[Positive, OnlyWith("rollout.max_lag")] = 1800.0
    """How long the sampling process may take to load the model, or to sample the completions of one call, in seconds,
    before the run saves a checkpoint and stops."""

    @functools.cached_property
    def sampling(self) -> Sampling:
        """Sampling parameters, for training and evaluation alike."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            min_tokens=self.min_tokens,
            thinking_budget=self.thinking_budget,
            thinking_end=self.thinking_end,
        )


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    name: str = ""
    """Environment that answers the model, for conversations of several turns: a built-in by name
    (docs/environments.md), your own class as `file.py:Class`, or `verifiers` for a taskset of that package. If empty, a
    completion is a single turn."""
    options: Annotated[Mapping[str, Any], OnlyWith("environment.name")] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    max_turns: Annotated[int, Range(low=1), OnlyWith("environment.name")] = 8
    """Maximum number of turns of the model in a conversation."""
    turn_tokens: Annotated[int, Range(low=0), OnlyWith("environment.name")] = 0
    """Maximum number of tokens that the model samples in a turn. `0` leaves only the limit on the whole conversation,
    `rollout.max_tokens`, which counts the tokens of observations, too."""
    tool_format: Annotated[
        Literal["auto", "hermes", "llama", "json_block", "code_block", "gpt_oss", "call"], OnlyWith("environment.name")
    ] = "auto"
    """How the model writes tool calls: `hermes` (`<tool_call>` with JSON: Qwen, Hermes), `llama` (a JSON object),
    `json_block` (JSON in a block of ```` ```json ````: Qwen2.5-Coder), `code_block` (a block of ```` ```NAME ````),
    `gpt_oss` (harmony channels) or `call` (`name(text)`, for tiny models). `auto` takes it from the chat template."""
    rewritten_history: Annotated[Literal["branch", "verbatim", "refuse"], OnlyWith("environment.name")] = "branch"
    """What to do if the chat template changes what was written in earlier turns, for example drops the model's
    thinking. `branch` continues with what the template writes, as a server does, and trains on each turn in the context
    that it was sampled in. `verbatim` continues with the sampled tokens as they are, which a server would not do.
    `refuse` stops the run before training."""
    processes: Annotated[int, Range(low=1), OnlyWith("environment.name")] = 8
    """Maximum number of calls of the environment that are answered at the same time. Every conversation has a process
    of its own."""
    timeout_s: Annotated[float, Range(low=0, exclusive=True), OnlyWith("environment.name")] = 60.0
    """Timeout of one call of the environment, in seconds. The process is killed and the completion is unscored."""
    max_seconds: Annotated[float, Range(low=0, exclusive=True), OnlyWith("environment.name")] = 600.0
    """Limit on the time that all calls of a conversation take together, in seconds. The conversation ends and keeps
    the rewards that it has."""
    patience_s: Annotated[float, Range(low=0), OnlyWith("environment.name")] = 2.0
    """How long the others wait for a call of the environment, in seconds. Conversations whose calls take longer join a
    later round of sampling, so a slow tool does not stall the others. Which round a conversation is in changes nothing
    but rounding."""
    variables: Annotated[tuple[str, ...], OnlyWith("environment.name")] = ()
    """Names of environment variables that the environment needs, such as the API key of a search engine. Besides them,
    its process gets only those that programs need to run (`PATH`, `HOME`, `PYTHONPATH`, ...), and no keys of the
    trainer."""
    memory_mb: Annotated[int, Range(low=0), OnlyWith("environment.name")] = 1024
    """Memory limit of a conversation's process, in MB, in addition to what loading the environment took. `0` disables
    it."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    functions: tuple[str, ...] = ()
    """Reward functions: built-ins by name (docs/rewards.md), such as `math_answer`, or your own as `file.py:function`.
    If empty, the verifier of the generated task."""
    weights: tuple[float, ...] = ()
    """One weight per reward function. An empty list gives every function weight 1."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword options per function: `options.exact_answer = {marker = "####"}`."""
    correct_above: float = 0.5
    """A completion counts as correct if the first reward function returns more than this."""
    timeout_s: Positive = 10.0
    """Timeout of one reward call, in seconds. A worker that exceeds it is killed. If a call takes half of this time,
    its completions are also scored one by one, so set the timeout to several times the usual duration of a call. For a
    judge or reward model it limits one completion, including retries (or one batch, if the model is local)."""
    memory_mb: NonNegative = 2048
    """Memory limit of a worker process and its children, in MB, in addition to the memory that loading the functions
    took. A worker that exceeds it is killed. `0` disables the limit. Does not apply to judges and reward models."""
    workers: Count = 2
    """Worker processes. More are started while calls hang. A judge or reward model has one more of its own."""
    max_unscored_fraction: Fraction = 0.5
    """Save a checkpoint and stop the run if more than this fraction of a step's completions cannot be scored."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    name: str = "gspo"
    """Name of the objective, as listed by `gspo objectives`, or `file.py:name` for your own
    (docs/library.md#your-own-objective). Overriding it on the command line drops the objective settings of the
    recipe."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the objective, given next to its name: `clip_low`, `kl`, `keep`, ... (`gspo objectives` lists
    them)."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    replay: Literal["off", "old", "sampler"] = "off"
    """Routing replay for MoE models: which experts the policy update uses. `off` lets every forward pass route.
    `old` replays the experts chosen when the old log-probs were computed (R2). `sampler` replays the sampling engine's
    experts, also for the old log-probs (R3)."""
    record: bool = True
    """Record expert choices for the `routing/` metrics. Costs one or two bytes per token, layer and chosen expert."""
    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the auxiliary load-balancing loss (Switch Transformer), computed on the routers' own choices. `0`
    disables it."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    mini_batches: Count = 4
    """Optimizer steps per full rollout batch. A batch with fewer completions to train on gets fewer, so that each has
    about as many completions as in a full batch: `mini_batches` x completions / (`rollout.prompts` x
    `rollout.group_size`), rounded up. The learning-rate schedule counts optimizer steps."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward and backward pass: the completions, and each group's prompt once. Padding counts too for
    models that do not support sequence packing. Affects memory and speed, never the gradient."""
    context_parallel: Count = 1
    """Ranks that compute each micro-batch together (Ulysses). A rank computes 1 / `context_parallel` of its tokens, so
    that sequences fit whose activations exceed the memory of one rank. It must divide the number of ranks and of
    attention heads. Affects memory and speed, never the gradient. Sampling does not use it."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` stores both moments of AdamW in 8 bits: 2.03 instead of 8 bytes per trained weight. Updates are no
    longer exactly those of AdamW. Needs bitsandbytes, and works in a single process only."""
    optimizer_offload: bool = False
    """Hold float32 master weights and moments in host memory, from where each update streams them through the GPU. It
    saves up to 12 bytes of GPU memory per trained weight, takes as much host memory, and makes updates slower. The
    updates are the same. Only on a GPU, and in a single process."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate of AdamW."""
    warmup_updates: NonNegative = 0
    """Optimizer steps of linear warmup."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate decay after warmup, over all steps of the run."""
    final_fraction: Annotated[Fraction, NotWith("learner.schedule", "constant")] = 0.1
    """Learning rate at the end of a linear or cosine schedule, as a fraction of the peak."""
    ess_scaling: Literal["off", "sqrt", "linear"] = "off"
    """Scale the learning rate of an optimizer step by the effective sample size of its completions, as VCPO does
    (arXiv:2602.17616). With weights w = prod pi/mu over the tokens of each of its N completions, before the step:
    ESS/N = (sum w)^2 / (N sum w^2). `sqrt` multiplies the rate by the root of ESS/N (published, for Adam), `linear` by
    ESS/N. `off` only reports it (`ratio/ess`)."""
    beta1: Decay = 0.9
    """AdamW's first-moment decay."""
    beta2: Decay = 0.95
    """AdamW's second-moment decay."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping: a larger gradient norm is scaled down to this value."""
    old_logp: Literal["recompute", "sampler", "interpolate"] = "recompute"
    """Source of the old log-probs, from which ratios start. `recompute` runs a learner forward pass: the learner's
    policy before the first update of the batch. `sampler` reuses the engine's and saves that pass for all but one
    mini-batch; the run stops if the two differ by more than the clip range (`learner.allow_mismatch`), unless the
    weights that sampled are older (`rollout.max_lag`). `interpolate`, with `rollout.max_lag`, saves the pass as well:
    it estimates the policy of `recompute` from the sampler's log-probs and the current ones, by their versions (A-3PO,
    arXiv:2512.06547)."""
    allow_mismatch: bool = False
    """With `old_logp = "sampler"`: continue although the engine's log-probs differ from the learner's by more than the
    clip range, with a warning. Rounding then decides much of what is clipped."""
    spike: NonNegativeFloat = 8.0
    """Skip an optimizer step whose gradient norm is this many standard deviations above the mean, in log space over
    the last 128 norms. `0` disables it."""
    max_skipped: Count = 5
    """Stop after this many skipped optimizer steps in a row. A step is skipped for a non-finite loss or gradient, or a
    gradient spike."""


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig(ProblemsConfig):
    """A named evaluation set."""

    size: NonNegative = 0
    """Number of problems. `0` uses all of them, or 256 of a generated task."""
    every: NonNegative = 10
    """Steps between evaluations on this set, which is also evaluated before the first and after the last step. `0`
    evaluates it only with `gspo eval --set`. If not given, `eval.every`."""
    samples: Count = 1
    """Sampled completions per problem. If not given, `eval.samples`."""
    greedy: bool = True
    """Also measure accuracy with greedy decoding. If not given, `eval.greedy`."""
    reward: tuple[str, ...] = ()
    """Reward functions for this set; the first one decides what counts as correct. An empty list uses
    `reward.functions`, or a generated task's own verifier if that is empty too."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: NonNegative = 10
    """Steps between evaluations on the held-out set, which is also evaluated before the first and after the last step.
    `0` disables evaluation."""
    samples: Count = 1
    """Sampled completions per held-out problem."""
    greedy: bool = True
    """Also measure accuracy with greedy decoding."""
    metric: Literal["accuracy", "accuracy_greedy", "reward"] = "accuracy"
    """Held-out metric that decides which checkpoint is the best (`checkpoint.keep_best`) and when to stop early
    (`eval.patience`)."""
    patience: Annotated[NonNegative, OnlyWith("eval.every")] = 0
    """End the run after this many evaluations in a row without a gain of `eval.metric`. `0` disables early stopping."""
    min_gain: Annotated[Fraction, OnlyWith("eval.patience")] = 0.0
    """A gain counts for early stopping if it is more than this, for example `0.01` for one percentage point."""
    sets: Mapping[str, EvalSetConfig] = field(default_factory=dict)
    """More evaluation sets besides the held-out problems: a table `[eval.sets.NAME]` for each. A table takes the keys
    of `[data]` that say where problems come from and how they are read; `[data]` gives the defaults of the latter, and
    `[eval]` those of `every`, `samples` and `greedy`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Count = 20
    """Steps between checkpoints. The last step and a stop always save one."""
    keep: NonNegative = 2
    """Number of most recent checkpoints to keep. `0` keeps all."""
    keep_best: Annotated[bool, OnlyWith("eval.every")] = False
    """Also keep the checkpoint with the highest `eval.metric`. An evaluation that is the best so far saves one. It
    takes the disk space of one more checkpoint. `best.json` names the step."""


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    steps: Count = 5
    """An alarm is raised after its condition has held for this many steps in a row. There are two exceptions: "held-out
    drop" needs two evaluations, and "engine mismatch" needs a single step after this many steps have passed."""
    stop: tuple[AlarmName, ...] = ()
    """Alarms that save a checkpoint and stop the run: "no trainable samples", "uniform rewards", "entropy collapse",
    "truncation", "repetition", "reward jump", "held-out drop", "tricks in programs", "engine mismatch" or
    "rounding noise". The others only write an event and a message."""
    rollback: tuple[RollbackName, ...] = ()
    """Alarms that roll the run back to the last checkpoint from before their condition held: any alarm of `stop` except
    "engine mismatch" and "rounding noise", or "skipped updates" (`learner.max_skipped`). The abandoned steps are kept
    in `abandoned/`."""
    rollback_rate: Annotated[Factor, OnlyWith("alarms.rollback")] = 0.5
    """Each rollback multiplies the learning rate by this factor."""
    rollback_clip: Annotated[Factor, OnlyWith("alarms.rollback")] = 1.0
    """Each rollback multiplies the clip range by this factor. Only for objectives with a fixed clip range."""
    max_rollbacks: Annotated[Count, OnlyWith("alarms.rollback")] = 2
    """Maximum number of rollbacks of a run. After that, an alarm of `alarms.rollback` stops the run."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    rollouts: bool = True
    """Write every completion with its tokens and log-probs to `rollouts/`."""
    evaluations: NonNegative = 100
    """Write the completions of at most this many problems of each evaluation to `evaluations/`: on the held-out
    problems and on each set of `eval.sets`. Of more problems, evenly spaced ones are written, always the same. `0`
    writes none."""
    sinks: tuple[Sink, ...] = ()
    """Also log metrics and settings to `tensorboard`, `wandb`, `trackio` or `mlflow`. A resumed run continues in the
    same run there."""
    project: Annotated[str, OnlyWith("log.sinks")] = "gspo"
    """Project of `wandb` and `trackio`, and experiment of `mlflow`."""
    entity: Annotated[str, OnlyWith("log.sinks")] = ""
    """Team or user of `wandb`. If empty, your default one."""
    group: Annotated[str, OnlyWith("log.sinks")] = ""
    """Group of the run in `wandb` and `trackio`; a tag in `mlflow`."""
    tags: Annotated[tuple[str, ...], OnlyWith("log.sinks")] = ()
    """Tags of the run in `wandb` and `mlflow`; part of its settings in `trackio`."""
    completions: Annotated[NonNegative, OnlyWith("log.sinks")] = 0
    """Completions per step in the table of completions that sinks get. `0` sends none."""
    report: Annotated[bool, OnlyWith("log.sinks")] = False
    """Send the report of the run (`gspo report`) to `wandb`, `trackio` or `mlflow` as an artifact when it ends."""


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    sampling_weights: Literal["auto", "whole", "layers"] = "auto"
    """What each of several ranks holds of the weights while engine `local` samples. `whole`: all of them, so that a
    decoding step needs no communication. `layers`: one decoder layer at a time, which all ranks gather in every forward
    pass; for models that do not fit on a rank, without CUDA graphs. `auto`: `layers` on a CPU without enough free
    memory, otherwise `whole`. Has no effect in a single process."""
    timeout_s: Positive = 600.0
    """How long a rank waits for the others, in seconds, before the run ends with an error: in a collective, for the
    completions of a rank that samples longer than rank 0, and for signs of life. It must be longer than the slowest
    rank takes for a micro-batch, and for loading the model. Has no effect in a single process."""


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "run"
    """Name of the run. It becomes part of the directory name."""
    run_dir: str = ""
    """Directory of the run. If empty, `runs/NAME-DATE-TIME`."""
    seed: Seed = 0
    """Random seed for data order, sampling and the weights of a built model."""
    steps: NonNegative = 100
    """Training steps (rollout batches). `0` runs only the cold start and one evaluation."""
    tokens: NonNegative = 0
    """Stop after the step that reaches this many sampled completion tokens in total, instead of after `steps`. `steps`
    still sets the learning-rate schedule, and the run never exceeds twice `steps`. `0` disables it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)

    @property
    def problem_sections(self) -> dict[str, ProblemsConfig]:
        """The sources of training problems and the evaluation sets by name, which no two of them share."""
        return {**self.data.sources, **self.eval.sets}

    @property
    def data_files(self) -> list[str]:
        """Every data file that the settings name."""
        files = [section.path for section in self.problem_sections.values()]
        return list(filter(None, (*files, *(source.held_out_path for source in self.data.sources.values()))))

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """Every reward function that the settings name."""
        own = [source.reward for source in self.data.mix.values()] + [one.reward for one in self.eval.sets.values()]
        return tuple(dict.fromkeys((*self.reward.functions, *(spec for specs in own for spec in specs))))


def named_section(hint: Any) -> type | None:
    """The class of the sections in a table of named sections, such as `[data.mix.NAME]`; None for any other type."""
    item = typing.get_args(hint)[1:]
    return typing.cast(type, item[0]) if item and dataclasses.is_dataclass(item[0]) else None


def sections(config: Config) -> Iterator[tuple[str, Any]]:
    """Every section of a config with its dotted prefix, from `("", config)` to `("data.mix.NAME.", source)`."""
    yield from _sections(config, "")


def _sections(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, section
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            yield from _sections(value, f"{prefix}{f.name}.")
        elif named_section(field_types(type(section))[f.name]):
            for name, item in value.items():
                yield from _sections(item, f"{prefix}{f.name}.{name}.")


def markers(section: Any) -> Iterator[tuple[str, Any]]:
    """Every (field name, marker) pair of a section. A marker is a `Range`, `OnlyWith` or `NotWith`."""
    for name, hint in field_types(type(section), markers=True).items():
        yield from ((name, marker) for marker in getattr(hint, "__metadata__", ()))


def help_texts() -> Iterator[tuple[str, str, Any, str]]:
    """Every setting as (dotted key, type, default, help), in the order of this file.

    Of a named section, only the keys that `[data]` does not have."""
    yield from _help(Config, "")


def _help(cls: type, prefix: str, known: Collection[str] = ()) -> Iterator[tuple[str, str, Any, str]]:
    hints = field_types(cls)
    docs = field_docs(cls)
    tables: list[tuple[type, str]] = []
    for f in dataclasses.fields(cls):
        if f.name in known:
            continue
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _help(typing.cast(type, hints[f.name]), f"{prefix}{f.name}.")
            continue
        yield prefix + f.name, _type_name(hints[f.name]), getattr(cls(), f.name), docs.get(f.name, "")
        if item := named_section(hints[f.name]):
            tables.append((item, f"{prefix}{f.name}.NAME."))
    # After the section itself, whose keys would otherwise be listed in two parts.
    shared = {f.name for f in dataclasses.fields(SourceConfig)}
    for item, where in tables:
        yield from _help(item, where, shared)


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_type_name, args))
    if origin is Literal:
        return " or ".join(f'"{a}"' for a in args)
    if origin is tuple:
        return f"list of {'str' if typing.get_origin(args[0]) is Literal else args[0].__name__}"
    return "table" if origin else hint.__name__


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string under it as one line, for a dataclass whose source is available."""
    # Python keeps no docstrings of fields at run time, so they are read from the source.
    docs: dict[str, str] = {}
    for base in cls.__mro__[1:]:
        if dataclasses.is_dataclass(base):
            docs = field_docs(base) | docs
    definition = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(definition, ast.ClassDef)
    for node, doc in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(doc.value).split())
    return docs

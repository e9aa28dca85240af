"""From a `Config` to components. `train`, `eval`, `doctor` and `replay` build theirs here and nowhere else.

In: a checked `Config`. Out: the objective, tokenizer, policy, optimizer, reward pool, engine, or the `RunContext` with
all of them.
Invariant: a combination of settings that cannot work raises a `ConfigError` that names the key and the fix, before
anything expensive starts.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.activity import activity
from gspo.cluster.connect import membership
from gspo.config import Config, ModelConfig, RolloutConfig, check_number_of_ranks, to_toml
from gspo.context import LearnContext, RunContext
from gspo.data.order import SamplingOrder
from gspo.data.problems import Problems, load_problems
from gspo.data.task import build_task
from gspo.environment.rewards import ConversationRewards
from gspo.environment.setup import RunEnvironment
from gspo.errors import ConfigError
from gspo.learner.batch import needs_old_logprobs
from gspo.learner.checkpoint import size_of as checkpoint_size
from gspo.learner.optimizer import Optimizer, check_optimizer
from gspo.model.adapter import adapted, base_of
from gspo.model.context_parallel import check_context_parallel
from gspo.model.free_memory import free_memory
from gspo.model.load import Policy, device_of, dtype_name, load_policy, load_tokenizer
from gspo.model.partial import whole
from gspo.model.save import gathered_weights, trained_weights
from gspo.model.sharding import shard
from gspo.objectives.adaptive_clip import AdaptiveClip, take_adaptive
from gspo.objectives.objective import Objective, change, settings_of
from gspo.objectives.samples import overlong_range
from gspo.objectives.table import base_objective
from gspo.ranks.context import join_context
from gspo.ranks.environment import local_ranks
from gspo.ranks.group import ONE, Ranks
from gspo.ranks.start import check_device
from gspo.reward.reward import RewardPool
from gspo.reward.source_rewards import source_rewards
from gspo.rollout.data_parallel import DataParallelEngine
from gspo.rollout.engine import Engine, EngineContext, build_engine, controls_for, engine_names, engine_traits
from gspo.rollout.sampling_process import SamplingProcess
from gspo.serving.verifiers_env import NAME as VERIFIERS
from gspo.serving.verifiers_env import VerifiersEnvironment

ROOM = 0.5
"""The share of the free memory of a rank that whole weights may take while it samples. The KV cache needs some, too."""
REWARD_CACHE = "reward_cache"
"""The folder of a run directory with the scores of models and endpoints."""
SAMPLER_LOG = "sampler.log"
"""The file of a run directory with what the sampling process has printed."""


def run_objective(config: Config) -> Objective:
    """The config's objective. Raises `ConfigError` if a run cannot use it."""
    name = config.objective.name
    base = base_objective(name)
    _, settings = run_adaptive_clip(config)
    if "max_length" in settings_of(base):
        settings.setdefault("max_length", config.rollout.max_tokens)
    objective = change(base, settings)
    if objective.advantage.scope == "external":
        raise ConfigError(
            f"objective.name: {name} needs external advantages, so it works only in your own training loop "
            "(gspo.policy_loss); choose another objective"
        )
    if config.rollout.group_size < 2 and objective.advantage.scope != "batch":
        raise ConfigError(f"rollout.group_size: {name} compares the completions of a group; set at least 2")
    if objective.keep == "all" and config.rollout.refill_budget != RolloutConfig().refill_budget:
        raise ConfigError(
            'rollout.refill_budget: has no effect unless groups are filtered; set objective.keep = "mixed"'
        )
    _check_overlong(config, objective)
    _check_separate(config, objective)
    _check_rollback_clip(config, objective)
    _check_quantized(config)
    _check_lora_reference(config, objective)
    held_out = any(source.held_out for source in config.data.sources.values())
    if config.eval.every and not (held_out or config.eval.sets):
        raise ConfigError("eval.every: there is nothing to evaluate with data.held_out = 0; set eval.every = 0")
    if not held_out:
        _check_needs_no_held_out(config)
    return with_reward_weights(objective, config)


def with_reward_weights(objective: Objective, config: Config) -> Objective:
    """The objective with the run's reward weights, if it compares reward functions separately."""
    if objective.normalize == "sum":
        return objective
    return dataclasses.replace(objective, reward_weights=config.reward.weights)


def _check_separate(config: Config, objective: Objective) -> None:
    if objective.normalize == "separate" and any(source.reward for source in config.data.mix.values()):
        raise ConfigError(
            'objective.normalize: "separate" needs the same reward functions for all problems, and a source of '
            'data.mix has its own; leave out data.mix.NAME.reward, or set "sum"'
        )
    # Without functions, a generated task has its own verifier.
    weights = config.reward.weights or (1.0,) * max(1, len(config.reward.functions))
    if objective.normalize == "separate" and sum(map(bool, weights)) < 2:
        raise ConfigError(
            'objective.normalize: "separate" needs two or more reward functions with a weight, and there are '
            f'{sum(map(bool, weights))} (reward.functions, reward.weights); add one, or set "sum"'
        )


def _check_needs_no_held_out(config: Config) -> None:
    """Refuse what decides by the held-out score of a run that has none. The sets of `eval.sets` do not count for it."""
    alarms = config.alarms
    needing = {
        "eval.patience": config.eval.patience,
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "alarms.stop": "held-out drop" in alarms.stop,
        "alarms.rollback": "held-out drop" in alarms.rollback,
    }
    key = next((key for key, used in needing.items() if used), None)
    if key:
        raise ConfigError(f"{key}: depends on held-out problems, and data.held_out = 0; set that, or leave it out")


def _check_quantized(config: Config) -> None:
    engine = config.rollout.engine
    if config.model.quantize and not engine_traits(engine).accepts_quantized:
        raise ConfigError(
            f"model.quantize: 4-bit weights cannot be sent to engine {engine!r}; "
            'set rollout.engine = "local", or quantize = ""'
        )


def _check_lora_reference(config: Config, objective: Objective) -> None:
    """With LoRA the reference is the model without its adapters, and that must be what RL starts from."""
    if not (config.model.lora.rank and objective.kl):
        return
    if config.cold_start.steps:
        raise ConfigError(
            "cold_start.steps: with model.lora the reference of objective.kl is the model without its adapters, "
            "not the model after the cold start; set objective.kl = 0, cold_start.steps = 0 or model.lora.rank = 0"
        )
    if base_of(config.model.path):
        raise ConfigError(
            "objective.kl: its reference would be the model without adapters, not the adapter that the run starts "
            "from; merge the adapter first (gspo save --merge) and train the merged model, or set objective.kl = 0"
        )


def _check_rollback_clip(config: Config, objective: Objective) -> None:
    if config.alarms.rollback_clip == 1:
        return
    remedy = "set it to 1, and lower alarms.rollback_rate instead"
    if objective.trust_region.clip_range is None:
        raise ConfigError(f"alarms.rollback_clip: {objective.name!r} has no clip range to narrow; {remedy}")
    if run_adaptive_clip(config)[0]:
        raise ConfigError(
            "alarms.rollback_clip: an adaptive clip range follows its target clip fraction and would widen again in "
            f"a few steps; {remedy}"
        )


def _check_overlong(config: Config, objective: Objective) -> None:
    """The ramp of a length penalty must fit below its limit and start below the length of the longest completion."""
    if "soft_overlong" not in objective.shape:
        return
    longest = config.rollout.max_tokens
    limit, cache = overlong_range(objective, max_tokens=longest)
    if cache > limit:
        raise ConfigError(
            f"objective.overlong_cache: the ramp of {cache} tokens is longer than the limit of {limit} "
            "(objective.overlong_limit, by default rollout.max_tokens); "
            f"set it to {limit} or less, or raise the limit"
        )
    if limit - cache >= longest:
        raise ConfigError(
            f"objective.overlong_limit: the length penalty begins above {limit - cache} tokens (overlong_limit {limit} "
            f"minus overlong_cache {cache}), but completions are truncated at rollout.max_tokens = {longest}, so it "
            "never applies; lower overlong_limit, or raise overlong_cache or rollout.max_tokens"
        )


def run_adaptive_clip(config: Config) -> tuple[AdaptiveClip | None, dict[str, Any]]:
    """The adaptive clip range, or None if the range is fixed, and the objective's other settings."""
    auto, settings = take_adaptive(base_objective(config.objective.name), config.objective.settings)
    if auto and config.learner.mini_batches == 1 and config.learner.old_logp != "sampler":
        raise ConfigError(
            f"objective.{auto.sides[0]}: nothing is ever clipped with learner.mini_batches = 1; "
            "set learner.mini_batches to 2 or more, or use a fixed number here"
        )
    return auto, settings


def with_dtype(config: Config) -> Config:
    """The config with the precision that `model.dtype = "auto"` is on this machine. It is what a run directory records,
    so that the run resumes in it on any machine."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype_name(config.model)))


def reward_pool(config: Config, run: Path | None = None) -> RewardPool | ConversationRewards:
    """The worker processes that score completions, on a cluster if this process is part of a run there. Scores that
    were paid for are kept in the directory of the run."""
    cache_dir = str((run / REWARD_CACHE).absolute()) if run else ""
    environment = config.environment.name
    # An environment gives rewards itself, so reward functions are optional.
    if environment and not config.reward.functions:
        return ConversationRewards(environment, correct_above=config.reward.correct_above, pool=None)
    with activity("starting the reward workers"):
        pool = RewardPool(config.reward, sources=source_rewards(config), cache_dir=cache_dir, cluster=membership())
    if not environment:
        return pool
    return ConversationRewards(environment, correct_above=config.reward.correct_above, pool=pool)


def environment_for(config: Config, stack: ExitStack) -> RunEnvironment | None:
    """The environment that answers the model; None without one. `stack` closes it."""
    if not config.environment.name:
        return None
    # An environment of somebody else's package, or one of ours.
    kind = VerifiersEnvironment if config.environment.name == VERIFIERS else RunEnvironment
    environment = kind(config)
    stack.callback(environment.close)
    environment.check_rewards()
    return environment


def tokenizer_for(config: Config, model: ModelConfig | None = None) -> Any:
    """The tokenizer of the config's model, or of `model` in its place (`saved_model`)."""
    # A built model has one token per character that its tasks use, or per ASCII character if any may occur.
    sections = config.problem_sections.values()
    alphabets = [build_task(s.task, s.task_options).alphabet if s.task else "" for s in sections]
    alphabet = "".join(sorted(set("".join(alphabets)))) if all(alphabets) else ""
    return load_tokenizer(model or config.model, alphabet=alphabet)


def run_tokenizer(config: Config, checkpoint: Path | None) -> Any:
    """The tokenizer of a run that starts, or resumes from a checkpoint."""
    return tokenizer_for(config, config.model if checkpoint is None else saved_model(config.model, checkpoint))


def policy_for(
    config: Config, tokenizer: Any, model: ModelConfig | None = None, *, routers: bool = True, ranks: Ranks = ONE
) -> Policy:
    """The config's model on its device, or `model` in its place. Sampling alone does not need its `routers`."""
    routing = config.routing if routers else None
    with activity("loading the model"):
        return load_policy(model or config.model, tokenizer, seed=config.seed, routing=routing, ranks=ranks)


def optimizer_for(config: Config, policy: Policy) -> Optimizer:
    """The optimizer of a policy, with the learning-rate schedule of the whole run."""
    return Optimizer(policy.model, config.learner, config.steps * config.learner.mini_batches)


def engine_for(config: Config, policy: Policy, ranks: Ranks = ONE) -> Engine:
    """The engine that samples from a policy."""
    context = EngineContext(
        model=policy.model, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids, routers=policy.routers, ranks=ranks
    )
    controls_for(context, config.rollout.sampling)  # settings that the tokenizer refuses, before vLLM starts
    with activity("starting the sampling engine"):
        return build_engine(config.rollout.engine, context, config.rollout.engine_options)


def build_run(
    config: Config,
    objective: Objective,
    *,
    run: Path,
    checkpoint: Path | None,
    stack: ExitStack,
    ranks: Ranks = ONE,
) -> RunContext:
    """All components of a run. It resumes from `checkpoint` if there is one. `stack` closes the components."""
    check_ranks(config, ranks)
    # Rewards and data come before the weights, so that their errors appear within seconds.
    rewards = reward_pool(config, run)
    stack.callback(rewards.close)
    environment = environment_for(config, stack)
    tokenizer = run_tokenizer(config, checkpoint)
    with activity("loading the data"):
        problems = load_problems(config.data, tokenizer, config.seed, config.eval.sets)
    if environment:
        problems = environment.open_problems(problems, tokenizer)
    rewards.check_columns([*problems.train, *chain.from_iterable(problems.sets.values())])
    if ranks.several:
        ranks.watch.run = run
    with ranks.together("build", config=to_toml(config), run=str(run), checkpoint=str(checkpoint or "")):
        learner, engine = build_learner(config, objective, tokenizer, run=run, checkpoint=checkpoint, ranks=ranks)
    assert engine is not None  # the leader has one
    if _on_every_rank(config, ranks):
        engine = DataParallelEngine(engine, learner.policy.model, learner.ranks)
    stack.callback(engine.close)
    sampler = (
        engine
        if isinstance(engine, SamplingProcess)
        else sampler_for(config, learner.policy, run, checkpoint, learner.ranks)
    )
    if sampler is not None:
        stack.callback(sampler.close)
    _check_positions(learner.policy, problems, config.rollout.max_tokens)
    check_routes(config, engine)
    _check_old_logp(config, objective, learner.policy)
    _check_spans(config, objective)
    conversations = environment.engine(engine, learner.policy) if environment else None
    return RunContext(
        **vars(learner),
        problems=problems,
        order=SamplingOrder.of(problems.train, config.data, config.seed),
        engine=conversations or engine,
        conversations=conversations,
        rewards=rewards,
        sampler=sampler,
        adaptive_clip=run_adaptive_clip(config)[0],
    )


def build_learner(
    config: Config, objective: Objective, tokenizer: Any, *, run: Path, checkpoint: Path | None, ranks: Ranks = ONE
) -> tuple[LearnContext, Engine | None]:
    """What every rank has: the components that `learn` needs, and an engine, if it samples."""
    check_device(device_of(config.model.device), ranks)
    check_optimizer(config.learner, device_of(config.model.device))
    policy = policy_for(
        config, tokenizer, config.model if checkpoint is None else saved_model(config.model, checkpoint), ranks=ranks
    )
    ranks = dataclasses.replace(ranks, by_layer=samples_by_layer(config, policy, ranks))
    engine: Engine | None = None
    if config.rollout.max_lag and not engine_traits(config.rollout.engine).shares_weights:
        # With its own weights, an engine can do both: sample ahead, and evaluate. The process has it then.
        engine = sampler_for(config, policy, run, checkpoint, ranks)
    elif not ranks.several or _on_every_rank(config, ranks):
        # Before the model is sharded, because an engine may try forwards of its own.
        with nullcontext() if ranks.by_layer else whole(policy.model):
            engine = engine_for(config, policy, ranks)
    if ranks.several:
        if config.learner.context_parallel > 1:
            context = join_context(ranks, config.learner.context_parallel, config.ranks.timeout_s)
            check_context_parallel(policy.model, context)
            ranks = dataclasses.replace(ranks, context=context)
        shard(policy.model, ranks.count)
    learner = LearnContext(
        config=config,
        objective=objective,
        policy=policy,
        reference=load_reference(run, config, objective, policy, ranks) if checkpoint else None,
        optimizer=optimizer_for(config, policy),
        ranks=ranks,
    )
    if engine is None and ranks.leads:
        # The others wait for commands, so this engine must not run the model.
        engine = engine_for(config, policy, ranks)
    return learner, engine


def samples_by_layer(config: Config, policy: Policy, ranks: Ranks) -> bool:
    """Whether the ranks gather the weights layer by layer while they sample; the same on all of them."""
    choice, model = config.ranks.sampling_weights, policy.model
    if not _on_every_rank(config, ranks) or choice == "whole":
        return False
    if choice == "layers":
        return True
    # On GPUs it was never tried, and it costs the CUDA graphs.
    if policy.device.type == "cuda":
        return False
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # Masters and moments will take their memory at the first update.
    free = (
        free_memory(policy.device)[0] / local_ranks(ranks.count)
        - checkpoint_size(model, config.learner.optimizer) / ranks.count
    )
    return bool(ranks.max(torch.tensor(int(weights > ROOM * free))))


def _on_every_rank(config: Config, ranks: Ranks) -> bool:
    """Whether there are several ranks and each has an engine."""
    return ranks.several and engine_traits(config.rollout.engine).data_parallel


def sampler_for(
    config: Config, policy: Policy, run: Path, checkpoint: Path | None, ranks: Ranks
) -> SamplingProcess | None:
    """The process that samples while the learner trains; None if they take turns, and on all ranks but the leader."""
    lag = config.rollout.max_lag
    if not lag or not ranks.leads:
        return None

    def weights() -> dict[str, Tensor]:
        with gathered_weights(policy, ranks) as whole:
            return dict(whole)

    return SamplingProcess(
        config=to_toml(config),
        checkpoint=str(checkpoint or ""),
        log=run / SAMPLER_LOG,
        timeout_s=config.rollout.sampler_timeout_s,
        weights=weights,
        room=(lag + 2) * sum(w.numel() * w.element_size() for w in trained_weights(policy).values()),
    )


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Refuse settings that do not work on this number of ranks."""
    check_number_of_ranks(config, ranks.count)
    engine = config.rollout.engine
    if ranks.several and engine not in (able := _engines_of_ranks()):
        raise ConfigError(
            f"rollout.engine: {engine!r} cannot sample on {ranks.count} ranks; use {' or '.join(able)}, or a single "
            "process"
        )
    if ranks.several and config.ranks.sampling_weights != "auto" and not _on_every_rank(config, ranks):
        raise ConfigError(
            f"ranks.sampling_weights: has no effect with engine {engine!r}, which has weights of its own; leave it out"
        )
    if config.learner.context_parallel > 1 and config.model.compile == "on":
        raise ConfigError(
            'model.compile: compiled layers cannot exchange tokens with other ranks; set it to "off", or '
            "learner.context_parallel = 1"
        )


def _engines_of_ranks() -> list[str]:
    """The engines that work on several ranks."""
    traits = {name: engine_traits(name) for name in engine_names()}
    return [name for name, known in traits.items() if known.data_parallel or known.on_leader]


def check_routes(config: Config, engine: Engine) -> None:
    """Routing replay needs the experts that the engine used, if it replays those."""
    if config.routing.replay == "sampler" and not engine.reports_routes:
        raise ConfigError(
            f"routing.replay: engine {config.rollout.engine!r} does not report the experts of its completions; "
            'use engine "local", or replay = "old"'
        )


def _check_old_logp(config: Config, objective: Objective, policy: Policy) -> None:
    """If the engine's log-probs are the old policy's, there is no mismatch to correct, and no forward of the old policy
    whose experts could be replayed."""
    if config.learner.old_logp == "interpolate":
        _check_interpolation(objective, policy)
    if config.learner.old_logp != "sampler":
        return
    if objective.mismatch != "none":
        raise ConfigError(
            f'objective.mismatch: {objective.mismatch} has no effect with learner.old_logp = "sampler", '
            "where the old log-probs are the engine's; leave one of them out"
        )
    if settings_of(objective).get("denominator") == "sampler":
        raise ConfigError(
            'objective.denominator: "sampler" has no effect with learner.old_logp = "sampler", where the old log-probs '
            "are the engine's; leave one of them out"
        )
    if policy.routers is None:
        return
    if config.routing.replay == "old":
        raise ConfigError(
            'routing.replay: "old" replays the experts of the forward pass that learner.old_logp = "sampler" skips; '
            'set replay = "sampler" (the engine\'s experts) or "off", or old_logp = "recompute"'
        )
    if config.routing.balance_loss:
        raise ConfigError(
            'routing.balance_loss: it counts the experts of the forward pass that learner.old_logp = "sampler" skips; '
            'set balance_loss = 0, or old_logp = "recompute"'
        )


def _check_spans(config: Config, objective: Objective) -> None:
    """Completions that are cut need an engine that continues them, and batches whose prompts are known."""
    if not config.rollout.span_tokens:
        return
    if not engine_traits(config.rollout.engine).extends:
        able = ", ".join(name for name in engine_names() if engine_traits(name).extends)
        raise ConfigError(
            f"rollout.span_tokens: engine {config.rollout.engine!r} does not continue completions; use {able}, or set "
            "it to 0"
        )
    if objective.keep == "mixed" and config.rollout.refill_budget != 1:
        raise ConfigError(
            "rollout.refill_budget: with rollout.span_tokens a batch is not refilled, because the next ones have begun "
            "by then; set it to 1 (the step trains on the groups that are left), or span_tokens = 0"
        )


def _check_interpolation(objective: Objective, policy: Policy) -> None:
    """Interpolated log-probs are known only during the training forwards, and nothing records the old experts."""
    remedy = 'set learner.old_logp = "recompute"'
    if needs_old_logprobs(objective):
        raise ConfigError(
            f'learner.old_logp: {objective.name} needs old log-probs before the first update, and "interpolate" has '
            f"them only during the updates; {remedy}"
        )
    if policy.routers is not None:
        raise ConfigError(
            'learner.old_logp: "interpolate" skips the forward pass whose experts are recorded; '
            f"{remedy}, or routing.record = false"
        )


def saved_model(config: ModelConfig, path: Path, device: str | None = None) -> ModelConfig:
    """The same settings for a model that a run has saved at `path`, on another device if one is given."""
    saved = dataclasses.replace(config, path=str(path), device=device or config.device)
    if config.lora.rank:
        return saved  # a base that was built from scratch is built again, from the same seed
    return dataclasses.replace(saved, build="", build_options={})


def _check_positions(policy: Policy, problems: Problems, max_tokens: int) -> None:
    """A completion that exceeds the model's positions would fail in the middle of a run."""
    limit = policy.position_limit
    longest = max(problems.everything, key=lambda p: len(p.token_ids))
    if limit is not None and len(longest.token_ids) + max_tokens > limit:
        raise ConfigError(
            f"rollout.max_tokens: prompt {longest.id} has {len(longest.token_ids)} tokens, and with {max_tokens} more "
            f"it exceeds the model's {limit} positions; lower rollout.max_tokens, or data.max_prompt_tokens with "
            "data.on_bad_row = skip"
        )


def load_reference(run: Path, config: Config, objective: Objective, policy: Policy, ranks: Ranks = ONE) -> Any:
    """The policy at the start of RL. A run that built or cold-started its model has saved it; otherwise it is the given
    model. With LoRA it is the policy's own model, whose adapters can be disabled."""
    if not objective.kl:
        return None
    if adapted(policy.model):
        return policy.model
    saved = run / "reference"
    model = saved_model(config.model, saved) if saved.is_dir() else config.model
    # The reference has no backward pass, so checkpointing its activations would save nothing.
    model = dataclasses.replace(model, gradient_checkpointing=False)
    reference = load_policy(model, load_tokenizer(model), seed=0, ranks=ranks).model.requires_grad_(False)
    if ranks.several:
        shard(reference, ranks.count)
    return reference

"""From a `Config` to components. `train`, `eval`, `doctor` and `replay` build theirs here and nowhere else.

In: a checked `Config`. Out: the objective, the reward pool, the engine, or everything a run works with. Invariant: a combination of
settings that cannot work is a `ConfigError` that names the key and the fix, before anything expensive starts.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gspo.config import Config, ModelConfig, RolloutConfig
from gspo.context import RunContext
from gspo.data.problems import Problems, PromptOrder, load_problems
from gspo.data.task import build_task
from gspo.errors import ConfigError
from gspo.learner.optimizer import Optimizer
from gspo.model.adapter import adapted, base_of
from gspo.model.load import Policy, load_policy, load_tokenizer
from gspo.objectives.adaptive_clip import AdaptiveClip, take_adaptive
from gspo.objectives.objective import Objective, settings_of
from gspo.objectives.samples import overlong_range
from gspo.objectives.table import TABLE
from gspo.objectives.table import objective as build_objective
from gspo.reward.reward import RewardPool
from gspo.rollout.engine import Engine, EngineContext, build_engine


def run_objective(config: Config) -> Objective:
    """The config's objective, refused where a run cannot use it."""
    name, (_, settings) = config.objective.name, run_adaptive_clip(config)
    if name in TABLE and "max_length" in settings_of(TABLE[name]):
        settings.setdefault("max_length", config.rollout.max_tokens)
    objective = build_objective(name, **settings)
    if objective.advantage.scope == "external":
        raise ConfigError(f"objective.name: {name} needs advantages from outside and is for your own loop (gspo.policy_loss); runs take another row")  # fmt: skip
    if config.rollout.replies < 2 and objective.advantage.scope != "batch":
        raise ConfigError(f"rollout.replies: {name} compares replies of a group, so it needs at least 2")
    if objective.keep == "all" and config.rollout.refill_budget != RolloutConfig().refill_budget:
        raise ConfigError(
            'rollout.refill_budget: has no effect unless groups are filtered; set objective.keep = "mixed"'
        )
    _check_overlong(config, objective)
    if config.model.lora.rank and config.cold_start.steps and objective.kl:
        raise ConfigError("cold_start.steps: with model.lora the reference of objective.kl is the model without its adapters, which a cold start would have left; set objective.kl = 0, or do without one of the others")  # fmt: skip
    if config.model.lora.rank and objective.kl and base_of(config.model.path):
        raise ConfigError("objective.kl: its reference would be the model without adapters, not the adapter that the run begins with; merge that first (gspo merge) and give the result, or set objective.kl = 0")  # fmt: skip
    if config.eval.every and not (config.data.held_out or config.data.held_out_path):
        raise ConfigError("eval.every: there is nothing to evaluate with data.held_out = 0; set eval.every = 0")
    return objective


def _check_overlong(config: Config, objective: Objective) -> None:
    """A length penalty needs a ramp that fits below its limit and begins below the length at which replies are cut."""
    if objective.shape != "soft_overlong":
        return
    longest = config.rollout.max_tokens
    limit, cache = overlong_range(objective, max_tokens=longest)
    if cache > limit:
        raise ConfigError(f"objective.overlong_cache: the ramp of {cache} tokens is longer than the limit of {limit} (objective.overlong_limit, or rollout.max_tokens without it); set it to {limit} or less, or raise the limit")  # fmt: skip
    if limit - cache >= longest:
        raise ConfigError(f"objective.overlong_limit: the length penalty begins above {limit - cache} tokens (overlong_limit {limit} less overlong_cache {cache}), and replies are cut at rollout.max_tokens = {longest}, so it can never act; lower overlong_limit, or raise overlong_cache or rollout.max_tokens")  # fmt: skip


def run_adaptive_clip(config: Config) -> tuple[AdaptiveClip | None, dict[str, Any]]:
    """The adapting clip range, if the settings ask for one, and the objective's other settings."""
    name, settings = config.objective.name, dict(config.objective.settings)
    if name not in TABLE:
        return None, settings
    auto, settings = take_adaptive(dataclasses.replace(TABLE[name], name=name), settings)
    if auto and config.learner.mini_batches == 1:
        raise ConfigError(f"objective.{auto.sides[0]}: nothing is ever clipped with learner.mini_batches = 1; set more, or a number")  # fmt: skip
    return auto, settings


def reward_pool(config: Config) -> RewardPool:
    """The worker processes that score completions."""
    data = config.data
    return RewardPool(config.reward, (data.task, data.task_options) if data.task else None)


def engine_for(config: Config, policy: Policy) -> Engine:
    """The engine that samples from a policy."""
    context = EngineContext(
        model=policy.model, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids, routers=policy.routers
    )
    return build_engine(config.rollout.engine, context, config.rollout.engine_options)


def build_run(
    config: Config, objective: Objective, *, run: Path, checkpoint: Path | None, stack: ExitStack
) -> RunContext:
    """Everything a run works with; `checkpoint` is where it resumes from. `stack` closes what has to be closed."""
    task = build_task(config.data.task, config.data.task_options) if config.data.task else None
    rewards = reward_pool(config)
    stack.callback(rewards.close)
    model = config.model if checkpoint is None else saved_model(config.model, checkpoint)
    tokenizer = load_tokenizer(model, alphabet=task.alphabet if task else "")
    problems = load_problems(config.data, tokenizer, config.seed)
    rewards.check_columns(set().union(*(p.columns for p in problems.train)))
    policy = load_policy(model, tokenizer, seed=config.seed, routing=config.routing)
    _check_positions(policy, problems, config.rollout.max_tokens)
    engine = engine_for(config, policy)
    stack.callback(engine.close)
    if config.routing.replay == "sampler" and not engine.reports_routes:
        raise ConfigError(f'routing.replay: engine {config.rollout.engine!r} does not report the experts of its replies; use engine "local", or replay = "old"')  # fmt: skip
    _check_old_logp(config, objective, policy)
    return RunContext(
        config=config,
        objective=objective,
        problems=problems,
        order=PromptOrder(len(problems.train), config.seed),
        policy=policy,
        reference=_reference(run, config.model, objective, policy) if checkpoint else None,
        engine=engine,
        rewards=rewards,
        optimizer=Optimizer(policy.model, config.learner, config.steps * config.learner.mini_batches),
        adaptive_clip=run_adaptive_clip(config)[0],
    )


def _check_old_logp(config: Config, objective: Objective, policy: Policy) -> None:
    """Where the engine's log-probabilities are the old policy's, nothing is left to correct, and no old forward to watch."""
    if config.learner.old_logp != "sampler":
        return
    if objective.mismatch != "none":
        raise ConfigError(f'objective.mismatch: {objective.mismatch} has no effect with learner.old_logp = "sampler", where the old policy is the engine\'s; leave one of them out')  # fmt: skip
    if policy.routers is not None:
        raise ConfigError('learner.old_logp: "sampler" leaves out the forward in which the experts of the old policy are seen; set routing.record = false (no replay), or old_logp = "recompute"')  # fmt: skip


def saved_model(config: ModelConfig, path: Path) -> ModelConfig:
    """The same settings for a model that a run has saved at `path`."""
    return dataclasses.replace(config, path=str(path), build="", build_options={})


def _check_positions(policy: Policy, problems: Problems, max_tokens: int) -> None:
    """A reply that could outgrow the model's positions would end the run in its middle."""
    limit, longest = policy.position_limit, max((*problems.train, *problems.held_out), key=lambda p: len(p.token_ids))
    if limit is not None and len(longest.token_ids) + max_tokens > limit:
        raise ConfigError(
            f"rollout.max_tokens: prompt {longest.id} has {len(longest.token_ids)} tokens, and with {max_tokens} more it exceeds the "
            f"model's {limit} positions; lower rollout.max_tokens, or data.max_prompt_tokens with data.on_bad_row = skip"
        )


def _reference(run: Path, config: ModelConfig, objective: Objective, policy: Policy) -> Any:
    """The policy as RL found it: kept in the run where it was built or cold-started, else the given model; with adapters,
    the policy itself, which can switch them off."""
    if not objective.kl:
        return None
    if adapted(policy.model):
        return policy.model
    kept = run / "reference"
    if kept.is_dir():
        config = saved_model(config, kept)
    config = dataclasses.replace(config, gradient_checkpointing=False)
    return load_policy(config, load_tokenizer(config), seed=0).model.requires_grad_(False)

"""A run: build the parts, start or resume, loop over steps, evaluate, checkpoint, stop.

In: a `Config`, or the directory of an earlier run. Out: a run directory and an `Outcome`.
Invariant: everything a step depends on is in the checkpoint before it (weights, moments, `TrainerState`) or is a pure
function of the config, so a resumed run writes the same `metrics.jsonl` to the byte.
"""

from __future__ import annotations

import dataclasses
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import trust
from gspo.config import (
    Config,
    ModelConfig,
    RolloutConfig,
    anchored,
    check,
    check_single_process,
    differing,
    flat,
    override,
    to_toml,
)
from gspo.context import RunContext
from gspo.data.problems import Problems, PromptOrder, load_problems
from gspo.data.sources import check_file
from gspo.data.task import build_task
from gspo.errors import ConfigError, DiskError, GspoError, MemoryLimitError
from gspo.evaluation import Estimate
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.learner.optimizer import TUNABLE, Optimizer
from gspo.loop import MAY_CHANGE, Loop
from gspo.model.adapter import adapted, base_of
from gspo.model.load import Policy, load_policy, load_tokenizer
from gspo.model.memory import out_of_memory
from gspo.objectives.adaptive_clip import AdaptiveClip, take_adaptive
from gspo.objectives.advantage import batch_whitened, external
from gspo.objectives.objective import Objective, settings_of
from gspo.objectives.samples import overlong_range
from gspo.objectives.table import TABLE
from gspo.objectives.table import objective as build_objective
from gspo.record.curves_image import draw_curves
from gspo.record.progress import Display
from gspo.record.run_dir import RunDir, read_jsonl
from gspo.record.sinks import Sinks
from gspo.reward.reward import RewardPool
from gspo.rollout.engine import EngineContext, build_engine
from gspo.signals import StopRequest

OWN_OPTION = ("name", "run_dir", "steps")
"""Settings that a resume takes by an option of its own, or from where the run lies."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    run: Path
    step: int
    began: int
    """The step that this process went on from; 0: it began the run."""
    steps: int
    """Steps after which the run ends; where sampled tokens decide, at the pace so far."""
    idle: int
    """Steps of this process that trained on nothing."""
    stopped_by: int | None
    """Signal that stopped it early."""
    before: Estimate | None
    """Held-out accuracy at step 0, if this process measured it or the run directory has it."""
    after: Estimate | None
    greedy: tuple[float, float] | None
    """Greedy accuracy at the start and at the end."""
    evaluated_at: int
    """Step of the last evaluation."""
    unscored: int
    """Replies of the steps of this process that could not be scored."""
    picture: Path | None
    seconds: float


def train(config: Config, display: Display) -> Outcome:
    """Start a new run."""
    check_single_process()
    check(config)
    config = anchored(config)
    objective = run_objective(config)
    for path in filter(None, (config.data.path, config.data.held_out_path)):
        check_file(path)
    run = RunDir.create(config)
    try:
        trust.remember(run.path, trust.all_code(config, [config.model.path]))
        return _run(run, config, objective, display, begin=None)
    finally:
        run.discard_if_empty()


def resume(
    path: str | Path,
    display: Display,
    *,
    steps: int | None = None,
    overrides: Sequence[str] = (),
    trust_run: bool = False,
) -> Outcome:
    """Continue a run from its newest whole checkpoint; `steps` moves its end; `overrides` are settings that may change
    during a run; `trust_run`: also with code that was not asked for here before."""
    check_single_process()
    run, config = RunDir.open(path)
    try:
        config = _with_overrides(config, overrides)
        begin = _where_to_resume(run, display)
        trust.check(run.path, trust.all_code(config, _models(run, config, begin)), trust=trust_run)
        done = int(begin.name) if begin else 0
        if steps is not None and steps < done:
            raise ConfigError(
                f"--steps: {run.path} has already done {done} steps, more than {steps}; give a larger number"
            )
        if steps is not None and steps != config.steps:
            config = _with_new_end(config, steps, display)
        check(config)
        return _run(run, config, run_objective(config), display, begin=begin)
    finally:
        run.close()


def _with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The run's settings with those of the command line, which must be ones that a run may change."""
    new = override(tomllib.loads(to_toml(config)), overrides, where="command line")
    refused = [k for k in differing([flat(config), flat(new)]) if not k.startswith(MAY_CHANGE) or k in OWN_OPTION]
    if refused:
        raise ConfigError(f"train --resume: a run continues with its own settings (RUN/config.toml); {', '.join(refused)} cannot be given, --steps and {', '.join(f'learner.{name}' for name in TUNABLE)} and those of logs, checkpoints, alarms and limits can")  # fmt: skip
    return new


def _models(run: RunDir, config: Config, begin: Path | None) -> list[Path | str]:
    """Where the models of a resumed run are loaded from: the policy, and the reference of a KL penalty."""
    kept = run.path / "reference"
    return [begin or config.model.path, *([kept if kept.is_dir() else config.model.path] if run_objective(config).kl else [])]  # fmt: skip


def _where_to_resume(run: RunDir, display: Display) -> Path | None:
    """The newest checkpoint that can be used; None if there never was one."""
    if not checkpoint.saved(run.checkpoints):
        display.message(f"{run.path}: no checkpoint yet; starting from the beginning")
        return None
    begin, complaints = checkpoint.newest(run.checkpoints, lambda state: _unfit(run, state))
    for complaint in complaints:
        run.event("damaged checkpoint", what=complaint)
        display.message(f"passed over a damaged checkpoint: {complaint}")
    return begin


def _unfit(run: RunDir, state: TrainerState) -> str | None:
    """What the run's own log says against a checkpoint: it is shorter, or was written by another run."""
    if lacking := run.lacks(state.offsets):
        return lacking
    last = run.last_row(state.offsets.get("metrics.jsonl", 0))
    step = state.step if state.pending is None else state.step - 1
    if last is None and step < 0:
        return None
    if last is None or last.get("step") != step:
        return f"metrics.jsonl ends at another step than {step} where the checkpoint says that step ended"
    sampled = last.get("tokens/sampled")
    known = isinstance(sampled, int) and (sampled == state.tokens if state.pending is None else sampled <= state.tokens)
    return (
        None
        if known
        else f"metrics.jsonl has {sampled} sampled tokens after step {step}, the checkpoint {state.tokens}"
    )


def _with_new_end(config: Config, steps: int, display: Display) -> Config:
    if config.learner.schedule != "constant":
        display.message(f"the {config.learner.schedule} schedule now ends at step {steps}: learning rates from here on are not those of the run as it was planned")  # fmt: skip
    return dataclasses.replace(config, steps=steps)


def run_objective(config: Config) -> Objective:
    """The config's objective, refused where a run cannot use it."""
    name, (_, settings) = config.objective.name, run_adaptive_clip(config)
    if name in TABLE and "max_length" in settings_of(TABLE[name]):
        settings.setdefault("max_length", config.rollout.max_tokens)
    objective = build_objective(name, **settings)
    if objective.advantage is external:
        raise ConfigError(f"objective.name: {name} needs advantages from outside and is for your own loop (gspo.policy_loss); runs take another row")  # fmt: skip
    if config.rollout.replies < 2 and objective.advantage is not batch_whitened:
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


# ------------------------------------------------------------------------------------------------- building


def _run(run: RunDir, config: Config, objective: Objective, display: Display, begin: Path | None) -> Outcome:
    started = time.monotonic()
    with ExitStack() as stack:
        stack.callback(run.close)
        stack.callback(display.close)
        stop = stack.enter_context(StopRequest(display.message))
        sinks = Sinks(config.log.sinks, name=config.name, run=run.path, settings=dataclasses.asdict(config), complain=display.message)  # fmt: skip
        stack.callback(sinks.close)
        stack.enter_context(_errors_as_events(run, display))
        parts = _build_parts(run, config, objective, begin, stack)
        if begin is None:
            run.describe(config)
        loop = Loop(run=run, parts=parts, display=display, sinks=sinks, stop=stop)
        state = loop.run_from(begin)
        picture = _picture(run, display) if state.step and not stop else None
        before, after, greedy, evaluated_at = held_out_accuracy(run.path)
        run.event("stop", step=state.step, signal=stop.signal)
    return Outcome(
        run=run.path, step=state.step, began=loop.began, steps=loop.planned_steps(state), idle=loop.idle, stopped_by=None if loop.over(state) else stop.signal,
        before=before, after=after, greedy=greedy, evaluated_at=evaluated_at, unscored=loop.unscored, picture=picture, seconds=time.monotonic() - started,
    )  # fmt: skip


def _picture(run: RunDir, display: Display) -> Path | None:
    """The curves as an image; a run that could not draw it has still finished."""
    try:
        with run.writing("curves.png"):
            return draw_curves(run.path)
    except DiskError as error:
        display.message(f"warning: {error}")
        return None


@contextmanager
def _errors_as_events(run: RunDir, display: Display) -> Iterator[None]:
    """What ended a run is written in it, where there is room for it."""
    try:
        yield
    except GspoError as error:
        if run.started:
            with suppress(DiskError):
                run.event("error", error=type(error).__name__, what=str(error))
        raise
    except Exception as error:
        if not out_of_memory(error):
            raise
        with suppress(DiskError):
            run.event("error", error="MemoryLimitError", what=str(error))
        raise MemoryLimitError(f"{str(error).splitlines()[0]}; lower learner.micro_batch_tokens or rollout.engine_options.slots, then: gspo train --resume {run.path}") from error  # fmt: skip
    except KeyboardInterrupt:
        if run.started:
            display.message(f"Left at once. Continue with:  gspo train --resume {run.path}")
        raise


def _build_parts(run: RunDir, config: Config, objective: Objective, begin: Path | None, stack: ExitStack) -> RunContext:
    task = build_task(config.data.task, config.data.task_options) if config.data.task else None
    rewards = RewardPool(config.reward, (config.data.task, config.data.task_options) if task else None)
    stack.callback(rewards.close)
    model = config.model if begin is None else _kept_model(config.model, begin)
    tokenizer = load_tokenizer(model, alphabet=task.alphabet if task else "")
    problems = load_problems(config.data, tokenizer, config.seed)
    rewards.check_columns(set().union(*(p.columns for p in problems.train)))
    policy = load_policy(model, tokenizer, seed=config.seed, routing=config.routing)
    _check_positions(policy, problems, config.rollout.max_tokens)
    engine = build_engine(
        config.rollout.engine,
        EngineContext(model=policy.model, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids, routers=policy.routers),
        config.rollout.engine_options,
    )
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
        reference=_reference(run, config.model, objective, policy) if begin else None,
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


def _kept_model(config: ModelConfig, path: Path) -> ModelConfig:
    """The same settings for a model that this run has saved."""
    return dataclasses.replace(config, path=str(path), build="", build_options={})


def _check_positions(policy: Policy, problems: Problems, max_tokens: int) -> None:
    """A reply that could outgrow the model's positions would end the run in its middle."""
    limit, longest = policy.position_limit, max((*problems.train, *problems.held_out), key=lambda p: len(p.token_ids))
    if limit is not None and len(longest.token_ids) + max_tokens > limit:
        raise ConfigError(
            f"rollout.max_tokens: prompt {longest.id} has {len(longest.token_ids)} tokens, and with {max_tokens} more it exceeds the "
            f"model's {limit} positions; lower rollout.max_tokens, or data.max_prompt_tokens with data.on_bad_row = skip"
        )


def _reference(run: RunDir, config: ModelConfig, objective: Objective, policy: Policy) -> Any:
    """The policy as RL found it: kept in the run where it was built or cold-started, else the given model; with adapters,
    the policy itself, which can switch them off."""
    if not objective.kl:
        return None
    if adapted(policy.model):
        return policy.model
    kept = run.path / "reference"
    if kept.is_dir():
        config = _kept_model(config, kept)
    config = dataclasses.replace(config, gradient_checkpointing=False)
    return load_policy(config, load_tokenizer(config), seed=0).model.requires_grad_(False)


def held_out_accuracy(run: Path) -> tuple[Estimate | None, Estimate | None, tuple[float, float] | None, int]:
    """Held-out accuracy at the first and at the last evaluation in a run directory, greedy likewise, and the last's step."""
    rows = [r for r in read_jsonl(run / "metrics.jsonl") if r.get("eval/accuracy") is not None]
    if not rows:
        return None, None, None, 0
    before, after = (Estimate(value=r["eval/accuracy"], low=r["eval/accuracy_low"], high=r["eval/accuracy_high"]) for r in (rows[0], rows[-1]))  # fmt: skip
    first, last = rows[0].get("eval/accuracy_greedy"), rows[-1].get("eval/accuracy_greedy")
    return before, after, None if first is None or last is None else (first, last), rows[-1]["step"]

"""A run: build the parts, start or resume, loop over steps, evaluate, checkpoint, stop.

In: a `Config`, or the directory of an earlier run. Out: a run directory and an `Outcome`.
Invariant: everything a step depends on is in the checkpoint before it (weights, moments, `TrainerState`) or is a pure
function of the config, so a resumed run writes the same `metrics.jsonl` to the byte.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gspo.config import Config, ModelConfig, RolloutConfig, check
from gspo.data.chat import render
from gspo.data.problems import Problems, PromptOrder, demonstrations, load_problems, shown
from gspo.data.sources import check_file
from gspo.data.task import build_task
from gspo.errors import ConfigError, GspoError, NumericalError, RewardError
from gspo.evaluate import Estimate, Evaluation, evaluate
from gspo.objective.advantage import batch_whitened, external
from gspo.objective.auto_clip import AutoClip, at_limit, take_auto
from gspo.objective.loss import build as build_objective
from gspo.objective.objective import Objective, settings_of
from gspo.objective.table import TABLE
from gspo.observe.clock import Clock
from gspo.observe.metrics import rollout_records, step_metrics
from gspo.observe.picture import draw_curves
from gspo.observe.progress import Display
from gspo.observe.run_dir import RunDir, read_jsonl
from gspo.observe.sinks import Sinks
from gspo.policy import checkpoint
from gspo.policy.batch import Row
from gspo.policy.checkpoint import TrainerState
from gspo.policy.cold_start import cold_start
from gspo.policy.model import Policy, load_policy, load_tokenizer
from gspo.policy.optimizer import Optimizer
from gspo.reward.reward import RewardPool
from gspo.rollout.engine import EngineContext, build_engine
from gspo.step import Collected, Learned, Parts, collect, learn
from gspo.stop import StopRequest
from gspo.types import Prompt, Sampling, Status

COLD_START_CHECK = 128
"""Fresh problems per accuracy check of the cold start."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    run: Path
    step: int
    steps: int
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
    check(config)
    objective = run_objective(config)
    for path in filter(None, (config.data.path, config.data.held_out_path)):
        check_file(path)
    run = RunDir.create(config)
    try:
        return _run(run, config, objective, display, begin=None)
    finally:
        run.discard_if_empty()


def resume(path: str | Path, display: Display, *, steps: int | None = None) -> Outcome:
    """Continue a run from its newest whole checkpoint; `steps` moves its end."""
    run, config = RunDir.open(path)
    try:
        begin = _where_to_resume(run, display)
        done = int(begin.name) if begin else 0
        if steps is not None and steps < done:
            raise ConfigError(
                f"--steps: {run.path} has already done {done} steps, more than {steps}; give a larger number"
            )
        if steps is not None and steps != config.steps:
            config = _with_new_end(run, config, steps, display)
        check(config)
        return _run(run, config, run_objective(config), display, begin=begin)
    finally:
        run.close()


def _where_to_resume(run: RunDir, display: Display) -> Path | None:
    """The newest checkpoint that can be used; None if there never was one."""
    if not checkpoint.saved(run.checkpoints):
        display.message(f"{run.path}: no checkpoint yet; starting from the beginning")
        return None
    begin, complaints = checkpoint.newest(run.checkpoints, lambda state: run.lacks(state.offsets))
    for complaint in complaints:
        run.event("damaged checkpoint", what=complaint)
        display.message(f"passed over a damaged checkpoint: {complaint}")
    return begin


def _with_new_end(run: RunDir, config: Config, steps: int, display: Display) -> Config:
    if config.learner.schedule != "constant":
        display.message(f"the {config.learner.schedule} schedule now ends at step {steps}: learning rates from here on are not those of the run as it was planned")  # fmt: skip
    run.event("new end", steps=steps, before=config.steps)
    config = dataclasses.replace(config, steps=steps)
    check(config)
    run.describe(config)
    return config


def run_objective(config: Config) -> Objective:
    """The config's objective, refused where a run cannot use it."""
    name, (_, settings) = config.objective.name, _auto_clip(config)
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
    if config.eval.every and not (config.data.held_out or config.data.held_out_path):
        raise ConfigError("eval.every: there is nothing to evaluate with data.held_out = 0; set eval.every = 0")
    return objective


def _auto_clip(config: Config) -> tuple[AutoClip | None, dict[str, Any]]:
    """The adapting clip range, if the settings ask for one, and the objective's other settings."""
    name, settings = config.objective.name, dict(config.objective.settings)
    if name not in TABLE:
        return None, settings
    auto, settings = take_auto(dataclasses.replace(TABLE[name], name=name), settings)
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
        loop = _Loop(run=run, parts=parts, display=display, sinks=sinks, stop=stop)
        state = loop.begin_fresh() if begin is None else loop.begin_from(begin)
        state = loop.run_steps(state) if state else TrainerState()
        picture = draw_curves(run.path) if state.step else None
        before, after, greedy, evaluated_at = held_out_accuracy(run.path)
        run.event("stop", step=state.step, signal=stop.signal)
    return Outcome(
        run=run.path, step=state.step, steps=config.steps, stopped_by=None if loop.over(state.step, state.tokens) else stop.signal,
        before=before, after=after, greedy=greedy, evaluated_at=evaluated_at, unscored=loop.unscored, picture=picture, seconds=time.monotonic() - started,
    )  # fmt: skip


@contextmanager
def _errors_as_events(run: RunDir, display: Display) -> Iterator[None]:
    """What ended a run is written in it."""
    try:
        yield
    except GspoError as error:
        if run.started:
            run.event("error", error=type(error).__name__, what=str(error))
        raise
    except KeyboardInterrupt:
        if run.started:
            display.message(f"Left at once. Continue with:  gspo train --resume {run.path}")
        raise


def _build_parts(run: RunDir, config: Config, objective: Objective, begin: Path | None, stack: ExitStack) -> Parts:
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
    return Parts(
        config=config,
        objective=objective,
        problems=problems,
        order=PromptOrder(len(problems.train), config.seed),
        policy=policy,
        reference=_reference(run, config.model, objective) if begin else None,
        engine=engine,
        rewards=rewards,
        optimizer=Optimizer(policy.model, config.learner, config.steps * config.learner.mini_batches),
        auto_clip=_auto_clip(config)[0],
    )


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


def _reference(run: RunDir, config: ModelConfig, objective: Objective) -> Any:
    """The policy as RL found it: kept in the run where it was built or cold-started, else the given model."""
    if not objective.kl:
        return None
    kept = run.path / "reference"
    if kept.is_dir():
        config = _kept_model(config, kept)
    config = dataclasses.replace(config, gradient_checkpointing=False)
    return load_policy(config, load_tokenizer(config), seed=0).model.requires_grad_(False)


# ------------------------------------------------------------------------------------------------- running


class _Loop:
    """The steps of one run."""

    def __init__(self, *, run: RunDir, parts: Parts, display: Display, sinks: Sinks, stop: StopRequest) -> None:
        self.run, self.parts, self.display, self.sinks, self.stop = run, parts, display, sinks, stop
        self.config = parts.config
        self._saved: int | None = None
        self._fingerprint = fingerprint(parts.problems)
        self.unscored = 0

    def begin_fresh(self) -> TrainerState | None:
        """Cold start, first evaluation, checkpoint 0. None if it was stopped before that."""
        self.run.rewind(-1, {})
        self.run.event("start", steps=self.config.steps)
        self._describe()
        if self.config.cold_start.steps:
            self._cold_start()
            if self.stop:
                return None
        if self.parts.objective.kl:
            self._keep_reference()
        first = {"step": 0, "tokens/sampled": 0, **self._evaluate(0, last=not self.config.steps)}
        self.run.metrics(first)
        self.display.evaluated(first)
        state = TrainerState(offsets=self.run.offsets(), problems=self._fingerprint)
        self._save(state)
        return state

    def begin_from(self, path: Path) -> TrainerState:
        """Restore a checkpoint and forget everything after it."""
        state = checkpoint.read_state(path)
        if state.problems != self._fingerprint:
            raise ConfigError("data: the problems are not those the run began with (rows, order, template or tokenizer changed); put them back, or start a new run")  # fmt: skip
        checkpoint.restore(path, self.parts.optimizer, state.updates)
        self.run.rewind(state.step, state.offsets)
        self.run.event("resume", step=state.step)
        self.display.message(f"resumed {self.run.path} at step {state.step}")
        for row in read_jsonl(self.run.path / "metrics.jsonl"):
            self.display.evaluated(row)
        self._saved = state.step
        return state

    def run_steps(self, state: TrainerState) -> TrainerState:
        """Loop until the last step or a request to stop; the state is always that of a finished step."""
        while not self.over(state.step, state.tokens) and not self.stop:
            state = self._step(state)
            if state.step % self.config.checkpoint.every == 0:
                self._save(state)
        self._save(state)
        return state

    def over(self, step: int, tokens: int) -> bool:
        """Whether a run that has come this far is finished."""
        if not self.config.tokens:
            return step >= self.config.steps
        return tokens >= self.config.tokens or step >= 2 * self.config.steps

    def _step(self, state: TrainerState) -> TrainerState:
        step, clock = state.step + 1, Clock()
        parts = self._with_range(state.clip_scale)
        with clock.measure("step"):
            collected = collect(parts, step=step, cursor=state.cursor, clock=clock)
            self._check_scores(collected, state)
            with clock.measure("learn"):
                learned = learn(parts, collected.gathered.groups, step=step)
            skipped = self._check_updates(step, learned, state.skipped_in_row)
            tokens = state.tokens + collected.tokens
            with clock.measure("eval"):
                evaluation = self._evaluate(step, last=self.over(step, tokens))
        metrics = {"step": step, "tokens/sampled": tokens, **step_metrics(parts.objective, collected, learned), **evaluation}  # fmt: skip
        timings = {"step": step, **{f"time/{name}_s": round(seconds, 6) for name, seconds in clock.seconds.items()}}
        self._write(step, metrics, timings, collected, learned)
        return TrainerState(
            step=step, cursor=collected.cursor, updates=self.parts.optimizer.updates, skipped_in_row=skipped,
            tokens=tokens, clip_scale=self._next_range(step, state.clip_scale, learned), offsets=self.run.offsets(), problems=state.problems,
        )  # fmt: skip

    def _with_range(self, scale: float) -> Parts:
        """The parts with the clip range that this step uses."""
        if self.parts.auto_clip is None:
            return self.parts
        return dataclasses.replace(self.parts, objective=self.parts.auto_clip.scaled(self.parts.objective, scale))

    def _next_range(self, step: int, scale: float, learned: Learned | None) -> float:
        """The scale of the next step's clip range; says so when it can adapt no further."""
        if self.parts.auto_clip is None or learned is None:
            return scale
        wanted = self.parts.auto_clip.next_scale(self.parts.objective, scale, learned.tokens)
        why = at_limit(wanted)
        if why and not at_limit(scale):
            self.run.event("clip range at its limit", step=step, what=why)
            self.display.message(f"step {step}: the clip range stops adapting: {why}")
        return wanted

    def _write(
        self, step: int, metrics: dict[str, Any], timings: dict[str, Any], collected: Collected, learned: Learned | None
    ) -> None:
        if self.config.log.rollouts:
            self.run.rollouts(step, rollout_records(self.parts.objective, collected, learned))
        self.run.metrics(metrics)
        self.run.timings(timings)
        self.sinks.log(step, metrics | timings)
        self.display.step(step, self.config.steps, metrics, timings)

    def _check_scores(self, collected: Collected, state: TrainerState) -> None:
        """Too many unscored replies: the reward is broken, and going on would train on what is left of it."""
        scores = [s for g in collected.gathered.sampled for s in g.scores]
        failed = [s.failure for s in scores if s.status is Status.UNSCORED]
        if failed and not self.unscored:
            self.display.message(
                f"step {state.step + 1}: {len(failed)} of {len(scores)} replies could not be scored; they are left out. The first: {failed[0]}"
            )
        self.unscored += len(failed)
        if len(failed) > self.config.reward.max_unscored_fraction * len(scores):
            self._save(state)
            self.run.event("unscored", step=state.step + 1, unscored=len(failed), replies=len(scores), first=failed[0])
            raise RewardError(
                f"step {state.step + 1}: {len(failed)} of {len(scores)} replies could not be scored (reward.max_unscored_fraction = "
                f"{self.config.reward.max_unscored_fraction:g}); the first: {failed[0]}. Mend the reward, then: gspo train --resume {self.run.path}"
            )

    def _check_updates(self, step: int, learned: Learned | None, in_row: int) -> int:
        """Say when an update was skipped, or when there was nothing to learn from; stop when it keeps happening."""
        if learned is None:
            self.run.event("nothing to learn", step=step)
            self.display.message(
                f"step {step}: no group to learn from (all uniform or unscored); the policy stays as it is"
            )
            return in_row
        for index, update in enumerate(learned.updates):
            in_row = 0 if update.applied else in_row + 1
            if not update.applied:
                loss = float(learned.losses[index].total)
                self.run.event("skipped update", step=step, mini_batch=index, loss=loss, grad_norm=update.grad_norm)
                self.display.message(f"step {step}: update {index} skipped, loss {loss:g} or gradient norm {update.grad_norm:g} is not finite")  # fmt: skip
            if in_row >= self.config.learner.max_skipped:
                raise NumericalError(
                    f"step {step}: {in_row} updates in a row had a non-finite loss or gradient (learner.max_skipped); lower "
                    f"learner.learning_rate, or resume from the last checkpoint: gspo train --resume {self.run.path}"
                )
        return in_row

    def _save(self, state: TrainerState) -> None:
        if self._saved == state.step:
            return
        checkpoint.save(
            self.run.checkpoints, self.parts.policy, self.parts.optimizer, state, keep=self.config.checkpoint.keep
        )
        self._saved = state.step
        self.run.event("checkpoint", step=state.step)

    # ---- evaluation and cold start

    def _evaluate(self, step: int, *, last: bool) -> dict[str, Any]:
        settings = self.config.eval
        if not settings.every or (step % settings.every and not last):
            return {}
        sampling, held_out = self.config.rollout.sampling, self.parts.problems.held_out
        done = self._held_out(held_out, sampling, settings.samples, "eval")
        sampled = done.accuracy
        values = {
            "eval/unscored": done.unscored,
            "eval/accuracy": sampled.value,
            "eval/accuracy_low": sampled.low,
            "eval/accuracy_high": sampled.high,
            "eval/length_mean": done.mean_length,
        }
        if settings.greedy:
            greedy = self._held_out(held_out, sampling.greedy, 1, "eval-greedy")
            values["eval/accuracy_greedy"] = greedy.accuracy.value
        return values

    def _held_out(self, prompts: Sequence[Prompt], sampling: Sampling, samples: int, stream: str) -> Evaluation:
        parts = self.parts
        return evaluate(
            parts.engine, parts.rewards, prompts, samples=samples, sampling=sampling, seed=self.config.seed, stream=stream,
            version=parts.optimizer.updates,
        )  # fmt: skip

    def _cold_start(self) -> None:
        parts, config = self.parts, self.config.cold_start
        fresh = self._fresh_problems()

        def accuracy(step: int) -> float:
            prompts = [next(fresh)[0] for _ in range(COLD_START_CHECK)]
            sampling = Sampling(max_tokens=self.config.rollout.max_tokens, temperature=self.config.rollout.temperature)
            done = self._held_out(prompts, sampling, 1, f"cold-start/{step}")
            if not done.verdicts:
                raise RewardError(f"cold start: not one reply could be scored; the first: {done.scores[0][0].failure}")
            return done.accuracy.value

        def report(step: int, loss: float, reached: float) -> None:
            self.display.cold_start(step, config.steps, loss, reached)

        rows = (Row(prompt_ids=p.token_ids, reply_ids=reply) for p, reply in fresh)
        done = cold_start(parts.policy, config, rows, accuracy, report, lambda: bool(self.stop))
        parts.optimizer.adopt_weights()
        if self.stop:
            self.display.message("cold start interrupted: a resume begins it anew, with the same outcome")
            return
        self.run.event("cold start", steps=done.steps, accuracy=done.accuracy)
        reached = "reached" if done.accuracy >= config.stop_accuracy else "did NOT reach"
        self.display.message(f"cold start: {done.steps} supervised steps, {reached} sampled accuracy {config.stop_accuracy:.0%} (now {done.accuracy:.0%})")  # fmt: skip

    def _fresh_problems(self) -> Iterator[tuple[Prompt, tuple[int, ...]]]:
        """Endless (prompt, demonstration ids) that are not held out."""
        tokenizer, data = self.parts.policy.tokenizer, self.config.data
        held_out = {p.content for p in self.parts.problems.held_out if isinstance(p.content, str)}
        end = self.parts.policy.end_id
        for number, problem in zip(count(), demonstrations(data, self.config.seed, exclude=held_out), strict=False):
            text, ids = render(shown(problem.prompt, data), tokenizer, chat=data.chat)
            columns = {"answer": problem.answer, **problem.columns}
            prompt = Prompt(id=f"cold/{number}", content=problem.prompt, text=text, token_ids=ids, columns=columns)
            reply = tokenizer(problem.demonstration, add_special_tokens=False)["input_ids"]
            yield prompt, (*reply, end)

    def _keep_reference(self) -> None:
        """The reference is the policy as it stands now. Kept on disk for resumes unless the given model is just that."""
        parts = self.parts
        if self.config.model.build or self.config.cold_start.steps:
            checkpoint.save_model(parts.policy, self.run.path / "reference")
        reference = copy.deepcopy(parts.policy.model).eval().requires_grad_(False)
        self.parts = dataclasses.replace(parts, reference=reference)

    def _describe(self) -> None:
        parts, config = self.parts, self.config
        size = sum(p.numel() for p in parts.policy.model.parameters())
        self.display.message(
            f"{type(parts.policy.model).__name__}, {size / 1e6:.2f}M parameters on {parts.policy.device}; "
            f"{len(parts.problems.train)} training and {len(parts.problems.held_out)} held-out problems; objective {parts.objective.name}; "
            f"run directory {self.run.path}"
        )
        if parts.problems.overlapping:
            self.display.message(f"left out {parts.problems.overlapping} training problems that are also held out")
        if parts.problems.skipped:
            self.display.message(f"left out {parts.problems.skipped} bad rows (data.on_bad_row = skip)")
        if config.rollout.top_p < 1 or config.rollout.top_k:
            text = "sampling with top_p or top_k draws from a truncated distribution that the learner's probabilities are not: mismatch/k3 will show it; 1 and 0 are safe"
            self.run.event("warning", what=text)
            self.display.message(f"warning: {text}")


def fingerprint(problems: Problems) -> str:
    """A digest of every prompt, its place and its columns."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in (*problems.train, *problems.held_out):
        digest.update(json.dumps([prompt.id, prompt.token_ids, dict(prompt.columns)]).encode())
    return digest.hexdigest()


def held_out_accuracy(run: Path) -> tuple[Estimate | None, Estimate | None, tuple[float, float] | None, int]:
    """Held-out accuracy at the first and at the last evaluation in a run directory, greedy likewise, and the last's step."""
    rows = [r for r in read_jsonl(run / "metrics.jsonl") if r.get("eval/accuracy") is not None]
    if not rows:
        return None, None, None, 0
    before, after = (Estimate(value=r["eval/accuracy"], low=r["eval/accuracy_low"], high=r["eval/accuracy_high"]) for r in (rows[0], rows[-1]))  # fmt: skip
    first, last = rows[0].get("eval/accuracy_greedy"), rows[-1].get("eval/accuracy_greedy")
    return before, after, None if first is None or last is None else (first, last), rows[-1]["step"]

"""The training loop: start or resume, then collect, learn, evaluate, record and save until the last step or a stop.

In: the components of a run and its directory. Out: a `TrainerState` after every step. Invariant: a checkpoint holds the
state and the weights of a finished step, or of one whose evaluation is still pending. A signal interrupts sampling,
scoring and evaluation immediately. The optimizer steps of a batch finish first, because a run cannot resume from the
middle of a batch.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo import trust
from gspo.clock import Clock
from gspo.cold_start import describe, supervised_start
from gspo.config import differing, flat
from gspo.context import RunContext
from gspo.data.problems import Problems
from gspo.errors import (
    AlarmError,
    CheckpointError,
    ConfigError,
    DiskError,
    EngineError,
    MismatchError,
    NumericalError,
    RewardError,
)
from gspo.evaluation import Evaluation, evaluate
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.learner.optimizer import TUNABLE
from gspo.learner.result import LearnResult
from gspo.model.adapter import adapted
from gspo.model.source import weights_fingerprint
from gspo.objectives.adaptive_clip import at_limit
from gspo.objectives.describe import resolved
from gspo.record.alarms import HISTORY, holding
from gspo.record.metrics import drop_reasons, rollout_records, step_metrics
from gspo.record.progress import Display
from gspo.record.run_dir import RunDir, read_metrics
from gspo.record.run_format import FORMAT
from gspo.record.sinks import Sinks
from gspo.rollout.gather import CollectResult
from gspo.signals import Interrupted, StopRequest
from gspo.step import collect, learn
from gspo.types import Status

MAY_CHANGE = (
    "name",
    "run_dir",
    "steps",
    "tokens",
    "log.",
    "checkpoint.",
    "alarms.",
    "model.device",
    "model.threads",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.max_unscored_fraction",
    "learner.micro_batch_tokens",
    "learner.max_skipped",
    "learner.old_logp",
    *(f"learner.{name}" for name in TUNABLE),
)
"""Settings and sections that may change on resume. Most do not affect the training result. The others fix a run that
could not continue otherwise: `learner.old_logp` for an engine that drifts from the learner, the optimizer settings for
updates that diverge. The objective, the batch and the data are fixed: changing them would make it a different run."""

DROP_REASONS = {
    "unscored": "could not be scored",
    "overlong": "were truncated at rollout.max_tokens (objective.shape = overlong_filter drops them)",
    "empty": "were empty",
    "alone": "had no other usable completion in their group to compare with",
    "uniform": "were in groups whose completions all have the same reward (objective.keep = mixed)",
}
"""Drop reason -> how a message states it, with the dropped completions as the subject."""


class Loop:
    """The training loop of one run."""

    def __init__(self, *, run: RunDir, parts: RunContext, display: Display, sinks: Sinks, stop: StopRequest) -> None:
        self.run = run
        self.parts = parts
        self.display = display
        self.sinks = sinks
        self.stop = stop
        self.config = parts.config
        self.unscored = 0
        """Unscored completions in this process."""
        self.idle = 0
        """Steps of this process without any completion to train on."""
        self.began = 0
        """The step from which this process started or resumed."""
        self._few_updates_shown = False
        """Whether the message about fewer updates than mini-batches was shown."""
        self._fault_file: Path | None = None
        self._saved_step: int | None = None
        self._problems_fingerprint = fingerprint(parts.problems)
        # A resume reads the original weights again if they are the base of adapters or the reference of a KL penalty.
        # Their fingerprint proves that they are still the same. Other runs need only their own checkpoints.
        needs_base_weights = adapted(parts.policy.model) or (parts.objective.kl and not self.config.cold_start.steps)
        self._model_fingerprint = weights_fingerprint(self.config.model) if needs_base_weights else ""
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=HISTORY)
        self._active_alarms: set[str] = set()
        self._latest: TrainerState | None = None
        """The state that matches the current weights; `None` until the cold start has finished."""

    # ---- start, resume

    def run_from(self, begin: Path | None) -> TrainerState:
        """Start, or resume from the checkpoint `begin`, and train until the last step or a request to stop.

        The result has step 0 if no step was finished."""
        fresh = TrainerState(
            problems=self._problems_fingerprint, model=self._model_fingerprint, settings=flat(self.config)
        )
        with suppress(Interrupted), self._checkpoint_on_engine_error(), self._checkpoint_on_full_disk():
            state = self._resume(begin, fresh) if begin else self._start(fresh)
            while not self.over(state) and not self.stop:
                state = self._step(state)
                if state.step % self.config.checkpoint.every == 0:
                    self._save(state, must=False)
        if self._latest is None:
            return fresh
        self._save(self._latest)
        return self._latest

    @contextmanager
    def _checkpoint_on_engine_error(self) -> Iterator[None]:
        """Save a checkpoint before re-raising an unrecoverable engine error."""
        try:
            yield
        except (EngineError, MismatchError) as error:
            if self._latest is None:
                raise
            self._save(self._latest)
            raise type(error)(f"{error}. The run is saved: gspo train --resume {self.run.path}") from error

    @contextmanager
    def _checkpoint_on_full_disk(self) -> Iterator[None]:
        """If a step's metrics cannot be written, save them in a checkpoint if that still fits. A resume writes them."""
        try:
            yield
        except DiskError as error:
            if self._latest is not None:
                with suppress(CheckpointError, DiskError):
                    self._save(self._latest)
            raise DiskError(f"{error} ({self._resume_point()})") from error

    def _resume_point(self) -> str:
        if self._saved_step is None or self._latest is None:
            return "no step was finished before that"
        lost = f", because there was no room for a checkpoint of step {self._latest.step}"
        return f"a resume continues from step {self._saved_step}{lost if self._saved_step != self._latest.step else ''}"

    def _preflight(self, *, done: int) -> None:
        """Report the sandbox of the rewards and the adapter path of the engine. Warn if checkpoints will not fit."""
        for name, text in self.parts.rewards.about.items():
            self.run.event("reward", name=name, message=text)
            self.display.message(f"{name}: {text}")
        if about := getattr(self.parts.engine, "about", ""):
            self.run.event("engine", message=about)
            self.display.message(f"{self.config.rollout.engine}: {about}")
        keep = self.config.checkpoint.keep
        saves = 2 + (self.config.steps - done) // self.config.checkpoint.every
        existing = len(checkpoint.saved(self.run.checkpoints))
        # The oldest checkpoint is deleted only after the newest is complete, so one more than `keep` must fit.
        count = saves if not keep else max(1, min(saves, keep + 1 - existing))
        need = count * checkpoint.size_of(self.parts.policy.model)
        free = shutil.disk_usage(self.run.path).free
        if need > free:
            self._warn(
                f"checkpoints will need {need / 1e9:.3g} GB more, and {free / 1e9:.3g} GB are free at {self.run.path}: "
                "make room, lower checkpoint.keep, or raise checkpoint.every"
            )

    def over(self, state: TrainerState) -> bool:
        """Whether the run is finished in this state."""
        if not self.config.tokens:
            return state.step >= self.config.steps
        # Completions may become so short that the token budget is never reached, hence the bound on steps.
        return state.tokens >= self.config.tokens or state.step >= 2 * self.config.steps

    def planned_steps(self, state: TrainerState) -> int:
        """Number of steps after which the run will end, extrapolated if `tokens` decides."""
        steps = self.config.steps
        tokens = self.config.tokens
        if not tokens:
            return steps
        expected = math.ceil(state.step * tokens / state.tokens) if state.tokens else steps
        return state.step if self.over(state) else min(max(expected, state.step + 1), 2 * steps)

    def _set_state(self, state: TrainerState) -> TrainerState:
        self._latest = state
        return state

    def _start(self, state: TrainerState) -> TrainerState:
        # An earlier attempt may have stopped before its first checkpoint and left files behind.
        self.run.rewind(-1, {})
        self.run.event("start", steps=self.config.steps)
        self._preflight(done=0)
        describe(self.parts, self.run.path, self.display, self._warn)
        with self.run.writing("tokenizer"):
            self.parts.policy.tokenizer.save_pretrained(self.run.path / "tokenizer")
        if self.config.cold_start.steps:
            try:
                with self.stop.interruptible():
                    done = supervised_start(self.parts, self.display)
            except Interrupted:
                self.display.message("cold start interrupted: a resume repeats it, with the same result")
                raise
            self.run.event("cold_start", steps=done.steps, accuracy=done.accuracy)
        if self.parts.objective.kl:
            self._keep_reference()
        state = self._finish(self._set_state(replace(state, pending={"step": 0, "tokens/sampled": 0})))
        self._save(state)
        return state

    def _resume(self, path: Path, fresh: TrainerState) -> TrainerState:
        """Restore a checkpoint and discard everything after it."""
        state = checkpoint.read_state(path)
        if state.problems != self._problems_fingerprint:
            raise ConfigError(
                "data: the problems are not those the run began with (rows, order, template, tokenizer or the version "
                "of gspo changed); restore them, or start a new run"
            )
        if state.model != self._model_fingerprint and state.model:
            raise ConfigError(
                f"model.path: the weights in {self.config.model.path} are not those the run began with; "
                "restore them, or start a new run"
            )
        # Nothing in the run directory changes before all checks have passed and the checkpoint has been read.
        changed = self._check_settings(state.settings)
        checkpoint.restore(path, self.parts.optimizer, state.updates)
        self.run.rewind(state.step, state.offsets)
        self._write_changes(state, changed)
        self.run.event("resume", step=state.step, **({"changed": changed} if changed else {}))
        self._preflight(done=state.step)
        self.display.message(f"resumed {self.run.path} at step {state.step}")
        rows = read_metrics(self.run.path)
        self._recent.extend(rows)
        # Alarms that were already active are not reported again, and do not stop the resumed run at once.
        self._active_alarms = {alarm.name for alarm in holding(rows, self.config.alarms.steps)}
        for row in rows:
            self.display.evaluated(row)
        self._saved_step = self.began = state.step
        state = self._set_state(replace(state, settings=fresh.settings))
        return self._finish(state) if state.pending is not None else state

    def _write_changes(self, state: TrainerState, changed: Mapping[str, Any]) -> None:
        """Write changed settings into the run directory, once every check has accepted them."""
        before = state.settings.get("steps")
        steps = self.config.steps
        if steps != before:
            self.run.event("steps_changed", steps=steps, before=before)
        # Names of settings may have changed since a directory of an older format was written.
        if steps != before or changed or self.run.format < FORMAT:
            self.run.describe(self.config, resolved(self.parts.objective))

    def _check_settings(self, saved: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Report settings that differ from the checkpoint's, as [old, new]. Reject those not in `MAY_CHANGE`."""
        now = flat(self.config)
        changed = {k: [saved.get(k), now.get(k)] for k in differing([saved, now]) if k not in ("steps", "run_dir")}
        changes = [f"{key}: {before!r} then, {after!r} now" for key, (before, after) in changed.items()]
        if changes:
            self.display.message("settings changed since the checkpoint: " + "; ".join(changes))
        refused = [text for key, text in zip(changed, changes, strict=True) if not key.startswith(MAY_CHANGE)]
        if refused:
            raise ConfigError(
                f"{self.run.path}/config.toml: a resume cannot change {'; '.join(refused)}; "
                "restore it, or start a new run"
            )
        return changed

    def _keep_reference(self) -> None:
        """Make the current policy the frozen reference of the KL penalty.

        It is saved for a resume, unless `model.path` already holds the same weights."""
        parts = self.parts
        if adapted(parts.policy.model):
            # Fresh adapters change nothing: the policy with its adapters disabled is the reference, without a copy.
            self.parts = replace(parts, reference=parts.policy.model)
            return
        if self.config.model.build or self.config.cold_start.steps:
            with self.run.writing("reference"):
                checkpoint.save_model(parts.policy, self.run.path / "reference")
        reference = copy.deepcopy(parts.policy.model).eval().requires_grad_(False)
        self.parts = replace(parts, reference=reference)

    # ---- one step

    def _step(self, state: TrainerState) -> TrainerState:
        step = state.step + 1
        clock = Clock()
        parts = self._with_clip_range(state.clip_scale)
        with clock.measure("step"):
            with self.stop.interruptible():
                collected = collect(parts, step=step, cursor=state.cursor, clock=clock)
            self._report_faults(step)
            self._check_scores(collected, state)
            with clock.measure("learn"):
                learned = learn(parts, collected.gathered.groups, step=step)
        skipped = self._check_updates(step, collected, learned, state.skipped_in_row)
        tokens = state.tokens + collected.tokens
        pending = {"step": step, "tokens/sampled": tokens, **step_metrics(parts.objective, collected, learned)}
        self._write_rollouts(parts, step, collected, learned)
        learned_state = replace(
            state,
            step=step,
            cursor=collected.cursor,
            updates=parts.optimizer.updates,
            skipped_in_row=skipped,
            tokens=tokens,
            clip_scale=self._next_clip_scale(step, state.clip_scale, learned),
            pending=pending,
        )
        self._keep_micro_batch_size(step, learned)
        # The weights have changed, so this is the state to save from here on, even if the evaluation is interrupted.
        return self._finish(self._set_state(learned_state), clock)

    def _finish(self, state: TrainerState, clock: Clock | None = None) -> TrainerState:
        """Evaluate, if due, and record the step. A stop during the evaluation leaves the step pending."""
        assert state.pending is not None
        clock = clock or Clock()
        with clock.measure("step"), clock.measure("eval"), self.stop.interruptible():
            evaluation = self._evaluate(state)
        metrics = {**state.pending, **evaluation}
        timings = {"step": state.step, **{f"time/{name}_s": round(s, 6) for name, s in clock.seconds.items()}}
        self.run.metrics(metrics)
        # Step 0 is the evaluation before training. It has metrics, but no training step to time.
        if state.step:
            self.run.timings(timings)
            self.sinks.log(state.step, metrics | timings)
            self.display.step(state.step, self.planned_steps(state), metrics, timings)
        else:
            self.display.evaluated(metrics)
        state = self._set_state(replace(state, pending=None, offsets=self.run.offsets()))
        self._raise_alarms(metrics, state)
        return state

    def _write_rollouts(
        self, parts: RunContext, step: int, collected: CollectResult, learned: LearnResult | None
    ) -> None:
        """Write the completions of a step. Nothing trains on this file, so a failure is only a warning."""
        if not self.config.log.rollouts:
            return
        try:
            routes = self.config.routing.replay == "sampler"
            self.run.rollouts(step, rollout_records(parts.objective, collected, learned, routes=routes))
        except OSError as error:
            self.display.message(f"warning: step {step}: the completions could not be written ({error})")

    def _with_clip_range(self, scale: float) -> RunContext:
        """The run context with the clip range of this step."""
        if self.parts.adaptive_clip is None:
            return self.parts
        return replace(self.parts, objective=self.parts.adaptive_clip.scaled(self.parts.objective, scale))

    def _next_clip_scale(self, step: int, scale: float, learned: LearnResult | None) -> float:
        """The scale of the next step's clip range. Reports when it reaches its limit."""
        if self.parts.adaptive_clip is None or learned is None:
            return scale
        next_scale = self.parts.adaptive_clip.next_scale(self.parts.objective, scale, learned.tokens)
        limit = at_limit(next_scale)
        if limit and not at_limit(scale):
            self.run.event("clip_range_limit", step=step, message=limit)
            self.display.message(f"step {step}: the clip range stops adapting: {limit}")
        return next_scale

    def _keep_micro_batch_size(self, step: int, learned: LearnResult | None) -> None:
        """Keep the smaller micro-batches of a step that ran out of memory for the rest of this process."""
        if learned is None or not learned.halvings:
            return
        smaller = max(1, self.parts.config.learner.micro_batch_tokens >> learned.halvings)
        config = replace(self.parts.config, learner=replace(self.parts.config.learner, micro_batch_tokens=smaller))
        self.parts = replace(self.parts, config=config)
        self.run.event("out_of_memory", step=step, micro_batch_tokens=smaller)
        self.display.message(
            f"step {step}: out of memory; the same gradient was computed with micro-batches of {smaller} tokens, "
            "and later steps use that size"
        )

    # ---- failures and alarms

    def _warn(self, text: str) -> None:
        self.run.event("warning", message=text)
        self.display.message(f"warning: {text}")

    def _raise_alarms(self, metrics: Mapping[str, Any], state: TrainerState) -> None:
        """Report alarms that are newly raised. Stop the run if one of them is in `alarms.stop`."""
        self._recent.append(metrics)
        now = holding(list(self._recent), self.config.alarms.steps)
        for alarm in now:
            if alarm.name not in self._active_alarms:
                self.run.event("alarm", step=state.step, name=alarm.name, message=alarm.what)
                self.display.message(f"ALARM at step {state.step}, {alarm.name}: {alarm.what}")
        fatal = [a for a in now if a.name not in self._active_alarms and a.name in self.config.alarms.stop]
        self._active_alarms = {alarm.name for alarm in now}
        if fatal:
            self._save(state)
            raise AlarmError(
                f"step {state.step}: {fatal[0].name} (alarms.stop): {fatal[0].what}. "
                f"The run is saved: gspo train --resume {self.run.path}"
            )

    def _check_scores(self, collected: CollectResult, state: TrainerState) -> None:
        """Stop if too many completions are unscored: the reward is broken, and the scored rest is a biased sample."""
        scores = [s for g in collected.gathered.sampled for s in g.scores]
        failed = [s.failure for s in scores if s.status is Status.UNSCORED]
        if failed and not self.unscored:
            self.display.message(
                f"step {state.step + 1}: {len(failed)} of {len(scores)} completions could not be scored and are not "
                f"trained on. The first: {failed[0]}"
            )
        self.unscored += len(failed)
        if len(failed) > self.config.reward.max_unscored_fraction * len(scores):
            # The state before this step is saved: a resume repeats the step. Its completions show what failed.
            self._save(state)
            self._write_rollouts(self.parts, state.step + 1, collected, None)
            self.run.event(
                "unscored", step=state.step + 1, unscored=len(failed), completions=len(scores), first=failed[0]
            )
            raise RewardError(
                f"step {state.step + 1}: {len(failed)} of {len(scores)} completions could not be scored "
                f"(reward.max_unscored_fraction = {self.config.reward.max_unscored_fraction:g}); "
                f"the first: {failed[0]}.{self._fault_details()} Fix the reward, then: {self._resume_command()}"
            )

    def _report_faults(self, step: int) -> None:
        """Record and report each new failure of a reward function. The run continues if the file cannot be written."""
        for fault in self.parts.rewards.new_faults():
            try:
                self._fault_file = self.run.reward_error(f"step {step}: {fault}")
                where = f"; details: {self._fault_file}"
            except OSError as error:
                where = f" (the details could not be written: {error})"
            self.run.event("reward_failed", step=step, function=fault.function, message=fault.failure)
            self.display.message(f"step {step}: {fault.failure}{where}")

    def _fault_details(self) -> str:
        return f" Details: {self._fault_file}." if self._fault_file else ""

    def _resume_command(self) -> str:
        """The command that resumes after a fix of the reward. A changed reward file needs `--trust-run`."""
        flag = " --trust-run" if trust.reward_code(self.config) else ""
        return f"gspo train --resume {self.run.path}{flag}"

    def _check_first_evaluation(self, done: Evaluation) -> None:
        """Stop before the first step if the reward cannot score a single completion."""
        failed = [s.failure for scores in done.scores for s in scores if s.status is Status.UNSCORED]
        if failed and len(failed) == sum(map(len, done.scores)):
            raise RewardError(
                f"the first evaluation: none of {len(failed)} completions could be scored; the first: {failed[0]}."
                f"{self._fault_details()} Fix the reward or the answers of the held-out problems, "
                f"then: {self._resume_command()}"
            )

    def _check_updates(self, step: int, collected: CollectResult, learned: LearnResult | None, in_row: int) -> int:
        """Report skipped updates and steps without data to train on. Stop after too many skipped updates in a row."""
        if learned is None:
            reasons = drop_reasons(self.parts.objective, collected, None)
            counts = ", ".join(f"{count} {DROP_REASONS[reason]}" for reason, count in reasons.items())
            self.idle += 1
            self.run.event("no_trainable_samples", step=step, reasons=reasons)
            self.display.message(
                f"step {step}: no group to train on (of its completions, {counts}); the policy is unchanged"
            )
            return in_row
        if len(learned.updates) < self.config.learner.mini_batches:
            self._report_few_updates(step, len(learned.updates))
        for index, update in enumerate(learned.updates):
            in_row = 0 if update.applied else in_row + 1
            if not update.applied:
                loss = float(learned.losses[index].total)
                norm = update.grad_norm
                self.run.event(
                    "update_skipped", step=step, mini_batch=index, loss=loss, grad_norm=norm, reason=update.skipped
                )
                self.display.message(
                    f"step {step}: update {index} skipped, loss {loss:g}, gradient norm {norm:g}: {update.skipped}"
                )
            if in_row >= self.config.learner.max_skipped:
                lower = self.config.learner.learning_rate / 3
                raise NumericalError(
                    f"step {step}: {in_row} updates in a row were skipped, the last because of {update.skipped} "
                    "(learner.max_skipped); resume from the last checkpoint with a lower learning rate: "
                    f"gspo train --resume {self.run.path} --learner.learning_rate={lower:.1g}"
                )
        return in_row

    def _report_few_updates(self, step: int, updates: int) -> None:
        """Record a step with fewer updates than mini-batches. Only the first such step of a process shows a message."""
        self.run.event("fewer_updates", step=step, updates=updates)
        if not self._few_updates_shown:
            self._few_updates_shown = True
            self.display.message(
                f"warning: step {step}: only {updates} completions could be trained on, so there were {updates} "
                f"optimizer steps instead of {self.config.learner.mini_batches} (learner.mini_batches)"
            )

    def _save(self, state: TrainerState, *, must: bool = True) -> None:
        """Write a checkpoint. If that fails (a full disk), raise if it `must` be saved, otherwise warn and continue."""
        if self._saved_step == state.step:
            return
        try:
            self.run.check_held()
            saved = checkpoint.save(
                self.run.checkpoints, self.parts.policy, self.parts.optimizer, state, keep=self.config.checkpoint.keep
            )
        except OSError as error:
            text = f"the checkpoint of step {state.step} could not be written ({error}); the previous one is intact"
            with suppress(OSError):
                self.run.event("checkpoint_failed", step=state.step, message=str(error))
            if must:
                raise CheckpointError(f"{text}; make room, then: gspo train --resume {self.run.path}") from error
            self.display.message(f"warning: {text}; the next attempt is in {self.config.checkpoint.every} steps")
            return
        self._saved_step = state.step
        # This process has run the model code that it saves with the weights, so a resume may trust it.
        trust.remember(self.run.path, trust.model_code(self.config.model, [saved]))
        self.run.event("checkpoint", step=state.step)

    # ---- evaluation

    def _evaluate(self, state: TrainerState) -> dict[str, Any]:
        settings = self.config.eval
        if not settings.every or (state.step % settings.every and not self.over(state)):
            return {}
        done = self._evaluate_held_out()
        self._report_faults(state.step)
        if state.step == 0:
            self._check_first_evaluation(done)
        sampled = done.accuracy
        metrics = {
            "eval/unscored": done.unscored,
            "eval/accuracy": sampled.value,
            "eval/accuracy_low": sampled.low,
            "eval/accuracy_high": sampled.high,
            "eval/length_mean": done.mean_length,
        }
        if done.greedy is not None:
            metrics["eval/accuracy_greedy"] = done.greedy.value
        return metrics

    def _evaluate_held_out(self) -> Evaluation:
        parts = self.parts
        settings = self.config.eval
        return evaluate(
            parts.engine,
            parts.rewards,
            parts.problems.held_out,
            samples=settings.samples,
            greedy=settings.greedy,
            sampling=self.config.rollout.sampling,
            seed=self.config.seed,
            stream="eval",
            version=parts.optimizer.updates,
        )


def fingerprint(problems: Problems) -> str:
    """A digest of every problem: its prompt, position and columns."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in (*problems.train, *problems.held_out):
        digest.update(json.dumps([prompt.id, prompt.token_ids, dict(prompt.columns)]).encode())
    return digest.hexdigest()

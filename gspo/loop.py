"""The steps of a run: collect, learn, evaluate, write, save; begin, go on, stop.

In: the parts of a run and its directory. Out: a `TrainerState` after every step. Invariant: what is saved is always the
state of a finished step, or of one whose evaluation is still to come, with that step's weights. A signal is obeyed at once
while replies are sampled, scored or evaluated; a batch that is being learned from is learned from to its end, because half
of its updates are no state that anything could go on from.
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
from gspo.record.alarms import HISTORY, holding
from gspo.record.metrics import reasons_left_out, rollout_records, step_metrics
from gspo.record.progress import Display
from gspo.record.run_dir import RunDir, read_jsonl
from gspo.record.sinks import Sinks
from gspo.rollout.gather import CollectResult
from gspo.signals import Interrupted, StopRequest
from gspo.step import collect, learn
from gspo.types import Status

MAY_CHANGE = (
    "name", "run_dir", "steps", "tokens", "log.", "checkpoint.", "alarms.", "model.device", "model.threads", "reward.workers",
    "reward.timeout_s", "reward.memory_mb", "reward.max_unscored_fraction", "learner.micro_batch_tokens", "learner.max_skipped",
    "learner.old_logp", *(f"learner.{name}" for name in TUNABLE),
)  # fmt: skip
"""Settings (or sections) that a resume may find changed. Most do not change what is learned. The others are the remedies for
a run that could not continue otherwise: `learner.old_logp` for an engine that has drifted too far, the optimizer's step for
updates that diverge. The objective, the batch and the data stay: with others it would be another run."""

LEFT_OUT = {
    "unscored": "could not be scored",
    "overlong": "were cut at rollout.max_tokens (objective.shape = overlong_filter leaves them out)",
    "empty": "were empty",
    "alone": "had no other left in their group to be compared with",
    "not mixed": "were in groups whose replies all have the same reward (objective.keep = mixed)",
}
"""What became of replies that were not learned from, in words."""


class Loop:
    """The steps of one run."""

    def __init__(self, *, run: RunDir, parts: RunContext, display: Display, sinks: Sinks, stop: StopRequest) -> None:
        self.run, self.parts, self.display, self.sinks, self.stop = run, parts, display, sinks, stop
        self.config = parts.config
        self.unscored = 0
        self.idle = 0
        """Steps of this process that trained on nothing."""
        self.began = 0
        """The step that this process went on from."""
        self._few = False
        """Whether a step was told of that had fewer updates than mini-batches."""
        self._fault_file: Path | None = None
        self._saved: int | None = None
        self._fingerprint = fingerprint(parts.problems)
        read_again = adapted(parts.policy.model) or (parts.objective.kl and not self.config.cold_start.steps)
        self._given = weights_fingerprint(self.config.model) if read_again else ""
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=HISTORY)
        self._alarms: set[str] = set()
        self._last: TrainerState | None = None
        """The state that the weights are now in; None until the cold start has ended."""

    # ---- begin, go on

    def run_from(self, begin: Path | None) -> TrainerState:
        """Start, or go on from a checkpoint, until the last step or a request to stop. Step 0: it did not get anywhere."""
        fresh = TrainerState(problems=self._fingerprint, model=self._given, settings=flat(self.config))
        with suppress(Interrupted), self._saved_without_engine(), self._saved_without_room():
            state = self._begin_from(begin, fresh) if begin else self._begin_fresh(fresh)
            while not self.over(state) and not self.stop:
                state = self._step(state)
                if state.step % self.config.checkpoint.every == 0:
                    self._save(state, must=False)
        if self._last is None:
            return fresh
        self._save(self._last)
        return self._last

    @contextmanager
    def _saved_without_engine(self) -> Iterator[None]:
        """A sampling engine that fails for good, or is too far from the learner, ends the run, not what it has learned."""
        try:
            yield
        except (EngineError, MismatchError) as error:
            if self._last is None:
                raise
            self._save(self._last)
            raise type(error)(f"{error}. The run is saved: gspo train --resume {self.run.path}") from error

    @contextmanager
    def _saved_without_room(self) -> Iterator[None]:
        """A step whose numbers cannot be written is saved with them, where there is room for that; a resume writes them."""
        try:
            yield
        except DiskError as error:
            if self._last is not None:
                with suppress(CheckpointError, DiskError):
                    self._save(self._last)
            raise DiskError(f"{error} ({self._says_saved()})") from error

    def _says_saved(self) -> str:
        if self._saved is None or self._last is None:
            return "no step was finished before that"
        lost = f", because there was no room for a checkpoint of step {self._last.step}"
        return f"it goes on from step {self._saved}{lost if self._saved != self._last.step else ''}"

    def _preflight(self, *, done: int) -> None:
        """Before anything is spent: which sandbox rewards use, how an adapter reaches the engine, and whether the checkpoints
        will fit on the disk."""
        for name, text in self.parts.rewards.about.items():
            self.run.event("reward", name=name, what=text)
            self.display.message(f"{name}: {text}")
        if about := getattr(self.parts.engine, "about", ""):
            self.run.event("engine", what=about)
            self.display.message(f"{self.config.rollout.engine}: {about}")
        keep = self.config.checkpoint.keep
        saves = 2 + (self.config.steps - done) // self.config.checkpoint.every
        there = len(checkpoint.saved(self.run.checkpoints))
        count = saves if not keep else max(1, min(saves, keep + 1 - there))
        need, free = count * checkpoint.size_of(self.parts.policy.model), shutil.disk_usage(self.run.path).free
        if need > free:
            self._warn(f"checkpoints will need {need / 1e9:.3g} GB more, and {free / 1e9:.3g} GB are free at {self.run.path}: make room, lower checkpoint.keep, or raise checkpoint.every")  # fmt: skip

    def over(self, state: TrainerState) -> bool:
        """Whether a run that has come this far is finished."""
        if not self.config.tokens:
            return state.step >= self.config.steps
        return state.tokens >= self.config.tokens or state.step >= 2 * self.config.steps

    def planned_steps(self, state: TrainerState) -> int:
        """After how many steps the run will end; where sampled tokens decide, at the pace so far."""
        steps, tokens = self.config.steps, self.config.tokens
        if not tokens:
            return steps
        expected = math.ceil(state.step * tokens / state.tokens) if state.tokens else steps
        return state.step if self.over(state) else min(max(expected, state.step + 1), 2 * steps)

    def _set_state(self, state: TrainerState) -> TrainerState:
        self._last = state
        return state

    def _begin_fresh(self, state: TrainerState) -> TrainerState:
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
                self.display.message("cold start interrupted: a resume begins it anew, with the same outcome")
                raise
            self.run.event("cold start", steps=done.steps, accuracy=done.accuracy)
        if self.parts.objective.kl:
            self._keep_reference()
        state = self._finish(self._set_state(replace(state, pending={"step": 0, "tokens/sampled": 0})))
        self._save(state)
        return state

    def _begin_from(self, path: Path, fresh: TrainerState) -> TrainerState:
        """Restore a checkpoint and forget everything after it."""
        state = checkpoint.read_state(path)
        if state.problems != self._fingerprint:
            raise ConfigError("data: the problems are not those the run began with (rows, order, template, tokenizer or the version of gspo changed); put them back, or start a new run")  # fmt: skip
        if state.model != self._given and state.model:
            raise ConfigError(f"model.path: the weights in {self.config.model.path} are not those the run began with; put them back, or start a new run")  # fmt: skip
        changed = self._check_settings(state.settings)
        checkpoint.restore(path, self.parts.optimizer, state.updates)
        self.run.rewind(state.step, state.offsets)
        self._write_changes(state, changed)
        self.run.event("resume", step=state.step, **({"changed": changed} if changed else {}))
        self._preflight(done=state.step)
        self.display.message(f"resumed {self.run.path} at step {state.step}")
        rows = read_jsonl(self.run.path / "metrics.jsonl")
        self._recent.extend(rows)
        self._alarms = {alarm.name for alarm in holding(rows, self.config.alarms.steps)}
        for row in rows:
            self.display.evaluated(row)
        self._saved = self.began = state.step
        state = self._set_state(replace(state, settings=fresh.settings))
        return self._finish(state) if state.pending is not None else state

    def _write_changes(self, state: TrainerState, changed: Mapping[str, Any]) -> None:
        """Write new settings into the run directory, now that nothing can refuse them any more."""
        before, steps = state.settings.get("steps"), self.config.steps
        if steps != before:
            self.run.event("new end", steps=steps, before=before)
        if steps != before or changed:
            self.run.describe(self.config)

    def _check_settings(self, saved: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Say which settings differ from those of the checkpoint, then and now; refuse what would make it another run."""
        now = flat(self.config)
        changed = {k: [saved.get(k), now.get(k)] for k in differing([saved, now]) if k not in ("steps", "run_dir")}
        said = [f"{key}: {before!r} then, {after!r} now" for key, (before, after) in changed.items()]
        if said:
            self.display.message("settings changed since the checkpoint: " + "; ".join(said))
        refused = [text for key, text in zip(changed, said, strict=True) if not key.startswith(MAY_CHANGE)]
        if refused:
            raise ConfigError(f"{self.run.path}/config.toml: a resume cannot change {'; '.join(refused)}; put it back, or start a new run")  # fmt: skip
        return changed

    def _keep_reference(self) -> None:
        """The reference is the policy as it stands now. Kept on disk for resumes unless the given model is just that. With
        adapters it needs no copy: they have done nothing yet, so it is the policy with its adapters switched off."""
        parts = self.parts
        if adapted(parts.policy.model):
            self.parts = replace(parts, reference=parts.policy.model)
            return
        if self.config.model.build or self.config.cold_start.steps:
            with self.run.writing("reference"):
                checkpoint.save_model(parts.policy, self.run.path / "reference")
        reference = copy.deepcopy(parts.policy.model).eval().requires_grad_(False)
        self.parts = replace(parts, reference=reference)

    # ---- one step

    def _step(self, state: TrainerState) -> TrainerState:
        step, clock = state.step + 1, Clock()
        parts = self._with_range(state.clip_scale)
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
            state, step=step, cursor=collected.cursor, updates=parts.optimizer.updates, skipped_in_row=skipped, tokens=tokens,
            clip_scale=self._next_range(step, state.clip_scale, learned), pending=pending,
        )  # fmt: skip
        self._remember_memory(step, learned)
        return self._finish(self._set_state(learned_state), clock)

    def _finish(self, state: TrainerState, clock: Clock | None = None) -> TrainerState:
        """Evaluate, if it is time, and write the step down. A stop during it leaves the step pending."""
        assert state.pending is not None
        clock = clock or Clock()
        with clock.measure("step"), clock.measure("eval"), self.stop.interruptible():
            evaluation = self._evaluate(state)
        metrics = {**state.pending, **evaluation}
        timings = {"step": state.step, **{f"time/{name}_s": round(s, 6) for name, s in clock.seconds.items()}}
        self.run.metrics(metrics)
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
        """Replies are for looking at: training goes on without them."""
        if not self.config.log.rollouts:
            return
        try:
            routes = self.config.routing.replay == "sampler"
            self.run.rollouts(step, rollout_records(parts.objective, collected, learned, routes=routes))
        except OSError as error:
            self.display.message(f"warning: step {step}: the replies could not be written ({error})")

    def _with_range(self, scale: float) -> RunContext:
        """The parts with the clip range that this step uses."""
        if self.parts.adaptive_clip is None:
            return self.parts
        return replace(self.parts, objective=self.parts.adaptive_clip.scaled(self.parts.objective, scale))

    def _next_range(self, step: int, scale: float, learned: LearnResult | None) -> float:
        """The scale of the next step's clip range; says so when it can adapt no further."""
        if self.parts.adaptive_clip is None or learned is None:
            return scale
        wanted = self.parts.adaptive_clip.next_scale(self.parts.objective, scale, learned.tokens)
        why = at_limit(wanted)
        if why and not at_limit(scale):
            self.run.event("clip range at its limit", step=step, what=why)
            self.display.message(f"step {step}: the clip range stops adapting: {why}")
        return wanted

    def _remember_memory(self, step: int, learned: LearnResult | None) -> None:
        """Micro-batches that did not fit once are not tried at that size again."""
        if learned is None or not learned.halvings:
            return
        smaller = max(1, self.parts.config.learner.micro_batch_tokens >> learned.halvings)
        config = replace(self.parts.config, learner=replace(self.parts.config.learner, micro_batch_tokens=smaller))
        self.parts = replace(self.parts, config=config)
        self.run.event("out of memory", step=step, micro_batch_tokens=smaller)
        self.display.message(
            f"step {step}: out of memory; the same gradient was computed with micro-batches of {smaller} tokens, which are used from now on"
        )

    # ---- what may be wrong

    def _warn(self, text: str) -> None:
        self.run.event("warning", what=text)
        self.display.message(f"warning: {text}")

    def _raise_alarms(self, metrics: Mapping[str, Any], state: TrainerState) -> None:
        """Say when an alarm begins to hold; stop at those that the config says are fatal."""
        self._recent.append(metrics)
        now = holding(list(self._recent), self.config.alarms.steps)
        for alarm in now:
            if alarm.name not in self._alarms:
                self.run.event("alarm", step=state.step, name=alarm.name, what=alarm.what)
                self.display.message(f"ALARM at step {state.step}, {alarm.name}: {alarm.what}")
        new = [alarm for alarm in now if alarm.name not in self._alarms and alarm.name in self.config.alarms.stop]
        self._alarms = {alarm.name for alarm in now}
        if new:
            self._save(state)
            raise AlarmError(f"step {state.step}: {new[0].name} (alarms.stop): {new[0].what}. The run is saved: gspo train --resume {self.run.path}")  # fmt: skip

    def _check_scores(self, collected: CollectResult, state: TrainerState) -> None:
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
            self._write_rollouts(self.parts, state.step + 1, collected, None)
            self.run.event("unscored", step=state.step + 1, unscored=len(failed), replies=len(scores), first=failed[0])
            raise RewardError(
                f"step {state.step + 1}: {len(failed)} of {len(scores)} replies could not be scored (reward.max_unscored_fraction = "
                f"{self.config.reward.max_unscored_fraction:g}); the first: {failed[0]}.{self._evidence()} Fix the reward, then: "
                f"{self._resume_fixed()}"
            )

    def _report_faults(self, step: int) -> None:
        """Write down, and say, each new way in which a reward function fails. The run may go on without the file."""
        for fault in self.parts.rewards.new_faults():
            try:
                self._fault_file = self.run.reward_error(f"step {step}: {fault}")
                where = f"; details: {self._fault_file}"
            except OSError as error:
                where = f" (and that could not be written down: {error})"
            self.run.event("reward failed", step=step, function=fault.function, what=fault.failure)
            self.display.message(f"step {step}: {fault.failure}{where}")

    def _evidence(self) -> str:
        return f" Details: {self._fault_file}." if self._fault_file else ""

    def _resume_fixed(self) -> str:
        """The command that continues the run after its reward was edited: a changed file is asked for again."""
        flag = " --trust-run" if trust.reward_code(self.config) else ""
        return f"gspo train --resume {self.run.path}{flag}"

    def _check_first_evaluation(self, done: Evaluation) -> None:
        """A reward that can score nothing is better known before the first step than after it."""
        failed = [s.failure for scores in done.scores for s in scores if s.status is Status.UNSCORED]
        if failed and len(failed) == sum(map(len, done.scores)):
            raise RewardError(
                f"the first evaluation: none of {len(failed)} completions could be scored; the first: {failed[0]}."
                f"{self._evidence()} Fix the reward or the answers of the held-out problems, then: {self._resume_fixed()}"
            )

    def _check_updates(self, step: int, collected: CollectResult, learned: LearnResult | None, in_row: int) -> int:
        """Say when an update was skipped, or when there was nothing to learn from; stop when it keeps happening."""
        if learned is None:
            reasons = reasons_left_out(self.parts.objective, collected, None)
            told = ", ".join(f"{count} {LEFT_OUT[reason]}" for reason, count in reasons.items())
            self.idle += 1
            self.run.event("nothing to learn", step=step, reasons=reasons)
            self.display.message(
                f"step {step}: no group to learn from (of its replies {told}); the policy stays as it is"
            )
            return in_row
        if len(learned.updates) < self.config.learner.mini_batches:
            self._warn_of_few(step, len(learned.updates))
        for index, update in enumerate(learned.updates):
            in_row = 0 if update.applied else in_row + 1
            if not update.applied:
                loss = float(learned.losses[index].total)
                self.run.event("skipped update", step=step, mini_batch=index, loss=loss, grad_norm=update.grad_norm, why=update.skipped)  # fmt: skip
                self.display.message(f"step {step}: update {index} skipped, loss {loss:g}, gradient norm {update.grad_norm:g}: {update.skipped}")  # fmt: skip
            if in_row >= self.config.learner.max_skipped:
                raise NumericalError(
                    f"step {step}: {in_row} updates in a row were skipped, the last because of {update.skipped} (learner.max_skipped); resume "
                    f"from the last checkpoint with a lower rate: gspo train --resume {self.run.path} --learner.learning_rate={self.config.learner.learning_rate / 3:.1g}"
                )
        return in_row

    def _warn_of_few(self, step: int, updates: int) -> None:
        """Fewer replies than mini-batches are left to train on. An event at every such step, a message at the first."""
        self.run.event("fewer updates", step=step, updates=updates)
        if not self._few:
            self._few = True
            self.display.message(
                f"warning: step {step}: only {updates} replies were left to train on, so there were {updates} optimizer steps "
                f"instead of {self.config.learner.mini_batches} (learner.mini_batches)"
            )

    def _save(self, state: TrainerState, *, must: bool = True) -> None:
        """Write a checkpoint. One that cannot be written (a full disk) leaves the last one; training goes on unless it must."""
        if self._saved == state.step:
            return
        try:
            self.run.check_held()
            saved = checkpoint.save(
                self.run.checkpoints, self.parts.policy, self.parts.optimizer, state, keep=self.config.checkpoint.keep
            )
        except OSError as error:
            text = f"the checkpoint of step {state.step} could not be written ({error}); the one before it is untouched"
            with suppress(OSError):
                self.run.event("checkpoint failed", step=state.step, what=str(error))
            if must:
                raise CheckpointError(f"{text}; make room, then: gspo train --resume {self.run.path}") from error
            self.display.message(f"warning: {text}; the next one is tried in {self.config.checkpoint.every} steps")
            return
        self._saved = state.step
        # Model code that this process has run and saved with its weights is not a stranger's when the run resumes.
        trust.remember(self.run.path, trust.model_code(self.config.model, [saved]))
        self.run.event("checkpoint", step=state.step)

    # ---- evaluation

    def _evaluate(self, state: TrainerState) -> dict[str, Any]:
        settings = self.config.eval
        if not settings.every or (state.step % settings.every and not self.over(state)):
            return {}
        done = self._held_out()
        self._report_faults(state.step)
        if state.step == 0:
            self._check_first_evaluation(done)
        sampled = done.accuracy
        values = {
            "eval/unscored": done.unscored,
            "eval/accuracy": sampled.value,
            "eval/accuracy_low": sampled.low,
            "eval/accuracy_high": sampled.high,
            "eval/length_mean": done.mean_length,
        }
        if done.greedy is not None:
            values["eval/accuracy_greedy"] = done.greedy.value
        return values

    def _held_out(self) -> Evaluation:
        parts, settings = self.parts, self.config.eval
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
    """A digest of every prompt, its place and its columns."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in (*problems.train, *problems.held_out):
        digest.update(json.dumps([prompt.id, prompt.token_ids, dict(prompt.columns)]).encode())
    return digest.hexdigest()

"""The training loop: start or resume, then collect, learn, evaluate, record and save until the last step or a stop.

    take a batch  ->  learn  ->  evaluate  ->  record  ->  save          `Loop._step` is one iteration

`collection/collector.py` collects the batches: in turn with training or, with `rollout.max_lag`, ahead of it.

In: the components of a run and its directory. Out: a `TrainerState` after every step. Invariant: a checkpoint holds the
state and the weights of a finished step, or of one whose evaluation is still pending. A signal interrupts sampling,
scoring and evaluation immediately. The optimizer steps of a batch finish first, because a run cannot resume from the
middle of a batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.activity import activity
from gspo.build import load_reference, saved_model
from gspo.callbacks import Callbacks
from gspo.checkpoints.resume_checks import (
    change_texts,
    changed_objective,
    changed_settings,
    check_data_and_model,
    check_may_change,
    initial_state,
)
from gspo.checkpoints.rollback import RollBack, carry_out, record_rollback, rollback_or
from gspo.checkpoints.saving import Saver
from gspo.clock import Clock
from gspo.cold_start import run_cold_start
from gspo.collection.collector import Ahead, Collector, InTurn
from gspo.collection.span_collector import InTurns
from gspo.config import EvalConfig, EvalSetConfig
from gspo.context import RunContext
from gspo.errors import CheckpointError, DiskError, EngineError, MismatchError
from gspo.evaluation import Evaluation, evaluate
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.learner.result import LearnResult
from gspo.model.adapter import adapted
from gspo.model.compiled_layers import compile_seconds
from gspo.model.load import reload_weights
from gspo.model.save import save_model
from gspo.objectives.adaptive_clip import ClipRange, at_limit
from gspo.objectives.describe import resolved
from gspo.ranks.environment import resume_command
from gspo.ranks.usage import RankUsage, exchange_usage
from gspo.record.eval_metrics import rank_timings, step_eval_metrics, step_timings
from gspo.record.held_out import HeldOutScores
from gspo.record.incidents import Incidents, skipped_in_row
from gspo.record.ledger import Ledger
from gspo.record.metrics import evaluation_records, lag_metrics, rollout_records, step_metrics
from gspo.record.progress import Display
from gspo.record.rollbacks import SKIPPED, Rollback
from gspo.record.run_dir import RunDir, read_metrics
from gspo.record.run_format import FORMAT
from gspo.record.sinks import Sinks
from gspo.record.start_report import check_disk_space, report_components, report_setup
from gspo.reduction import combined
from gspo.rollout.gather import CollectResult
from gspo.signals import Interrupted, StopRequest
from gspo.step import learn
from gspo.types import Prompt, without_columns


class Loop:
    """The training loop of one run."""

    def __init__(
        self,
        *,
        run_dir: RunDir,
        context: RunContext,
        display: Display,
        sinks: Sinks,
        stop: StopRequest,
        callbacks: Callbacks,
    ) -> None:
        self.run_dir = run_dir
        self.context = context
        self.display = display
        self.sinks = sinks
        self.stop = stop
        self.callbacks = callbacks
        self.config = context.config
        """The settings of the run. `context.config` may have smaller micro-batches, after a step ran out of memory."""
        self.incidents = Incidents(run_dir=run_dir, display=display, config=context.config)
        self.held_out = HeldOutScores(context.config.eval)
        self.saver = Saver(run_dir=run_dir, context=context, display=display, held_out=self.held_out)
        self.collector: Collector | None = None
        """Collects the batches, once the run has started."""
        self.start_step = 0
        """The step from which this process started or resumed."""
        self._latest: TrainerState | None = None
        """The state that matches the current weights; `None` until the cold start has finished, and if the weights must
        not be saved."""

    def run_from(self, begin: Path | None) -> TrainerState:
        """Start, or resume from the checkpoint `begin`, and train until the last step or a request to stop.

        The result has step 0 if no step was finished."""
        initial = initial_state(self.context)
        try:
            with suppress(Interrupted), self._checkpoint_on_engine_error(), self._checkpoint_on_full_disk():
                self._train(begin, initial)
            if self._latest is None:
                return initial
            self.saver.save(self._latest)
            return self._latest
        finally:
            if self.collector is not None:
                self.collector.close()

    def _train(self, begin: Path | None, initial: TrainerState) -> None:
        """Run all steps. `_latest` is the state after the last one."""
        self.callbacks.start(int(begin.name) if begin else 0, self.config.steps)
        if self.context.sampler is not None and begin is None:
            self.context.sampler.start()  # it loads the model while this process starts
        state = self._resume(begin, initial) if begin else self._start(initial)
        if state.pending or not self.is_finished(state):
            self._collect_from(state, begin)
        while (state.pending or not self.is_finished(state)) and not self.stop:
            try:
                # A run may resume at a step whose evaluation was interrupted.
                with activity(f"step {state.step + (state.pending is None)}/{self.planned_steps(state)}"):
                    state = self._evaluate_and_record(state) if state.pending else self._step(state)
            except RollBack as rollback:
                state = self._roll_back(rollback.record)
                self._collect_from(state, None)
                continue
            if state.step % self.config.checkpoint.every == 0:
                self.saver.save(state, required=False)

    def _collect_from(self, state: TrainerState, begin: Path | None) -> None:
        """Start to collect the batches after `state`. The checkpoint `begin` may have kept some of them."""
        if self.collector is not None:
            self.collector.close()
        sampler = self.context.sampler
        if sampler is None:
            self.collector = InTurn(self.context, state)
            return
        kept = None if begin is None else checkpoint.read_in_flight(begin)
        # After a rollback, the batches of the checkpoint belong to the steps that were abandoned.
        if begin is not None and checkpoint.read_state(begin).rollbacks != state.rollbacks:
            kept = None
        kind = InTurns if self.config.rollout.span_tokens else Ahead
        self.collector = kind(self.context, sampler, Ledger(self.run_dir), state, kept)
        self.saver.in_flight = self.collector.in_flight

    def is_finished(self, state: TrainerState) -> bool:
        """Whether the run is finished in this state."""
        if self.held_out.end_run:
            return True
        if not self.config.tokens:
            return state.step >= self.config.steps
        # Completions may become so short that the token budget is never reached, hence the bound on steps.
        return state.tokens >= self.config.tokens or state.step >= 2 * self.config.steps

    def planned_steps(self, state: TrainerState) -> int:
        """Number of steps after which the run will end, extrapolated if `tokens` decides."""
        if self.held_out.end_run:
            return state.step
        steps = self.config.steps
        tokens = self.config.tokens
        if not tokens:
            return steps
        expected = math.ceil(state.step * tokens / state.tokens) if state.tokens else steps
        return state.step if self.is_finished(state) else min(max(expected, state.step + 1), 2 * steps)

    # ---- one step

    def _step(self, state: TrainerState) -> TrainerState:
        """Take a batch, train on it, evaluate if it is time, and record all of it."""
        step = state.step + 1
        clock = Clock()
        collector = self.collector
        assert collector is not None
        # The step trains with the scaled clip range. `self.context` keeps the range of the settings, because
        # `_next_clip_scale` measures how far ratios move in units of it.
        context = self._with_clip_range(state)
        with clock.measure("step"):
            collected = self._take(collector, clock)
            self._check_scores(step, collected, state)
            compiled_before = compile_seconds()
            groups = collected.rollouts.groups
            # Of several ranks, each trains on a part of the groups.
            with (
                clock.measure("learn"),
                context.ranks.together("learn", groups=without_columns(groups), step=step, clip=_clip_range(state)),
                context.ranks.clock.measure("learn"),
            ):
                learned = learn(context, groups, step=step)
            if compile_seconds() > compiled_before:
                clock.add("compile", compile_seconds() - compiled_before)
            if learned is not None and learned.routed is not None:
                clock.add("routing", learned.routed.seconds)
        # One entry, because `learn` returns what all ranks have computed, and the leader has all completions.
        found = step_metrics(context.objective, collected, learned, self.config.rollout.sampling)
        if collected.weights is not None:
            found |= lag_metrics(
                collected, learned, step=state.step, updates=state.updates, settings=self.config.rollout
            )
        metrics = combined([found])
        tokens = state.tokens + collected.tokens
        # The weights have changed, so this is the state to save from here on, even if the evaluation is interrupted or
        # one of the reports below cannot be written.
        learned_state = self._set_state(
            replace(
                state,
                step=step,
                rollout=collected.after,
                updates=context.optimizer.updates,
                skipped_in_row=skipped_in_row(learned, state.skipped_in_row),
                tokens=tokens,
                clip_scale=self._next_clip_scale(state.clip_scale, learned),
                pending={"step": step, "tokens/sampled": tokens, **metrics},
            )
        )
        try:
            collector.trained(learned_state)
        finally:  # also if there is no room for the sampler's weights: the step is done, and a replay needs these
            self._write_rollouts(step, context, collected, learned)
        with context.ranks.together("exchange_usage"):
            usage = exchange_usage(context.ranks, context.policy.device)
        self.sinks.completions(step, collected.rollouts.groups)
        self._check_updates(state, context, collected, learned)
        self._report_clip_limit(step, state.clip_scale, learned_state.clip_scale)
        self._keep_micro_batch_size(step, learned)
        return self._evaluate_and_record(learned_state, clock, usage)

    def _check_updates(
        self, state: TrainerState, context: RunContext, collected: CollectResult, learned: LearnResult | None
    ) -> None:
        """Report the updates after `state`, and stop or roll back if too many were skipped."""
        step, in_row = state.step + 1, state.skipped_in_row
        error = self.incidents.check_updates(step, context.objective, collected, learned, in_row)
        if error is None:
            return
        sampled = replace(state, rollout=collected.after, tokens=state.tokens + collected.tokens)
        last_good = self.incidents.last_good_before_skipped(step, in_row)
        raise rollback_or(error, self.run_dir, self.config, sampled, alarm=SKIPPED, step=step, last_good=last_good)

    def _take(self, collector: Collector, clock: Clock) -> CollectResult:
        """The batch of the next step. A stop interrupts the wait for it, or discards what is being collected."""
        with self.stop.interruptible():
            collector.collect(clock)
        collected = collector.take()
        self.incidents.report_faults(collected.batch, self.context.rewards)
        return collected

    def _evaluate_and_record(
        self, state: TrainerState, clock: Clock | None = None, ranks: Sequence[RankUsage] = ()
    ) -> TrainerState:
        """Evaluate, if due, and record the step. A stop during the evaluation leaves the step pending."""
        assert state.pending is not None
        clock = clock or Clock()
        with clock.measure("step"), clock.measure("eval"), self.stop.interruptible():
            evaluations = self._evaluate(state)
        self._write_evaluations(state.step, evaluations)
        metrics = {**state.pending, **step_eval_metrics(evaluations)}
        # Step 0 has no timings: the usage of its evaluation is counted in step 1.
        usage = self.context.rewards.take_usage() if state.step else {}
        lag = self.collector.timings() if self.collector is not None else {}
        self._record(state, metrics, {**step_timings(state.step, clock, usage, lag), **rank_timings(ranks)})
        state = self._set_state(replace(state, pending=None, offsets=self.run_dir.offsets()))
        self._check_alarms(state, metrics)
        self._check_held_out(state, metrics)
        self._call_back(state, metrics, evaluated=bool(evaluations))
        return state

    def _call_back(self, state: TrainerState, metrics: Mapping[str, Any], *, evaluated: bool) -> None:
        """Tell the user's callbacks about a recorded step. If one of them fails, the step is saved before the run ends
        with its error."""
        try:
            self.callbacks.recorded(state.step, self.planned_steps(state), metrics, evaluated=evaluated)
        except BaseException:
            self.saver.save(state, required=False)
            raise

    def _check_alarms(self, state: TrainerState, metrics: Mapping[str, Any]) -> None:
        """Report new alarms, and stop or roll back for one that is to."""
        if any(alarm.name in self.config.alarms.rollback for alarm in self.incidents.new_alarms(metrics)):
            # Until the rollback is decided: if a report cannot be written (a full disk), these weights must not be
            # saved. A resume would continue with them, because it does not raise the alarms of a checkpoint again.
            self._latest = None
        alarm = self.incidents.check_alarms(state.step, metrics)
        if alarm is None:
            return
        error = rollback_or(
            self.incidents.alarm_error(state.step, alarm),
            self.run_dir,
            self.config,
            state,
            alarm=alarm.name,
            step=state.step,
            last_good=self.incidents.last_good(alarm),
        )
        self._set_state(state)
        if not isinstance(error, RollBack):
            self.saver.save(state)
        raise error

    def _check_held_out(self, state: TrainerState, metrics: Mapping[str, Any]) -> None:
        """Keep the checkpoint of the best evaluation so far, and report if the evaluations end the run."""
        ended_before = self.held_out.end_run
        self.held_out.add(metrics)
        self.saver.save_if_best(state)
        if self.held_out.end_run and not ended_before:
            self.incidents.report_early_stop(state.step, self.held_out)

    def _record(self, state: TrainerState, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        self.run_dir.write_metrics(metrics)
        # Step 0 is the evaluation before training. It has metrics, but no training step to time.
        if not state.step:
            self.display.evaluated(metrics)
            return
        self.run_dir.write_timings(timings)
        self.sinks.log(state.step, {**metrics, **timings})
        self.display.step(state.step, self.planned_steps(state), metrics, timings)

    def _evaluate(self, state: TrainerState) -> dict[str, Evaluation]:
        """The evaluations that are due: on the held-out problems (`""`) and on the sets of `eval.sets`, by name."""
        problems, settings = self.context.problems, self.config.eval
        evaluations: dict[str, Evaluation] = {}
        if problems.held_out and self._due(settings, state):
            done = self._evaluation(problems.held_out, settings, "eval", state.step)
            if state.step == 0:
                self.incidents.check_first_evaluation(done)
            evaluations[""] = done
        # The last step evaluates all sets, also if the evaluation above makes it the last.
        ends = self.held_out.would_end_run({"step": state.step, **step_eval_metrics(evaluations)})
        for name, one in settings.sets.items():
            if self._due(one, state, ends=ends):
                evaluations[name] = self._evaluation(problems.sets[name], one, f"eval/{name}", state.step)
        return evaluations

    def _due(self, settings: EvalConfig | EvalSetConfig, state: TrainerState, *, ends: bool = False) -> bool:
        return bool(settings.every) and (state.step % settings.every == 0 or ends or self.is_finished(state))

    def _evaluation(
        self, prompts: Sequence[Prompt], settings: EvalConfig | EvalSetConfig, stream: str, step: int
    ) -> Evaluation:
        _, _, name = stream.partition("/")
        with activity(("evaluation" if step else "first evaluation") + (f" on {name}" if name else "")):
            done = evaluate(
                self.context.engine,
                self.context.rewards,
                prompts,
                samples=settings.samples,
                greedy=settings.greedy,
                sampling=self.config.rollout.sampling,
                seed=self.config.seed,
                stream=stream,
                version=self.context.optimizer.updates,
            )
        self.incidents.report_faults(step, self.context.rewards)
        return done

    def _check_scores(self, step: int, collected: CollectResult, state: TrainerState) -> None:
        """Stop if too many completions are unscored, or if sampling cannot find anything to train on."""
        error = self.incidents.check_scores(step, collected) or self.incidents.check_groups(
            step, self.context.objective, collected
        )
        if error is None:
            return
        # The state before this step is saved: a resume repeats the step. Its completions show what failed.
        self.saver.save(state)
        self._write_rollouts(step, self.context, collected, None)
        raise error

    def _write_rollouts(
        self, step: int, context: RunContext, collected: CollectResult, learned: LearnResult | None
    ) -> None:
        """Write the completions of a step. Nothing trains on this file, so a failure is only a warning."""
        if not self.config.log.rollouts:
            return
        try:
            routes = self.config.routing.replay == "sampler"
            self.run_dir.write_rollouts(step, rollout_records(context.objective, collected, learned, routes=routes))
        except OSError as error:
            self.display.message(f"warning: step {step}: the completions could not be written ({error})")

    def _write_evaluations(self, step: int, evaluations: Mapping[str, Evaluation]) -> None:
        """Write completions of a step's evaluations. As with those of training, a failure is only a warning."""
        most = self.config.log.evaluations
        if not evaluations or not most:
            return
        records = (
            record
            for name, evaluation in evaluations.items()
            for record in evaluation_records(evaluation, name=name, most=most)
        )
        try:
            self.run_dir.write_evaluations(step, records)
        except OSError as error:
            self.display.message(f"warning: step {step}: the held-out completions could not be written ({error})")

    # ---- what a step changes for the next one

    def _set_state(self, state: TrainerState) -> TrainerState:
        self._latest = state
        return state

    def _with_clip_range(self, state: TrainerState) -> RunContext:
        """The run context with the clip range of this step."""
        objective = _clip_range(state).apply(self.context.objective, self.context.adaptive_clip)
        return replace(self.context, objective=objective)

    def _next_clip_scale(self, scale: float, learned: LearnResult | None) -> float:
        """The scale of the next step's clip range."""
        if self.context.adaptive_clip is None or learned is None:
            return scale
        return self.context.adaptive_clip.next_scale(self.context.objective, scale, learned.tokens)

    def _report_clip_limit(self, step: int, scale: float, next_scale: float) -> None:
        """Report when the scale of the clip range reaches its limit."""
        limit = at_limit(next_scale)
        if limit and not at_limit(scale):
            self.incidents.report_clip_limit(step, limit)

    def _keep_micro_batch_size(self, step: int, learned: LearnResult | None) -> None:
        """Keep the smaller micro-batches of a step that ran out of memory for the rest of this process."""
        if learned is None or not learned.halvings:
            return
        config = self.context.config
        smaller = max(1, config.learner.micro_batch_tokens >> learned.halvings)
        config = replace(config, learner=replace(config.learner, micro_batch_tokens=smaller))
        self.context = replace(self.context, config=config)
        self.incidents.report_smaller_micro_batches(step, smaller)

    # ---- start, resume, roll back

    def _start(self, state: TrainerState) -> TrainerState:
        self.run_dir.restart()
        self.run_dir.event("start", steps=self.config.steps)
        self._preflight(done=0)
        report_setup(self.context, self.run_dir, self.display, self.incidents)
        with self.run_dir.writing("tokenizer"):
            self.context.policy.tokenizer.save_pretrained(self.run_dir.path / "tokenizer")
        if self.config.cold_start.steps:
            self._cold_start()
        if self.context.objective.kl:
            self._freeze_reference()
        state = self._evaluate_and_record(self._set_state(replace(state, pending={"step": 0, "tokens/sampled": 0})))
        self.saver.save(state)
        return state

    def _preflight(self, *, done: int) -> None:
        report_components(self.context, self.run_dir, self.display)
        check_disk_space(self.context, self.run_dir, self.incidents, done=done)

    def _cold_start(self) -> None:
        try:
            with self.stop.interruptible():
                done = run_cold_start(self.context, self.display)
        except Interrupted:
            self.display.message("cold start interrupted: a resume repeats it, with the same result")
            raise
        self.run_dir.event("cold_start", steps=done.steps, accuracy=done.accuracy, **done.demonstrations)

    def _freeze_reference(self) -> None:
        """Make the current policy the frozen reference of the KL penalty.

        It is saved for a resume, unless `model.path` already holds the same weights."""
        context = self.context
        if adapted(context.policy.model):
            # Fresh adapters change nothing: the policy with its adapters disabled is the reference, without a copy.
            with context.ranks.together("load_reference"):
                self.context = replace(context, reference=context.policy.model)
            return
        if self.config.model.build or self.config.cold_start.steps:
            with self.run_dir.writing("reference"):
                save_model(context.policy, self.run_dir.path / "reference", context.ranks)
        if context.ranks.several:  # a sharded model cannot be copied
            with context.ranks.together("load_reference"):
                reference = load_reference(
                    self.run_dir.path, self.config, context.objective, context.policy, context.ranks
                )
        else:
            reference = copy.deepcopy(context.policy.model).eval().requires_grad_(False)
        self.context = replace(context, reference=reference)

    def _resume(self, path: Path, initial: TrainerState) -> TrainerState:
        """Restore a checkpoint and discard everything after it."""
        state = checkpoint.read_state(path)
        # Nothing in the run directory changes before all checks have passed and the checkpoint has been read.
        check_data_and_model(state, initial, self.config)
        changed = changed_settings(state, initial)
        if changed:
            self.display.message("settings changed since the checkpoint: " + "; ".join(change_texts(changed).values()))
        check_may_change(changed, self.run_dir.path)
        objective_text = changed_objective(self.run_dir.path, self.context.objective)
        state = self._restore(path, state)
        if objective_text:
            self.incidents.warn(objective_text)
        self._write_changes(state, changed, objective=bool(objective_text))
        self.run_dir.event("resume", step=state.step, **({"changed": changed} if changed else {}))
        self._preflight(done=state.step)
        self.display.message(f"resumed {self.run_dir.path} at step {state.step}")
        self.start_step = state.step
        return self._set_state(replace(state, settings=initial.settings))

    def _restore(self, path: Path, state: TrainerState) -> TrainerState:
        """Continue from a checkpoint whose weights the policy has: restore the rest, discard everything after it."""
        optimizer = self.context.optimizer
        with self.context.ranks.together("restore", path=str(path), updates=state.updates):
            checkpoint.restore(path, optimizer, state.updates)
        state = carry_out(self.run_dir, self.display, self.config, state)
        self.run_dir.rewind(state.step, state.offsets)
        learner = self.config.learner
        with self.context.ranks.together("set_rate_factor", factor=state.rate_factor):
            optimizer.config = replace(learner, learning_rate=learner.learning_rate * state.rate_factor)
        rows = read_metrics(self.run_dir.path)
        self.incidents.remember_alarms(rows)
        for row in rows:
            self.display.evaluated(row)
        self.held_out.restart(rows)
        self.saver.saved_step = state.step
        self.saver.mark_best()
        return state

    def _roll_back(self, record: Rollback) -> TrainerState:
        """Continue from an earlier checkpoint, as decided."""
        assert self._latest is not None
        path = self.run_dir.checkpoints / f"{record.to:06d}"
        restored = replace(checkpoint.read_state(path), settings=self._latest.settings)
        # From here on this is the state to save, and it is saved. If the decision cannot be written (a full disk), the
        # bad state must not be saved either: a resume would continue with it.
        self.saver.saved_step = self._set_state(restored).step
        self.start_step = min(self.start_step, restored.step)
        record_rollback(self.run_dir, record)
        with self.context.ranks.together("reload_weights", path=str(path)):
            reload_weights(self.context.policy, saved_model(self.config.model, path), self.context.ranks)
        return self._set_state(self._restore(path, restored))

    def _write_changes(self, state: TrainerState, changed: Mapping[str, Any], *, objective: bool) -> None:
        """Write changed settings into the run directory, once every check has accepted them. `objective` says whether
        the objective does something else than the run recorded."""
        before = state.settings.get("steps")
        steps = self.config.steps
        if steps != before:
            self.run_dir.event("steps_changed", steps=steps, before=before)
        # Names of settings may have changed since a directory of an older format was written.
        if steps != before or changed or objective or self.run_dir.format < FORMAT:
            self.run_dir.describe(self.config, resolved(self.context.objective))

    # ---- checkpoints

    @contextmanager
    def _checkpoint_on_engine_error(self) -> Iterator[None]:
        """Save a checkpoint before re-raising an unrecoverable engine error."""
        try:
            yield
        except (EngineError, MismatchError) as error:
            if self._latest is None:
                raise
            self.saver.save(self._latest)
            raise type(error)(f"{error}. The run is saved: {resume_command(self.run_dir.path)}") from error

    @contextmanager
    def _checkpoint_on_full_disk(self) -> Iterator[None]:
        """If a step's metrics cannot be written, save them in a checkpoint if that still fits. A resume writes them."""
        try:
            yield
        except DiskError as error:
            if self._latest is not None:
                with suppress(CheckpointError, DiskError):
                    self.saver.save(self._latest)
            raise DiskError(f"{error} ({self.saver.resume_point(self._latest)})") from error


def _clip_range(state: TrainerState) -> ClipRange:
    """What changes the clip range of the step after this state."""
    return ClipRange(scale=state.clip_scale, factor=state.clip_factor)

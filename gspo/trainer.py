"""A run from start to end: build its components, start or resume, loop over steps, evaluate, checkpoint, stop.

In: a `Config`, or the directory of an earlier run. Out: a run directory and an `Outcome`.
Invariant: everything a step depends on is in the checkpoint before it (weights, moments, `TrainerState`) or is a pure
function of the config. So a resumed run writes a byte-identical `metrics.jsonl`.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import trust
from gspo.activity import activity
from gspo.build import build_run, run_objective, with_dtype
from gspo.callbacks import Callback, Callbacks
from gspo.checkpoints.resume_checks import may_change
from gspo.config import (
    Config,
    anchored,
    check,
    check_single_process,
    differing,
    flat,
    override,
    to_toml,
    with_settings,
)
from gspo.data.sources import check_file
from gspo.errors import ConfigError, DiskError, GspoError, MemoryLimitError
from gspo.evaluation import Estimate, MeanEstimate
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.learner.optimizer import TUNABLE
from gspo.loop import Loop
from gspo.model.out_of_memory import out_of_memory
from gspo.objectives.describe import resolved
from gspo.objectives.objective import Objective
from gspo.ranks.environment import resume_command
from gspo.ranks.group import ONE, Ranks
from gspo.record import rollbacks
from gspo.record.curves_image import draw_curves
from gspo.record.held_out import Score
from gspo.record.progress import Display
from gspo.record.run_dir import RunDir, read_metrics
from gspo.record.sinks import Sinks
from gspo.rollout.engine import engine_traits
from gspo.signals import StopRequest

OWN_OPTION = ("name", "run_dir", "steps")
"""Settings that a resumed run takes from a command-line option, or from the location of its directory."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    run: Path
    step: int
    start_step: int
    """The step that this process resumed from; 0 for a new run."""
    steps: int
    """Steps after which the run ends. Estimated from the pace so far if a token budget ends it."""
    idle: int
    """Steps of this process that trained on nothing."""
    rollbacks: int
    """How many times the run was rolled back, also before this process."""
    ended_early: bool
    """Whether early stopping (`eval.patience`) ended it."""
    stopped_by: int | None
    """The signal that stopped it early; None if it finished, or if a callback stopped it."""
    stop_reason: str | None
    """Why a callback stopped it early; None if it finished, or if a signal stopped it."""
    before: Estimate | None
    """Held-out accuracy at step 0, if this process measured it or the run directory has it."""
    after: Estimate | None
    greedy: tuple[Estimate, Estimate] | None
    """Greedy accuracy at the start and at the end."""
    reward: tuple[MeanEstimate, MeanEstimate] | None
    """Mean held-out reward at the start and at the end; None if it was not measured or equals the accuracy."""
    evaluated_at: int
    """Step of the last evaluation."""
    best: Score | None
    """The score of the best checkpoint, if the run keeps it (`checkpoint.keep_best`)."""
    best_metric: str
    """What the score is: `eval.metric`."""
    unscored: int
    """Completions that could not be scored, in the steps of this process."""
    picture: Path | None
    seconds: float


def check_recipe(config: Config) -> Objective:
    """Refuse settings with which no run can start. Returns the objective of the run."""
    check(config)
    config = anchored(config)
    for path in config.data_files:
        check_file(path)
    return run_objective(config)


def train(config: Config, display: Display, ranks: Ranks = ONE, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Start a new run. Of several ranks, this is what the leader does."""
    check_single_process(ranks)
    objective = check_recipe(config)
    config = with_dtype(anchored(config))
    run = RunDir.create(config)
    try:
        trust.remember(run.path, [*trust.all_code(config, [config.model.path]), *trust.objective_code(config)])
        return _run(run, config, objective, display, begin=None, ranks=ranks, callbacks=callbacks)
    finally:
        run.discard_if_empty()


def resume(
    path: str | Path,
    display: Display,
    *,
    steps: int | None = None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    trust_run: bool = False,
    ranks: Ranks = ONE,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Resume a run from its newest intact checkpoint.

    `steps` changes where it ends. `overrides` are settings that may change during a run, as text, and `settings` others
    by dotted key. `trust_run` also allows code that only the run directory names."""
    check_single_process(ranks)
    run, config = RunDir.open(path)
    try:
        config = _with_overrides(config, overrides, settings or {})
        begin = _where_to_resume(run, display)
        # Before any code that the run directory names is loaded. Whether there is a reference is known only to the
        # objective, so its model comes second.
        code = [*trust.all_code(config, [begin or config.model.path]), *trust.objective_code(config)]
        trust.check(run.path, code, trust=trust_run)
        trust.check(run.path, trust.model_code(config.model, _models(run, config, begin)), trust=trust_run)
        done = int(begin.name) if begin else 0
        if steps is not None and steps < done:
            raise ConfigError(
                f"--steps: {run.path} has already done {done} steps, more than {steps}; give a larger number"
            )
        if steps is not None and steps != config.steps:
            config = _with_new_end(config, steps, display)
        check(config)
        return _run(run, config, run_objective(config), display, begin=begin, ranks=ranks, callbacks=callbacks)
    finally:
        run.close()


def _with_overrides(config: Config, overrides: Sequence[str], settings: Mapping[str, Any]) -> Config:
    """The run's settings with the overrides applied. Only settings that may change during a run are accepted."""
    new = override(tomllib.loads(to_toml(config)), overrides, where="command line")
    if settings:
        tree = tomllib.loads(to_toml(new))
        new = with_settings(tree, list(settings.items()), where="config.toml", given_where="resume")
    refused = [k for k in differing([flat(config), flat(new)]) if not may_change(k) or k in OWN_OPTION]
    if refused:
        tunable = ", ".join(f"learner.{name}" for name in TUNABLE)
        raise ConfigError(
            f"train --resume: a run continues with its own settings (RUN/config.toml); {', '.join(refused)} cannot be "
            f"given, --steps and {tunable} and those of logs, checkpoints, alarms and limits can"
        )
    return new


def _models(run: RunDir, config: Config, begin: Path | None) -> list[Path | str]:
    """Where a resumed run loads its models from: the policy and, with a KL penalty, the reference."""
    policy = begin or config.model.path
    if not run_objective(config).kl:
        return [policy]
    saved = run.path / "reference"
    return [policy, saved if saved.is_dir() else config.model.path]


def _where_to_resume(run: RunDir, display: Display) -> Path | None:
    """The newest usable checkpoint; None if the run has not written any."""
    if not checkpoint.saved(run.checkpoints):
        display.message(f"{run.path}: no checkpoint yet; starting from the beginning")
        return None
    records = rollbacks.read(run.path)
    begin, complaints = checkpoint.newest(
        run.checkpoints,
        lambda state: _unfit(run, state),
        # Left by a run that was killed while it rolled back.
        abandoned=lambda state: rollbacks.is_abandoned(records, step=state.step, rollbacks=state.rollbacks),
    )
    for complaint in complaints:
        run.event("checkpoint_damaged", message=complaint)
        display.message(f"skipped a damaged checkpoint: {complaint}")
    return begin


def _unfit(run: RunDir, state: TrainerState) -> str | None:
    """Why the run's own log contradicts a checkpoint: the log is shorter, or another run wrote the checkpoint."""
    if lacking := run.lacks(state.offsets):
        return lacking
    if state.rollbacks > (recorded := len(rollbacks.read(run.path))):
        return f"{rollbacks.FILE} has {recorded} rollbacks, the checkpoint {state.rollbacks}"
    last = run.last_row(state.offsets.get("metrics.jsonl", 0))
    step = state.step if state.pending is None else state.step - 1
    if last is None and step < 0:
        return None
    if last is None or last.get("step") != step:
        return f"metrics.jsonl does not end with step {step} at the length that the checkpoint recorded"
    sampled = last.get("tokens/sampled")
    # A pending step has sampled its tokens, but its record is not in metrics.jsonl yet.
    consistent = isinstance(sampled, int) and (
        sampled == state.tokens if state.pending is None else sampled <= state.tokens
    )
    if consistent:
        return None
    return f"metrics.jsonl has {sampled} sampled tokens after step {step}, the checkpoint {state.tokens}"


def _with_new_end(config: Config, steps: int, display: Display) -> Config:
    if config.learner.schedule != "constant":
        display.message(
            f"the {config.learner.schedule} schedule now ends at step {steps}: "
            "from here on, learning rates differ from those of the original schedule"
        )
    return dataclasses.replace(config, steps=steps)


def _run(
    run: RunDir,
    config: Config,
    objective: Objective,
    display: Display,
    *,
    begin: Path | None,
    ranks: Ranks,
    callbacks: Sequence[Callback],
) -> Outcome:
    started = time.monotonic()
    with ExitStack() as stack:
        # Closed in reverse order: the run directory last, so that everything else can still write events.
        stack.callback(run.close)
        stack.callback(display.close)
        stop = stack.enter_context(StopRequest(display.message))
        sinks = Sinks(
            config.log.sinks,
            name=config.name,
            run=run.path,
            settings=dataclasses.asdict(config),
            complain=display.message,
            log=config.log,
        )
        stack.callback(sinks.close)
        stack.enter_context(_errors_as_events(run, config, display))
        context = build_run(config, objective, run=run.path, checkpoint=begin, stack=stack, ranks=ranks)
        if begin is None:
            run.describe(config, resolved(objective))
        listeners = Callbacks(callbacks, run=run.path, config=config, policy=context.policy, stop=stop)
        loop = Loop(run_dir=run, context=context, display=display, sinks=sinks, stop=stop, callbacks=listeners)
        state = loop.run_from(begin)
        picture = _picture(run, display) if state.step and not stop else None
        if config.log.report and sinks and state.step:
            _send_report(run, sinks, display)
        before, after, greedy, evaluated_at = held_out_accuracy(run.path)
        held_out_reward = held_out_rewards(run.path)
        early = None if loop.is_finished(state) else stop.reason
        run.event("stop", step=state.step, signal=stop.signal, **({"reason": early} if early else {}))
        listeners.end(state.step)
    return Outcome(
        run=run.path,
        step=state.step,
        start_step=loop.start_step,
        steps=loop.planned_steps(state),
        idle=loop.incidents.idle,
        rollbacks=state.rollbacks,
        ended_early=loop.held_out.end_run,
        stopped_by=None if loop.is_finished(state) else stop.signal,
        stop_reason=early if stop.signal is None else None,
        before=before,
        after=after,
        greedy=greedy,
        reward=held_out_reward,
        evaluated_at=evaluated_at,
        best=loop.saver.best,
        best_metric=config.eval.metric,
        unscored=loop.incidents.unscored,
        picture=picture,
        seconds=time.monotonic() - started,
    )


def _picture(run: RunDir, display: Display) -> Path | None:
    """Plot the curves. A run that has no room for the image has still finished."""
    try:
        with run.writing("curves.png"), activity("drawing the curves"):
            return draw_curves(run.path)
    except DiskError as error:
        display.message(f"warning: {error}")
        return None


def _send_report(run: RunDir, sinks: Sinks, display: Display) -> None:
    """Write the report of the run as it is now, and send it to the sinks. A run without it has still finished."""
    with activity("writing the report"), tempfile.TemporaryDirectory(prefix="gspo-report-") as folder:
        file = Path(folder) / f"{run.path.name}.html"
        # What reads run directories is not part of the trainer, so it runs as a command.
        command = [sys.executable, "-m", "gspo", "report", str(run.path), "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not file.is_file():
            display.message(f"warning: log.report: the report could not be written: {done.stderr.strip()[-500:]}")
            return
        sinks.report(file)


@contextmanager
def _errors_as_events(run: RunDir, config: Config, display: Display) -> Iterator[None]:
    """Write the error that ended a run to its events, if the disk has room.

    A run that has not started has no events: a file of it would keep its directory from being removed and used again.
    """
    try:
        yield
    except GspoError as error:
        _write_error(run, type(error).__name__, error)
        raise
    except Exception as error:
        if not out_of_memory(error):
            raise
        _write_error(run, MemoryLimitError.__name__, error)
        raise MemoryLimitError(f"{str(error).splitlines()[0]}; {_how_to_save_memory(run, config)}") from error
    except KeyboardInterrupt:
        if run.started:
            display.message(f"Stopped immediately. Continue with:  {resume_command(run.path)}")
        raise


def _write_error(run: RunDir, name: str, error: Exception) -> None:
    if run.started:
        with suppress(DiskError):
            run.event("error", error=name, message=str(error))


def _how_to_save_memory(run: RunDir, config: Config) -> str:
    if not run.started:
        # Only the weights and the engine are in memory yet, so smaller batches would not help.
        return "the model does not fit: use a smaller model, a smaller model.dtype or more memory"
    options = ("learner.micro_batch_tokens", *engine_traits(config.rollout.engine).memory_options)
    return f"lower {' or '.join(options)}, then: {resume_command(run.path)}"


def held_out_accuracy(run: Path) -> tuple[Estimate | None, Estimate | None, tuple[Estimate, Estimate] | None, int]:
    """(before, after, greedy, step): held-out accuracy at the first and the last evaluation in a run directory, the
    pair for greedy decoding, and the step of the last evaluation."""
    records = [r for r in read_metrics(run) if r.get("eval/accuracy") is not None]
    if not records:
        return None, None, None, 0
    ends = (records[0], records[-1])
    before, after = (
        Estimate(value=r["eval/accuracy"], low=r["eval/accuracy_low"], high=r["eval/accuracy_high"]) for r in ends
    )
    first, last = (_greedy(r) for r in ends)
    return before, after, (first, last) if first and last else None, records[-1]["step"]


def _greedy(record: Mapping[str, Any]) -> Estimate | None:
    """The accuracy of greedy decoding; None if it was not measured, or by a version that recorded no interval."""
    value, low, high = (record.get(f"eval/accuracy_greedy{end}") for end in ("", "_low", "_high"))
    return None if value is None or low is None or high is None else Estimate(value=value, low=low, high=high)


def held_out_rewards(run: Path) -> tuple[MeanEstimate, MeanEstimate] | None:
    """Mean held-out reward at the first and the last evaluation; None if it was not measured or is the accuracy."""
    records = [r for r in read_metrics(run) if r.get("eval/reward") is not None]
    if all(r["eval/reward"] == r.get("eval/accuracy") for r in records):
        return None
    first, last = (
        MeanEstimate(value=r["eval/reward"], low=r.get("eval/reward_low"), high=r.get("eval/reward_high"))
        for r in (records[0], records[-1])
    )
    return first, last

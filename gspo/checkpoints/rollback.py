"""Rolling a run back: whether an alarm does, to which checkpoint, and what has to be done in the run directory.

In: an alarm and the state of the run. Out: a `Rollback` record, or why there is none; the state to continue from.
Invariant: writing the record is the decision. `carry_out` does the rest and may be repeated: a run that is killed in
between resumes from the same checkpoint with the same state. Abandoned steps are moved, never deleted. What they
sampled stays spent: the count of tokens and the position in the data do not go back. Measured pass rates do go back,
because the abandoned weights measured them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.config import Config
from gspo.errors import CheckpointError, ConfigError
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.record import rollbacks
from gspo.record.progress import Display
from gspo.record.rollbacks import Rollback
from gspo.record.run_dir import RunDir, read_events
from gspo.rollout.gather import RolloutState


class RollBack(Exception):
    """Ends a step, because the run goes back to an earlier checkpoint."""

    def __init__(self, record: Rollback) -> None:
        super().__init__(f"rollback {record.number}")
        self.record = record


class NoRollback(Exception):
    """There is no rollback. The message gives the reason."""


def decide(run_dir: RunDir, config: Config, state: TrainerState, *, alarm: str, step: int, last_good: int) -> Rollback:
    """The rollback of an alarm at `step`. `state` says where sampling stands, `last_good` which weights are good.

    Raises `NoRollback` with the reason if there can be none."""
    if state.rollbacks >= config.alarms.max_rollbacks:
        raise NoRollback(f"the run has rolled back {state.rollbacks} times (alarms.max_rollbacks)")
    if last_good < 0:
        raise NoRollback("the condition has held since the first step, so no weights of the run are good")
    try:
        path, complaints = checkpoint.newest(run_dir.checkpoints, last=last_good)
    except CheckpointError:
        raise NoRollback(f"no intact checkpoint of step {last_good} or earlier, when the weights were good") from None
    for complaint in complaints:
        run_dir.event("checkpoint_damaged", message=complaint)
    return Rollback(
        number=state.rollbacks + 1,
        alarm=alarm,
        step=step,
        to=int(path.name),
        batch=state.rollout.batch,
        cursor=state.rollout.cursor,
        tokens=state.tokens,
        rate_factor=state.rate_factor * config.alarms.rollback_rate,
        clip_factor=state.clip_factor * config.alarms.rollback_clip,
        skipped=() if state.rollout.difficulty is None else state.rollout.difficulty.skipped,
    )


def rollback_or(
    error: Exception, run_dir: RunDir, config: Config, state: TrainerState, *, alarm: str, step: int, last_good: int
) -> Exception:
    """What to raise for an alarm: the rollback, if the settings ask for one and there can be one, or the error."""
    if alarm not in config.alarms.rollback:
        return error
    try:
        return RollBack(decide(run_dir, config, state, alarm=alarm, step=step, last_good=last_good))
    except NoRollback as reason:
        return type(error)(f"{error} (no rollback: {reason})")


def record_rollback(run_dir: RunDir, decision: Rollback) -> None:
    """Write the decision. From here on the run has rolled back, whatever happens to this process."""
    run_dir.write_rollbacks([*rollbacks.read(run_dir.path), decision])


def carry_out(run_dir: RunDir, display: Display, config: Config, state: TrainerState) -> TrainerState:
    """Apply the rollbacks that a restored state does not know yet, and report each once. The state that results.

    Called for every restored checkpoint, in a rollback and in a resume."""
    records = rollbacks.read(run_dir.path)
    pending = records[state.rollbacks :]
    # A resume may have found only an earlier checkpoint intact.
    moved = [replace(r, to=min(r.to, state.step)) for r in pending]
    after = with_rollback(state, moved[-1]) if moved else state
    if list(pending) != moved:
        run_dir.write_rollbacks([*records[: state.rollbacks], *moved])
    for rollback in moved:
        run_dir.abandon(rollback.number, state.step, state.offsets)
        _report(run_dir, display, config, rollback)
    checkpoint.delete(abandoned_checkpoints(run_dir.checkpoints, moved, state))
    return after


def with_rollback(state: TrainerState, record: Rollback) -> TrainerState:
    """The state of a checkpoint from before a rollback, after it."""
    difficulty = state.rollout.difficulty
    if difficulty is not None:
        if len(record.skipped) != len(difficulty.skipped):
            raise ConfigError(
                f"{rollbacks.FILE}: rollback {record.number} has {len(record.skipped)} numbers of skipped visits for "
                f"{len(difficulty.skipped)} sources of problems; restore the file from a copy"
            )
        difficulty = replace(difficulty, skipped=record.skipped)
    return replace(
        state,
        # Sampling does not go back: the same batches would lead to the same failure.
        rollout=RolloutState(batch=record.batch, cursor=record.cursor, difficulty=difficulty),
        tokens=record.tokens,
        rollbacks=record.number,
        rate_factor=record.rate_factor,
        clip_factor=record.clip_factor,
    )


def abandoned_checkpoints(folder: Path, pending: Sequence[Rollback], restored: TrainerState) -> list[Path]:
    """The checkpoints of abandoned steps. They would be the newest ones, and resumed from."""
    found = []
    for path in checkpoint.saved(folder) if pending else ():
        try:
            known = checkpoint.read_state(path).rollbacks
        except CheckpointError:
            continue  # damaged: a resume skips it
        if int(path.name) > restored.step and known < pending[-1].number:
            found.append(path)
    return found


def _report(run_dir: RunDir, display: Display, config: Config, record: Rollback) -> None:
    if record.number in _reported(run_dir.path):
        return
    rate = config.learner.learning_rate
    text = rollbacks.text(record, rate)
    run_dir.event(
        "rollback",
        step=record.to,
        from_step=record.step,
        name=record.alarm,
        number=record.number,
        learning_rate=rate * record.rate_factor,
        rate_factor=record.rate_factor,
        clip_factor=record.clip_factor,
        tokens=record.tokens,
        message=text,
    )
    display.message(text[0].upper() + text[1:])


def _reported(run: Path) -> list[Any]:
    """The numbers of the rollbacks that have an event, since the run started from the beginning."""
    found: list[Any] = []
    for event in read_events(run):
        if event.get("event") == "start":
            found.clear()
        if event.get("event") == "rollback":
            found.append(event.get("number"))
    return found

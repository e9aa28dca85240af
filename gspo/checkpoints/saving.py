"""Saving a run: when a checkpoint is written, which ones stay, which one is the best, and what a failed save means.

In: the state after a step. Out: checkpoints, `best.json`, events. Invariant: a save that fails leaves the earlier
checkpoints as they are. The best checkpoint, and those that a rollback may need, are not deleted to make room for newer
ones. `best.json` names the new best checkpoint before the old one is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from gspo import trust
from gspo.activity import activity
from gspo.context import RunContext
from gspo.errors import CheckpointError
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.ranks.environment import resume_command
from gspo.record.held_out import HeldOutScores, Score, to_json
from gspo.record.progress import Display
from gspo.record.retention import for_rollback
from gspo.record.rollbacks import horizon
from gspo.record.run_dir import RunDir
from gspo.rollout.in_flight import InFlight


class Saver:
    """Writes the checkpoints of one run in this process."""

    def __init__(self, *, run_dir: RunDir, context: RunContext, display: Display, held_out: HeldOutScores) -> None:
        self.saved_step: int | None = None
        """The step that the newest checkpoint holds; None before the first."""
        self.in_flight: Callable[[int], InFlight | None] = lambda step: None
        """What the checkpoint of a step keeps of the next batches."""
        self._run_dir = run_dir
        self._policy, self._optimizer = context.policy, context.optimizer
        self._ranks = context.ranks
        self._config = context.config
        self._display = display
        self._held_out = held_out

    def save(self, state: TrainerState, *, required: bool = True) -> None:
        """Write a checkpoint. If that fails (a full disk), raise if it is `required`, otherwise warn and continue."""
        if self.saved_step == state.step:
            return
        settings = self._config.checkpoint
        try:
            self._run_dir.check_held()
            with activity("saving a checkpoint"):
                saved = checkpoint.save(
                    self._run_dir.checkpoints,
                    self._policy,
                    self._optimizer,
                    state,
                    keep=settings.keep,
                    ranks=self._ranks,
                    protected=self._protected(state.step),
                    batches=self.in_flight(state.step),
                    before_deletion=self.mark_best,
                )
        except OSError as error:
            text = f"the checkpoint of step {state.step} could not be written ({error}); the previous one is intact"
            with suppress(OSError):
                self._run_dir.event("checkpoint_failed", step=state.step, message=str(error))
            if required:
                raise CheckpointError(f"{text}; make room, then: {resume_command(self._run_dir.path)}") from error
            later = f"{settings.every} step{'s' * (settings.every != 1)}"
            self._display.message(f"warning: {text}; the next attempt is in {later}")
            return
        self.saved_step = state.step
        # This process has run the model code that it saves with the weights, so a resume may trust it.
        trust.remember(self._run_dir.path, trust.model_code(self._config.model, [saved]))
        self._run_dir.event("checkpoint", step=state.step)

    def save_if_best(self, state: TrainerState) -> None:
        """Write a checkpoint if the evaluation of this step is the best of all that have one."""
        if not self._config.checkpoint.keep_best:
            return
        best = self._best(state.step)
        if best is not None and best.step == state.step:
            self.save(state, required=False)
            # Nothing was saved if a checkpoint of the step existed before its evaluation, which was interrupted.
            self.mark_best()

    def mark_best(self) -> None:
        """Write which checkpoint is the best, with `checkpoint.keep_best`."""
        if self._config.checkpoint.keep_best:
            best = self.best
            self._run_dir.write_best(None if best is None else to_json(best, self._config.eval.metric))

    @property
    def best(self) -> Score | None:
        """The score of the best checkpoint; None without `checkpoint.keep_best` or an evaluation."""
        return self._best() if self._config.checkpoint.keep_best else None

    def resume_point(self, latest: TrainerState | None) -> str:
        """From where a resume continues after a failed write, in words. `latest` is the state of the weights; None if
        they are not to be saved."""
        if self.saved_step is None:
            return "no step was finished before that"
        point = f"a resume continues from step {self.saved_step}"
        if latest is None or self.saved_step == latest.step:
            return point
        return f"{point}, because there was no room for a checkpoint of step {latest.step}"

    def _protected(self, step: int) -> set[int]:
        """The steps whose checkpoints stay, besides the newest, once `step` is saved."""
        best = self._best(step) if self._config.checkpoint.keep_best else None
        # A checkpoint of a later step is damaged: the run has resumed from an earlier one.
        earlier = [saved for saved in self._steps() if saved < step]
        kept = for_rollback([*earlier, step], horizon(self._config))
        return kept if best is None else {*kept, best.step}

    def _best(self, *more: int) -> Score | None:
        """The best evaluation of a step that has a checkpoint, or of one of `more`."""
        return self._held_out.best({*self._steps(), *more})

    def _steps(self) -> list[int]:
        return [int(path.name) for path in checkpoint.saved(self._run_dir.checkpoints)]

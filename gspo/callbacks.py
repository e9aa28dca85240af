"""Callbacks: the user's own code at the start, after steps and evaluations, and at the end of a run.

In: what the loop has just recorded. Out: calls of the user's methods, which may ask for a stop. Invariant: a callback
sees copies, so it can change neither a step nor its record. Nothing that it does is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.config import Config
from gspo.signals import StopRequest

if TYPE_CHECKING:
    from gspo.model.load import Policy


class Training:
    """The run that a callback is called by."""

    def __init__(self, *, path: Path, config: Config, policy: Policy, stop: StopRequest) -> None:
        self.path = path
        """The run directory."""
        self.config = config
        """All settings of the run."""
        self.step = 0
        """The last finished step."""
        self.steps = config.steps
        """Steps after which the run will end; estimated if a token budget decides."""
        self._policy = policy
        self._stop = stop

    @property
    def model(self) -> Any:
        """The model that is being trained. Read it, but do not change it."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._policy.tokenizer

    def stop(self, reason: str = "a callback stopped the run") -> None:
        """Save a checkpoint and end the run after this step. It can be resumed."""
        self._stop.request(reason)


class Callback:
    """Base class of callbacks. Override the methods that you need.

    `metrics` are the values of the step by their names in `metrics.jsonl` (docs/metrics.md). An exception in a method
    ends the run, after a checkpoint was saved."""

    def on_start(self, training: Training) -> None:
        """Called once before the first step, also when the run is resumed: `training.step` is where it starts."""

    def on_step(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after every training step."""

    def on_evaluation(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after every evaluation, also the one before the first step (step 0), before `on_step`."""

    def on_end(self, training: Training) -> None:
        """Called once when the run has finished or was stopped, after its last checkpoint. Not after an error."""


class Callbacks:
    """The callbacks of one run."""

    def __init__(
        self, callbacks: Sequence[Callback], *, run: Path, config: Config, policy: Policy, stop: StopRequest
    ) -> None:
        self._callbacks = tuple(callbacks)
        self._training = Training(path=run, config=config, policy=policy, stop=stop)

    def start(self, step: int, steps: int) -> None:
        """The run starts, or resumes after `step`."""
        self._training.step, self._training.steps = step, steps
        for callback in self._callbacks:
            callback.on_start(self._training)

    def recorded(self, step: int, steps: int, metrics: Mapping[str, Any], *, evaluated: bool) -> None:
        """A step, or the evaluation before the first one, was recorded."""
        self._training.step, self._training.steps = step, steps
        for callback in self._callbacks:
            if evaluated:
                found = {k: v for k, v in metrics.items() if k.startswith("eval/")}
                callback.on_evaluation(self._training, step, found)
            if step:
                callback.on_step(self._training, step, dict(metrics))

    def end(self, step: int) -> None:
        """The run has ended, and its last checkpoint is saved."""
        self._training.step = step
        for callback in self._callbacks:
            callback.on_end(self._training)

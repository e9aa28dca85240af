"""Read a run directory for replay: checkpoints, completions by step, metrics, and the settings of each step.

In: a run directory, finished, running or copied from elsewhere. Out: a `Source`. Invariant: nothing is written and
nothing is locked, so a replay never disturbs a running trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any

from gspo.config import Config, LearnerConfig, from_tree, read_toml
from gspo.errors import CheckpointError, ConfigError, DataError
from gspo.learner import checkpoint
from gspo.learner.optimizer import TUNABLE
from gspo.record import rollbacks, run_format
from gspo.record.ledger import BatchHistory, read_ledger
from gspo.record.rollbacks import Rollback
from gspo.record.run_dir import read_events, read_metrics


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run directory, read only."""

    path: Path
    config: Config
    checkpoints: Mapping[int, Path]
    """By step."""
    recorded: frozenset[int]
    """Steps with recorded completions."""
    events: Sequence[Mapping[str, Any]]
    rollbacks: Sequence[Rollback] = ()
    ledger: Mapping[int, BatchHistory] = field(default_factory=dict)
    """The batch that each step trained on, if the run has a ledger (`rollout.max_lag`)."""

    def rollouts(self, step: int) -> Path:
        """The file with the completions of a step."""
        return self.path / "rollouts" / f"{step:06d}.jsonl"

    @cached_property
    def _metrics(self) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in read_metrics(self.path) if "step" in row}

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The metrics of a step; `None` if they are not written (yet)."""
        return self._metrics.get(step)

    @property
    def replayable(self) -> list[int]:
        """Steps after a checkpoint for which every step since that checkpoint has recorded completions."""
        return sorted({step for start in self.checkpoints for step in self._after(start)})

    def _after(self, start: int) -> list[int]:
        """The steps from `start` on that have recorded completions, up to the first one that has none."""
        return list(takewhile(self.recorded.__contains__, count(start + 1)))

    def start_of(self, step: int | None, start: int | None = None) -> tuple[int, int]:
        """(step to replay, checkpoint before it). Without a step: the last one that can be replayed. Without a
        checkpoint: the newest one."""
        steps = self.replayable
        if start is not None:
            steps = self._after(start)
            if start not in self.checkpoints:
                there = ranges(self.checkpoints) or "there is none"
                raise CheckpointError(f"{self.path}: --from: there is no checkpoint {start}; choose one of: {there}")
        if step is None and steps:
            step = steps[-1]
        if step is None or step not in steps:
            raise CheckpointError(self._why_not(step, steps))
        # The newest one, because every step in between must be recomputed.
        return step, max(c for c in self.checkpoints if c < step) if start is None else start

    def _why_not(self, step: int | None, steps: Sequence[int]) -> str:
        what = f"{self.path}: " + ("no step can be replayed" if step is None else f"step {step} cannot be replayed")
        if not self.recorded:
            why = "log.rollouts was false" if not self.config.log.rollouts else "no step is finished"
            return f"{what}: rollouts/ has no completions ({why})"
        if not self.checkpoints:
            return f"{what}: checkpoints/ is empty"
        if step is not None and step not in self.recorded:
            reason = "its completions are not in rollouts/"
        else:
            reason = "no checkpoint before it has recorded completions for all steps in between"
        available = f"; choose one of: {ranges(steps)}" if steps else ""
        return f"{what}: {reason}{available} (checkpoint.keep = 0 keeps every checkpoint)"

    def steps_planned(self, step: int) -> int:
        """The run's planned number of steps at this step.

        The learning rate schedule depends on it, and a resume with `--steps` changes it.
        """
        planned = self.config.steps
        ends = [(0, planned)]
        for event in self.events:
            if event.get("event") in ("start", "steps_changed"):
                planned = int(event["steps"])
            if event.get("event") == "start":
                ends = [(0, planned)]
            if event.get("event") in ("resume", "rollback"):
                # Both go back to an earlier checkpoint and discard later steps with the plans made for them.
                ends = [(at, value) for at, value in ends if at < int(event["step"])] + [(int(event["step"]), planned)]
        return next((value for at, value in reversed(ends) if at < step), planned)

    def learner_at(self, step: int) -> LearnerConfig:
        """The learner's settings at this step. A resume may change some and records the change in its event."""
        resumes = self._resumes()
        values = {}
        for name in TUNABLE:
            key = f"learner.{name}"
            at = step
            before = resumes
            # config.toml holds the newest value; the first change records the original one.
            first = next((e["changed"][key][0] for e in resumes if key in e.get("changed", {})), None)
            value = getattr(self.config.learner, name) if first is None else first
            # Walk back through the resumes that led to this step. A resume at step 5 discards a resume at step 8.
            while last := max((i for i, e in enumerate(before) if int(e["step"]) < at), default=-1) + 1:
                event, before = before[last - 1], before[: last - 1]
                if key in event.get("changed", {}):
                    value = event["changed"][key][1]
                    break
                at = int(event["step"])
            values[name] = value
        values["learning_rate"] *= 1.0 if (rollback := self.rollback_at(step)) is None else rollback.rate_factor
        return replace(self.config.learner, **values)

    def rollback_at(self, step: int) -> Rollback | None:
        """The rollback whose factors this step was trained with; `None` before the first."""
        return rollbacks.in_force(self.rollbacks, step)

    def _resumes(self) -> list[dict[str, Any]]:
        """The events of all resumes. A rollback counts as one, with the settings that were in force when it happened:
        those of a later step that it abandoned, too."""
        found: list[dict[str, Any]] = []
        changed: dict[str, Any] = {}
        for event in self.events:
            if event.get("event") == "resume":
                changed |= event.get("changed", {})
                found.append(dict(event))
            elif event.get("event") == "rollback":
                found.append({"step": event["step"], "changed": dict(changed)})
        return found


def open_run(path: str | Path) -> Source:
    """Open a run directory for reading."""
    folder = Path(path)
    file = folder / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{path}: not a run directory (no config.toml); give a directory that 'gspo train' wrote")
    run_format.read(folder)
    return Source(
        path=folder,
        config=from_tree(read_toml(file), where=str(file)),
        checkpoints={int(p.name): p for p in checkpoint.saved(folder / "checkpoints")},
        # Only files that a run wrote: the folder may hold a user's own.
        recorded=frozenset(int(p.stem) for p in (folder / "rollouts").glob("*.jsonl") if p.stem.isdecimal()),
        events=_validate_events(read_events(folder), folder / "events.jsonl"),
        rollbacks=rollbacks.read(folder),
        # Of several batches, a rollback has abandoned all but the last.
        ledger={history.trained[-1]: history for history in read_ledger(folder) if history.trained},
    )


def _validate_events(events: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Check the events that a replay depends on."""
    required = {"start": "steps", "steps_changed": "steps", "resume": "step", "rollback": "step"}
    for event in events:
        key = required.get(str(event.get("event")), "")
        changed = event.get("changed", {})
        pairs = isinstance(changed, dict) and all(isinstance(v, list) and len(v) == 2 for v in changed.values())
        # Not isinstance: JSON's `true` is a bool, which is a subclass of int.
        if key and not (type(event.get(key)) is int and pairs):
            raise DataError(f"{file}: invalid event {event['event']!r}; the file is damaged, restore it from a copy")
    return events


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges, for example `1-3, 7`."""
    ordered = sorted(numbers)
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    parts = [ordered[a:b] for a, b in pairwise(cuts) if a < b]
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)

"""What a run directory offers for replay: checkpoints, replies by step, metrics, and how the run was planned.

In: a run directory, finished, running or copied from elsewhere. Out: a `Source`. Invariant: nothing is written and nothing
is locked, so the run that works in it never notices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from gspo.config import Config, LearnerConfig, from_tree, read_toml
from gspo.errors import CheckpointError, ConfigError, DataError
from gspo.learner import checkpoint
from gspo.learner.optimizer import TUNABLE
from gspo.record.run_dir import read_jsonl


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run directory, read only."""

    path: Path
    config: Config
    checkpoints: Mapping[int, Path]
    """By step."""
    recorded: frozenset[int]
    """Steps whose replies are there."""
    events: Sequence[Mapping[str, Any]]

    def rollouts(self, step: int) -> Path:
        """The file with the replies of a step."""
        return self.path / "rollouts" / f"{step:06d}.jsonl"

    @cached_property
    def _metrics(self) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in read_jsonl(self.path / "metrics.jsonl") if "step" in row}

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The metrics of a step; None: not written (yet)."""
        return self._metrics.get(step)

    @property
    def replayable(self) -> list[int]:
        """Steps that a checkpoint lies before, with the replies of every step from there on."""
        found = set()
        for start in self.checkpoints:
            for step in count(start + 1):
                if step not in self.recorded:
                    break
                found.add(step)
        return sorted(found)

    def start_of(self, step: int | None) -> tuple[int, int]:
        """(step to replay, newest checkpoint before it); without a step the last one that can be replayed."""
        steps = self.replayable
        if step is None and steps:
            step = steps[-1]
        if step is None or step not in steps:
            raise CheckpointError(self._why_not(step, steps))
        return step, max(c for c in self.checkpoints if c < step)

    def _why_not(self, step: int | None, steps: Sequence[int]) -> str:
        what = f"{self.path}: " + ("no step can be replayed" if step is None else f"step {step} cannot be replayed")
        if not self.recorded:
            off = "log.rollouts was false" if not self.config.log.rollouts else "no step is finished"
            return f"{what}: rollouts/ holds no replies ({off})"
        if not self.checkpoints:
            return f"{what}: checkpoints/ is empty"
        reason = "its replies are not in rollouts/" if step is not None and step not in self.recorded else "no checkpoint before it has the replies of all steps in between"  # fmt: skip
        there = f"; steps that can be: {ranges(steps)}" if steps else ""
        return f"{what}: {reason}{there} (checkpoint.keep = 0 keeps every checkpoint)"

    def steps_planned(self, step: int) -> int:
        """How many steps the run meant to take when it took this one, which its learning rate may depend on: a resume
        with --steps moves the end."""
        planned, ends = self.config.steps, [(0, self.config.steps)]
        for event in self.events:
            if event.get("event") in ("start", "new end"):
                planned = int(event["steps"])
            if event.get("event") == "start":
                ends = [(0, planned)]
            if event.get("event") == "resume":
                ends = [(at, value) for at, value in ends if at < int(event["step"])] + [(int(event["step"]), planned)]
        return next((value for at, value in reversed(ends) if at < step), planned)

    def learner_at(self, step: int) -> LearnerConfig:
        """The learner's settings when the run took this step: a resume may change some, and says so in its event."""
        resumes = [e for e in self.events if e.get("event") == "resume"]
        values = {}
        for name in TUNABLE:
            key, at, before = f"learner.{name}", step, resumes
            first = next((e["changed"][key][0] for e in resumes if key in e.get("changed", {})), None)
            value = getattr(self.config.learner, name) if first is None else first
            while last := max((i for i, e in enumerate(before) if int(e["step"]) < at), default=-1) + 1:
                event, before = before[last - 1], before[: last - 1]
                if key in event.get("changed", {}):
                    value = event["changed"][key][1]
                    break
                at = int(event["step"])
            values[name] = value
        return replace(self.config.learner, **values)


def open_run(path: str | Path) -> Source:
    """Look at a run directory."""
    folder = Path(path)
    file = folder / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{path}: not a run directory (no config.toml); give the directory that 'gspo train' made")
    return Source(
        path=folder,
        config=from_tree(read_toml(file), where=str(file)),
        checkpoints={int(p.name): p for p in checkpoint.saved(folder / "checkpoints")},
        recorded=frozenset(int(p.stem) for p in (folder / "rollouts").glob("*.jsonl") if p.stem.isdecimal()),
        events=_checked(read_jsonl(folder / "events.jsonl"), folder / "events.jsonl"),
    )


def _checked(events: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Events of which those that a replay depends on hold what a run writes."""
    needed = {"start": "steps", "new end": "steps", "resume": "step"}
    for event in events:
        key, changed = needed.get(str(event.get("event")), ""), event.get("changed", {})
        pairs = isinstance(changed, dict) and all(isinstance(v, list) and len(v) == 2 for v in changed.values())
        if key and not (type(event.get(key)) is int and pairs):
            raise DataError(f"{file}: an event {event['event']!r} is not what a run writes")
    return events


def ranges(numbers: Iterable[int]) -> str:
    """`1-3, 7`."""
    ordered = sorted(numbers)
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    parts = [ordered[a:b] for a, b in pairwise(cuts) if a < b]
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)

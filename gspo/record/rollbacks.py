"""`rollbacks.json`: every rollback of a run, each a decision that is made once and then carried out.

    decision     rollbacks.json gets one more record, in one atomic rename          the run has rolled back
    execution    restore the checkpoint `to`, move later steps to `abandoned/N`,    a resume does the same
                 delete later checkpoints

In: a run directory, possibly from someone else. Out: its `Rollback` records, and what they say about a step or a
checkpoint. Invariant: a checkpoint plus the records that it does not know yet give the state of the run, so a run that
is killed at any instant resumes as if it had not been. Nothing here imports torch, so tools that only read a run start
fast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config import Config
from gspo.errors import ConfigError
from gspo.safe_files import read_regular

FILE = "rollbacks.json"
LARGEST_FILE = 1 << 20
MOST = 2**62
"""Upper bound of every count, beyond what any run reaches."""
SKIPPED = "skipped updates"
"""The one cause of a rollback that is not an alarm: `learner.max_skipped` was reached."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One rollback of a run."""

    number: int
    """From 1."""
    alarm: str
    """What raised it."""
    step: int
    """The last step that was abandoned."""
    to: int
    """The step of the checkpoint that the run went back to."""
    batch: int
    """Where sampling continues (`RolloutState`): after the abandoned batches, so with other prompts and random
    numbers."""
    cursor: int
    tokens: int
    """Tokens sampled so far, those of abandoned steps included."""
    rate_factor: float
    """Factor on the learning rate from here on, with that of all earlier rollbacks."""
    clip_factor: float
    """The same for the clip range."""
    skipped: tuple[int, ...] = ()
    """Visits of each source that were skipped so far (`Difficulty`), which are part of where sampling continues; empty
    if sampling is uniform."""


def to_json(records: Sequence[Rollback]) -> str:
    """The text of `rollbacks.json`."""
    return json.dumps([dataclasses.asdict(record) for record in records], indent=2) + "\n"


def read(run: Path) -> tuple[Rollback, ...]:
    """The rollbacks of a run, oldest first; a run without the file has none."""
    file = run / FILE
    try:
        values = json.loads(read_regular(file, LARGEST_FILE))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; a run writes it as a plain file") from None
    except (ValueError, RecursionError) as error:
        # Beyond JSONDecodeError, an integer with too many digits is a ValueError, and deep nesting a RecursionError.
        raise ConfigError(f"{file}: not valid JSON ({type(error).__name__}); restore it from a copy") from None
    if not isinstance(values, list) or not all(_valid(record, i + 1) for i, record in enumerate(values)):
        raise ConfigError(f"{file}: no run writes such records; restore it from a copy")
    return tuple(Rollback(**{**record, "skipped": tuple(record.get("skipped", ()))}) for record in values)


def _valid(record: Any, number: int) -> bool:
    names = {f.name for f in dataclasses.fields(Rollback)}
    # The first versions with rollbacks did not write `skipped`.
    if not isinstance(record, dict) or {*record, "skipped"} != names:
        return False
    skipped = record.get("skipped", [])
    if not isinstance(skipped, list) or not all(type(n) is int and 0 <= n <= MOST for n in skipped):
        return False
    # Not isinstance: JSON's `true` is a bool, which is a subclass of int.
    counts = all(
        type(record[name]) is int and 0 <= record[name] <= MOST
        for name in ("number", "step", "to", "batch", "cursor", "tokens")
    )
    factors = all(
        type(record[name]) in (int, float) and 0 < record[name] <= 1 for name in ("rate_factor", "clip_factor")
    )
    return counts and factors and isinstance(record["alarm"], str) and record["number"] == number


def is_abandoned(records: Sequence[Rollback], *, step: int, rollbacks: int) -> bool:
    """Whether a later rollback has abandoned the weights of a step, saved after `rollbacks` rollbacks."""
    return any(record.to < step for record in records[rollbacks:])


def in_force(records: Sequence[Rollback], step: int) -> Rollback | None:
    """The rollback whose factors a step of the final history was trained with; None before the first."""
    return next((record for record in reversed(records) if record.to < step), None)


def horizon(config: Config) -> int:
    """How far back the good weights of an alarm may be: one at step n needs a checkpoint of step n - horizon or
    earlier. `0` without `alarms.rollback`."""
    spans = []
    for name in config.alarms.rollback:
        if name == "held-out drop":
            spans.append(2 * config.eval.every)
        elif name == SKIPPED:
            # The first of them is at most this many steps back, if each step skipped one.
            spans.append(config.learner.max_skipped + 1)
        else:
            spans.append(config.alarms.steps + 1)
    return max(spans, default=0)


def text(record: Rollback, learning_rate: float) -> str:
    """A rollback in words, for the terminal, the events and the page. `learning_rate` is that of the settings."""
    lower = f"the learning rate is now {learning_rate * record.rate_factor:.3g} ({record.rate_factor:g} of the setting)"
    narrower = "" if record.clip_factor == 1 else f", the clip range {record.clip_factor:g} of the setting"
    steps = f"steps {record.to + 1} to {record.step}"
    return (
        f"rollback {record.number} ({record.alarm}): back to the checkpoint of step {record.to}; {lower}{narrower}; "
        f"{steps if record.step > record.to + 1 else f'step {record.step}'} moved to abandoned/{record.number:03d}"
    )

"""The batches of the next steps in a checkpoint: those that are collected, and from which weights the others come.

    in_flight.json         one entry per step: which weights sample its batch, and the batch if it is collected; with
                           `rollout.span_tokens` also its completions so far, if some of them were cut
    weights-000011.tensors the weights after step 11, if a batch that is not collected yet needs them; in safetensors
                           format, but without that suffix, because vLLM would load it as weights

In: the plan of the steps after a checkpoint. Out: the same plan, after a resume. Invariant: with these files and the
weights of the checkpoint itself, every batch that the plan names is either restored or sampled again from the same
weights, so nothing is lost and nothing is sampled twice. What is read was checked against the checkpoint's manifest,
and every value is converted to its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo.data.difficulty import Difficulty
from gspo.errors import CheckpointError
from gspo.ranks.codec import convert, encode
from gspo.rollout.gather import CollectResult, RolloutBatch
from gspo.types import Completion, Group, Prompt, without_columns

FILE = "in_flight.json"
ROUNDING = 1e-3
"""Rounding can make a log-prob slightly positive."""


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The permission to sample the batch of a step."""

    step: int
    """The step that trains on it."""
    weights: int
    """The step after which its weights are taken."""
    version: int
    """Their version: how many optimizer steps are behind them."""


@dataclass(frozen=True, kw_only=True)
class OpenBatch:
    """A batch that is sampled in turns and not finished (`rollout/spans.py`)."""

    batch: int
    """Its number."""
    cursor: int
    """Prompts that were taken before it."""
    weights: int
    """The step after which the weights of its next turn are taken."""
    completions: tuple[tuple[Completion, ...], ...]
    """Those of each prompt. Some were cut."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A step after a checkpoint."""

    ticket: Ticket
    batch: CollectResult | None
    """None if the batch is not collected yet."""
    last: int | None = None
    """With `rollout.span_tokens`, the step after which the weights of its last turn are taken."""
    part: OpenBatch | None = None
    """What its turns so far have sampled; None before the first and after the last one."""

    @property
    def needed(self) -> range:
        """The weights that the batch still needs, by the steps after which they are taken."""
        if self.batch is not None:
            return range(0)
        first = self.ticket.weights if self.part is None else self.part.weights
        return range(first, (self.ticket.weights if self.last is None else self.last) + 1)


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """The steps after a checkpoint, in order, and the weights that they still need."""

    entries: tuple[Entry, ...]
    older: Mapping[int, Mapping[str, Tensor]]
    """The weights from before the checkpoint, by the step after which they were taken."""


def older_weights(entries: Sequence[Entry], step: int) -> list[int]:
    """The weights from before `step` that batches still need."""
    return sorted({weights for entry in entries for weights in entry.needed if weights < step})


def save(folder: Path, in_flight: InFlight) -> None:
    """Write the files into a checkpoint."""
    (folder / FILE).write_bytes(encode({"entries": list(map(_entry_fields, in_flight.entries))}) + b"\n")
    for step, weights in in_flight.older.items():
        save_file(dict(weights), _weights_file(folder, step))


def read(folder: Path, step: int) -> InFlight | None:
    """The plan in the checkpoint of `step`; None if it has none, because sampling and training take turns.

    Raises `CheckpointError` for what no run writes."""
    if not (folder / FILE).is_file():
        return None
    try:
        entries = tuple(map(_entry, orjson.loads((folder / FILE).read_bytes())["entries"]))
        older = {older: load_file(_weights_file(folder, older)) for older in older_weights(entries, step)}
    except Exception as error:  # a stranger's file may have any shape
        raise CheckpointError(f"{folder / FILE}: cannot be read ({type(error).__name__}: {error})") from error
    collected = [entry.batch is not None for entry in entries]
    steps = [entry.ticket.step for entry in entries]
    if steps != list(range(step + 1, step + 1 + len(steps))) or collected != sorted(collected, reverse=True):
        raise CheckpointError(f"{folder / FILE}: is not about the steps after {step}; no run writes such a file")
    if any(not e.ticket.weights <= e.needed.start < e.needed.stop for e in entries if e.batch is None):
        raise CheckpointError(f"{folder / FILE}: names turns that no batch has; no run writes such a file")
    return InFlight(entries=entries, older=older)


def with_columns(batch: CollectResult, prompts: Sequence[Prompt]) -> CollectResult:
    """A restored batch with the columns and messages of its prompts, which a checkpoint does not keep."""
    rows = {prompt.id: prompt for prompt in prompts}

    def complete(group: Group) -> Group:
        # The second occurrence of a prompt in a batch is PROMPT#2.
        id_ = group.prompt.id if group.prompt.id in rows else group.prompt.id.rpartition("#")[0]
        row = rows.get(id_)
        if row is None:
            return group
        return replace(group, prompt=replace(group.prompt, content=row.content, columns=row.columns))

    groups, discarded = (tuple(map(complete, g)) for g in (batch.rollouts.groups, batch.rollouts.discarded))
    return replace(batch, rollouts=RolloutBatch(groups=groups, discarded=discarded))


def _weights_file(folder: Path, step: int) -> Path:
    return folder / f"weights-{step:06d}.tensors"


def _check(completions: Iterable[Completion]) -> None:
    """Raise `ValueError` for completions that no engine samples."""
    for completion in completions:
        ids, logp = completion.token_ids, completion.logp_sampler
        if not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{completion.prompt_id}: invalid token ids")
        if len(logp) != completion.sampled_count or not all(type(v) is float and v < ROUNDING for v in logp):
            raise ValueError(f"{completion.prompt_id}: invalid log-probs")


def _entry_fields(entry: Entry) -> dict[str, Any]:
    batch = entry.batch
    turns = {} if entry.last is None else {"last": entry.last, "part": entry.part}
    if batch is None:
        return {"ticket": entry.ticket, "batch": None, "difficulty": None, **turns}
    difficulty = batch.after.difficulty
    measured = difficulty and {
        "correct": difficulty.correct.tolist(),
        "judged": difficulty.judged.tolist(),
        "skipped": difficulty.skipped,
    }
    groups, discarded = map(without_columns, (batch.rollouts.groups, batch.rollouts.discarded))
    rollouts = RolloutBatch(groups=groups, discarded=discarded)
    plain = replace(batch, rollouts=rollouts, after=replace(batch.after, difficulty=None))
    return {"ticket": entry.ticket, "batch": plain, "difficulty": measured, **turns}


def _entry(fields: Mapping[str, Any]) -> Entry:
    batch: CollectResult | None = convert(CollectResult | None, fields["batch"])
    measured = fields["difficulty"]
    if batch is not None and measured is not None:
        difficulty = Difficulty(
            correct=np.array(measured["correct"], dtype=np.float64),
            judged=np.array(measured["judged"], dtype=np.float64),
            skipped=tuple(measured["skipped"]),
        )
        batch = replace(batch, after=replace(batch.after, difficulty=difficulty))
    part: OpenBatch | None = convert(OpenBatch | None, fields.get("part"))
    _check(c for group in (batch.rollouts.sampled if batch else ()) for c in group.completions)
    _check(c for group in (part.completions if part else ()) for c in group)
    ticket: Ticket = convert(Ticket, fields["ticket"])
    return Entry(ticket=ticket, batch=batch, last=fields.get("last"), part=part)

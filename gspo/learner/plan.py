"""Replies as packed tokens, and the plan that cuts a rollout batch into optimiser steps and micro-batches.

In: rows of prompt and reply token ids. Out: a `Plan`: optimiser steps, each a list of micro-batches of whole rows.
Invariant: the plan is made once per rollout batch and every forward on these rows uses it, the one for old
log-probabilities included. So at the first update the ratio is 1 to the bit, and a row's neighbours never change.

A micro-batch is a matrix of padded rows, or one long row in which nothing is padded and a prompt stands once for all of its
replies (`Packing`); what a token sees, and so its log-probability, is the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.model.packing import Packing, Span

Places = NDArray[np.int64]
"""numpy: a batch has thousands of short stretches, and each costs torch ten times as long."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One sequence: what was given and what was generated."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together: padded on the right, where a causal model cannot see it, or packed."""

    rows: tuple[int, ...]
    """Which sequences of the batch."""
    owners: tuple[int, ...]
    """For each of them, whose prompt stands for its own: itself, unless prompts are shared."""
    input_ids: Tensor
    row_N: Tensor
    """TokenSequence of each reply token within this micro-batch."""
    output_N: Tensor
    """Which output predicts the token, counted over `input_ids`, flattened."""
    target_N: Tensor
    at_N: Tensor
    """Where each reply token stands among the batch's packed tokens."""
    input_at: Tensor
    """Where each of `input_ids` stands among the batch's input tokens (see `Plan.input_starts`); -1: padding."""
    times: Tensor
    """How many rows each of `input_ids` stands for; 0: padding."""
    position_ids: Tensor | None = None
    packing: Packing | None = None
    """None: each row of `input_ids` is a row of the batch."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor | Packing)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How many positions the forwards of one pass over a batch compute."""

    computed: int
    empty: int
    """Of these, padding."""
    padded: int
    """If every reply had a row of its own, with its prompt, padded to the longest of its optimiser step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A rollout batch, cut up. `updates[i]` are the micro-batches of optimizer step i."""

    rows: tuple[TokenSequence, ...]
    sequence_N: Tensor
    """Sequence of each packed reply token."""
    updates: tuple[tuple[MicroBatch, ...], ...]
    pad_id: int
    packed: bool = False

    @property
    def tokens(self) -> int:
        return len(self.sequence_N)

    @property
    def input_starts(self) -> list[int]:
        """Where each row begins among the input tokens: prompt and reply of all rows, one after the other."""
        return [0, *accumulate(row.length for row in self.rows)][:-1]

    @property
    def input_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def positions(self) -> Positions:
        """What a pass over the batch computes."""
        micros = [micro for step in self.updates for micro in step]
        widths = [[self.rows[r].length for micro in step for r in micro.rows] for step in self.updates]
        return Positions(
            computed=sum(micro.input_ids.numel() for micro in micros),
            empty=sum(int((micro.times == 0).sum()) for micro in micros),
            padded=sum(len(lengths) * max(lengths) for lengths in widths),
        )

    def halves(self, micro: MicroBatch) -> tuple[MicroBatch, ...]:
        """The rows of a micro-batch in two; a single row cannot be cut."""
        middle, owner = len(micro.rows) // 2, dict(zip(micro.rows, micro.owners, strict=True))
        parts = (part for part in (micro.rows[:middle], micro.rows[middle:]) if part)
        return tuple(_micro_batch(self.rows, part, self.pad_id, self.packed, owner) for part in parts)

    def halved(self, update: int) -> Plan | None:
        """The plan with the micro-batches of an optimiser step cut in two; None if they are single rows already."""
        smaller = tuple(part for micro in self.updates[update] for part in self.halves(micro))
        if len(smaller) == len(self.updates[update]):
            return None
        return replace(self, updates=(*self.updates[:update], smaller, *self.updates[update + 1 :]))

    def lengths(self, rows: Sequence[int]) -> Tensor:
        """Reply tokens of some rows, in float64."""
        return torch.tensor([len(self.rows[r].completion_ids) for r in rows], dtype=torch.float64)


def make_plan(
    rows: Sequence[TokenSequence],
    groups: Sequence[int],
    *,
    mini_batches: int,
    token_budget: int,
    pad_id: int,
    seed: str,
    packed: bool = False,
) -> Plan:
    """Deal groups, in seeded order, into `mini_batches` optimiser steps of equal size (to one reply); a group stays whole
    unless it stands across a cut. With `packed`, rows of a micro-batch that have the same prompt share it."""
    sequence_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r.completion_ids) for r in rows], dtype=torch.long))  # fmt: skip
    order = _grouped_order(groups, seed)
    count = min(mini_batches, len(rows))
    cuts = [len(order) * i // count for i in range(count + 1)] if count else [0]
    cut = _by_packed_budget if packed else _by_budget
    updates = tuple(
        tuple(_micro_batch(rows, part, pad_id, packed) for part in cut(rows, order[a:b], token_budget))
        for a, b in pairwise(cuts)
    )
    return Plan(rows=tuple(rows), sequence_N=sequence_N, updates=updates, pad_id=pad_id, packed=packed)


def _grouped_order(groups: Sequence[int], seed: str) -> list[int]:
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    shuffled = list(members.values())
    random.Random(seed).shuffle(shuffled)
    return [row for group in shuffled for row in group]


def _by_budget(rows: Sequence[TokenSequence], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of like length together, so that little is padded; at least one row per micro-batch."""
    parts: list[list[int]] = []
    width = 0
    for row in sorted(chosen, key=lambda r: (rows[r].length, r)):
        width = max(width, rows[row].length)
        if parts and (len(parts[-1]) + 1) * width <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
            width = rows[row].length
    return parts


def _by_packed_budget(rows: Sequence[TokenSequence], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Rows in the order they were dealt in, so that groups stay together; a prompt counts once."""
    parts: list[list[int]] = []
    used, prompts = 0, set[tuple[int, ...]]()
    for row in chosen:
        new = 0 if rows[row].prompt_ids in prompts else len(rows[row].prompt_ids)
        if parts and used + new + len(rows[row].completion_ids) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
            used, new, prompts = 0, len(rows[row].prompt_ids), set()
        used += new + len(rows[row].completion_ids)
        prompts.add(rows[row].prompt_ids)
    return parts


def _micro_batch(
    rows: Sequence[TokenSequence],
    chosen: Sequence[int],
    pad_id: int,
    packed: bool,
    owner: Mapping[int, int] | None = None,
) -> MicroBatch:
    """`owner`: whose prompt stands for that of a row, where that was settled before."""
    if not packed:
        return _padded(rows, chosen, pad_id)
    first: dict[tuple[int, ...], int] = {}
    for row in chosen:
        first.setdefault(rows[row].prompt_ids, row)
    return _packed(rows, {row: (owner or {}).get(row, first[rows[row].prompt_ids]) for row in chosen})


def _padded(rows: Sequence[TokenSequence], chosen: Sequence[int], pad_id: int) -> MicroBatch:
    starts = [0, *accumulate(row.length for row in rows)]
    width = max(rows[r].length for r in chosen)
    input_ids = torch.full((len(chosen), width), pad_id)
    input_at = torch.full((len(chosen), width), -1)
    for i, r in enumerate(chosen):
        input_ids[i, : rows[r].length] = torch.tensor(rows[r].prompt_ids + rows[r].completion_ids)
        input_at[i, : rows[r].length] = torch.arange(starts[r], starts[r + 1])
    where = [np.arange(i * width, i * width + rows[r].length) for i, r in enumerate(chosen)]
    return MicroBatch(
        rows=tuple(chosen),
        owners=tuple(chosen),
        input_ids=input_ids,
        input_at=input_at,
        times=(input_at >= 0).long(),
        **_replies(rows, chosen, where),
    )


def _packed(rows: Sequence[TokenSequence], owner: Mapping[int, int]) -> MicroBatch:
    starts = [0, *accumulate(row.length for row in rows)]
    members: dict[int, list[int]] = {}
    for row, prompt in owner.items():
        members.setdefault(prompt, []).append(row)
    order = [row for group in members.values() for row in group]
    ids: list[int] = []
    columns: list[tuple[range, int, int]] = []  # of each stretch: places among the inputs, times, first position
    where: list[Places] = []
    prompts: list[Places] = []
    replies: list[Places] = []
    parts: list[Places] = []
    for prompt, group in members.items():
        given, begin = rows[prompt].prompt_ids, len(ids)
        prompts.append(np.arange(begin, begin + len(given)))
        parts.append(prompts[-1])
        ids += given
        columns.append((range(starts[prompt], starts[prompt] + len(given)), len(group), 0))
        for row in group:
            here = np.arange(len(ids), len(ids) + len(rows[row].completion_ids))
            where.append(np.concatenate([prompts[-1], here]))
            parts.append(here)
            ids += rows[row].completion_ids
            columns.append((range(starts[row] + len(given), starts[row + 1]), 1, len(given)))
        replies.append(np.arange(begin + len(given), len(ids)))
    lengths = [len(at) for at, _, _ in columns]
    return MicroBatch(
        rows=tuple(order),
        owners=tuple(owner[row] for row in order),
        input_ids=torch.tensor(ids).unsqueeze(0),
        input_at=_joined([np.arange(at.start, at.stop) for at, _, _ in columns]).unsqueeze(0),
        times=torch.from_numpy(np.repeat([times for _, times, _ in columns], lengths)).unsqueeze(0),
        position_ids=_joined([np.arange(t, t + n) for (_, _, t), n in zip(columns, lengths, strict=True)]).unsqueeze(0),
        packing=_packing(where, parts, prompts, replies),
        **_replies(rows, order, where),
    )


def _packing(where: list[Places], parts: list[Places], prompts: list[Places], replies: list[Places]) -> Packing:
    """`where` each row stands; its `parts`; the `prompts` and, for each of them, all `replies` to it."""
    width = max(map(len, where))
    rows_RT = np.zeros((len(where), width), dtype=np.int64)
    place_I = np.zeros(sum(map(len, parts)), dtype=np.int64)
    for i, row in enumerate(where):
        rows_RT[i, : len(row)] = row
        place_I[row] = np.arange(i * width, i * width + len(row))
    return Packing(
        parts=_span(parts),
        prompts=_span(prompts),
        replies=_span(replies),
        rows_RT=torch.from_numpy(rows_RT),
        place_I=torch.from_numpy(place_I),
    )


def _span(stretches: list[Places]) -> Span:
    lengths = [len(s) for s in stretches]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Span(at=_joined(stretches), starts=starts, longest=max(lengths))


def _replies(rows: Sequence[TokenSequence], chosen: Sequence[int], where: Sequence[Places]) -> dict[str, Any]:
    """The reply tokens of a micro-batch; `where` its rows' tokens stand among the inputs, flattened."""
    starts = [0, *accumulate(len(row.completion_ids) for row in rows)]
    lengths = [len(rows[r].completion_ids) for r in chosen]
    return {
        "row_N": torch.from_numpy(np.repeat(np.arange(len(chosen)), lengths)),
        "output_N": _joined([at[len(rows[r].prompt_ids) - 1 : -1] for r, at in zip(chosen, where, strict=True)]),
        "target_N": torch.tensor([x for r in chosen for x in rows[r].completion_ids], dtype=torch.long),
        "at_N": _joined([np.arange(starts[r], starts[r + 1]) for r in chosen]),
    }


def _joined(stretches: Sequence[Places]) -> Tensor:
    return torch.from_numpy(np.concatenate(stretches))

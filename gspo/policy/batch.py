"""Replies as packed tokens, and the plan that cuts a rollout batch into optimiser steps and micro-batches.

In: rows of prompt and reply token ids. Out: a `Plan`: optimiser steps, each a list of micro-batches of whole rows.
Invariant: the plan is made once per rollout batch and every forward on these rows uses it, the one for old
log-probabilities included. So at the first update the ratio is 1 to the bit, and a row's neighbours never change.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence: what was given and what was generated."""

    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.reply_ids)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together, padded on the right, where a causal model cannot see it."""

    rows: tuple[int, ...]
    """Which sequences of the batch."""
    input_ids: Tensor
    row_N: Tensor
    """Row of each reply token within this micro-batch."""
    position_N: Tensor
    """Position whose output predicts the token."""
    target_N: Tensor
    at_N: Tensor
    """Where each reply token stands among the batch's packed tokens."""
    input_at: Tensor
    """Where each of `input_ids` stands among the batch's input tokens (see `Plan.input_starts`); -1: padding."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A rollout batch, cut up. `steps[i]` are the micro-batches of optimiser step i."""

    rows: tuple[Row, ...]
    sequence_N: Tensor
    """Sequence of each packed reply token."""
    steps: tuple[tuple[MicroBatch, ...], ...]
    pad_id: int

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

    def halves(self, micro: MicroBatch) -> tuple[MicroBatch, ...]:
        """The rows of a micro-batch in two; a single row cannot be cut."""
        middle = len(micro.rows) // 2
        return tuple(_micro_batch(self.rows, part, self.pad_id) for part in (micro.rows[:middle], micro.rows[middle:]) if part)  # fmt: skip

    def halved(self, step: int) -> Plan | None:
        """The plan with the micro-batches of an optimiser step cut in two; None if they are single rows already."""
        smaller = tuple(part for micro in self.steps[step] for part in self.halves(micro))
        if len(smaller) == len(self.steps[step]):
            return None
        return replace(self, steps=(*self.steps[:step], smaller, *self.steps[step + 1 :]))

    def lengths(self, rows: Sequence[int]) -> Tensor:
        """Reply tokens of some rows, in float64."""
        return torch.tensor([len(self.rows[r].reply_ids) for r in rows], dtype=torch.float64)


def make_plan(
    rows: Sequence[Row], groups: Sequence[int], *, mini_batches: int, token_budget: int, pad_id: int, seed: str
) -> Plan:
    """Deal groups, in seeded order, into `mini_batches` optimiser steps of equal size (to one reply); a group stays whole
    unless it stands across a cut."""
    sequence_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r.reply_ids) for r in rows], dtype=torch.long))  # fmt: skip
    order = _grouped_order(groups, seed)
    count = min(mini_batches, len(rows))
    cuts = [len(order) * i // count for i in range(count + 1)] if count else [0]
    steps = tuple(
        tuple(_micro_batch(rows, part, pad_id) for part in _by_budget(rows, order[a:b], token_budget))
        for a, b in pairwise(cuts)
    )
    return Plan(rows=tuple(rows), sequence_N=sequence_N, steps=steps, pad_id=pad_id)


def _grouped_order(groups: Sequence[int], seed: str) -> list[int]:
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    shuffled = list(members.values())
    random.Random(seed).shuffle(shuffled)
    return [row for group in shuffled for row in group]


def _by_budget(rows: Sequence[Row], chosen: Sequence[int], budget: int) -> list[list[int]]:
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


def _micro_batch(rows: Sequence[Row], chosen: Sequence[int], pad_id: int) -> MicroBatch:
    start_B = [0, *accumulate(len(row.reply_ids) for row in rows)]
    input_start_B = [0, *accumulate(row.length for row in rows)]
    width = max(rows[r].length for r in chosen)
    input_ids = torch.full((len(chosen), width), pad_id)
    input_at = torch.full((len(chosen), width), -1)
    row_N, position_N, target_N, at_N = [], [], [], []
    for i, r in enumerate(chosen):
        prompt, reply = rows[r].prompt_ids, rows[r].reply_ids
        input_ids[i, : rows[r].length] = torch.tensor(prompt + reply)
        input_at[i, : rows[r].length] = torch.arange(input_start_B[r], input_start_B[r + 1])
        row_N.append(torch.full((len(reply),), i))
        position_N.append(torch.arange(len(prompt) - 1, len(prompt) + len(reply) - 1))
        target_N.append(torch.tensor(reply))
        at_N.append(torch.arange(start_B[r], start_B[r + 1]))
    return MicroBatch(
        rows=tuple(chosen),
        input_ids=input_ids,
        row_N=torch.cat(row_N),
        position_N=torch.cat(position_N),
        target_N=torch.cat(target_N),
        at_N=torch.cat(at_N),
        input_at=input_at,
    )

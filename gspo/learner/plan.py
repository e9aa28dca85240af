"""The plan that splits a rollout batch into optimizer steps and micro-batches.

In: sequences of prompt and completion token ids. Out: a `Plan`: optimizer steps, each a list of micro-batches of whole
sequences. Invariant: the plan is made once per rollout batch, and every forward on these sequences uses it, also the
one for the old log-probs. So at the first update the importance ratio is exactly 1, and the sequences that share a
micro-batch never change.

A micro-batch is a matrix of padded sequences, or one long row without padding that contains each prompt once for all of
its completions (`Packing`). A token attends to the same tokens in both, so its log-prob is the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gspo.model.micro_batch import MicroBatch, TokenSequence, micro_batch


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How many positions the forwards of one pass over a batch compute."""

    computed: int
    empty: int
    """Padding, included in `computed`."""
    padded: int
    """What it would be if every completion had its own row, with its prompt, padded to the longest of its update."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A rollout batch, split. `updates[i]` are the micro-batches of optimizer step i."""

    rows: tuple[TokenSequence, ...]
    sequence_N: Tensor
    """Sequence of each packed completion token."""
    updates: tuple[tuple[MicroBatch, ...], ...]
    pad_id: int
    packed: bool = False

    @property
    def tokens(self) -> int:
        return len(self.sequence_N)

    @property
    def input_starts(self) -> list[int]:
        """Where each sequence starts in the input tokens: all prompts and completions, one sequence after the other."""
        return [0, *accumulate(row.length for row in self.rows)][:-1]

    @property
    def input_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def positions(self) -> Positions:
        """How many positions a pass over the batch computes."""
        micros = [micro for step in self.updates for micro in step]
        widths = [[self.rows[r].length for micro in step for r in micro.rows] for step in self.updates]
        return Positions(
            computed=sum(micro.input_ids.numel() for micro in micros),
            empty=sum(int((micro.times == 0).sum()) for micro in micros),
            padded=sum(len(lengths) * max(lengths) for lengths in widths),
        )

    def halves(self, micro: MicroBatch) -> tuple[MicroBatch, ...]:
        """A micro-batch split into two. A single sequence is not split."""
        middle = len(micro.rows) // 2
        # Keep the owners: experts are stored by input token, and those of a shared prompt under its owner.
        owner = dict(zip(micro.rows, micro.owners, strict=True))
        parts = (part for part in (micro.rows[:middle], micro.rows[middle:]) if part)
        return tuple(micro_batch(self.rows, part, self.pad_id, self.packed, owner) for part in parts)

    def halved(self, update: int) -> Plan | None:
        """The plan with the micro-batches of one update split into two; None if all are single sequences already."""
        smaller = tuple(part for micro in self.updates[update] for part in self.halves(micro))
        if len(smaller) == len(self.updates[update]):
            return None
        return replace(self, updates=(*self.updates[:update], smaller, *self.updates[update + 1 :]))

    def lengths(self, rows: Sequence[int]) -> Tensor:
        """Completion lengths of some sequences, in float64."""
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
    """Split the sequences, with groups in seeded order, into `mini_batches` optimizer steps of equal size, up to one
    completion. A group stays together unless it crosses a boundary. With `packed`, sequences of a micro-batch that have
    the same prompt share it."""
    lengths = torch.tensor([len(r.completion_ids) for r in rows], dtype=torch.long)
    sequence_N = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    order = _grouped_order(groups, seed)
    count = min(mini_batches, len(rows))
    cuts = [len(order) * i // count for i in range(count + 1)] if count else [0]
    split = _split_packed if packed else _split_padded
    updates = tuple(
        tuple(micro_batch(rows, part, pad_id, packed) for part in split(rows, order[a:b], token_budget))
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


def _split_padded(rows: Sequence[TokenSequence], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences of similar length together, so that there is little padding. At least one per micro-batch."""
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


def _split_packed(rows: Sequence[TokenSequence], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences in the given order, so that groups stay together. A shared prompt counts once."""
    parts: list[list[int]] = []
    used = 0
    prompts = set[tuple[int, ...]]()
    for row in chosen:
        new = 0 if rows[row].prompt_ids in prompts else len(rows[row].prompt_ids)
        if parts and used + new + len(rows[row].completion_ids) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
            used = 0
            new = len(rows[row].prompt_ids)
            prompts = set()
        used += new + len(rows[row].completion_ids)
        prompts.add(rows[row].prompt_ids)
    return parts

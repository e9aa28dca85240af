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
"""Token indices. numpy, because a batch has thousands of short spans and torch takes ten times as long for each."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One sequence: a prompt and its completion."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences that share a forward pass: padded on the right, where a causal model ignores it, or packed."""

    rows: tuple[int, ...]
    """Indices of its sequences in the batch."""
    owners: tuple[int, ...]
    """For each of them, the sequence whose copy of the prompt it uses: itself, unless prompts are shared."""
    input_ids: Tensor
    row_N: Tensor
    """Sequence of each completion token, numbered within this micro-batch."""
    output_N: Tensor
    """Index of the output that predicts the token, over flattened `input_ids`."""
    target_N: Tensor
    at_N: Tensor
    """Index of each completion token among the batch's packed tokens."""
    input_at: Tensor
    """Index of each of `input_ids` among the batch's input tokens (see `Plan.input_starts`); -1 for padding."""
    times: Tensor
    """How many sequences contain each of `input_ids`; 0 for padding."""
    position_ids: Tensor | None = None
    packing: Packing | None = None
    """None if padded: each row of `input_ids` is one sequence."""

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor | Packing)}
        return replace(self, **moved)


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
        return tuple(_micro_batch(self.rows, part, self.pad_id, self.packed, owner) for part in parts)

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
        tuple(_micro_batch(rows, part, pad_id, packed) for part in split(rows, order[a:b], token_budget))
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


def _micro_batch(
    rows: Sequence[TokenSequence],
    chosen: Sequence[int],
    pad_id: int,
    packed: bool,
    owner: Mapping[int, int] | None = None,
) -> MicroBatch:
    """`owner` maps a sequence to the one whose copy of the prompt it uses, if an earlier split has decided that."""
    if not packed:
        return _padded_micro_batch(rows, chosen, pad_id)
    first: dict[tuple[int, ...], int] = {}
    for row in chosen:
        first.setdefault(rows[row].prompt_ids, row)
    return _packed_micro_batch(rows, {row: (owner or {}).get(row, first[rows[row].prompt_ids]) for row in chosen})


def _padded_micro_batch(rows: Sequence[TokenSequence], chosen: Sequence[int], pad_id: int) -> MicroBatch:
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
        **_completion_tokens(rows, chosen, where),
    )


def _packed_micro_batch(rows: Sequence[TokenSequence], owner: Mapping[int, int]) -> MicroBatch:
    starts = [0, *accumulate(row.length for row in rows)]
    members: dict[int, list[int]] = {}
    for row, prompt in owner.items():
        members.setdefault(prompt, []).append(row)
    order = [row for group in members.values() for row in group]
    ids: list[int] = []
    spans: list[tuple[range, int, int]] = []  # input tokens, times, first position
    where: list[Places] = []
    prompts: list[Places] = []
    completions: list[Places] = []
    parts: list[Places] = []
    for prompt, group in members.items():
        given = rows[prompt].prompt_ids
        begin = len(ids)
        prompts.append(np.arange(begin, begin + len(given)))
        parts.append(prompts[-1])
        ids += given
        spans.append((range(starts[prompt], starts[prompt] + len(given)), len(group), 0))
        for row in group:
            here = np.arange(len(ids), len(ids) + len(rows[row].completion_ids))
            where.append(np.concatenate([prompts[-1], here]))
            parts.append(here)
            ids += rows[row].completion_ids
            spans.append((range(starts[row] + len(given), starts[row + 1]), 1, len(given)))
        completions.append(np.arange(begin + len(given), len(ids)))
    lengths = [len(at) for at, _, _ in spans]
    positions = [np.arange(first, first + n) for (_, _, first), n in zip(spans, lengths, strict=True)]
    return MicroBatch(
        rows=tuple(order),
        owners=tuple(owner[row] for row in order),
        input_ids=torch.tensor(ids).unsqueeze(0),
        input_at=_concatenate([np.arange(at.start, at.stop) for at, _, _ in spans]).unsqueeze(0),
        times=torch.from_numpy(np.repeat([times for _, times, _ in spans], lengths)).unsqueeze(0),
        position_ids=_concatenate(positions).unsqueeze(0),
        packing=_packing(where, parts, prompts, completions),
        **_completion_tokens(rows, order, where),
    )


def _packing(where: list[Places], parts: list[Places], prompts: list[Places], completions: list[Places]) -> Packing:
    """Indices into the packed row: `where` each sequence is, all `parts`, each prompt, and all completions of each."""
    width = max(map(len, where))
    rows_RT = np.zeros((len(where), width), dtype=np.int64)
    place_I = np.zeros(sum(map(len, parts)), dtype=np.int64)
    for i, row in enumerate(where):
        rows_RT[i, : len(row)] = row
        place_I[row] = np.arange(i * width, i * width + len(row))
    return Packing(
        parts=_span(parts),
        prompts=_span(prompts),
        replies=_span(completions),
        rows_RT=torch.from_numpy(rows_RT),
        place_I=torch.from_numpy(place_I),
    )


def _span(spans: list[Places]) -> Span:
    lengths = [len(s) for s in spans]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Span(at=_concatenate(spans), starts=starts, longest=max(lengths))


def _completion_tokens(rows: Sequence[TokenSequence], chosen: Sequence[int], where: Sequence[Places]) -> dict[str, Any]:
    """The completion tokens of a micro-batch. `where` indexes the tokens of each sequence in the flattened inputs."""
    starts = [0, *accumulate(len(row.completion_ids) for row in rows)]
    lengths = [len(rows[r].completion_ids) for r in chosen]
    return {
        "row_N": torch.from_numpy(np.repeat(np.arange(len(chosen)), lengths)),
        "output_N": _concatenate([at[len(rows[r].prompt_ids) - 1 : -1] for r, at in zip(chosen, where, strict=True)]),
        "target_N": torch.tensor([x for r in chosen for x in rows[r].completion_ids], dtype=torch.long),
        "at_N": _concatenate([np.arange(starts[r], starts[r + 1]) for r in chosen]),
    }


def _concatenate(spans: Sequence[Places]) -> Tensor:
    return torch.from_numpy(np.concatenate(spans))

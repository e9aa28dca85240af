"""Sequences that go through a model together: padded rows, or one packed row.

In: sequences of prompt and completion token ids. Out: a `MicroBatch`. Invariant: what a token attends to, and so its
log-prob, is the same either way. A packed row has no padding and holds a prompt once for all of its completions. The
model reads every token of a completion; log-probs exist only for the tokens that it sampled.

A sequence may have branches (`types.Branch`). A packed row holds each of its tokens once. Padded, each branch is a row
of its own, and a token that several of them contain counts in the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.model.attention_blocks import AttentionBlocks, attention_blocks
from gspo.types import Branch, branch_paths

if TYPE_CHECKING:
    from gspo.model.context_parallel import HeadExchange

Places = NDArray[np.int64]
"""Token indices. numpy, because a batch has thousands of short spans and torch takes ten times as long for each."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One sequence: a prompt and its completion."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampled: tuple[bool, ...] = ()
    """Which completion tokens the model sampled; empty if all (see `types.Completion`)."""
    excluded_ids: tuple[int, ...] = ()
    """Tokens that could not be sampled at the first `excluded_for` positions: end tokens, with `rollout.min_tokens`."""
    excluded_for: int = 0
    branches: tuple[Branch, ...] = ()
    """How the tokens follow each other (see `types.Completion`); empty if each follows the one before it."""

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @cached_property
    def paths(self) -> list[Places]:
        """What a forward reads, for each branch: indices into prompt and completion."""
        if not self.branches:
            return [np.arange(self.length)]
        return list(map(np.array, branch_paths(len(self.prompt_ids), len(self.completion_ids), self.branches)))

    @property
    def width(self) -> int:
        """Tokens of the longest branch: the length of a row that a forward reads."""
        return max(map(len, self.paths)) if self.branches else self.length

    @property
    def rows(self) -> int:
        """How many rows it has if it is padded."""
        return len(self.branches) or 1

    @property
    def positions(self) -> Places:
        """How many tokens come before each token of the completion."""
        found = len(self.prompt_ids) + np.arange(len(self.completion_ids))
        ends = [*(branch.start for branch in self.branches[2:]), len(found)]
        for branch, end in zip(self.branches[1:], ends, strict=False):
            found[branch.start : end] = branch.shared + np.arange(end - branch.start)
        return found

    @property
    def predecessors(self) -> Places:
        """Index in prompt and completion of the token before each token of the completion."""
        found = len(self.prompt_ids) - 1 + np.arange(len(self.completion_ids))
        for branch in self.branches[1:]:
            if branch.shared:
                found[branch.start : branch.start + 1] = self.paths[branch.parent][branch.shared - 1]
        return found

    @property
    def unread(self) -> Places:
        """Indices in prompt and completion of the tokens that nothing follows: sampled, but read by no forward."""
        if not self.branches:
            return np.array([self.length - 1])
        ends = np.array([path[-1] for path in self.paths])
        return ends[~np.isin(ends, self.predecessors)]

    @property
    def sampled_count(self) -> int:
        """Tokens that have a log-prob."""
        return sum(self.sampled) if self.sampled else len(self.completion_ids)

    @property
    def sampled_at(self) -> Places:
        """Indices of the sampled tokens in the completion."""
        return np.flatnonzero(self.sampled) if self.sampled else np.arange(len(self.completion_ids))


@dataclass(frozen=True, kw_only=True)
class ExcludedTokens:
    """Tokens of the vocabulary that have probability 0 in some rows."""

    rows: Tensor
    """Which rows: indices of sampled tokens."""
    ids: Tensor

    def to(self, device: torch.device) -> ExcludedTokens:
        """The same on another device."""
        return ExcludedTokens(rows=self.rows.to(device), ids=self.ids.to(device))


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Sequences in one packed row: a prompt, its completions one after the other, the next prompt, and so on."""

    rows_RT: Tensor
    """Index in the packed row of each token of each sequence, or of each of its branches; a shared prompt occurs in
    several. Padded with 0 on the right."""
    place_I: Tensor
    """Index in the flattened `rows_RT` of each token of the packed row, in one of its sequences."""
    blocks: AttentionBlocks | None
    """How attention kernels divide the packed row. None with branches, which they do not support: then each branch is
    expanded to a row for the attention."""
    exchange: HeadExchange | None = None
    """With context parallelism: how the ranks that have parts of the row attend together."""

    def to(self, device: torch.device) -> Packing:
        """The same on another device."""
        return replace(self, **{k: v.to(device) for k, v in vars(self).items() if k != "exchange" and v is not None})


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences that share a forward pass: padded on the right, where a causal model ignores it, or packed."""

    sequence_ids: tuple[int, ...]
    """Indices of its sequences in the batch."""
    owners: tuple[int, ...]
    """For each of them, the sequence whose copy of the prompt it uses: itself, unless prompts are shared."""
    input_ids: Tensor
    sequence_N: Tensor
    """Sequence of each sampled token, numbered within this micro-batch."""
    output_N: Tensor
    """Index of the output that predicts the token, over flattened `input_ids`."""
    target_N: Tensor
    at_N: Tensor
    """Index of each sampled token among the batch's packed tokens."""
    input_at: Tensor
    """Index of each of `input_ids` among the batch's input tokens (see `Plan.input_starts`); -1 for padding."""
    times: Tensor
    """How many sequences contain each of `input_ids`; 0 for padding, and for a token of another branch that is already
    in one before it."""
    position_ids: Tensor | None = None
    packing: Packing | None = None
    """None if padded: each row of `input_ids` is one sequence."""
    excluded: ExcludedTokens | None = None
    """Tokens that had probability 0 where some of its tokens were sampled; None if there are none."""
    part: MicroBatch | None = None
    """With context parallelism: the part of its tokens that this rank computes."""

    @property
    def own(self) -> MicroBatch:
        """What this rank computes of it: all, unless there is context parallelism."""
        return self if self.part is None else self.part

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Movable)}
        return replace(self, **moved)

    def without_tokens(self) -> MicroBatch:
        """The same forward pass without any token to train on: its loss is 0, and so is its gradient.

        Ranks that share a model run equally many forwards. This one is for a rank that has fewer to do."""
        empty = {name: getattr(self, name)[:0] for name in ("sequence_N", "output_N", "target_N", "at_N")}
        nowhere = torch.full_like(self.input_at, -1)
        none = torch.zeros_like(self.times)
        return replace(self, sequence_ids=(), owners=(), input_at=nowhere, times=none, excluded=None, **empty)


Movable = Tensor | Packing | ExcludedTokens | MicroBatch


def micro_batch(
    sequences: Sequence[TokenSequence],
    chosen: Sequence[int],
    pad_id: int,
    packed: bool,
    owner: Mapping[int, int] | None = None,
) -> MicroBatch:
    """The `chosen` of all `sequences` of a batch. `owner` maps a sequence to the one whose copy of the prompt it uses,
    if an earlier split has decided that."""
    if not packed:
        return _padded_micro_batch(sequences, chosen, pad_id)
    first: dict[tuple[int, ...], int] = {}
    for s in chosen:
        first.setdefault(sequences[s].prompt_ids, s)
    owners = {s: (owner or {}).get(s, first[sequences[s].prompt_ids]) for s in chosen}
    return _packed_micro_batch(sequences, owners)


def _padded_micro_batch(sequences: Sequence[TokenSequence], chosen: Sequence[int], pad_id: int) -> MicroBatch:
    starts = [0, *accumulate(sequence.length for sequence in sequences)]
    width = max(sequences[s].width for s in chosen)
    shape = (sum(sequences[s].rows for s in chosen), width)
    input_ids, input_at, times = np.full(shape, pad_id), np.full(shape, -1), np.zeros(shape, dtype=np.int64)
    where = []
    row = 0
    for s in chosen:
        ids = np.array(sequences[s].prompt_ids + sequences[s].completion_ids)
        place = np.full(len(ids), -1)
        for path in sequences[s].paths:
            input_ids[row, : len(path)] = ids[path]
            input_at[row, : len(path)] = starts[s] + path
            new = place[path] < 0
            place[path[new]] = row * width + np.flatnonzero(new)
            times[row, : len(path)] = new
            row += 1
        where.append(place)
    return MicroBatch(
        sequence_ids=tuple(chosen),
        owners=tuple(chosen),
        input_ids=torch.from_numpy(input_ids),
        input_at=torch.from_numpy(input_at),
        times=torch.from_numpy(times),
        **_sampled_tokens(sequences, chosen, where),
    )


def _packed_micro_batch(sequences: Sequence[TokenSequence], owner: Mapping[int, int]) -> MicroBatch:
    starts = [0, *accumulate(sequence.length for sequence in sequences)]
    members: dict[int, list[int]] = {}
    for s, prompt in owner.items():
        members.setdefault(prompt, []).append(s)
    order = [s for group in members.values() for s in group]
    ids: list[int] = []
    spans: list[tuple[range, int]] = []  # input tokens, times
    positions: list[Places] = []
    where: list[Places] = []
    for prompt, group in members.items():
        given = sequences[prompt].prompt_ids
        begin = len(ids)
        ids += given
        spans.append((range(starts[prompt], starts[prompt] + len(given)), len(group)))
        positions.append(np.arange(len(given)))
        for s in group:
            here = np.arange(len(ids), len(ids) + len(sequences[s].completion_ids))
            where.append(np.concatenate([np.arange(begin, begin + len(given)), here]))
            ids += sequences[s].completion_ids
            spans.append((range(starts[s] + len(given), starts[s + 1]), 1))
            positions.append(sequences[s].positions)
    blocks = None
    if not any(sequences[s].branches for s in order):
        lengths_by_group = [
            (len(sequences[prompt].prompt_ids), [len(sequences[s].completion_ids) for s in group])
            for prompt, group in members.items()
        ]
        blocks = attention_blocks(lengths_by_group)
    rows = [at[path] for s, at in zip(order, where, strict=True) for path in sequences[s].paths]
    return MicroBatch(
        sequence_ids=tuple(order),
        owners=tuple(owner[s] for s in order),
        input_ids=torch.tensor(ids).unsqueeze(0),
        input_at=_concatenate([np.arange(at.start, at.stop) for at, _ in spans]).unsqueeze(0),
        times=torch.from_numpy(np.repeat([times for _, times in spans], [len(at) for at, _ in spans])).unsqueeze(0),
        position_ids=_concatenate(positions).unsqueeze(0),
        packing=_packing(rows, len(ids), blocks),
        **_sampled_tokens(sequences, order, where),
    )


def _packing(rows: list[Places], tokens: int, blocks: AttentionBlocks | None) -> Packing:
    """Indices into a packed row of so many tokens: where each sequence or branch is."""
    width = max(map(len, rows))
    rows_RT = np.zeros((len(rows), width), dtype=np.int64)
    place_I = np.zeros(tokens, dtype=np.int64)
    for i, row in enumerate(rows):
        rows_RT[i, : len(row)] = row
        # What is shared is overwritten by each of its sequences: its outputs are the same in all of them.
        place_I[row] = np.arange(i * width, i * width + len(row))
    return Packing(
        rows_RT=torch.from_numpy(rows_RT),
        place_I=torch.from_numpy(place_I),
        blocks=blocks,
    )


def _sampled_tokens(
    sequences: Sequence[TokenSequence], chosen: Sequence[int], where: Sequence[Places]
) -> dict[str, Any]:
    """The sampled tokens of a micro-batch. `where` indexes the tokens of each sequence in the flattened inputs."""
    starts = [0, *accumulate(sequence.sampled_count for sequence in sequences)]
    targets, outputs, excluded = [], [], []
    for s, at in zip(chosen, where, strict=True):
        sequence = sequences[s]
        sampled_at = sequence.sampled_at
        excluded.append(sampled_at < sequence.excluded_for)
        targets.append(np.asarray(sequence.completion_ids, dtype=np.int64)[sampled_at])
        # The output at a position predicts the next token: the first completion token comes from the last prompt token.
        outputs.append(at[sequence.predecessors[sampled_at]])
    return {
        "sequence_N": torch.from_numpy(np.repeat(np.arange(len(chosen)), [len(ids) for ids in targets])),
        "output_N": _concatenate(outputs),
        "target_N": _concatenate(targets),
        "at_N": _concatenate([np.arange(starts[s], starts[s + 1]) for s in chosen]),
        "excluded": _excluded(sequences[chosen[0]].excluded_ids, np.concatenate(excluded)),
    }


def _excluded(ids: tuple[int, ...], excluded_N: NDArray[np.bool_]) -> ExcludedTokens | None:
    """The excluded tokens, which are the same for all sequences of a batch."""
    if not ids or not excluded_N.any():
        return None
    return ExcludedTokens(rows=torch.from_numpy(np.flatnonzero(excluded_N)), ids=torch.tensor(ids))


def _concatenate(spans: Sequence[Places]) -> Tensor:
    return torch.from_numpy(np.concatenate(spans))


def padded(ids_B: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Token ids, padded on the right. In a causal model no earlier position attends to the padding."""
    width = max(map(len, ids_B))
    return torch.tensor([ids + (0,) * (width - len(ids)) for ids in ids_B], dtype=torch.int64, device=device)

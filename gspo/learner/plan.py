"""The plan that splits a rollout batch into optimizer steps and micro-batches.

In: sequences of prompt and completion token ids. Out: a `Plan`: optimizer steps, each a list of micro-batches of whole
sequences. Invariant: the plan is made once per rollout batch, and every forward on these sequences uses it, also the
one for the old log-probs. So if the learner computes the old log-probs, the importance ratio is exactly 1 at the first
update. Which sequences share an update never changes. Which share a micro-batch changes only if memory runs out
(`Plan.halved`), and then the ratio is 1 up to rounding. A sequence that need not be computed belongs to its update, and
so to its denominators, but to no micro-batch.

If several ranks share the model, the sequences of an update are divided among them by the tokens to compute. A rank
holds its own micro-batches, and as many of them as any other rank: a forward pass that one rank skips would block the
others. Everything else in a plan is the same on all ranks. With context parallelism, the ranks of a group have the
same micro-batches, and each has another part of their tokens (`MicroBatch.own`).

A micro-batch is a matrix of padded sequences, or one long row without padding that contains each prompt once for all of
its completions (`Packing`). A token attends to the same tokens in both, so its log-prob is the same.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from gspo.model.context_parallel import with_part
from gspo.model.micro_batch import MicroBatch, TokenSequence, micro_batch
from gspo.ranks.group import ONE, Ranks

_NONE = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How many positions the forwards of one pass over a batch compute."""

    computed: int
    empty: int
    """Padding, included in `computed`, and what a rank computes because others have more micro-batches."""
    padded: int
    """What it would be if every completion, or each of its branches, had its own row, with its prompt, padded to the
    longest of its update."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A rollout batch, split. `updates[i]` are the micro-batches of optimizer step i on this rank."""

    sequences: tuple[TokenSequence, ...]
    sequence_N: Tensor
    """Sequence of each packed sampled token."""
    updates: tuple[tuple[MicroBatch, ...], ...]
    sequence_ids: tuple[tuple[int, ...], ...]
    """Indices of the sequences of each optimizer step, also of those that are in no micro-batch."""
    computed_ids: tuple[tuple[int, ...], ...]
    """Indices of the sequences of each optimizer step that are in a micro-batch, of any rank."""
    pad_id: int
    packed: bool = False

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return len(self.sequence_N)

    @property
    def computed_N(self) -> Tensor:
        """Which tokens are in a micro-batch, of any rank."""
        return self._tokens_in(chain.from_iterable(self.computed_ids))

    def at_N(self, update: int) -> Tensor:
        """Indices of the tokens of an optimizer step that are in a micro-batch, of any rank."""
        return self._tokens_in(self.computed_ids[update]).nonzero().squeeze(-1)

    def own_at_N(self, update: int) -> Tensor:
        """Those of them that are in a micro-batch of this rank."""
        return torch.cat([micro.at_N for micro in self.updates[update]]) if self.updates[update] else _NONE

    @property
    def own(self) -> Plan:
        """The plan with what this rank computes of each micro-batch in its place."""
        return replace(self, updates=tuple(tuple(micro.own for micro in update) for update in self.updates))

    def part(self, updates: Sequence[int]) -> Plan:
        """A plan of some of the optimizer steps."""
        return replace(
            self,
            updates=tuple(self.updates[i] for i in updates),
            computed_ids=tuple(self.computed_ids[i] for i in updates),
        )

    def _tokens_in(self, sequence_ids: Iterable[int]) -> Tensor:
        chosen_B = torch.zeros(len(self.sequences), dtype=torch.bool)
        chosen_B[list(sequence_ids)] = True
        return chosen_B[self.sequence_N]

    @property
    def input_starts(self) -> list[int]:
        """Where each sequence starts in the input tokens: all prompts and completions, one sequence after the other."""
        return [0, *accumulate(sequence.length for sequence in self.sequences)][:-1]

    @property
    def input_tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)

    @property
    def positions(self) -> Positions:
        """How many positions a pass over the batch computes on this rank."""
        micros = [micro.own for update in self.updates for micro in update]
        updates = [[self.sequences[s] for s in chosen] for chosen in self.computed_ids]
        widths = [[sequence.width for sequence in own for _ in range(sequence.rows)] for own in updates]
        return Positions(
            computed=sum(micro.input_ids.numel() for micro in micros),
            empty=sum(int((micro.times == 0).sum()) for micro in micros),
            padded=sum(len(own) * max(own, default=0) for own in widths),
        )

    def halves(self, micro: MicroBatch) -> tuple[MicroBatch, ...]:
        """A micro-batch split into two. A single sequence is not split."""
        middle = len(micro.sequence_ids) // 2
        # Keep the owners: experts are stored by input token, and those of a shared prompt under its owner.
        owner = dict(zip(micro.sequence_ids, micro.owners, strict=True))
        parts = (part for part in (micro.sequence_ids[:middle], micro.sequence_ids[middle:]) if part)
        return tuple(micro_batch(self.sequences, part, self.pad_id, self.packed, owner) for part in parts)

    def halved(self, update: int) -> Plan | None:
        """The plan with the micro-batches of one update split into two; None if all are single sequences already."""
        smaller = tuple(part for micro in self.updates[update] for part in self.halves(micro))
        if len(smaller) == len(self.updates[update]):
            return None
        return replace(self, updates=(*self.updates[:update], smaller, *self.updates[update + 1 :]))

    def lengths(self, sequence_ids: Sequence[int]) -> Tensor:
        """Sampled tokens of some sequences, in float64."""
        return torch.tensor([self.sequences[s].sampled_count for s in sequence_ids], dtype=torch.float64)


def update_count(mini_batches: int, completions: int, *, full: int) -> int:
    """Optimizer steps for a batch of so many completions, if a full batch has `full` and gets `mini_batches`.

    ceil(mini_batches x completions / full): few completions must not become many optimizer steps on a few each, which
    would be far noisier than those of a full batch. At least 1, and never more than `mini_batches`."""
    # In integers: a float could round a full batch up to one more.
    return max(1, min(mini_batches, -(-mini_batches * completions // full)))


def make_plan(
    sequences: Sequence[TokenSequence],
    groups: Sequence[int],
    *,
    mini_batches: int,
    token_budget: int,
    pad_id: int,
    seed: str,
    packed: bool = False,
    uncomputed: Collection[int] = (),
    ranks: Ranks = ONE,
) -> Plan:
    """Split the sequences, with groups in seeded order, into `mini_batches` optimizer steps of equal size, up to one
    completion. A group stays together unless it crosses a boundary. With `packed`, sequences of a micro-batch that have
    the same prompt share it. The `uncomputed` sequences are in no micro-batch; an optimizer step may have none. The
    micro-batches are those of this rank."""
    lengths = torch.tensor([s.sampled_count for s in sequences], dtype=torch.long)
    sequence_N = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    order = _grouped_order(groups, seed)
    count = min(mini_batches, len(sequences))  # an optimizer step without sequences would have no gradient
    # Integer division spreads the remainder, so that sizes differ by at most one.
    cuts = [len(order) * i // count for i in range(count + 1)] if count else [0]
    sequence_ids = tuple(tuple(order[a:b]) for a, b in pairwise(cuts))
    split = _split_packed if packed else _split_padded
    # After the cuts: what is computed must not decide which sequences share an optimizer step.
    computed = tuple(tuple(s for s in chosen if s not in uncomputed) for chosen in sequence_ids)
    updates = []
    for chosen in computed:
        parts_of_ranks = [
            split(sequences, share, token_budget) for share in _shares(sequences, chosen, ranks.data_count, packed)
        ]
        own = [micro_batch(sequences, part, pad_id, packed) for part in parts_of_ranks[ranks.data_rank]]
        missing = max(map(len, parts_of_ranks)) - len(own)
        if missing:
            shortest = min(chosen, key=lambda s: sequences[s].length)
            own += [micro_batch(sequences, [shortest], pad_id, packed).without_tokens()] * missing
        updates.append(tuple(own if ranks.context is None else [with_part(micro, ranks.context) for micro in own]))
    return Plan(
        sequences=tuple(sequences),
        sequence_N=sequence_N,
        updates=tuple(updates),
        sequence_ids=sequence_ids,
        computed_ids=computed,
        pad_id=pad_id,
        packed=packed,
    )


def _grouped_order(groups: Sequence[int], seed: str) -> list[int]:
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(groups):
        members.setdefault(group, []).append(sequence)
    # Groups, not sequences: a group that stays together shares its prompt in a packed row.
    shuffled = list(members.values())
    # A text as seed is hashed with SHA-512, so the order is the same in every process.
    random.Random(seed).shuffle(shuffled)
    return [sequence for group in shuffled for sequence in group]


def _shares(sequences: Sequence[TokenSequence], chosen: Sequence[int], ranks: int, packed: bool) -> list[list[int]]:
    """The sequences of each rank: consecutive ones, because those of a group share their prompt, and with numbers of
    tokens to compute that are as equal as they can be without splitting a sequence."""
    before = (None, *(sequences[s].prompt_ids for s in chosen))
    costs = [
        sequences[s].rows * sequences[s].width
        if not packed
        else len(sequences[s].completion_ids)
        if sequences[s].prompt_ids == prompt
        else sequences[s].length
        for s, prompt in zip(chosen, before, strict=False)
    ]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for s, cost, end in zip(chosen, costs, accumulate(costs), strict=True):
        # The rank in whose equal part of all tokens the middle of this sequence lies.
        shares[(2 * end - cost) * ranks // (2 * sum(costs))].append(s)
    return shares


def _split_padded(sequences: Sequence[TokenSequence], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences of similar length together, so that there is little padding. At least one per micro-batch."""
    parts: list[list[int]] = []
    width = rows = 0
    for s in sorted(chosen, key=lambda i: (sequences[i].width, i)):
        width = max(width, sequences[s].width)
        rows += sequences[s].rows
        if parts and rows * width <= budget:
            parts[-1].append(s)
        else:
            parts.append([s])
            width, rows = sequences[s].width, sequences[s].rows
    return parts


def _split_packed(sequences: Sequence[TokenSequence], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences in the given order, so that groups stay together. A shared prompt counts once."""
    parts: list[list[int]] = []
    used = 0
    prompts = set[tuple[int, ...]]()
    for s in chosen:
        prompt_ids, completion_ids = sequences[s].prompt_ids, sequences[s].completion_ids
        new = 0 if prompt_ids in prompts else len(prompt_ids)
        if parts and used + new + len(completion_ids) <= budget:
            parts[-1].append(s)
        else:
            parts.append([s])
            used = 0
            new = len(prompt_ids)
            prompts = set()
        used += new + len(completion_ids)
        prompts.add(prompt_ids)
    return parts

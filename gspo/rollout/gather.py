"""Gather enough groups to train on, refilling what the objective discards.

In: scored groups, as they come. Out: a `CollectResult`. Invariant: a group is kept or discarded by its rewards before
length shaping. When the budget runs out, the step trains on what was kept; nothing that was discarded comes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gspo.rollout.engine import DecodeStats
from gspo.types import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The groups that a step sampled."""

    groups: tuple[Group, ...]
    discarded: tuple[Group, ...]

    @property
    def sampled(self) -> tuple[Group, ...]:
        """All groups, discarded ones included."""
        return self.groups + self.discarded


@dataclass(frozen=True, kw_only=True)
class CollectResult:
    """The rollout half of a step."""

    gathered: RolloutBatch
    cursor: int
    """Position in the data order after this step."""
    decoded: DecodeStats | None = None
    """What decoding cost; None if the engine does not know."""

    @property
    def tokens(self) -> int:
        """Sampled tokens of all completions, discarded ones included."""
        return sum(c.sampled_count for group in self.gathered.sampled for c in group.completions)


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """Prompts to sample next."""

    cursor: int
    count: int


class Gatherer:
    """Iterates over requests for prompts until `want` groups are kept, with at most `budget` times `want` prompts."""

    def __init__(self, *, want: int, budget: int, cursor: int, keep: Callable[[Group], bool]) -> None:
        self._want = want
        self._limit = budget * want
        self._cursor = cursor
        self._keep = keep
        self._kept: list[Group] = []
        self._discarded: list[Group] = []

    def __iter__(self) -> Iterator[PromptRequest]:
        requested = 0
        while len(self._kept) < self._want and requested < self._limit:
            count = min(self._want - len(self._kept), self._limit - requested)
            requested += count
            yield PromptRequest(cursor=self._cursor, count=count)
            self._cursor += count

    def add(self, groups: Sequence[Group]) -> None:
        """Keep or discard the groups of the last request."""
        for group in groups:
            (self._kept if self._keep(group) else self._discarded).append(group)

    def result(self, before: DecodeStats | None, after: DecodeStats | None) -> CollectResult:
        """What was gathered; `before` and `after` are the engine's counters around it."""
        batch = RolloutBatch(groups=tuple(self._kept), discarded=tuple(self._discarded))
        decoded = after - before if after and before else None
        return CollectResult(gathered=batch, cursor=self._cursor, decoded=decoded)


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give a prompt that occurs twice in one request (small data) its own id, and so its own random stream."""
    seen: dict[str, int] = {}
    renamed = []
    for prompt in prompts:
        times = seen[prompt.id] = seen.get(prompt.id, 0) + 1
        renamed.append(prompt if times == 1 else dataclasses.replace(prompt, id=f"{prompt.id}#{times}"))
    return renamed

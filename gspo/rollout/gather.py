"""Stages 2 and 3 together: prompts to groups of scored completions, refilled until there are enough to train on.

In: a function that samples and scores a number of prompts. Out: the groups to train on and the discarded ones.
Invariant: a group is kept or discarded by its unshaped rewards. When the budget is exhausted, the step continues with
the groups it has; a discarded group never comes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gspo.types import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The groups that a step sampled."""

    groups: tuple[Group, ...]
    discarded: tuple[Group, ...]

    @property
    def sampled(self) -> tuple[Group, ...]:
        """All groups, kept or discarded."""
        return self.groups + self.discarded


def gather(
    sample: Callable[[int], Sequence[Group]], *, want: int, keep: Callable[[Group], bool], budget: int
) -> RolloutBatch:
    """Collect `want` groups that pass `keep`, from at most `budget * want` prompts."""
    kept: list[Group] = []
    discarded: list[Group] = []
    sampled = 0
    while len(kept) < want and sampled < budget * want:
        count = min(want - len(kept), budget * want - sampled)
        sampled += count
        for group in sample(count):
            (kept if keep(group) else discarded).append(group)
    return RolloutBatch(groups=tuple(kept), discarded=tuple(discarded))


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give a prompt that occurs twice in a batch (small data sets) an id of its own, hence its own random stream."""
    seen: dict[str, int] = {}
    renamed = []
    for prompt in prompts:
        times = seen[prompt.id] = seen.get(prompt.id, 0) + 1
        renamed.append(prompt if times == 1 else dataclasses.replace(prompt, id=f"{prompt.id}#{times}"))
    return renamed

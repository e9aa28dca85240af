"""Stage 2 and 3 together: prompts to groups of scored replies, refilled until there is enough to learn from.

In: a function that samples and scores some prompts. Out: the groups to learn from and those thrown away.
Invariant: a group is kept or discarded on its rewards, never on the shaped ones; when the budget runs out, what was
kept is used as it is, and nothing that was filtered comes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gspo.types import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """What a step sampled."""

    groups: tuple[Group, ...]
    discarded: tuple[Group, ...]

    @property
    def sampled(self) -> tuple[Group, ...]:
        """Everything that was drawn."""
        return self.groups + self.discarded


def gather(
    draw: Callable[[int], Sequence[Group]], *, want: int, keep: Callable[[Group], bool], budget: int
) -> RolloutBatch:
    """`want` groups; those that are not to be kept are replaced, drawing at most `budget` times `want` prompts."""
    kept: list[Group] = []
    discarded: list[Group] = []
    drawn = 0
    while len(kept) < want and drawn < budget * want:
        count = min(want - len(kept), budget * want - drawn)
        drawn += count
        for group in draw(count):
            (kept if keep(group) else discarded).append(group)
    return RolloutBatch(groups=tuple(kept), discarded=tuple(discarded))


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give a prompt that was drawn twice at once (small data) an id of its own, hence its own random stream."""
    seen: dict[str, int] = {}
    named = []
    for prompt in prompts:
        times = seen[prompt.id] = seen.get(prompt.id, 0) + 1
        named.append(prompt if times == 1 else dataclasses.replace(prompt, id=f"{prompt.id}#{times}"))
    return named

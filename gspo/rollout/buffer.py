"""The batches that are collected and not yet trained on. `collect` and `learn` communicate through it alone.

In: a `CollectResult` per batch. Out: the same batches, oldest first. Invariant: batches are consecutive, and each is
taken exactly once. `end` is where the next batch starts. A checkpoint stores where the oldest batch in flight starts
(`TrainerState.rollout`), so a resume collects the batches in flight again, and none is lost or trained on twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gspo.rollout.gather import CollectResult, RolloutState


class RolloutBuffer:
    """A bounded FIFO of collected batches.

    Its capacity bounds how many steps a batch can wait: with a capacity of 1, every batch is trained on by the policy
    that sampled it."""

    def __init__(self, *, capacity: int, start: RolloutState) -> None:
        assert capacity >= 1
        self.end = start
        """Where sampling stands after the newest batch."""
        self._capacity = capacity
        self._batches: deque[CollectResult] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def full(self) -> bool:
        """Whether a batch must be taken before another can be added."""
        return len(self) >= self._capacity

    def put(self, collected: CollectResult) -> None:
        """Add the batch that was collected from `end`."""
        # One thread produces and consumes, so waiting for room would never end.
        assert not self.full, f"batch {collected.batch}: the buffer is full ({self._capacity})"
        assert collected.batch == self.end.batch + 1, f"batch {collected.batch} does not follow {self.end.batch}"
        self._batches.append(collected)
        self.end = collected.after

    def __iter__(self) -> Iterator[CollectResult]:
        """The batches, oldest first."""
        return iter(tuple(self._batches))

    def take(self) -> CollectResult:
        """Remove and return the oldest batch."""
        assert self._batches, "the buffer is empty"
        return self._batches.popleft()

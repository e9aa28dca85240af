"""Restart an optimizer step with micro-batches of half the size if it runs out of memory.

In: a batch and one of its optimizer steps. Out: attempts, the last of which succeeded or raised. Invariant: the
gradient is the same, because token weights belong to the optimizer step and not to the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from gspo.learner.batch import TrainBatch
from gspo.learner.plan import Plan
from gspo.model.out_of_memory import out_of_memory, release_memory

if TYPE_CHECKING:
    from gspo.context import LearnContext


class Attempt:
    """One try of an update. Its context swallows an out-of-memory error if smaller micro-batches may help."""

    def __init__(self, batch: TrainBatch, index: int, halvings: int) -> None:
        self.batch = batch
        self.halvings = halvings
        self.smaller: Plan | None = None
        self._index = index

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None and out_of_memory(error):
            self.smaller = self.batch.plan.halved(self._index)  # None for single sequences, which are not split
        return self.smaller is not None


def attempts(context: LearnContext, batch: TrainBatch, index: int) -> Iterator[Attempt]:
    """Attempts at an update: `for attempt in attempts(...): with attempt: ...`."""
    halvings = 0
    while True:
        attempt = Attempt(batch, index, halvings)
        yield attempt
        if attempt.smaller is None:
            return
        # By now the traceback of the error, which held the tensors that did not fit, is gone.
        if batch.cached is not None:
            batch.cached.drop()
        batch = replace(batch, plan=attempt.smaller)
        halvings += 1
        context.policy.model.zero_grad(set_to_none=True)
        release_memory()

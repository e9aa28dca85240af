"""Restart an optimizer step with micro-batches of half the size if it runs out of memory.

In: a function that accumulates the gradient of one optimizer step. Out: its result, and the batch with the plan that
fits. Invariant: the gradient is the same, because token weights belong to the optimizer step, not to the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gspo.learner.batch import TrainBatch
from gspo.learner.result import UpdateResult
from gspo.model.memory import out_of_memory, release_memory

if TYPE_CHECKING:
    from gspo.context import LearnContext


def halve_on_oom(
    accumulate: Callable[[LearnContext, TrainBatch, int], UpdateResult],
    context: LearnContext,
    batch: TrainBatch,
    index: int,
) -> tuple[UpdateResult, TrainBatch]:
    """Run `accumulate`, with smaller micro-batches each time memory runs out. A single sequence is not split."""
    halvings = 0
    while True:
        try:
            return replace(accumulate(context, batch, index), halvings=halvings), batch
        except Exception as error:
            smaller = batch.plan.halved(index) if out_of_memory(error) else None
            if smaller is None:
                raise
        # Outside the handler: the traceback of the error holds the tensors that did not fit.
        if batch.cached is not None:
            batch.cached.drop()
        batch = replace(batch, plan=smaller)
        halvings += 1
        context.policy.model.zero_grad(set_to_none=True)
        release_memory()

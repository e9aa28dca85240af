"""The buffer between `collect` and `learn`: order, bound, and what an interrupted batch leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo.clock import Clock
from gspo.config import Config
from gspo.rollout.buffer import RolloutBuffer
from gspo.rollout.gather import CollectResult, RolloutBatch, RolloutState
from gspo.signals import Interrupted
from gspo.step import collect


def batch(number: int, cursor: int = 0) -> CollectResult:
    nothing = RolloutBatch(groups=(), discarded=())
    return CollectResult(rollouts=nothing, version=0, after=RolloutState(batch=number, cursor=cursor))


def test_batches_are_taken_in_the_order_in_which_they_were_put() -> None:
    buffer = RolloutBuffer(capacity=3, start=RolloutState(batch=4, cursor=16))
    for number in (5, 6, 7):
        buffer.put(batch(number))
    assert [buffer.take().batch, buffer.take().batch] == [5, 6]
    buffer.put(batch(8))
    assert [buffer.take().batch, buffer.take().batch] == [7, 8]
    assert len(buffer) == 0


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_no_more_batches_than_the_capacity_are_in_flight(capacity: int) -> None:
    buffer = RolloutBuffer(capacity=capacity, start=RolloutState())
    for number in range(1, capacity + 1):
        assert not buffer.full
        buffer.put(batch(number))
    assert buffer.full
    assert len(buffer) == capacity
    with pytest.raises(AssertionError, match=f"the buffer is full \\({capacity}\\)"):
        buffer.put(batch(capacity + 1))
    assert buffer.take().batch == 1
    assert not buffer.full


def test_the_next_batch_starts_where_the_newest_ends() -> None:
    buffer = RolloutBuffer(capacity=2, start=RolloutState(batch=2, cursor=8))
    assert buffer.end == RolloutState(batch=2, cursor=8)
    buffer.put(batch(3, cursor=12))
    buffer.put(batch(4, cursor=20))
    assert buffer.end == RolloutState(batch=4, cursor=20)
    buffer.take()
    assert buffer.end == RolloutState(batch=4, cursor=20), "taking a batch does not change where sampling stands"


@pytest.mark.parametrize("number", [2, 4])
def test_no_batch_is_skipped_or_repeated(number: int) -> None:
    buffer = RolloutBuffer(capacity=2, start=RolloutState(batch=2))
    with pytest.raises(AssertionError, match=f"batch {number} does not follow 2"):
        buffer.put(batch(number))


def test_an_empty_buffer_has_nothing_to_take() -> None:
    with pytest.raises(AssertionError, match="the buffer is empty"):
        RolloutBuffer(capacity=1, start=RolloutState()).take()


def test_an_interrupted_batch_is_collected_again_with_the_same_completions(
    tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = parts_of(tiny())
    buffer = RolloutBuffer(capacity=1, start=RolloutState())

    def interrupted(*args: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(context.rewards, "score", interrupted)
        with pytest.raises(Interrupted):
            buffer.put(collect(context, buffer.end, clock=Clock()))
    assert len(buffer) == 0
    assert buffer.end == RolloutState()
    buffer.put(collect(context, buffer.end, clock=Clock()))
    assert buffer.take().rollouts == collect(context, RolloutState(), clock=Clock()).rollouts

"""The order over the problems of several sources, and how it depends on measured pass rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.data.difficulty import Difficulty
from gspo.data.order import Mixture, PromptOrder, SamplingOrder
from gspo.types import Completion, Group, Prompt, Score, Status, StopReason

COUNTS, WEIGHTS = (30, 7, 12), (2.0, 1.0, 0.25)
STARTS = (0, 30, 37)


def order(seed: int = 5, floor: float = 0.1) -> SamplingOrder:
    return SamplingOrder(COUNTS, names=("a", "b", "c"), weights=WEIGHTS, seed=seed, floor=floor)


def source_of(index: int) -> int:
    return sum(index >= start for start in STARTS) - 1


@given(st.lists(st.floats(0.01, 100).map(lambda w: round(w, 3)), min_size=1, max_size=6), st.integers(0, 400))
def test_every_prefix_has_the_share_of_each_source(weights: list[float], n: int) -> None:
    taken = Mixture(weights).take(0, n)
    for source, weight in enumerate(weights):
        assert abs(taken.count(source) - n * weight / sum(weights)) <= (len(weights) + 1) / 2


@given(st.lists(st.sampled_from([1.0, 2.0, 0.3, 7.5]), min_size=1, max_size=5), st.integers(0, 300), st.integers(0, 40))
def test_the_mixture_is_a_function_of_the_position(weights: list[float], start: int, n: int) -> None:
    mixture = Mixture(weights)
    whole = mixture.take(0, start + n)
    assert mixture.take(start, n) == whole[start:]
    assert mixture.counts(start) == [whole[:start].count(s) for s in range(len(weights))]


def test_weights_are_exact_over_a_whole_period() -> None:
    taken = Mixture((0.7, 0.3)).take(0, 100_000)
    assert Counter(taken) == {0: 70_000, 1: 30_000}


def test_each_epoch_of_a_source_visits_each_of_its_problems_once() -> None:
    indices = order().take(0, 400).indices
    for source, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        visits = [i for i in indices if source_of(i) == source]
        epochs = [visits[at : at + count] for at in range(0, len(visits) - count + 1, count)]
        assert len(epochs) >= 2
        assert all(sorted(epoch) == list(range(start, start + count)) for epoch in epochs)
        assert epochs[0] != epochs[1]


@given(st.integers(0, 200), st.integers(0, 60))
def test_the_order_continues_from_the_cursor_alone(cursor: int, n: int) -> None:
    assert order().take(cursor, n).indices == order().take(0, cursor + n).indices[cursor:]


@given(st.integers(0, 500), st.integers(0, 100))
def test_a_single_source_has_the_order_that_runs_always_had(cursor: int, n: int) -> None:
    single = SamplingOrder((50,), names=("",), weights=(1.0,), seed=3, floor=0.1)
    assert single.take(cursor, n).indices == PromptOrder(50, 3).take(cursor, n)


# ---------------------------------------------------------------------------- difficulty


def group(verdicts: Sequence[bool | None]) -> Group:
    done: dict[str, Any] = {"prompt_id": "p", "token_ids": (1,), "text": "", "logp_sampler": (0.0,), "version": 0}
    completions = [Completion(sample=i, stop=StopReason.EOS, **done) for i in range(len(verdicts))]
    status = {None: Status.UNSCORED}
    scores = [Score(status=status.get(v, Status.SCORED), correct=v) for v in verdicts]
    return Group(prompt=Prompt(id="p", content="", text="", token_ids=(1,)), completions=completions, scores=scores)


def measured(rates: Sequence[float]) -> Difficulty:
    """As after very many completions of each problem."""
    judged = np.full(len(rates), 1e9)
    return Difficulty(correct=judged * np.array(rates), judged=judged, skipped=(0,) * len(COUNTS))


def test_an_estimate_decays_earlier_groups_and_ignores_unscored_completions() -> None:
    state = Difficulty.unknown(problems=3, sources=1)
    assert [state.pass_rate(i) for i in range(3)] == [0.5, 0.5, 0.5]
    state = state.measured([0, 2], [group([True, True, False, None]), group([None, None])])
    assert state.pass_rate(0) == (2 + 0.5) / (3 + 1)
    assert state.pass_rate(2) == 0.5
    assert state.measured_fraction == pytest.approx(1 / 3)
    state = state.measured([0, 0], [group([False] * 4), group([True] * 4)])  # the same problem twice in a batch
    assert state.pass_rate(0) == ((2 / 2 + 0) / 2 + 4 + 0.5) / ((3 / 2 + 4) / 2 + 4 + 1)


def test_unmeasured_problems_are_never_skipped() -> None:
    unknown = Difficulty.unknown(problems=sum(COUNTS), sources=len(COUNTS))
    taken = order().take(0, 100, unknown)
    assert taken.indices == order().take(0, 100).indices
    assert taken.difficulty is not None
    assert taken.difficulty.skipped == (0, 0, 0)


def test_problems_are_sampled_in_proportion_to_the_variance_of_their_verdicts() -> None:
    rates = [0.5, 0.9, 1.0, 0.0, 0.2] * 6 + [1.0] * 7 + [0.5] * 12
    indices = order(floor=0.05).take(0, 40_000, measured(rates)).indices
    times = Counter(indices)
    # Mean visits per problem of source a, which has 8 of 13 prompts, by the chance that a visit samples it.
    expected = {0.5: 1.0, 0.9: 0.36, 1.0: 0.05, 0.0: 0.05, 0.2: 0.64}
    epochs = 40_000 * 2 / 3.25 / (6 * sum(expected.values()))
    for place, rate in enumerate([0.5, 0.9, 1.0, 0.0, 0.2]):
        mean = sum(times[i] for i in range(place, 30, 5)) / 6
        assert mean == pytest.approx(epochs * expected[rate], rel=0.05)
    # A source without a training signal keeps its share, and none of its problems is lost.
    assert sum(times[i] for i in range(30, 37)) == pytest.approx(40_000 / 3.25, abs=2)
    assert min(times.values()) > 0


@given(st.integers(0, 60), st.integers(0, 40), st.integers(0, 10**6))
def test_sampling_by_difficulty_resumes_from_cursor_and_state(first: int, second: int, seed: int) -> None:
    rates = np.random.default_rng(seed).random(sum(COUNTS)).round(1)
    whole = order().take(0, first + second, measured(rates))
    before = order().take(0, first, measured(rates))
    after = order().take(first, second, before.difficulty)
    assert [*before.indices, *after.indices] == whole.indices
    assert after.difficulty is not None
    assert whole.difficulty is not None
    assert after.difficulty.skipped == whole.difficulty.skipped

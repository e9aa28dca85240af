"""Curves, variances and final numbers against values computed by hand."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import evaluation, rows_of, step_row, write_run

from gspo.student_t import t_point
from gspo.view.compare import spread
from gspo.view.compare.curves import Curve, Run, Series, band, curve, read_run, sampled_tokens, smooth, window_of
from gspo.view.compare.figures import spans_orders_of_magnitude
from gspo.view.compare.intervals import Number, over_seeds
from gspo.view.compare.rows import table_rows
from gspo.view.compare.spread import length_bins
from gspo.view.compare.table import arm_numbers


def run_of(path: Path, rows: list[dict[str, Any]], **values: Any) -> Run:
    run = read_run(write_run(path, rows, **values))
    assert run is not None
    return run


def points(*pairs: tuple[float, float]) -> Curve:
    x, y = np.array(pairs, dtype=float).T
    return Curve(x=x, y=y)


# ------------------------------------------------------------------------------------------------- curves


def test_tokens_are_accumulated_if_a_run_has_no_total() -> None:
    without_total = [{"step": 0}, {"step": 1, "tokens/generated": 5}, {"step": 2, "tokens/generated": 7}]
    with_total = [{"step": 0, "tokens/sampled": 0}, {"step": 1, "tokens/sampled": 9, "tokens/generated": 5}]
    assert sampled_tokens(without_total) == [0, 5, 12]
    assert sampled_tokens(with_total) == [0, 9]


def test_a_value_that_was_not_measured_adds_no_point(tmp_path: Path) -> None:
    rows = [step_row(0), step_row(1, x=2.0), step_row(2, x=None), step_row(3), step_row(4, x=4.0)]
    run = run_of(tmp_path / "r", rows)
    points = curve(run, "x")
    assert points.x.tolist() == [100, 400]
    assert points.y.tolist() == [2, 4]
    assert curve(run, "nowhere").x.tolist() == []


def test_smoothing_preserves_the_end_points() -> None:
    assert smooth(np.array([1.0, 2.0, 6.0, 2.0, 1.0]), 3).tolist() == [1, 3, 10 / 3, 3, 1]
    assert smooth(np.array([0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]), 5).tolist() == [0, 1, 0.6, 0.6, 0.6, 0, 0]
    assert smooth(np.array([5.0]), 9).tolist() == [5]
    assert smooth(np.array([]), 3).tolist() == []


def test_the_window_grows_with_the_run_and_is_odd(tmp_path: Path) -> None:
    short = Series(label="a", runs=[run_of(tmp_path / "a", rows_of(0, 1))])
    long = Series(label="b", runs=[run_of(tmp_path / "b", [step_row(0), step_row(80)])])
    assert window_of([short]) == 1
    assert window_of([short, long]) == 5


def test_a_band_covers_the_range_that_all_curves_share() -> None:
    both = band([points((0, 0), (100, 10), (300, 30)), points((50, 1), (200, 1))])
    assert both is not None
    assert both.x.tolist() == [50, 100, 200]
    assert both.mean.tolist() == [3, 5.5, 10.5]
    assert both.low.tolist() == [1, 1, 1]
    assert both.high.tolist() == [5, 10, 20]
    assert band([]) is None
    assert band([points((0, 0), (1, 1)), points((5, 0), (6, 1))]) is None
    alone = band([points((0, 1), (2, 3)), Curve(x=np.array([]), y=np.array([]))])
    assert alone is not None
    assert alone.mean.tolist() == [1, 3]


def test_log_axes_are_for_values_that_span_orders_of_magnitude() -> None:
    assert spans_orders_of_magnitude([points((0, 1e-4), (1, 0.1))])
    assert spans_orders_of_magnitude([points((0, 0.0), (1, 0.001)), points((0, 0.2), (1, 0.3))])
    assert not spans_orders_of_magnitude([points((0, 0.2), (1, 0.9))])
    assert not spans_orders_of_magnitude([points((0, -0.001), (1, 5.0))])
    assert not spans_orders_of_magnitude([points((0, 0.0), (1, 0.0))])


def test_a_run_is_truncated_at_a_number_of_tokens(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", rows_of(0.1, 0.9))
    assert [row["step"] for row in run.until(299).rows] == [0, 1, 2]
    assert (run.until(299).tokens, run.until(300).tokens, run.tokens) == (200, 300, 400)


# ------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (4, 2.7764),
        (20, 2.0860),
        (21, 2.0796),
        (30, 2.0423),
        (60, 2.0003),
        (120, 1.9799),
    ],
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert t_point(freedom) == pytest.approx(quantile, abs=6e-5)


def test_a_mean_over_seeds_has_a_t_interval() -> None:
    number = over_seeds([1.0, None, 2.0, 6.0])
    assert number is not None
    assert (number.value, number.seeds) == (3.0, 3)
    half = 4.3027 * math.sqrt(7) / math.sqrt(3)
    assert number.low == pytest.approx(3 - half)
    assert number.high == pytest.approx(3 + half)
    clipped = over_seeds([0.1, 0.9], lowest=0.0, highest=1.0)
    assert clipped is not None
    assert (clipped.low, clipped.high) == (0.0, 1.0)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [None, 0.5]])
def test_without_variance_there_is_no_interval(values: list[float | None]) -> None:
    number = over_seeds(values)
    assert number is not None
    assert (number.value, number.low, number.high) == (0.5, None, None)
    assert over_seeds([None]) is None


# ------------------------------------------------------------------------------------------------- table


def test_the_numbers_of_two_arms_over_three_seeds(tmp_path: Path) -> None:
    before = (0.3, 0.4, 0.2)
    after = {"grpo": (0.5, 0.6, 0.1), "gspo": (0.6, 0.8, 0.4)}
    clips = {"grpo": 0.002, "gspo": 0.1}

    def run(label: str, seed: int) -> Run:
        rows = rows_of(before[seed], after[label][seed], clip__fraction_tokens=clips[label])
        return run_of(tmp_path / f"{label}{seed}", rows, seed=seed)

    series = [Series(label=label, runs=[run(label, seed) for seed in range(3)]) for label in ("grpo", "gspo")]
    grpo, gspo = arm_numbers(series)
    assert grpo.difference is None
    assert gspo.difference is not None
    differences = [0.1, 0.2, 0.3]
    half = 4.3027 * statistics.stdev(differences) / math.sqrt(3)
    assert gspo.difference.value == pytest.approx(0.2)
    assert (gspo.difference.low, gspo.difference.high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    assert gspo.before is not None
    assert gspo.after is not None
    assert (gspo.before.value, gspo.after.value) == (pytest.approx(0.3), pytest.approx(0.6))
    assert (grpo.worse_than_start, gspo.worse_than_start) == (1, 0)
    assert (grpo.lowest, gspo.lowest) == (0.1, 0.2)
    assert gspo.clip_ratio == pytest.approx(50)
    assert grpo.clip_ratio is None
    assert gspo.tokens is not None
    assert gspo.tokens.value == 400
    assert gspo.reward is not None
    assert gspo.reward.value == pytest.approx(0.4)  # the last tenth of 400 tokens is step 4
    assert gspo.entropy_lowest is not None
    assert gspo.entropy_lowest.value == 0.25
    assert gspo.minutes is not None
    assert gspo.minutes.value == 2.0  # four steps of half a minute
    assert gspo.flips is None


def test_the_held_out_reward_is_compared_where_it_differs_from_the_accuracy(tmp_path: Path) -> None:
    def run(label: str, seed: int, after: float) -> Run:
        reward = {"eval__reward": after, "eval__reward_low": after - 0.1, "eval__reward_high": after + 0.1}
        rows = [step_row(0, **evaluation(0.0), eval__reward=0.25), step_row(4, **evaluation(0.0), **reward)]
        return run_of(tmp_path / f"{label}{seed}", rows, seed=seed)

    one = [Series(label="a", runs=[run("a", 0, 0.5)]), Series(label="b", runs=[run("b", s, 1 + s) for s in range(2)])]
    first, second = arm_numbers(one)
    assert first.held_out_after == Number(value=0.5, low=0.4, high=0.6)  # of one seed: over problems
    assert second.held_out_difference == Number(value=0.5)
    rows = dict(table_rows([first, second], 2))
    assert rows["held-out reward before"] == ["0.25", "0.25"]
    assert rows["held-out reward after"][0] == "0.5 [0.4, 0.6]"
    binary = [step_row(0, **evaluation(0.5), eval__reward=0.5)]
    (same,) = arm_numbers([Series(label="a", runs=[run_of(tmp_path / "same", binary)])])
    assert same.held_out_after is None


def test_the_final_reward_is_over_the_last_tenth_of_the_tokens(tmp_path: Path) -> None:
    rows = [step_row(0), *(step_row(step, reward__mean=float(step)) for step in range(1, 21))]
    (arm,) = arm_numbers([Series(label="a", runs=[run_of(tmp_path / "r", rows, steps=20)])])
    assert arm.reward is not None
    assert arm.reward.value == 19.5


def test_a_single_seed_shows_the_interval_over_problems(tmp_path: Path) -> None:
    rows = [
        step_row(0, **evaluation(0.2, low=0.15, high=0.26)),
        step_row(4, **evaluation(0.5, low=0.41, high=0.59, greedy=0.7)),
    ]
    (arm,) = arm_numbers([Series(label="a", runs=[run_of(tmp_path / "r", rows)])])
    assert arm.before is not None
    assert arm.after is not None
    assert (arm.before.low, arm.before.high) == (0.15, 0.26)
    assert (arm.after.value, arm.after.low, arm.after.high) == (0.5, 0.41, 0.59)
    assert arm.greedy_after is not None
    assert (arm.greedy_after.value, arm.greedy_after.low) == (0.7, None)


def test_unfinished_runs_are_excluded_from_means(tmp_path: Path) -> None:
    done = run_of(tmp_path / "a", rows_of(0.3, 0.6), seed=0)
    partial = run_of(tmp_path / "b", rows_of(0.3, 0.0)[:3], seed=1, last_event={"event": "checkpoint", "step": 2})
    (arm,) = arm_numbers([Series(label="a", runs=[done, partial])])
    assert (len(arm.finished), len(arm.runs)) == (1, 2)
    assert arm.after is not None
    assert arm.after.value == 0.6


def test_arms_are_paired_by_seed(tmp_path: Path) -> None:
    def runs(label: str, after: dict[int, float]) -> list[Run]:
        return [run_of(tmp_path / f"{label}{seed}", rows_of(0.3, end), seed=seed) for seed, end in after.items()]

    partial = run_of(tmp_path / "a2", rows_of(0.3, 0.7)[:3], seed=2, last_event={"event": "checkpoint", "step": 2})
    first = Series(label="a", runs=[*runs("a", {0: 0.1, 1: 0.9}), partial])
    other = Series(label="b", runs=runs("b", {1: 0.8, 2: 0.0}))
    difference = arm_numbers([first, other])[1].difference
    assert difference is not None
    assert difference.value == pytest.approx(-0.1)
    assert difference.seeds == 1


# ------------------------------------------------------------------------------------------------- variance by length


def completion(log_ratio: list[float], *, trained: bool = True) -> dict[str, Any]:
    """A record whose text contains the names of its fields, which must not confuse the reader."""
    record = {
        "prompt": 'say "trained": true, "logp_old": [1]',
        "text": '{"logp_new": [3]}',
        "parts": {"]": 1.0},
        "trained": trained,
    }
    if not trained:
        return {**record, "drop_reason": "empty"}
    old = [-0.5] * len(log_ratio)
    return {**record, "logp_old": old, "logp_new": [a + b for a, b in zip(old, log_ratio, strict=True)]}


def test_variances_over_tokens_and_over_completions(tmp_path: Path) -> None:
    rng = random.Random(0)
    short = [[rng.gauss(0, 0.1) for _ in range(5)] for _ in range(40)]
    long = [[rng.gauss(0, 0.1) for _ in range(50)] for _ in range(40)]
    on_policy = [completion([0.0] * 7)] * 30
    untrained = [completion([], trained=False)] * 30
    names = ("logp_old", "logp_new")
    uncomputed = [{k: v for k, v in completion([]).items() if k not in names} | {"computed": False}] * 30
    completions = {
        1: [*map(completion, short), *on_policy, *uncomputed],
        2: [*untrained, *map(completion, long)],
        9: [completion([9.0] * 5)] * 99,  # beyond the last step of the metrics
    }
    run = run_of(tmp_path / "r", rows_of(0, 0), completions=completions)
    bins = length_bins([run])
    assert sum(b.completions for b in bins) == 80
    for length, group in ((5, short), (50, long)):
        (found,) = [b for b in bins if b.length == length]
        assert found.token_variance == pytest.approx(statistics.pvariance([x for r in group for x in r]))
        assert found.completion_variance == pytest.approx(statistics.pvariance([statistics.fmean(r) for r in group]))


def test_bins_hold_about_equally_many_completions(tmp_path: Path) -> None:
    rng = random.Random(1)
    completions = [completion([rng.gauss(0, 0.1) for _ in range(rng.randint(3, 300))]) for _ in range(400)]
    bins = length_bins([run_of(tmp_path / "r", rows_of(0, 0), completions={1: completions})])
    assert len(bins) == 8
    assert all(40 <= b.completions <= 60 for b in bins)
    assert [b.length for b in bins] == sorted(b.length for b in bins)
    assert bins[-1].completion_variance < bins[0].completion_variance / 5  # independent tokens: 1/length


def test_a_limited_number_of_evenly_spaced_files_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "MOST_FILES", 5)
    rows = [step_row(step) for step in range(101)]
    run = run_of(tmp_path / "r", rows, completions={step: [completion([0.1])] for step in range(1, 101)})
    assert [int(f.stem) for f in spread._files(run)] == [11, 31, 51, 71, 91]
    monkeypatch.setattr(spread, "MOST_BYTES", 1)
    assert [int(f.stem) for f in spread._files(run)] == [51]
    monkeypatch.undo()
    assert len(spread._files(run)) == 40
    assert len(spread._files(run.until(300))) == 3


def test_too_few_completions_give_no_bins(tmp_path: Path) -> None:
    assert length_bins([]) == []
    assert length_bins([run_of(tmp_path / "r", rows_of(0, 0), completions={1: [completion([0.1, 0.2])] * 3})]) == []
    with_null = {"trained": True, "logp_old": [None, -1.0], "logp_new": [-1.0, -1.0]}
    assert length_bins([run_of(tmp_path / "s", rows_of(0, 0), completions={1: [with_null] * 50})]) == []
    assert json.dumps(with_null).count("null") == 1

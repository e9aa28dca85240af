"""Curves, variances and final numbers against ones worked out by hand."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import evaluated, rows_of, step_row, write_run

from gspo.view.compare import spread
from gspo.view.compare.curves import Curve, Run, Series, band, curve, read_run, sampled_tokens, smooth, window_of
from gspo.view.compare.figures import wide
from gspo.view.compare.intervals import over_seeds, t_point
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


def test_tokens_are_counted_where_a_run_did_not(tmp_path: Path) -> None:
    assert sampled_tokens([{"step": 0}, {"step": 1, "tokens/generated": 5}, {"step": 2, "tokens/generated": 7}]) == [0, 5, 12]  # fmt: skip
    assert sampled_tokens([{"step": 0, "tokens/sampled": 0}, {"step": 1, "tokens/sampled": 9, "tokens/generated": 5}]) == [0, 9]  # fmt: skip


def test_what_was_not_measured_is_no_point(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", [step_row(0), step_row(1, x=2.0), step_row(2, x=None), step_row(3), step_row(4, x=4.0)])  # fmt: skip
    drawn = curve(run, "x")
    assert drawn.x.tolist() == [100, 400]
    assert drawn.y.tolist() == [2, 4]
    assert curve(run, "nowhere").x.tolist() == []


def test_smoothing_keeps_the_ends_and_the_level() -> None:
    assert smooth(np.array([1.0, 2.0, 6.0, 2.0, 1.0]), 3).tolist() == [1, 3, 10 / 3, 3, 1]
    assert smooth(np.array([0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]), 5).tolist() == [0, 1, 0.6, 0.6, 0.6, 0, 0]
    assert smooth(np.array([5.0]), 9).tolist() == [5]
    assert smooth(np.array([]), 3).tolist() == []


def test_the_window_grows_with_the_run_and_is_odd(tmp_path: Path) -> None:
    short = Series(label="a", runs=[run_of(tmp_path / "a", rows_of(0, 1))])
    long = Series(label="b", runs=[run_of(tmp_path / "b", [step_row(0), step_row(80)])])
    assert window_of([short]) == 1
    assert window_of([short, long]) == 5


def test_a_band_is_over_what_all_curves_cover() -> None:
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


def test_log_axes_are_for_values_that_span_orders() -> None:
    assert wide([points((0, 1e-4), (1, 0.1))])
    assert wide([points((0, 0.0), (1, 0.001)), points((0, 0.2), (1, 0.3))])
    assert not wide([points((0, 0.2), (1, 0.9))])
    assert not wide([points((0, -0.001), (1, 5.0))])
    assert not wide([points((0, 0.0), (1, 0.0))])


def test_a_run_cut_at_a_number_of_tokens(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", rows_of(0.1, 0.9))
    assert [row["step"] for row in run.until(299).rows] == [0, 1, 2]
    assert (run.until(299).tokens, run.until(300).tokens, run.tokens) == (200, 300, 400)


# ------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(("freedom", "point"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (20, 2.0860), (21, 2.0796), (30, 2.0423), (60, 2.0003), (120, 1.9799)])  # fmt: skip
def test_points_of_students_t(freedom: int, point: float) -> None:
    assert t_point(freedom) == pytest.approx(point, abs=6e-5)


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
def test_without_a_spread_there_is_no_interval(values: list[float | None]) -> None:
    number = over_seeds(values)
    assert number is not None
    assert (number.value, number.low, number.high) == (0.5, None, None)
    assert over_seeds([None]) is None


# ------------------------------------------------------------------------------------------------- table


def test_the_numbers_of_two_arms_over_three_seeds(tmp_path: Path) -> None:
    before, ends = (0.3, 0.4, 0.2), {"grpo": (0.5, 0.6, 0.1), "gspo": (0.6, 0.8, 0.4)}
    clips = {"grpo": 0.002, "gspo": 0.1}
    series = [
        Series(
            label=label,
            runs=[
                run_of(tmp_path / f"{label}{seed}", rows_of(before[seed], ends[label][seed], clip__fraction_tokens=clips[label]), seed=seed)
                for seed in range(3)
            ],
        )
        for label in ("grpo", "gspo")
    ]  # fmt: skip
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


def test_the_reward_at_the_end_is_over_a_tenth_of_the_tokens(tmp_path: Path) -> None:
    rows = [step_row(0), *(step_row(step, reward__mean=float(step)) for step in range(1, 21))]
    (arm,) = arm_numbers([Series(label="a", runs=[run_of(tmp_path / "r", rows, steps=20)])])
    assert arm.reward is not None
    assert arm.reward.value == 19.5


def test_a_single_seed_shows_the_interval_over_problems(tmp_path: Path) -> None:
    rows = [step_row(0, **evaluated(0.2, low=0.15, high=0.26)), step_row(4, **evaluated(0.5, low=0.41, high=0.59, greedy=0.7))]  # fmt: skip
    (arm,) = arm_numbers([Series(label="a", runs=[run_of(tmp_path / "r", rows)])])
    assert arm.before is not None
    assert arm.after is not None
    assert (arm.before.low, arm.before.high) == (0.15, 0.26)
    assert (arm.after.value, arm.after.low, arm.after.high) == (0.5, 0.41, 0.59)
    assert arm.greedy_after is not None
    assert (arm.greedy_after.value, arm.greedy_after.low) == (0.7, None)


def test_unfinished_runs_are_in_no_mean(tmp_path: Path) -> None:
    done = run_of(tmp_path / "a", rows_of(0.3, 0.6), seed=0)
    begun = run_of(tmp_path / "b", rows_of(0.3, 0.0)[:3], seed=1, last_event={"event": "checkpoint", "step": 2})
    (arm,) = arm_numbers([Series(label="a", runs=[done, begun])])
    assert (len(arm.finished), len(arm.runs)) == (1, 2)
    assert arm.after is not None
    assert arm.after.value == 0.6


def test_arms_are_paired_by_seed(tmp_path: Path) -> None:
    first = Series(label="a", runs=[run_of(tmp_path / f"a{s}", rows_of(0.3, end), seed=s) for s, end in ((0, 0.1), (1, 0.9))])  # fmt: skip
    other = Series(label="b", runs=[run_of(tmp_path / f"b{s}", rows_of(0.3, end), seed=s) for s, end in ((1, 0.8), (2, 0.0))])  # fmt: skip
    begun = run_of(tmp_path / "a2", rows_of(0.3, 0.7)[:3], seed=2, last_event={"event": "checkpoint", "step": 2})
    first = Series(label="a", runs=[*first.runs, begun])
    difference = arm_numbers([first, other])[1].difference
    assert difference is not None
    assert difference.value == pytest.approx(-0.1)
    assert difference.seeds == 1


# ------------------------------------------------------------------------------------------------- variance by length


def reply(log_ratio: list[float], *, trained: bool = True) -> dict[str, Any]:
    record = {"prompt": 'say "trained": true, "logp_old": [1]', "text": '{"logp_new": [3]}', "parts": {"]": 1.0}, "trained": trained}  # fmt: skip
    if not trained:
        return {**record, "left_out": "empty"}
    old = [-0.5] * len(log_ratio)
    return {**record, "logp_old": old, "logp_new": [a + b for a, b in zip(old, log_ratio, strict=True)]}


def test_variances_over_tokens_and_over_replies(tmp_path: Path) -> None:
    draw = random.Random(0)
    short = [[draw.gauss(0, 0.1) for _ in range(5)] for _ in range(40)]
    long = [[draw.gauss(0, 0.1) for _ in range(50)] for _ in range(40)]
    unmoved, unused = [reply([0.0] * 7)] * 30, [reply([], trained=False)] * 30
    replies = {1: [*map(reply, short), *unmoved], 2: [*unused, *map(reply, long)], 9: [reply([9.0] * 5)] * 99}
    run = run_of(tmp_path / "r", rows_of(0, 0), replies=replies)  # step 9 is beyond the metrics
    bins = length_bins([run])
    assert sum(b.replies for b in bins) == 80
    for length, group in ((5, short), (50, long)):
        (found,) = [b for b in bins if b.length == length]
        assert found.token_variance == pytest.approx(statistics.pvariance([x for r in group for x in r]))
        assert found.reply_variance == pytest.approx(statistics.pvariance([statistics.fmean(r) for r in group]))


def test_bins_hold_about_equally_many_replies(tmp_path: Path) -> None:
    draw = random.Random(1)
    replies = [reply([draw.gauss(0, 0.1) for _ in range(draw.randint(3, 300))]) for _ in range(400)]
    bins = length_bins([run_of(tmp_path / "r", rows_of(0, 0), replies={1: replies})])
    assert len(bins) == 8
    assert all(40 <= b.replies <= 60 for b in bins)
    assert [b.length for b in bins] == sorted(b.length for b in bins)
    assert bins[-1].reply_variance < bins[0].reply_variance / 5  # independent tokens: 1/length


def test_at_most_so_many_files_evenly_spaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "MOST_FILES", 5)
    rows = [step_row(step) for step in range(101)]
    run = run_of(tmp_path / "r", rows, replies={step: [reply([0.1])] for step in range(1, 101)})
    assert [int(f.stem) for f in spread._files(run)] == [11, 31, 51, 71, 91]
    monkeypatch.setattr(spread, "MOST_BYTES", 1)
    assert [int(f.stem) for f in spread._files(run)] == [51]
    monkeypatch.undo()
    assert len(spread._files(run)) == 40
    assert len(spread._files(run.until(300))) == 3


def test_too_few_replies_or_none_give_no_bins(tmp_path: Path) -> None:
    assert length_bins([]) == []
    assert length_bins([run_of(tmp_path / "r", rows_of(0, 0), replies={1: [reply([0.1, 0.2])] * 3})]) == []
    odd = {"trained": True, "logp_old": [None, -1.0], "logp_new": [-1.0, -1.0]}
    assert length_bins([run_of(tmp_path / "s", rows_of(0, 0), replies={1: [odd] * 50})]) == []
    assert json.dumps(odd).count("null") == 1

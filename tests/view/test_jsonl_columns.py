"""Columns of growing files: no line is read twice or lost, whatever happens to the file."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.view.jsonl_columns import CHUNK, Columns, downsample


def lines(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_file_is_read_incrementally(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines({"step": 1, "a": 2}))
    columns = Columns(path)
    columns.refresh()
    with path.open("a") as out:
        out.write(lines({"step": 2, "b": 0.5}))
        out.write('{"step": 3, "a"')
    columns.refresh()
    assert columns.values("step").tolist() == [1, 2]
    with path.open("a") as out:
        out.write(": null}\n")
    columns.refresh()
    assert columns.values("step").tolist() == [1, 2, 3]
    assert columns.values("a")[0] == 2
    assert np.isnan(columns.values("a")[1:]).all()
    assert columns.values("b")[1] == 0.5
    assert columns.row(2) == {"step": 3, "a": None}
    assert columns.generation == 0


def test_the_old_and_the_new_name_of_a_metric_are_one_column(tmp_path: Path) -> None:
    old, new = "length/punished_fraction", "length/penalized_fraction"
    path = tmp_path / "m.jsonl"
    path.write_text(lines({"step": 1, old: 0.1}, {"step": 2, new: 0.2}, {"step": 3, old: 0.9, new: 0.3}))
    columns = Columns(path)
    columns.refresh()
    assert columns.values(new).tolist() == [0.1, 0.2, 0.3]
    assert set(columns.columns) == {"step", new}
    assert columns.row(0) == {"step": 1, new: 0.1}


def test_values_that_are_not_numbers_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        lines({"step": 1, "a": "12", "b": [1, 2], "c": True}, {"step": 2, "b": [3, 4]}) + "[1]\nnot json\n\n"
    )
    columns = Columns(path)
    columns.refresh()
    assert len(columns) == 2
    assert np.isnan(columns.values("a")).all()
    assert np.isnan(columns.values("b")).tolist() == [True, True]
    assert columns.last(1) == [{"step": 2.0}]
    assert columns.latest("c") == 1
    assert math.isnan(columns.latest("never"))


@pytest.mark.parametrize("how", ["shorter", "same length", "longer", "another file", "deleted"])
def test_a_truncated_or_replaced_file_is_read_again(tmp_path: Path, how: str) -> None:
    """A resume truncates the file and writes other lines, possibly beyond the old end before the next refresh."""
    path = tmp_path / "m.jsonl"
    path.write_text(lines(*({"step": s, "a": 0.25} for s in range(1, 51))))
    columns = Columns(path)
    columns.refresh()
    kept = {"shorter": 20, "same length": 50, "longer": 80, "another file": 70, "deleted": 0}[how]
    if how == "another file":
        path.rename(tmp_path / "old")
    if how == "deleted":
        path.unlink()
    else:
        path.write_text(lines(*({"step": s, "a": 0.75} for s in range(1, kept + 1))))
    columns.refresh()
    assert columns.generation == 1
    assert columns.values("a").tolist() == [0.75] * kept


def test_limited_reads_reach_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    text = lines(*({"step": s, "a": s / 7, "long": "x" * 300} for s in range(1, 20001)))
    path.write_text(text)
    columns = Columns(path)
    reads = 0
    columns.refresh(0)
    assert columns.behind
    assert not len(columns)
    while columns.behind:
        columns.refresh(CHUNK)
        reads += 1
    assert reads == math.ceil(len(text) / CHUNK)
    assert np.array_equal(columns.values("a"), np.arange(1, 20001) / 7)


@pytest.mark.parametrize("count", [3, 100, 1000])
def test_a_sample_is_evenly_spaced_and_includes_the_end(tmp_path: Path, count: int) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines(*({"step": s, "long": "x" * 300} for s in range(1, 20001))))
    steps = Columns.sampled(path, count).values("step")
    assert steps[0] == 1
    assert steps[-1] == 20000
    assert (np.diff(steps) > 0).all()
    assert np.diff(steps).max() <= 2 * 20000 / count
    assert set(range(19500, 20001)) <= set(steps.astype(int).tolist())
    assert len(steps) < count + 1000


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=400), st.integers(1, 50))
def test_buckets_preserve_extremes_and_mean(values: list[float | None], points: int) -> None:
    y = np.array([math.nan if v is None else v for v in values])
    found = downsample(np.arange(len(y), dtype=np.float64), y, points)
    there = y[~np.isnan(y)]
    assert len(found["x"]) == min(len(there), points)
    if len(there) <= points:
        assert found["y"] == there.tolist()
        return
    low, mean, high = (np.array(found[k]) for k in ("low", "y", "high"))
    assert low.min() == there.min()
    assert high.max() == there.max()
    assert ((low <= mean + 1e-6) & (mean <= high + 1e-6)).all()
    assert (np.diff(found["x"]) > 0).all()


@pytest.mark.parametrize("length", [3 << 20, 9 << 20, 17 << 20])
def test_a_very_long_line_is_skipped(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines({"step": 1}) + "\0" * length + "\n" + lines({"step": 2}, {"step": 3}))
    columns = Columns(path)
    reads = 0
    columns.refresh(1000)
    while columns.behind and reads < 100:
        columns.refresh(1000)
        reads += 1
    assert columns.values("step").tolist() == [1, 2, 3]
    assert columns.row(2) == {"step": 3}
    assert Columns.sampled(path, 1000).values("step").tolist() == [1, 2, 3]


def test_with_too_many_keys_the_displayed_ones_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines({f"a{i}": i for i in range(5000)} | {"step": 1, "reward/mean": 0.5}))
    columns = Columns(path)
    columns.refresh()
    assert len(columns.columns) == 2000
    assert columns.latest("reward/mean") == 0.5
    assert columns.latest("step") == 1


NAMES = {f"k{i}": 1 for i in range(2000)}
LARGE_FILES = {
    "many keys and many empty lines": lines(NAMES) + "{}\n" * 20_000 + lines(NAMES),
    "another key in each line": "".join(f'{{"k{i % 2000}": 1}}\n' for i in range(60_000)),
    "empty lines": "{}\n" * 300_000,
    "a nested line": '{"a": [' + "{}," * 200_000 + "{}]}\n",
}


@pytest.mark.parametrize("name", list(LARGE_FILES))
def test_memory_grows_with_the_file_and_not_with_lines_times_keys(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(LARGE_FILES[name])
    columns = Columns(path)
    tracemalloc.start()
    try:
        columns.refresh()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(columns) == LARGE_FILES[name].count("\n")
    assert kept < 4_000_000 + 12 * path.stat().st_size
    assert most < 64_000_000


def test_lines_with_different_keys_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines(*({"step": s, **({"a": s} if s % 3 else {"b": s})} for s in range(1, 1001))))
    columns = Columns(path)
    columns.refresh()
    steps, a, b = (columns.values(key) for key in ("step", "a", "b"))
    assert np.array_equal(np.where(steps % 3, steps, np.nan), a, equal_nan=True)
    assert np.array_equal(np.where(steps % 3, np.nan, steps), b, equal_nan=True)
    assert columns.latest("b") == 999
    assert columns.last(2) == [{"step": 999.0, "b": 999.0}, {"step": 1000.0, "a": 1000.0}]

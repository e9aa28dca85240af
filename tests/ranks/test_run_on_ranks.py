"""Runs on two and four ranks and a run in one process: the metrics of a step, and what is recorded about each rank."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo.record.metric_definitions import TIMINGS
from gspo.view.run_reader import RunReader

pytestmark = pytest.mark.slow  # whole runs in several processes

RECIPE = """\
name = "ranks"
steps = 2
[model]
build = "tiny_moe"
device = "cpu"
[data]
path = "FOLDER/rows.jsonl"
held_out = 4
[rollout]
prompts = 6
group_size = 4
max_tokens = 12
[learner]
mini_batches = 2
micro_batch_tokens = 64
[reward]
functions = ["FOLDER/reward.py:length"]
workers = 1
[eval]
every = 2
"""
# Only rewards read the fields of a row, so no other process gets one that exceeds what messages can contain.
ROWS = [{"prompt": f"sort {7 * i % 10} {3 * i % 10} {i}", "answer": str(i), "serial": 2**70 + i} for i in range(60)]
# An untrained model gets some of it.
REWARD = """\
def length(prompts, completions, **columns):
    return [len(text) % 7 / 7 for text in completions]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The run directories by the number of ranks."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.toml").write_text(RECIPE.replace("FOLDER", str(folder)), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    found = {}
    for count in (1, 2, 4):
        found[count] = folder / str(count)
        arguments = ["train", folder / "recipe.toml", "--nproc", str(count), "--run-dir", found[count]]
        done = subprocess.run(
            [sys.executable, "-m", "gspo", *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return found


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("count", [2, 4])
def test_the_metrics_of_the_first_step_are_those_of_one_process(runs: dict[int, Path], count: int) -> None:
    one, two = (rows(runs[number], "metrics.jsonl")[1] for number in (1, count))
    assert one["step"] == 1
    assert one["samples/trained"] > 0
    assert one["grad/norm"] > 0
    assert two.keys() == one.keys()
    assert {key for key in one if one[key] is None} == {key for key in two if two[key] is None}
    compared = [key for key in one if one[key] is not None and key not in OF_THE_LAYOUT]
    assert not {
        key: (one[key], two[key])
        for key in compared
        if not math.isclose(one[key], two[key], rel_tol=1e-5, abs_tol=1e-5)
    }


OF_THE_LAYOUT = {
    "sampler/decode_steps",
    "sampler/running_mean",
    "padding/sampler",
    "padding/learner",
    "padding/saved",
    "routing/stored_bytes",
}
"""Metrics of how the work is divided, which the number of ranks changes."""


@pytest.mark.parametrize("count", [2, 4])
def test_each_rank_has_its_time_and_memory(runs: dict[int, Path], count: int) -> None:
    for row in rows(runs[count], "timings.jsonl"):
        for name in ("rollout", "learn"):
            each = [row[f"rank/{rank}/{name}_s"] for rank in range(count)]
            assert min(each) > 0
            assert row[f"ranks/{name}_max_s"] == max(each)
            assert row[f"ranks/{name}_mean_s"] == pytest.approx(sum(each) / count)
        # The leader waits for all completions. It does not wait for what others do after the last update.
        assert row["ranks/rollout_max_s"] <= row["time/rollout_s"]
        memory = [row[f"rank/{rank}/memory_gb"] for rank in range(count)]
        assert min(memory) > 0.05
        assert row["memory/peak_gb"] == max(memory) < 50
        assert row["memory/mean_gb"] == pytest.approx(sum(memory) / count)
        assert f"rank/{count}/memory_gb" not in row


def test_one_process_has_no_metrics_of_ranks(runs: dict[int, Path]) -> None:
    for row in rows(runs[1], "timings.jsonl"):
        assert not [key for key in row if key.startswith("rank")]
        assert row["memory/peak_gb"] > 0.05
    assert RunReader(runs[1]).rank_logs == []


def test_times_and_memory_are_not_in_the_metrics(runs: dict[int, Path]) -> None:
    patterns = [re.sub("[A-Z]{2,}", "[^/]+", metric.key) for metric in TIMINGS]
    for row in rows(runs[2], "metrics.jsonl"):
        assert not [key for key in row for pattern in patterns if re.fullmatch(pattern, key)]
    for row in rows(runs[2], "timings.jsonl"):
        unknown = [key for key in row if not any(re.fullmatch(pattern, key) for pattern in patterns)]
        assert unknown == ["step"]


def test_the_page_shows_each_rank_and_its_log(runs: dict[int, Path]) -> None:
    run = RunReader(runs[2])
    run.refresh()
    assert run.rank_logs == ["ranks/1.log"]
    for axis, expected in (("step", [1, 2]), ("tokens/sampled", None)):
        curves = run.curves(100, x=axis)["curves"]
        for rank in range(2):
            found = curves[f"rank/{rank}/rollout_s"]
            assert found["y"] == [row[f"rank/{rank}/rollout_s"] for row in rows(runs[2], "timings.jsonl")]
            assert found["x"] == (expected or [row["tokens/sampled"] for row in rows(runs[2], "metrics.jsonl")[1:]])
    alone = RunReader(runs[1])
    alone.refresh()
    assert not [key for key in alone.curves(100)["curves"] if key.startswith("rank")]

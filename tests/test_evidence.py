"""The experiments of benchmarks/evidence.md: its arms and commands are valid, and its numbers are those of the runs."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.config import ObjectiveConfig
from gspo.view.compare.arms import parse_arms
from gspo.view.compare.plan import arm_configs
from gspo.view.compare.record import run_path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "evidence.md"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("compared", "evidence")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


def write_run(
    arms: Path, label: str, seed: int, accuracy: list[float], clipped: list[float | None], ended: bool
) -> None:
    """A run with these accuracies before and after training, and a step per clip fraction."""
    run = run_path(arms, label, seed)
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f'seed = {seed}\nsteps = {len(clipped)}\n[objective]\nname = "gspo"\n')
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": accuracy[0]}]
    rows += [{"step": n, "clip/fraction_tokens": value} for n, value in enumerate(clipped, start=1)]
    rows[-1]["eval/accuracy"] = accuracy[1]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"event": "stop" if ended else "start", "step": len(clipped)}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")


def test_numbers_are_of_runs_that_have_ended(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    write_run(tmp_path, "gspo", 0, [0.2, 0.5], [0.1, 0.2, 0.3, 0.5], ended=True)
    write_run(tmp_path, "gspo", 1, [0.3, 0.9], [0.1, 0.2, 0.3, None], ended=True)
    write_run(tmp_path, "gspo", 2, [0.3, 0.9], [0.1, 0.2, 0.3, 0.4], ended=False)
    runs = benchmarks.compared.finished(tmp_path, "gspo", [0, 1, 2, 3])
    assert benchmarks.compared.ends(runs) == {0: 0.5, 1: 0.9}
    assert benchmarks.compared.late(runs, "clip/fraction_tokens") == {0: 0.5}  # the last quarter
    assert benchmarks.compared.late(runs, "clip/fraction_tokens", 2) == {0: pytest.approx(0.4)}


def test_differences_are_paired_by_seed(benchmarks: SimpleNamespace) -> None:
    change = benchmarks.compared.change
    # Both seeds gain ten points, so seeds that differ by 40 points add no width.
    assert change({0: 0.2, 1: 0.6, 2: 0.9}, {0: 0.3, 1: 0.7}) == "+10.0"
    assert change({0: 0.2, 1: 0.6}, {0: 0.3, 1: 0.5}) == "+0.0 [-127.1, +127.1]"
    assert change({0: 0.2}, {1: 0.3}) == "-"
    assert benchmarks.compared.shown([0.9, 0.95]) == "92.5 % [60.7 %, 100.0 %]"


def test_the_demonstrations_have_different_lengths_for_the_same_kind_of_problem(
    benchmarks: SimpleNamespace, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in benchmarks.evidence.written_problems(tmp_path).read_text().splitlines()]
    for row in rows:
        assert row["solution"].endswith(f"|{row['answer']}")
        assert sum(map(int, row["prompt"].split("+"))) == int(row["answer"])
    columns = [row["solution"].count("=") for row in rows]
    assert all(abs(columns.count(3 * times) / len(rows) - 0.25) < 0.03 for times in range(4))


def test_the_arms_are_accepted(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    settings = [f"--data.path={benchmarks.evidence.written_problems(tmp_path)}"]
    results = benchmarks.evidence.Results(arms=tmp_path / "arms", seeds=[0])
    labels = {label for arms, _ in benchmarks.evidence.QUESTIONS.values() for label in arms(results)}
    configs = arm_configs(benchmarks.evidence.RECIPE, settings, parse_arms(",".join(labels)))
    # Equal work per step, so that arms with equal tokens take steps of equal size.
    assert {c.rollout.prompts * c.rollout.group_size for c in configs.values()} == {128}
    assert configs["gspo"].objective == ObjectiveConfig(name="gspo", settings={"clip_low": 3e-3, "clip_high": 4e-3})


def test_the_report_of_no_runs_has_no_numbers(
    benchmarks: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--out", str(tmp_path), "--report"])
    assert benchmarks.evidence.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("## ") == len(benchmarks.evidence.QUESTIONS)
    assert "%" not in printed
    assert {file.stem for file in tmp_path.glob("*.png")} == set(benchmarks.evidence.QUESTIONS)


def blocks() -> list[str]:
    """The blocks of the page with a comparison."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if block.startswith("gspo compare")]


@pytest.mark.parametrize("block", blocks(), ids=lambda text: text.split()[2])
def test_the_comparisons_that_the_page_proposes_are_accepted(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The words as a shell reads them, with its quotes and continued lines.
    script = f'gspo() {{ printf "%s\\n" "$@"; }}\n{block}'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    # The files that the commands and their recipes name are read from the working directory.
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "DIR/problems.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    arms = words[words.index("--objectives") + 1]
    # As for the comparison itself, a setting of the recipe is KEY=VALUE in one word.
    settings = [word for word in words if word.startswith("--") and "=" in word]
    assert arm_configs(ROOT / words[0], settings, parse_arms(arms))

"""The experiments of benchmarks/evidence.md: its arms and commands are valid, and its numbers are those of the runs."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.cli import build_parser
from gspo.config import ObjectiveConfig, load
from gspo.suites import suite_names
from gspo.view.compare.arms import parse_arms
from gspo.view.compare.plan import arm_configs
from gspo.view.compare.record import run_path

ROOT = Path(__file__).parent.parent


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("compared", "evidence", "evidence_gpu")
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


def places(benchmarks: SimpleNamespace, folder: Path, seeds: str = "0") -> Any:
    return benchmarks.evidence_gpu.Places(out=folder / "out", data=folder, smollm2="small", qwen="large", seeds=seeds)


def test_the_commands_for_a_gpu_are_accepted(
    benchmarks: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = benchmarks.evidence_gpu
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "mbpp.jsonl"):
        (tmp_path / name).touch()
    commands = [c.words for question in gpu.QUESTIONS.values() for c in question.commands(places(benchmarks, tmp_path))]
    kinds = {"compare": 0, "train": 0, "eval": 0, "benchmarks/upcycle.py": 0}
    monkeypatch.chdir(ROOT)
    for words in commands:
        kind = words[2] if words[0] == "-m" else words[0]
        kinds[kind] += 1
        if kind == "benchmarks/upcycle.py":
            continue
        # The command line's own options are checked by its parser, and the rest are settings of the recipe.
        options, settings = build_parser().parse_known_args(words[2:])
        if kind == "compare":
            assert arm_configs(Path(options.recipe), settings, parse_arms(options.objectives))
        elif kind == "train":
            load(options.recipe, settings)
        else:
            assert options.suite.partition("=")[0] in suite_names()
    assert all(kinds.values())


def test_a_rate_is_chosen_on_the_tuning_seed_alone(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    gpu = benchmarks.evidence_gpu
    where = places(benchmarks, tmp_path, "0-2")
    better, arms = gpu.GSPO + gpu.WIDE, where.out / "smollm2"
    for arm in gpu.TUNING_ARMS:
        assert not gpu.QUESTIONS["tuned"].after(where)
        write_run(arms, arm, gpu.TUNING_SEED, [0.1, 0.6 if arm == better else 0.5], [0.1], ended=True)
        # The seeds that are reported must not choose.
        write_run(arms, arm, 0, [0.1, 0.2 if arm == better else 0.9], [0.1], ended=True)
    assert gpu.QUESTIONS["tuned"].after(where)
    (command,) = gpu.tuned(where)
    chosen = parse_arms(command.words[command.words.index("--objectives") + 1])
    assert [arm.label for arm in chosen if arm.label.startswith("gspo+clip")] == [better]


def test_work_stops_in_time_and_continues(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    gpu, made = benchmarks.evidence_gpu, [tmp_path / "a", tmp_path / "b"]
    # The second command never ends by itself.
    touch = ("-c", f"import pathlib; pathlib.Path({str(made[0])!r}).touch()")
    wait = ("-c", "import time; time.sleep(1000)")
    commands = [gpu.Command(words=touch, leaves=made[0]), gpu.Command(words=wait, leaves=made[1])]
    while not made[0].exists():  # on a loaded machine Python may need longer to start than the first deadlines
        assert gpu.run(commands, time.monotonic() + 2) == gpu.UNFINISHED
    made[1].touch()
    assert gpu.run(commands, time.monotonic() + 2) == 0
    assert gpu.run([gpu.Command(words=("-c", "raise SystemExit(4)"))], None) == 4


def test_packed_runs_are_finished_ones_without_weights(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    arms = tmp_path / "out" / "smollm2"
    for seed, ended in ((0, True), (1, False)):
        write_run(arms, "gspo", seed, [0.2, 0.5], [0.1], ended=ended)
        weights = run_path(arms, "gspo", seed) / "checkpoints" / "000001"
        weights.mkdir(parents=True)
        (weights / "model.safetensors").touch()
    (arms / "compare.toml").touch()
    benchmarks.evidence_gpu.pack(tmp_path / "out", tmp_path / "file.tar.gz")
    with tarfile.open(tmp_path / "file.tar.gz") as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")
    other = tmp_path / "elsewhere" / "smollm2"
    assert benchmarks.compared.ends(benchmarks.compared.finished(other, "gspo", [0, 1])) == {0: 0.5}
    assert (other / "compare.toml").is_file()
    assert not [*other.rglob("*.safetensors")]

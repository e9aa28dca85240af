"""Whole comparisons with real processes that are stopped, killed and repeated."""

from __future__ import annotations

import fcntl
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from processes import descendants, is_running
from test_compare_report import check_self_contained

from gspo.cli import main
from gspo.record.run_dir import read_jsonl
from gspo.view.compare import launch

pytestmark = pytest.mark.slow  # whole runs in several processes
ARMS = "grpo,gspo+replay"
RUNS = [f"{arm}-seed-{seed}" for arm in ARMS.split(",") for seed in (0, 1)]
STEPS = 6
PROMPTS = 4
COMPLETIONS = 4
SMALL = [
    f"--steps={STEPS}",
    "--cold_start.steps=4",
    "--cold_start.check_every=4",
    f"--rollout.prompts={PROMPTS}",
    f"--rollout.group_size={COMPLETIONS}",
    "--rollout.max_tokens=12",
    "--data.held_out=16",
    "--data.task_size=60",
    "--eval.every=3",
    "--checkpoint.every=1",
    "--reward.workers=1",
    "--model.threads=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nearly random model never answers correctly, so the reward is the completion's length modulo 3."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "length_reward.py").write_text(
        "def vary(prompts, completions, **columns):\n    return [float(len(c) % 3) for c in completions]\n"
    )
    return folder


def command(out: Path, objectives: str = ARMS, seeds: str = "0,1", *more: str) -> list[str]:
    options = ["--objectives", objectives, "--seeds", seeds, "--out", str(out)]
    reward = f"--reward.functions={out.parent}/length_reward.py:vary"
    return [sys.executable, "-m", "gspo.cli", "compare", "demo", *options, reward, *SMALL, *more]


def finish(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=240)


def run_in_process(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command in this process: exit code, output, errors."""
    capsys.readouterr()
    code = main(words[3:])
    return (code, *capsys.readouterr())


class CallInsteadOfProcess:
    """Trains in this process, which has imported everything: six processes would import for half a minute."""

    def __init__(self, words: list[str], *, stdout: BinaryIO, **_: Any) -> None:
        log = io.TextIOWrapper(stdout)
        with redirect_stdout(log), redirect_stderr(log):
            self.returncode = main(words[3:])
        log.detach()

    def poll(self) -> int:
        return self.returncode


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[Path]:
    """A comparison that nothing interrupted."""
    said, threads = io.StringIO(), torch.get_num_threads()
    calls = SimpleNamespace(Popen=CallInsteadOfProcess, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(launch, "subprocess", calls)
        assert main(command(folder / "whole")[3:]) == 0, said.getvalue()
    assert "gspo+replay, seed 1: finished" in said.getvalue()
    assert "after, 95 % interval" in said.getvalue()
    yield folder / "whole"
    torch.set_num_threads(threads)


def test_arms_of_a_seed_start_from_the_same_model(whole: Path) -> None:
    for seed in (0, 1):
        first = read_jsonl(whole / "start" / f"seed-{seed}" / "metrics.jsonl")
        starts = [read_jsonl(whole / "runs" / name / "metrics.jsonl")[0] for name in RUNS if name.endswith(str(seed))]
        assert starts == [first[0], first[0]]
        assert "eval/accuracy" in first[0]
        events = [e["event"] for name in RUNS for e in read_jsonl(whole / "runs" / name / "events.jsonl")]
        assert "cold start" not in events
    checkpoints = [whole / "start" / f"seed-{seed}" / "checkpoints" / "000000" for seed in (0, 1)]
    first_weights, second_weights = ((path / "model.safetensors").read_bytes() for path in checkpoints)
    assert first_weights != second_weights


def test_every_run_samples_the_same_number_of_tokens(whole: Path) -> None:
    lengths = [read_jsonl(whole / "start" / f"seed-{s}" / "metrics.jsonl")[0]["eval/length_mean"] for s in (0, 1)]
    budget = round(STEPS * PROMPTS * COMPLETIONS * sum(lengths) / 2)
    assert f"tokens = {budget}\n" in (whole / "compare.toml").read_text()
    for name in RUNS:
        rows = read_jsonl(whole / "runs" / name / "metrics.jsonl")
        assert rows[-1]["tokens/sampled"] >= budget > rows[-2]["tokens/sampled"]
        assert sum(row.get("tokens/generated", 0) for row in rows) == rows[-1]["tokens/sampled"]


def test_arms_differ_where_they_should(whole: Path) -> None:
    plain, replayed = (read_jsonl(whole / "runs" / f"{arm}-seed-0" / "metrics.jsonl")[-1] for arm in ARMS.split(","))
    assert "routing/flip_fraction_native" not in plain
    assert replayed["routing/flip_fraction"] == 0
    assert replayed["routing/flip_fraction_native"] is not None
    assert plain != replayed


def test_the_report_of_real_runs(whole: Path) -> None:
    page = check_self_contained((whole / "report.html").read_text())
    names = {f.stem for f in (whole / "figures").iterdir()}
    assert names == {"accuracy", "reward", "clipping", "flips", "spread", "health"}
    assert "Incomplete" not in page.text
    data = json.loads((whole / "table.json").read_text())
    assert data["complete"] is True
    assert [len(arm["runs"]) for arm in data["arms"]] == [2, 2]
    assert all(arm["ratio_variance"] for arm in data["arms"])


def test_repeating_a_finished_comparison_trains_nothing(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in (whole / "runs").rglob("*")}
    code, output, _ = run_in_process(command(whole), capsys)
    assert code == 0
    assert "4 runs, 4 of them finished" in output
    assert ": started" not in output
    assert {p: p.stat().st_mtime_ns for p in (whole / "runs").rglob("*")} == before


def test_other_settings_are_refused_and_the_run_is_named(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run_in_process(command(whole, ARMS, "0,1", "--learner.beta1=0.5"), capsys)
    assert code == 1
    difference = "learner.beta1 is 0.9 there and would be 0.5"
    assert f"start/seed-0: this run was started with other settings: {difference}" in error
    assert error.count("\n") == 1
    _, _, error = run_in_process(command(whole, ARMS, "0,1", "--tokens=99"), capsys)
    assert "runs/grpo-seed-0: this run was started with other settings: tokens is" in error
    assert "would be 99" in error


def test_a_second_comparison_in_the_same_directory_is_refused(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (whole / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, error = run_in_process(command(whole), capsys)
    assert code == 1
    assert "another comparison is using this directory" in error


def test_an_arm_that_fails_is_recorded_and_reported(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole.parent / "broken.py").write_text(
        "def broken(prompts, completions, **columns):\n    raise ValueError('no')\n"
    )
    broken = f"gspo+reward.functions={whole.parent}/broken.py:broken+eval.every=0"
    code, output, _ = run_in_process(command(whole, f"{broken},rloo", "0"), capsys)
    assert code == 1
    assert "rloo, seed 0: finished" in output
    assert f"FAILED  {broken}, seed 0: exited with code 1" in output
    assert "could not be scored" in output
    page = check_self_contained((whole / "report.html").read_text())
    assert "Incomplete" in page.text
    assert "failed with RewardError" in page.text
    assert "rloo, seed 1: not started" in page.text
    names = [arm["label"] for arm in json.loads((whole / "table.json").read_text())["arms"]]
    assert names == ["grpo", "gspo+replay", broken, "rloo"]


# ------------------------------------------------------------------------------------------------- interruptions

LAUNCH = """
import sys
from pathlib import Path
from gspo.view.compare.launch import run_jobs
from gspo.view.compare.plan import shared_config, start_job
from gspo.config import recipe_dir
from gspo.signals import StopRequest

shared = shared_config(recipe_dir() / "demo.toml", [])
with StopRequest(print) as stop:
    jobs = [start_job(Path(sys.argv[1]), shared, seed) for seed in (0, 1, 2)]
    failures = run_jobs(jobs, concurrency=2, say=lambda text: print(text, flush=True), stop=stop)
print("failures", len(failures))
"""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with two runs in progress and one waiting."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(descendants(process.pid)) == 2, process)
    yield process
    process.kill()
    process.wait()


def test_no_run_outlives_a_comparison_that_is_killed(launched: subprocess.Popen[str]) -> None:
    family = descendants(launched.pid)
    launched.kill()
    launched.wait()
    wait_for(lambda: not any(is_running(pid) for pid in family), limit=5)


def test_a_stop_is_forwarded_and_no_run_starts_after_it(launched: subprocess.Popen[str]) -> None:
    family = descendants(launched.pid)
    launched.send_signal(signal.SIGINT)
    output, _ = launched.communicate(timeout=60)
    assert launched.returncode == 0
    assert output.count(": started") == 2
    assert output.count(": stopped") == 2
    assert "failures 0" in output
    assert not any(is_running(pid) for pid in family)


@pytest.mark.slow
def test_a_comparison_stopped_then_killed_then_repeated_equals_an_uninterrupted_one(folder: Path, whole: Path) -> None:
    out = folder / "interrupted"
    budget = json.loads((whole / "table.json").read_text())["tokens"]
    words = command(out, ARMS, "0", f"--tokens={budget}")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: steps_done(out) >= 1, process)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Repeat the command to resume" in output
    assert ": stopped" in output
    assert not (out / "report.html").exists()

    done = steps_done(out)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    wait_for(lambda: steps_done(out) > done and len(descendants(process.pid)) > 1, process)
    family = descendants(process.pid)
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in family), limit=5)
    assert steps_done(out) < 2 * (STEPS - 1)

    last = finish(words)
    assert last.returncode == 0, last.stdout + last.stderr
    assert ": resumed" in last.stdout
    for name in RUNS[::2]:
        resumed, uninterrupted = ((folder / "runs" / name / "metrics.jsonl").read_bytes() for folder in (out, whole))
        assert resumed == uninterrupted
    assert (out / "report.html").exists()


def steps_done(out: Path) -> int:
    return sum(len(read_jsonl(file)) for file in (out / "runs").glob("*/metrics.jsonl"))


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[Any] | None = None, *, limit: float = 120
) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, "ended too early"
        time.sleep(0.02)

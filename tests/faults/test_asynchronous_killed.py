"""Asynchronous runs whose trainer or sampling process is killed at random instants: no prompt is lost or repeated.

The trainer runs in a forked child. Most kills hit a run with a stand-in for the sampling process, whose seeded delays
leave batches in every state; a few hit the real process. Every kill is counted.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from ends import run_of, same_end
from sampling_stand_in import stand_in
from test_killed import forked, start_or_resume, wait

from gspo.config import Config
from gspo.errors import EngineError
from gspo.learner import checkpoint
from gspo.record.ledger import read_ledger
from gspo.record.run_dir import read_jsonl

STEPS = 24
SETTING = (f"steps={STEPS}", "rollout.max_lag=2", "eval.every=5", "checkpoint.every=3", "checkpoint.keep=2")
VARIANTS = {
    "all groups": (),
    "refilled groups": ("objective.keep=mixed", "rollout.group_size=2", "rollout.refill_budget=2"),
    "cut completions": ("rollout.span_tokens=4", "rollout.min_tokens=3", "checkpoint.every=1"),
}
KILLS = {"all groups": 12, "refilled groups": 12, "cut completions": 6}


def check_ledger(run: Path) -> None:
    """Every batch was trained on once, and the prompts follow the data order without a gap."""
    ledger = read_ledger(run)
    assert [history.batch for history in ledger] == list(range(1, STEPS + 1))
    assert [history.trained for history in ledger] == [[step] for step in range(1, STEPS + 1)]
    for step, history in enumerate(ledger, start=1):
        records = read_jsonl(run / f"rollouts/{step:06d}.jsonl")
        assert sorted(history.prompts or ()) == sorted({r["prompt_id"] for r in records})
    collected = [line for line in read_jsonl(run / "ledger.jsonl") if line["state"] == "collected"]
    ends = {line["batch"]: (line["cursor"], len(line["prompts"])) for line in collected}
    for batch in range(1, STEPS + 1):
        before = ends[batch - 1][0] if batch > 1 else 0
        assert ends[batch][0] - before == ends[batch][1], "a prompt was lost or repeated"


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_f12_the_trainer_is_killed_at_random_instants(
    variant: str, tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    overrides = VARIANTS[variant]
    golden = tiny(*SETTING, *overrides, run_dir="golden")

    def finish(config: Config) -> None:
        with monkeypatch.context() as patch:
            stand_in(patch)
            assert wait(forked(lambda: start_or_resume(config)), 300) == 0

    finish(golden)
    rng = random.Random(5)
    kills = 0
    cut = tiny(*SETTING, *overrides, run_dir="cut-0")
    with_cuts = 0
    while kills < KILLS[variant]:
        with monkeypatch.context() as patch:
            stand_in(patch, seed=kills, longest_s=0.1)
            child = forked(partial(start_or_resume, cut))
        if variant == "cut completions":  # they wait between turns, so the run must have come some way
            wait_for_steps(run_of(cut), 2)
        time.sleep(rng.uniform(0.5, 2.0) if variant != "cut completions" else rng.uniform(0, 0.5))
        os.kill(child, signal.SIGKILL)
        kills += wait(child) == -signal.SIGKILL
        with_cuts += keeps_cut_completions(run_of(cut))
        if kills == KILLS[variant] or len(read_jsonl(run_of(cut) / "metrics.jsonl")) > STEPS - 3:
            finish(cut)
            same_end(run_of(golden), run_of(cut))
            check_ledger(run_of(cut))
            cut = tiny(*SETTING, *overrides, run_dir=f"cut-{kills}")
    assert bool(with_cuts) == (variant == "cut completions")


def wait_for_steps(run: Path, more: int) -> None:
    """Wait until a run has done more steps than now, or nearly all."""
    goal = min(STEPS - 2, len(read_jsonl(run / "metrics.jsonl")) + more)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(read_jsonl(run / "metrics.jsonl")) < goal:
        time.sleep(0.02)


def keeps_cut_completions(run: Path) -> bool:
    """Whether the checkpoint from which a run resumes has completions that are not over."""
    saved = checkpoint.saved(run / "checkpoints")
    plan = checkpoint.read_in_flight(saved[-1]) if saved else None
    return plan is not None and any(entry.part is not None for entry in plan.entries)


def descendants(pid: int) -> list[int]:
    """The sampling processes of a trainer."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"gspo.collection.sampler" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def until_engine_error(config: Config) -> None:
    """Start or resume a run. The exit status is 3 if the sampling process failed."""
    try:
        start_or_resume(config)
    except EngineError as error:
        os._exit(3 if "The run is saved" in str(error) else 4)


@pytest.mark.slow
def test_f12_the_sampling_process_is_killed_at_random_instants(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = (*SETTING, "steps=200", "checkpoint.every=20")
    cut = tiny(*setting, run_dir="cut")
    rng = random.Random(6)
    kills = 0
    while kills < 3:
        child = forked(lambda: until_engine_error(cut))
        before = len(read_jsonl(run_of(cut) / "metrics.jsonl"))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(read_jsonl(run_of(cut) / "metrics.jsonl")) < before + 3:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        for pid in descendants(child):
            os.kill(pid, signal.SIGKILL)
            kills += 1
        assert wait(child) == 3
    # The same run without kills, for as many steps as were done.
    done = len(read_jsonl(run_of(cut) / "metrics.jsonl")) - 1
    golden = tiny(*setting, f"steps={done}", run_dir="golden")
    with monkeypatch.context() as patch:
        stand_in(patch)
        assert wait(forked(lambda: start_or_resume(golden)), 300) == 0
    for step in range(1, done + 1):
        name = f"rollouts/{step:06d}.jsonl"
        assert (run_of(golden) / name).read_bytes() == (run_of(cut) / name).read_bytes()
    ledger = [history for history in read_ledger(run_of(cut)) if history.trained]
    assert [history.trained for history in ledger] == [[step] for step in range(1, done + 1)]


@pytest.mark.slow
def test_f8_the_sampling_process_ends_with_the_trainer(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny(*SETTING, "steps=500", "eval.every=0")
    child = forked(lambda: start_or_resume(config))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(read_jsonl(run_of(config) / "metrics.jsonl")) < 3:
        time.sleep(0.05)
    (sampler,) = descendants(child)
    folder = Path(Path(f"/proc/{sampler}/cmdline").read_text().split("\0")[-2])
    # Weights are deleted when the last batch that needs them has been sampled, and the next ones follow at any time.
    while not (kept := list(folder.glob("*.tensors"))) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert kept, "otherwise it proves nothing that they are gone later"
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    deadline = time.monotonic() + 60  # generous for a busy machine; on an idle one it ends at once
    while time.monotonic() < deadline and (Path(f"/proc/{sampler}").exists() or folder.exists()):
        time.sleep(0.05)
    assert not Path(f"/proc/{sampler}").exists()
    assert not folder.exists()

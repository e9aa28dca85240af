"""Ranks that are killed or frozen, and errors of one rank alone: the others end in time, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import same_end
from forked_ranks import (
    SETTINGS,
    ForkedRanks,
    during_sampling,
    finished,
    own_signal,
    patch,
    resume,
    train,
    write_recipe,
)
from tiny_runs import tiny_config

import gspo.follower
import gspo.model.save
import gspo.rollout.data_parallel
from gspo.learner import checkpoint
from gspo.ranks.environment import LEADER_SILENT
from gspo.ranks.output import FollowerOutput
from gspo.record.run_dir import read_events, read_jsonl

Golden = Callable[[int], Path]
SHORT = "ranks.timeout_s=6"
"""For runs with a frozen rank. Others wait longer, because a rank may be slow on a loaded machine."""
DEADLINE_S = 60.0
"""Seconds within which a run ends after a rank is gone, also on a loaded machine."""


def in_phase(phase: str, rank: int, action: Callable[[], None]) -> None:
    """Do something in the middle of a phase of step 2."""
    if phase == "sampling":
        during_sampling("train/2/", action)
    elif phase == "learning":
        before_update(3, action)
    elif phase == "gathering to sample":
        before_gathering_to_sample(4, action)
    elif phase == "gathering":
        within_gathering(3, gspo.follower if rank else gspo.model.save, action)
    elif rank == 0:
        before_write(2, action)
    else:
        before_own_shards(3, action)


def before_update(updates: int, action: Callable[[], None]) -> None:
    from gspo.learner.optimizer import Optimizer

    def make(original: Any) -> Any:
        def step(self: Optimizer, **options: Any) -> Any:
            if self.updates == updates:
                action()
            return original(self, **options)

        return step

    patch(Optimizer, "step", make)


def before_gathering_to_sample(times: int, action: Callable[[], None]) -> None:
    """Before this rank gathers the weights of all layers. For the batch of step 2 it does so the fourth time, after two
    evaluations and the batch of step 1."""
    calls = []

    def make(original: Any) -> Any:
        def gathered(model: Any) -> Any:
            calls.append(1)
            if len(calls) == times:
                action()
            return original(model)

        return gathered

    patch(gspo.rollout.data_parallel, "gathered", make)


def within_gathering(times: int, where: Any, action: Callable[[], None]) -> None:
    """Between two of the weights that the ranks gather for a checkpoint. That of step 2 is the third one."""
    calls = []

    def make(original: Any) -> Any:
        def weights(*rest: Any) -> Iterator[Any]:
            calls.append(1)
            for number, item in enumerate(original(*rest)):
                if len(calls) == times and number == 2:
                    action()
                yield item

        return weights

    patch(where, "whole_weights", make)


def before_write(step: int, action: Callable[[], None]) -> None:
    """Between gathering the state of all ranks and the rename."""

    def make(original: Any) -> Any:
        def move(partial: Path, target: Path) -> None:
            if int(target.name) == step:
                action()
            original(partial, target)

        return move

    patch(checkpoint, "_move_into_place", make)


def before_own_shards(times: int, action: Callable[[], None]) -> None:
    """Between the shards of this rank and those of the others. The checkpoint of step 2 is the third one."""
    from gspo.follower import Follower

    calls = []

    def make(original: Any) -> Any:
        def write(self: Any, path: str) -> None:
            calls.append(1)
            if len(calls) == times:
                action()
            original(self, path)

        return write

    patch(Follower, "write_shards", make)


CASES = [
    (rank, number, phase)
    for rank in (0, 1)
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for phase in ("gathering to sample", "sampling", "learning", "gathering", "saving")
]
FAST = [(1, signal.SIGKILL, "learning"), (1, signal.SIGSTOP, "sampling")]


@pytest.mark.parametrize(
    ("rank", "number", "phase"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_a_rank_that_is_gone_ends_the_run_in_time_and_loses_nothing(
    rank: int, number: int, phase: str, golden: Golden, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, *SETTINGS, *([SHORT] if number == signal.SIGSTOP else []))
    run = Path(config.run_dir)

    def hook(own: int) -> None:
        if own == rank:
            in_phase(phase, rank, own_signal(number))

    ranks = train(config, hook=hook)
    try:
        (code,) = ranks.wait([1 - rank], limit_s=DEADLINE_S)
    finally:
        ranks.kill()  # a frozen process, as the launcher does
    assert ranks.codes[rank] == -signal.SIGKILL
    if rank == 0:
        assert code == (LEADER_SILENT if number == signal.SIGSTOP else 1)
        assert "rank 0 has not responded for" in (run / "ranks/1.log").read_text()
    else:
        assert code == 1
        (error,) = [line for line in ranks.output().splitlines() if line.startswith("gspo: ")]
        assert "rank 1 has not responded for" in error
        assert f"continue with: gspo train --resume {run}" in ranks.output()
        assert [event["error"] for event in read_events(run) if event["event"] == "error"] == ["RankError"]
        assert f"the last lines of {run / 'ranks/1.log'}:\n  2" in ranks.output()
    assert "Traceback" not in ranks.output(0) + ranks.output(1)
    assert not ranks.output(1)
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert not names & {"000002", "000003"}, "a save that was not finished must not be used"
    assert "000001" in names
    finished(resume(run, more=[f"--{SETTINGS[1]}"]))
    same_end(run, golden(2))


@pytest.mark.slow
def test_a_frozen_follower_ends_the_run_while_completions_are_scored(golden: Golden, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SETTINGS, SHORT)
    run = Path(config.run_dir)

    def hook(rank: int) -> None:
        if rank == 0:
            score_for_long(2)
        else:
            during_sampling("train/2/", lambda: threading.Timer(1.0, own_signal(signal.SIGSTOP)).start())

    ranks = train(config, hook=hook)
    try:
        assert ranks.wait([0], limit_s=DEADLINE_S) == [1]
    finally:
        ranks.kill()
    assert "gspo: rank 1 has not responded for" in ranks.output()
    finished(resume(run, more=[f"--{SETTINGS[1]}"]))
    same_end(run, golden(2))


def score_for_long(batch: int) -> None:
    """The rewards of a batch take longer than the limit of the test."""
    from gspo.reward.reward import RewardPool

    calls = []

    def make(original: Any) -> Any:
        def score(self: RewardPool, *rest: Any) -> Any:
            calls.append(1)
            if len(calls) == batch + 2:  # after two evaluations at step 0, sampled and greedy
                time.sleep(2 * DEADLINE_S)
            return original(self, *rest)

        return score

    patch(RewardPool, "score", make)


def test_a_full_disk_at_a_save_does_not_end_the_run(golden: Golden, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SETTINGS)

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ranks = finished(train(config, hook=lambda rank: before_write(2, fail)))
    assert "the checkpoint of step 2 could not be written" in ranks.output()
    assert not (Path(config.run_dir) / "checkpoints/000002").exists()
    same_end(Path(config.run_dir), golden(2))


@pytest.mark.slow
def test_a_full_disk_of_one_rank_does_not_end_the_run(golden: Golden, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SETTINGS)

    def hook(rank: int) -> None:
        if rank:
            full_disk_in_shards(2)
            patch(FollowerOutput, "log_to", lambda original: full_disk_of_log)

    ranks = train(config, hook=hook)
    assert ranks.wait()[0] == 0, ranks.output()  # rank 1 cannot write what it has printed, at its exit either
    assert "the checkpoint of step 2 could not be written" in ranks.output()
    assert "rank 1: [Errno 28] No space left on device" in ranks.output()
    assert not (Path(config.run_dir) / "checkpoints/000002").exists()
    same_end(Path(config.run_dir), golden(2))


def full_disk_of_log(output: Any, file: Path) -> None:
    """The log of this rank is on a full disk, too."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def full_disk_in_shards(step: int) -> None:
    """The disk is full when this rank writes the state of its optimizer."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    def make(original: Any) -> Any:
        def write_data(self: HuggingFaceStorageWriter, *rest: Any) -> Any:
            if f"{step:06d}" in str(self.path):
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(self, *rest)

        return write_data

    patch(HuggingFaceStorageWriter, "write_data", make)


def test_a_failing_reward_ends_the_run_as_in_one_process(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def broken(prompts, completions, **columns):\n    raise KeyError('no such column')\n")
    found = []
    for count in (1, 2):
        config = tiny_config(tmp_path, *SETTINGS, f"reward.functions={broken}:broken", run_dir=f"run{count}")
        ranks = train(config, count)
        assert ranks.wait(limit_s=DEADLINE_S) == [1] * count
        found.append(ranks.output().replace(f"run{count}", "run"))
    errors = [[line for line in text.splitlines() if line.startswith("gspo: ")] for text in found]
    assert errors[0] == errors[1] != []


def raise_error() -> None:
    raise ValueError("a broken part")


@pytest.mark.slow
def test_a_follower_that_fails_to_sample_is_an_engine_error(golden: Golden, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SETTINGS)
    run = Path(config.run_dir)
    ranks = train(config, hook=lambda rank: during_sampling("train/2/", raise_error) if rank else None)
    assert ranks.wait(limit_s=DEADLINE_S)[0] == 1
    assert "gspo: rank 1: ValueError: a broken part" in ranks.output()
    assert f"The run is saved: gspo train --resume {run}" in ranks.output()
    assert [event["error"] for event in read_events(run) if event["event"] == "error"] == ["EngineError"]
    finished(resume(run))
    same_end(run, golden(2))


def test_a_follower_that_fails_to_learn_ends_the_run_with_its_error(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SETTINGS)
    run = Path(config.run_dir)
    ranks = train(config, hook=lambda rank: before_update(3, raise_error) if rank else None)
    assert ranks.wait(limit_s=DEADLINE_S) == [1, 1]
    assert "gspo: rank 1 failed: ValueError: a broken part" in ranks.output()
    assert "Traceback" in (run / "ranks/1.log").read_text()
    assert not ranks.output(1)
    assert json.loads((run / "checkpoints/000001/trainer.json").read_text())["step"] == 1


@pytest.mark.slow
def test_a_follower_that_runs_out_of_memory_says_what_to_lower(tmp_path: Path) -> None:
    """The leader cannot halve the micro-batch of another rank: it waits in a collective."""
    config = tiny_config(tmp_path, *SETTINGS)
    ranks = train(config, hook=lambda rank: before_update(3, run_out_of_memory) if rank else None)
    assert ranks.wait(limit_s=DEADLINE_S) == [1, 1]
    expected = "gspo: rank 1 failed: MemoryLimitError: out of luck; lower learner.micro_batch_tokens"
    assert expected in ranks.output()
    assert f"gspo train --resume {config.run_dir}" in ranks.output()


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("out of luck")


def wait_for_steps(ranks: ForkedRanks, run: Path, count: int) -> None:
    """Wait until a run that was started or resumed has done this many steps more than before, at least one."""
    before = len(read_jsonl(run / "timings.jsonl"))
    until = time.monotonic() + DEADLINE_S
    while len(read_jsonl(run / "timings.jsonl")) < before + count and not ranks.poll() and time.monotonic() < until:
        time.sleep(0.005)


@pytest.mark.slow
def test_f26_ranks_killed_at_twenty_random_instants(tmp_path: Path) -> None:
    # More steps than twenty starts can do before they are killed.
    settings = ("steps=90", "eval.every=7", "checkpoint.every=2", "checkpoint.keep=2", "ranks.timeout_s=20")
    whole = tiny_config(tmp_path, *settings, run_dir="whole")
    cut = tiny_config(tmp_path, *settings, run_dir="cut")
    finished(train(whole))
    run = Path(cut.run_dir)
    rng = random.Random(7)
    kills = [0, 0]
    while sum(kills) < 20:
        arguments = ["--resume", str(run)] if (run / "config.toml").exists() else [str(write_recipe(cut))]
        ranks = ForkedRanks(tmp_path / "out", ["train", *arguments])
        victim = rng.randrange(2)
        if rng.random() < 0.8:  # otherwise it may be killed while it starts
            wait_for_steps(ranks, run, rng.randint(1, 2))
        time.sleep(rng.uniform(0.0, 0.2))
        if victim not in ranks.poll():
            os.kill(ranks.pids[victim], signal.SIGKILL)
        if victim == 0:  # as launchers do, for a rank that has not joined the others yet
            os.kill(ranks.pids[1], signal.SIGTERM)
        codes = ranks.wait(limit_s=DEADLINE_S)
        if codes == [0, 0]:
            break
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] in (1, -signal.SIGTERM), ranks.output(1 - victim)
        kills[victim] += 1
    resumed = sum(event["event"] == "resume" for event in read_events(run))
    print(f"killed {kills[0]} leaders and {kills[1]} followers; {resumed} of the starts resumed the run")
    if (run / "config.toml").exists():
        finished(resume(run))
    assert sum(kills) == 20
    same_end(run, Path(whole.run_dir))

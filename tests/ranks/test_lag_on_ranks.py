"""Sampling ahead of learning on two ranks: the weights are gathered for the sampling process of the leader."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from ends import same_end
from forked_ranks import agree, at_step, finished, own_signal, patch, resume, train
from sampling_stand_in import StandIn
from test_asynchronous import sampler_pids
from tiny_runs import tiny_config

import gspo.build
from gspo.record.ledger import read_ledger
from gspo.record.run_dir import read_jsonl

STEPS = 5
UPDATES = 2
SETTING = (f"steps={STEPS}", "rollout.max_lag=2", "ranks.timeout_s=60", "checkpoint.keep=10")
CASES = {"whole": (), "in turns": ("rollout.span_tokens=4", "rollout.min_tokens=3")}


def in_this_process(rank: int) -> None:
    """The leader samples without a process, which starts faster."""
    patch(gspo.build, "SamplingProcess", lambda original: StandIn)


def stopped(rank: int) -> None:
    in_this_process(rank)
    at_step(3, own_signal(signal.SIGTERM))


@pytest.mark.parametrize("case", [pytest.param("whole"), pytest.param("in turns", marks=pytest.mark.slow)])
def test_two_ranks_agree_with_one_process_and_resume(case: str, tmp_path: Path) -> None:
    one, two, cut = (tiny_config(tmp_path, *SETTING, *CASES[case], run_dir=name) for name in ("one", "two", "cut"))
    finished(train(one, 1, in_this_process))
    finished(train(two, 2, in_this_process))
    runs = [Path(config.run_dir) for config in (one, two, cut)]
    agree(*runs[:2])
    assert [history.trained for history in read_ledger(runs[1])] == [[step] for step in range(1, STEPS + 1)]
    for step in range(1, STEPS + 1):
        records = read_jsonl(runs[1] / f"rollouts/{step:06d}.jsonl")
        assert {r["version"] for r in records} == {UPDATES * max(0, step - 3)}
    assert train(cut, 2, stopped).wait() == [128 + signal.SIGTERM, 0]
    finished(resume(runs[2], 2, in_this_process))
    same_end(runs[1], runs[2])


def kill_the_sampler(rank: int) -> None:
    def kill() -> None:
        (pid,) = sampler_pids()
        os.kill(pid, signal.SIGKILL)

    at_step(1, kill)


@pytest.mark.slow
def test_the_ranks_end_when_the_sampling_process_is_killed(tmp_path: Path) -> None:
    config, golden = (tiny_config(tmp_path, *SETTING, run_dir=name) for name in ("cut", "golden"))
    killed = train(config, 2, kill_the_sampler)
    assert killed.wait()[0] == 1, killed.output()
    assert "the sampling process was killed by signal 9" in killed.output()
    finished(resume(Path(config.run_dir)))
    finished(train(golden, 2, in_this_process))
    same_end(Path(golden.run_dir), Path(config.run_dir))
    shutil.rmtree(config.run_dir)

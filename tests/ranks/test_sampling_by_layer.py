"""Ranks that sample without whole weights: each forward gathers one layer after the other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import same_end
from forked_ranks import agree, during_sampling, finished, own_signal, patch, resume, train
from tiny_runs import tiny_config

import gspo.build
from gspo.errors import ConfigError
from gspo.ranks.group import ONE, Ranks
from gspo.record.run_dir import read_events, read_jsonl
from gspo.rollout import data_parallel
from gspo.rollout.local.states import KVCacheState

# Three prompts are uneven shares, and in the evaluation the ranks have prompts of other lengths.
SETTINGS = ("steps=2", "rollout.prompts=3", "eval.every=1", "data.held_out=3", "ranks.timeout_s=60")


def without_memory(rank: int) -> None:
    """Whole weights do not fit, and are not gathered."""
    patch(gspo.build, "free_memory", lambda original: lambda device: (0, 0))
    patch(data_parallel, "gathered", lambda original: None)


@pytest.mark.parametrize(
    "model", ["tiny_dense", pytest.param("tiny_moe", marks=pytest.mark.slow)], ids=["dense", "moe"]
)
def test_completions_are_those_of_one_process(model: str, tmp_path: Path) -> None:
    one, two = (tiny_config(tmp_path, *SETTINGS, f"model.build={model}", run_dir=name) for name in ("one", "two"))
    finished(train(one, 1))
    finished(train(two, 2, without_memory))
    agree(Path(one.run_dir), Path(two.run_dir))
    for step in (1, 2):
        ids = [[row["text"] for row in read_jsonl(Path(c.run_dir) / f"rollouts/{step:06d}.jsonl")] for c in (one, two)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 12
    (event,) = [event for event in read_events(Path(two.run_dir)) if event["event"] == "engine"]
    assert "2 ranks sample completions, and gather the weights layer by layer" in event["message"]


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_samples_resumes_bitwise(tmp_path: Path) -> None:
    settings = (*SETTINGS, "ranks.sampling_weights=layers", "checkpoint.every=100")
    whole, cut = (tiny_config(tmp_path, *settings, run_dir=name) for name in ("whole", "cut"))
    finished(train(whole))
    stopped = train(cut, hook=in_a_forward(0, own_signal(signal.SIGTERM)))
    assert stopped.wait() == [128 + signal.SIGTERM, 0], stopped.output()
    assert "Stopped after step 1 of 2" in stopped.output()
    finished(resume(Path(cut.run_dir)))
    same_end(Path(cut.run_dir), Path(whole.run_dir))


def test_a_forward_that_fails_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    """The others wait for the rest of it, so it cannot be repeated with fewer completions."""

    def run_out() -> None:
        raise torch.OutOfMemoryError("out of luck")

    config = tiny_config(tmp_path, *SETTINGS, "ranks.sampling_weights=layers")
    ranks = train(config, hook=in_a_forward(1, run_out))
    assert ranks.wait() == [1, 1]
    (line,) = [line for line in ranks.output().splitlines() if line.startswith("gspo: ")]
    assert "rank 1 failed: ForwardError: rank 1: a forward pass failed while it sampled" in line
    assert "lower rollout.engine_options.slots" in line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_forward_is_named(rank: int, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SETTINGS, "ranks.sampling_weights=layers")
    ranks = train(config, hook=in_a_forward(rank, own_signal(signal.SIGKILL)))
    assert ranks.wait()[rank] == -signal.SIGKILL
    assert ranks.codes[1 - rank] == 1
    text = ranks.output() if rank else (Path(config.run_dir) / "ranks/1.log").read_text()
    assert f"rank {rank} has not responded for" in text
    assert "Traceback" not in ranks.output(0) + text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ranks.sampling_weights=layers", r"ranks\.sampling_weights: has no effect with engine 'vllm'"),
        ("rollout.engine=scripted", r"rollout\.engine: 'scripted' cannot sample on 2 ranks; use local or vllm"),
    ],
)
def test_what_has_no_effect_or_does_not_work_is_refused(setting: str, message: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "rollout.engine=vllm", setting)
    with pytest.raises(ConfigError, match=message):
        gspo.build.check_ranks(config, Ranks(count=2))
    gspo.build.check_ranks(config, ONE)


def act_once(module: Any, action: Callable[[], None]) -> None:
    """Do something after the next forward of a module."""

    def act(*forward: Any) -> None:
        handle.remove()
        action()

    handle = module.register_forward_hook(act)


def in_a_forward(chosen: int, action: Callable[[], None]) -> Callable[[int], None]:
    """A hook: one rank does something in the middle of a forward of step 2."""
    now = False

    def start() -> None:
        nonlocal now
        now = True

    def stepping(original: Any) -> Any:
        def step(self: KVCacheState, *args: Any) -> Any:
            nonlocal now
            if now:
                now = False
                act_once(self.model.model.layers[0].mlp, action)
            return original(self, *args)

        return step

    def hook(rank: int) -> None:
        if rank == chosen:
            during_sampling("train/2/", start)
            patch(KVCacheState, "step", stepping)

    return hook

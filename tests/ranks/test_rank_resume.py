"""Runs on several ranks that are stopped and resumed, on the same number of ranks and on another one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import same_end, tensors_of
from forked_ranks import SETTINGS, agree, at_step, during_sampling, finished, own_signal, patch, resume, train
from safetensors.torch import load_file, save_file
from tiny_runs import tiny_config

from gspo.learner import checkpoint
from gspo.learner.optimizer import Optimizer
from gspo.model.sharding import full

Golden = Callable[[int], Path]


def stop_after_a_step(rank: int) -> None:
    at_step(2, own_signal(signal.SIGTERM))


def stop_in_sampling(rank: int) -> None:
    if rank == 0:
        during_sampling("train/3/", own_signal(signal.SIGINT))


@pytest.mark.parametrize(
    ("hook", "number"),
    [
        pytest.param(stop_after_a_step, signal.SIGTERM, marks=pytest.mark.slow),
        (stop_in_sampling, signal.SIGINT),
    ],
)
def test_a_stopped_run_resumes_bitwise(
    hook: Callable[[int], None], number: int, golden: Golden, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, *SETTINGS, "checkpoint.every=100")
    run = Path(config.run_dir)
    stopped = train(config, hook=hook)
    assert stopped.wait() == [128 + number, 0], stopped.output()
    assert "Stopped after step 2 of 4. Continue with:" in stopped.output()
    assert f"train --resume {run}" in stopped.output()
    assert not stopped.output(1)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["000000", "000002"]
    finished(resume(run))
    same_end(run, golden(2))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_ranks(before: int, after: int, golden: Golden, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "restored.safetensors"
    shutil.copytree(golden(before), run)
    for step in (3, 4):  # as if the run was killed in step 3
        shutil.rmtree(run / f"checkpoints/{step:06d}")
    finished(resume(run, after, hook=lambda rank: write_restored(copy), more=["--trust-run"]))
    restored = load_file(copy)
    for name, tensor in tensors_of(run / "checkpoints/000002").items():
        assert torch.equal(restored.pop(name.partition(": ")[2]), tensor), name
    assert not restored
    agree(run, golden(after))
    metrics = [(folder / "metrics.jsonl").read_bytes().splitlines() for folder in (run, golden(before))]
    assert metrics[0][:3] == metrics[1][:3], "the steps before the resume stay as they are"


def write_restored(file: Path) -> None:
    """Write the weights and the state of the optimizer that a resumed run starts with."""

    def make(original: Any) -> Any:
        def restore(path: Path, optimizer: Optimizer, updates: int) -> None:
            original(path, optimizer, updates)
            # All ranks do the same, and write the same.
            tensors = {name: full(tensor).clone() for name, tensor in (optimizer._weights | optimizer.state()).items()}
            save_file(tensors, file.with_suffix(f".{os.getpid()}"))
            file.with_suffix(f".{os.getpid()}").rename(file)

        return restore

    patch(checkpoint, "restore", make)

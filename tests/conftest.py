"""Tiny runs for tests: a model of a few thousand weights, a generated task, a directory of its own.

Tests use `OMP_NUM_THREADS` threads (default 1). `GSPO_TESTS_OFFSET=8` has all loaded tensors begin 8 bytes after a multiple of 64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from misaligned import misalign_loading

import gspo.model.load
from gspo import config as settings
from gspo.build import build_run, run_objective
from gspo.config import Config
from gspo.context import RunContext
from gspo.record.run_dir import RunDir

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
torch.set_num_threads(THREADS)
gspo.model.load.TINY_PARAMETERS = 0  # tiny models too use as many threads as the tests were asked to use

if "GSPO_TESTS_OFFSET" in os.environ:
    misalign_loading(int(os.environ["GSPO_TESTS_OFFSET"]))


class SilentDisplay:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps: list[int] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def cold_start(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        pass

    def evaluated(self, metrics: Any) -> None:
        pass

    def step(self, step: int, steps: int, metrics: Any, timings: Any) -> None:
        self.steps.append(step)

    def close(self) -> None:
        pass


def tiny_tree(run_dir: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "run_dir": str(run_dir),
        "steps": 3,
        "model": {"build": "tiny_dense", "device": "cpu"},
        "data": {"task": "sorting", "task_options": {"min_items": 2, "max_items": 3}, "task_size": 60, "held_out": 8},
        "rollout": {"prompts": 4, "replies": 4, "max_tokens": 10},
        "reward": {"functions": ["lengths.py:shorter"], "workers": 1},
        "learner": {"learning_rate": 1e-3, "mini_batches": 2},
        "eval": {"every": 2},
        "checkpoint": {"every": 1, "keep": 0},
    }


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where runs of this session are remembered, also by the processes they start."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """A config of a run that takes a second; `tiny("objective.name=grpo", ...)` overrides. A random model is never
    right, so it is paid for what varies: short replies with many spaces."""
    (tmp_path / "lengths.py").write_text(
        "def shorter(prompts, completions, **columns):\n    return [len(c) % 3 + 0.5 * c.count(' ') for c in completions]\n"
    )

    def make(*overrides: str, run_dir: str = "run") -> Config:
        tree = tiny_tree(tmp_path / run_dir)
        tree["reward"]["functions"] = [f"{tmp_path}/lengths.py:shorter"]
        made = settings.override(tree, overrides, where="test")
        settings.check(made)
        return made

    return make


@pytest.fixture
def parts_of() -> Any:
    """Builds the parts of a config and closes them after the test."""
    with ExitStack() as stack:

        def build(config: Config) -> RunContext:
            run = RunDir.create(config)
            stack.callback(run.close)
            return build_run(config, run_objective(config), run=run.path, checkpoint=None, stack=stack)

        yield build


@pytest.fixture
def display() -> SilentDisplay:
    return SilentDisplay()

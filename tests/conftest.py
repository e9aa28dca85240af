"""Tiny runs for tests: a model of a few thousand weights, a generated task, a temporary directory.

Tests use `OMP_NUM_THREADS` threads (default 1). `GSPO_TESTS_OFFSET=8` makes all loaded tensors start 8 bytes after a
multiple of 64, to show that results do not depend on alignment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from misaligned import misalign_loading
from tiny_runs import tiny_config

import gspo.model.load
from gspo.build import build_run, run_objective
from gspo.config import Config
from gspo.context import RunContext
from gspo.record.run_dir import RunDir

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
torch.set_num_threads(THREADS)
gspo.model.load.TINY_PARAMETERS = 0  # tiny models must use OMP_NUM_THREADS too

if "GSPO_TESTS_OFFSET" in os.environ:
    misalign_loading(int(os.environ["GSPO_TESTS_OFFSET"]))


LONGEST = (
    "test_learning_ranks.py",
    "test_rank_variants.py",
    "test_rank_faults.py",
    "test_paged.py",
    "test_paged_families.py",
    "test_sandbox_clock.py",
    "test_sandbox_attacks.py",
    "test_misaligned.py",
    "test_cli.py",
    "test_trainer.py",
    "test_compare_whole.py",
    "test_loop_faults.py",
    "test_reward_functions.py",
    "test_code_tests_judge.py",
    "test_reward_blame.py",
    "test_lora.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first: a slow file at the end would keep one process busy while the others idle."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


class SilentDisplay:
    """Records messages and steps."""

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


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trust records of this session, also for the processes that tests start."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def empty_curves() -> Iterator[None]:
    """Plotting `curves.png` takes longer than a tiny run. tests/test_cli.py runs a subprocess that does plot it."""

    def write_empty(run: Path) -> Path:
        (run / "curves.png").write_bytes(b"")
        return run / "curves.png"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gspo.trainer.draw_curves", write_empty)
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """Make the config of a run that takes a second; `tiny("objective.name=grpo", ...)` overrides settings."""
    return partial(tiny_config, tmp_path)


@pytest.fixture
def parts_of() -> Any:
    """Build the components of a config and close them after the test."""
    with ExitStack() as stack:

        def build(config: Config) -> RunContext:
            run = RunDir.create(config)
            stack.callback(run.close)
            return build_run(config, run_objective(config), run=run.path, checkpoint=None, stack=stack)

        yield build


@pytest.fixture
def display() -> SilentDisplay:
    return SilentDisplay()

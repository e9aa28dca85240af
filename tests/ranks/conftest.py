"""Fixtures of the tests with several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import SETTINGS, finished, train, without_functional_collectives
from pools import group
from tiny_runs import tiny_config

__all__ = ["golden", "group"]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The directory of a run on this number of ranks that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("golden")
    done: dict[int, Path] = {}

    def run(count: int) -> Path:
        if count not in done:
            config = tiny_config(folder, *SETTINGS, run_dir=f"golden{count}")
            finished(train(config, count, without_functional_collectives))
            done[count] = Path(config.run_dir)
        return done[count]

    return run

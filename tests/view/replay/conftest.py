"""A run that several tests replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of GSPO with every checkpoint kept."""
    return make_run(tmp_path_factory.mktemp("dense"))

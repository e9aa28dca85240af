"""Comparison directories with hand-written metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from by_hand import write_run

from gspo.view.compare import record
from gspo.view.compare.record import Record


@pytest.fixture
def comparison(tmp_path: Path) -> Callable[..., Path]:
    """`comparison({("grpo", 0): {"rows": ...}}, tokens=400)` writes a comparison directory."""

    def make(runs: Mapping[tuple[str, int], Mapping[str, Any]], *, tokens: int | None = 400) -> Path:
        out = tmp_path / "out"
        for (label, seed), values in runs.items():
            write_run(record.run_path(out, label, seed), seed=seed, tokens=tokens or 0, **values)
        arms = list(dict.fromkeys(label for label, _ in runs))
        seeds = sorted({seed for _, seed in runs})
        out.mkdir(exist_ok=True)
        record.write(out, Record(recipe="demo", arms=arms, seeds=seeds, tokens=tokens))
        return out

    return make

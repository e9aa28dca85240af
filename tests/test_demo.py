"""A shortened demo learns, in a subprocess."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_held_out_accuracy_improves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gspo.cli", "demo", f"--run-dir={tmp_path}/run", "--steps=40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    assert last["eval/accuracy"] - first["eval/accuracy"] > 0.15
    assert last["eval/accuracy_low"] > first["eval/accuracy_high"]
    assert last["eval/accuracy_greedy"] > first["eval/accuracy_greedy"]

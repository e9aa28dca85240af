"""Tests of Triton kernels without a GPU, in Triton's interpreter, which must be enabled before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gspo

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str) -> None:
    """Run the tests of a file whose names end in `_on_triton` in a subprocess."""
    pytest.importorskip("triton", minversion="3.8", reason="needs Triton 3.8, whose interpreter works with this numpy")
    if CUDA or INTERPRETED:
        pytest.skip("the tests below run in this process")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", "on_triton"]
    root = Path(gspo.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "." * 8 in done.stdout, "a test was skipped"

"""Comparison of how two runs ended."""

from __future__ import annotations

from pathlib import Path

from gspo.config import Config
from gspo.learner import checkpoint


def run_of(config: Config) -> Path:
    return Path(config.run_dir)


def same_end(a: Path, b: Path) -> None:
    """Assert byte-identical metrics and completions, and a bitwise identical last checkpoint."""
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    for file in sorted((a / "rollouts").iterdir()):
        assert file.read_bytes() == (b / "rollouts" / file.name).read_bytes()
    last = [checkpoint.saved(run / "checkpoints")[-1] for run in (a, b)]
    assert last[0].name == last[1].name
    for name in ("model.safetensors", "trainer.tensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()

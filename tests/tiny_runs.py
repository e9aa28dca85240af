"""The config of a run that takes a second: a model of a few thousand weights, a generated task.

A random model never answers correctly, so the reward is for what varies: short completions with many spaces. A small
term breaks ties, because completions with advantage 0 are not computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo import config as settings
from gspo.config import Config

REWARD = """import zlib
def shorter(prompts, completions, **columns):
    ties = [0.1 * zlib.crc32(c.encode()) / 2**32 for c in completions]
    return [len(c) % 3 + 0.5 * c.count(' ') + tie for c, tie in zip(completions, ties)]
"""


def tiny_tree(run_dir: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "run_dir": str(run_dir),
        "steps": 3,
        "model": {"build": "tiny_dense", "device": "cpu"},
        "data": {"task": "sorting", "task_options": {"min_items": 2, "max_items": 3}, "task_size": 60, "held_out": 8},
        "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 10},
        "reward": {"functions": ["lengths.py:shorter"], "workers": 1},
        "learner": {"learning_rate": 1e-3, "mini_batches": 2},
        "eval": {"every": 2},
        "checkpoint": {"every": 1, "keep": 0},
    }


def tiny_config(folder: Path, *overrides: str, run_dir: str = "run") -> Config:
    """The config of the run `FOLDER/RUN_DIR`, with overrides of its settings."""
    (folder / "lengths.py").write_text(REWARD)
    tree = tiny_tree(folder / run_dir)
    tree["reward"]["functions"] = [f"{folder}/lengths.py:shorter"]
    config = settings.override(tree, overrides, where="test")
    settings.check(config)
    return config

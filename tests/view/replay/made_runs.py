"""Short training runs for replay tests."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from gspo import config as settings
from gspo.record.progress import PlainDisplay
from gspo.trainer import train
from gspo.view.replay.rebuild import ReplayedStep, UpdateHook, rebuild
from gspo.view.replay.source import open_run

REWARD = """
def spaces(prompts, completions, **columns):
    return [0.5 if "5" in p else 0.4 * (len(c) % 3) + 0.5 * c.count(" ") for p, c in zip(prompts, completions)]


def flat(prompts, completions, **columns):
    return [0.5 for c in completions]
"""


def tree(folder: Path) -> dict[str, Any]:
    return {
        "run_dir": str(folder / "run"),
        "steps": 3,
        "model": {"build": "tiny_dense", "device": "cpu"},
        "data": {"task": "sorting", "task_options": {"min_items": 2, "max_items": 3}, "task_size": 60, "held_out": 0},
        "rollout": {"prompts": 8, "group_size": 4, "max_tokens": 10},
        "reward": {"functions": [f"{folder}/spaces.py:spaces"], "workers": 1},
        "objective": {"name": "gspo", "clip_low": 3e-3, "clip_high": 4e-3},
        "learner": {"learning_rate": 1e-3, "mini_batches": 3},
        "eval": {"every": 0},
        "checkpoint": {"every": 1, "keep": 0},
    }


def make_run(folder: Path, *overrides: str) -> Path:
    """Train a few steps and return the run directory."""
    (folder / "spaces.py").write_text(REWARD)
    return train(settings.override(tree(folder), overrides, where="test"), PlainDisplay()).run


def copy_of(run: Path, folder: Path, *, without: tuple[int, ...] = ()) -> Path:
    """A copy of a run, without some checkpoints."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    for step in without:
        shutil.rmtree(copy / "checkpoints" / f"{step:06d}")
    return copy


def digest(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and modification time of every file."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def ignore(*args: Any) -> None:
    """A callback that does nothing."""


def rebuild_step(run: Path, step: int, before_update: UpdateHook = ignore, *, start: int | None = None) -> ReplayedStep:
    """Recompute a step of a run, from the newest checkpoint before it or the given one."""
    source = open_run(run)
    _, start = source.start_of(step, start)
    return rebuild(source, step, start, device=None, before_update=before_update, say=ignore)

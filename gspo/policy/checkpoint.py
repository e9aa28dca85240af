"""Checkpoints: a model directory that transformers loads as it is, plus the trainer's state, without pickle.

    000020/
      config.json, model.safetensors, tokenizer files   Hugging Face layout
      trainer.safetensors                               optimiser moments (and float32 masters) by parameter name
      trainer.json                                      step, data cursor, counters, file offsets
      manifest.json                                     size and SHA-256 of every other file

Invariant: a checkpoint is written to `.tmp-*`, flushed to disk and renamed into place, so a directory without that prefix
is whole. Loading checks it against its manifest; a damaged one is named and passed over, never loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gspo.errors import CheckpointError, NumericalError
from gspo.policy.model import Policy
from gspo.policy.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where a run stands after a step; with weights and moments, all that a resume needs."""

    step: int = 0
    cursor: int = 0
    """Prompts drawn so far; the data order is a function of it."""
    updates: int = 0
    """Optimiser steps applied; the policy's version."""
    skipped_in_row: int = 0
    tokens: int = 0
    """Reply tokens sampled so far."""
    clip_scale: float = 1.0
    """Factor on the objective's clip range, where that adapts."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Lengths of metrics and timings when this was saved."""
    problems: str = ""
    """Fingerprint of the problems; a resume on other problems would not be the same run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings by dotted key, for the same reason."""
    pending: Mapping[str, Any] | None = None
    """Metrics of the step whose evaluation was interrupted, and which is not written down yet."""


def save(folder: Path, policy: Policy, optimizer: Optimizer, state: TrainerState, *, keep: int) -> Path:
    """Write `folder/STEP`, then delete all but the newest `keep` (0: none are deleted)."""
    bad = next((name for name, p in policy.model.named_parameters() if not bool(torch.isfinite(p).all())), None)
    if bad is not None:
        raise NumericalError(f"step {state.step}: the weights of {bad} are not finite, so they are not saved; resume from the last checkpoint with a lower learner.learning_rate")  # fmt: skip
    target, partial = folder / f"{state.step:06d}", folder / f".tmp-{state.step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(partial, policy, optimizer, state)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    _flush(folder)
    _retire(folder, keep)
    return target


def _write(partial: Path, policy: Policy, optimizer: Optimizer, state: TrainerState) -> None:
    try:
        save_model(policy, partial)
        save_file(optimizer.state(), partial / "trainer.safetensors")
    except SafetensorError as error:
        raise OSError(str(error)) from error
    (partial / "trainer.json").write_text(json.dumps(dataclasses.asdict(state), indent=2) + "\n")
    files = {p.name: {"size": p.stat().st_size, "sha256": _digest(p)} for p in sorted(partial.iterdir())}
    (partial / "manifest.json").write_text(json.dumps(files, indent=2) + "\n")
    for path in partial.iterdir():
        _flush(path)
    _flush(partial)


def save_model(policy: Policy, folder: Path) -> None:
    """Weights, config and tokenizer in Hugging Face layout."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; other folders beside them are nobody's business."""
    return sorted((p for p in folder.glob("*") if p.is_dir() and p.name.isdecimal()), key=lambda p: int(p.name))


def newest(folder: Path, unfit: Callable[[TrainerState], str | None] = lambda state: None) -> tuple[Path, list[str]]:
    """The newest checkpoint that is whole and not `unfit`, and a sentence for each newer one that was passed over."""
    complaints: list[str] = []
    for path in reversed(saved(folder)):
        complaint = damage(path) or unfit(read_state(path))
        if complaint is None:
            return path, complaints
        complaints.append(f"{path.name}: {complaint}")
    found = "; ".join(complaints) or "the folder is empty"
    raise CheckpointError(f"{folder}: no whole checkpoint to resume from: {found}; start a new run")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((path / "manifest.json").read_text())
        for name, entry in files.items():
            if (path / name).stat().st_size != entry["size"]:
                return f"{path / name}: {(path / name).stat().st_size} bytes instead of {entry['size']}"
            if _digest(path / name) != entry["sha256"]:
                return f"{path / name}: contents differ from the manifest"
    except FileNotFoundError as error:
        return f"{error.filename}: missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{path}: unreadable manifest ({type(error).__name__})"
    return None


def read_state(path: Path) -> TrainerState:
    """The trainer's state of a whole checkpoint."""
    return TrainerState(**json.loads((path / "trainer.json").read_text()))


def restore(path: Path, optimizer: Optimizer, updates: int) -> None:
    """Load the optimiser's moments of a whole checkpoint."""
    try:
        optimizer.load(load_file(path / "trainer.safetensors"), updates)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / 'trainer.safetensors'}: {error}") from error


def _retire(folder: Path, keep: int) -> None:
    if keep:
        for path in saved(folder)[:-keep]:
            shutil.rmtree(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

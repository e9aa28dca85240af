"""Checkpoints: a model directory that transformers loads as it is, plus the trainer's state, without pickle.

    000020/
      config.json, model.safetensors, tokenizer files   Hugging Face layout (LoRA: adapter_config.json, adapter_model.safetensors)
      trainer.tensors                                   optimiser moments (and float32 masters) by parameter name; in
                                                        safetensors format, but not by name: vLLM would take it for weights
      trainer.json                                      step, data cursor, counters, file offsets
      manifest.json                                     size and SHA-256 of every other file

Invariant: a checkpoint is written to `.tmp-*`, read back, flushed to disk and renamed into place, so a directory without that
prefix is whole; one that is replaced is exchanged, so that at every instant there is a whole one. Loading checks a checkpoint
against its manifest, which names plain files beside it and nothing else; a damaged one is named and passed over, never loaded.
Only what this program wrote is ever deleted.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from gspo.errors import CheckpointError, NumericalError
from gspo.learner import trainer_state
from gspo.learner.optimizer import Optimizer
from gspo.model import adapter
from gspo.model.load import Policy

TRAINER = "trainer.tensors"
_NAME, _LEFT_OVER = re.compile("[0-9]{6,18}"), re.compile(r"\.tmp-(old-)?[0-9]{6,18}")
"""What the folders of checkpoints are called, and those of saves that did not finish."""


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
    model: str = ""
    """Fingerprint of the given model, where a resume reads it again: for the same reason."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings by dotted key, for the same reason."""
    pending: Mapping[str, Any] | None = None
    """Metrics of the step whose evaluation was interrupted, and which is not written down yet."""


def save(folder: Path, policy: Policy, optimizer: Optimizer, state: TrainerState, *, keep: int) -> Path:
    """Write `folder/STEP`, then delete all but the newest `keep` (0: none are deleted)."""
    bad = next((name for name, p in policy.model.named_parameters() if not bool(torch.isfinite(p).all())), None)
    if bad is not None:
        raise NumericalError(f"step {state.step}: the weights of {bad} are not finite, so they are not saved; resume from the last checkpoint with a lower rate: gspo train --resume RUN --learner.learning_rate=VALUE")  # fmt: skip
    target, partial = folder / f"{state.step:06d}", folder / f".tmp-{state.step:06d}"
    if os.path.lexists(target) and not _ours(target):
        raise FileExistsError(f"{target} is there, and is not a checkpoint; move it away")
    _clear(partial)
    try:
        _write(partial, policy, optimizer, state)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _put(partial, target)
    _flush(folder)
    _retire(folder, keep, state.step)
    return target


def _write(partial: Path, policy: Policy, optimizer: Optimizer, state: TrainerState) -> None:
    save_model(policy, partial)
    with _disk_errors():
        save_file(optimizer.state(), partial / TRAINER)
    _write_json(partial / "trainer.json", dataclasses.asdict(state))
    with _disk_errors():
        _read_back(partial, policy)
    files = {p.name: {"size": p.stat().st_size, "sha256": _digest(p)} for p in sorted(partial.iterdir())}
    _write_json(partial / "manifest.json", files)
    for path in partial.iterdir():
        _flush(path)
    _flush(partial)


def _clear(partial: Path) -> None:
    """Delete what an earlier save has left. What stays would be written in place, and may have a second name elsewhere."""
    shutil.rmtree(partial, ignore_errors=True)
    if os.path.lexists(partial):
        raise FileExistsError(f"{partial} is in the way and cannot be deleted; make it writable, or delete it yourself")


@contextmanager
def _disk_errors() -> Iterator[None]:
    """What the libraries below say of a disk that fails, as the error that it is: tokenizers raises a bare Exception."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2) + "\n"
    path.write_text(text)
    if path.read_text() != text:
        raise OSError(f"{path.name} is not on disk as it was written")


def _read_back(partial: Path, policy: Policy) -> None:
    """A write that was lost or cut short without an error must not be hashed as if it were right. Tensors: the file is as
    long as its header says. The tokenizer, whose files may be of any kind: it is written twice."""
    for path in (*partial.glob("*.safetensors"), partial / TRAINER):
        with safe_open(path, framework="pt"):
            pass
    again = partial / "again"
    policy.tokenizer.save_pretrained(again)
    for path in (*again.iterdir(), *partial.glob("*.json")):
        if path.read_bytes() != (partial / path.name).read_bytes() or not _is_json(path):
            raise OSError(f"{path.name} is not on disk as it was written")
    shutil.rmtree(again)


def _is_json(path: Path) -> bool:
    """Whether a file that is called so is it."""
    try:
        return path.suffix != ".json" or json.loads(path.read_text(encoding="utf-8")) is not None
    except ValueError:
        return False


def _put(partial: Path, target: Path) -> None:
    """Rename into place. A checkpoint that is there already is exchanged with the new one before it is deleted."""
    if target.exists() and not _exchange(partial, target):
        aside = partial.with_name(f".tmp-old-{target.name}")
        _clear(aside)
        target.rename(aside)
    if not target.exists():
        partial.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Whether the system could exchange two directories in one go (Linux, most file systems)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here, exchange = -100, 2
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def save_model(policy: Policy, folder: Path) -> None:
    """Weights, config and tokenizer in Hugging Face layout; of an adapted model the adapter alone, in peft's."""
    with _disk_errors():
        if adapter.adapted(policy.model):
            adapter.save(policy.model, folder)
        else:
            policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)


def size_of(model: Any) -> int:
    """Bytes of a checkpoint, about: the trained weights, two float32 moments, and float32 masters where weights are in less."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    n, low = sum(p.numel() for p in parameters), any(p.element_size() < 4 for p in parameters)
    return sum(p.numel() * p.element_size() for p in parameters) + (12 if low else 8) * n


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones too; other folders beside them are nobody's business."""
    return sorted((p for p in folder.glob("*") if _NAME.fullmatch(p.name) and p.is_dir()), key=lambda p: int(p.name))


def _ours(path: Path) -> bool:
    """Whether this program wrote a folder: damage may have taken one of the files that only a checkpoint has, not two."""
    own = ("manifest.json", "trainer.json", TRAINER)
    return not path.is_symlink() and sum((path / name).is_file() for name in own) >= 2


def newest(folder: Path, unfit: Callable[[TrainerState], str | None] = lambda state: None) -> tuple[Path, list[str]]:
    """The newest checkpoint that is whole and not `unfit`, and a sentence for each newer one that was passed over."""
    complaints: list[str] = []
    for path in reversed(saved(folder)):
        complaint = damage(path) or trainer_state.fault_in(path)
        complaint = complaint or unfit(read_state(path))
        if complaint is None:
            return path, complaints
        complaints.append(f"{path.name}: {complaint}")
    found = "; ".join(complaints) or "the folder is empty"
    raise CheckpointError(f"{folder}: no whole checkpoint to resume from: {found}; start a new run")


def newest_of(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, with a warning for each newer one; None: the folder is no run."""
    if not (run / "config.toml").is_file() or not (run / "checkpoints").is_dir():
        return None
    path, complaints = newest(run / "checkpoints")
    for complaint in complaints:
        warnings.warn(f"passed over a damaged checkpoint: {complaint}; {path.name} is used", stacklevel=2)
    return path


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((path / "manifest.json").read_text())
        complaint = _strange(path, files)
        for name, entry in () if complaint else files.items():
            if (path / name).stat().st_size != entry["size"]:
                return f"{path / name}: {(path / name).stat().st_size} bytes instead of {entry['size']}"
            if _digest(path / name) != entry["sha256"]:
                return f"{path / name}: contents differ from the manifest"
        return complaint
    except FileNotFoundError as error:
        return f"{error.filename}: missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{path}: unreadable manifest ({type(error).__name__})"


def _strange(path: Path, names: Iterable[str]) -> str | None:
    """What leads out of a checkpoint: a link, or a name that is more than a name."""
    for file in (path, *sorted(path.iterdir())):
        if file.is_symlink() or (file != path and not file.is_file()):
            return f"{file}: a link, or no plain file; a checkpoint holds files of its own"
    strange = next((name for name in names if Path(name).name != name), None)
    return None if strange is None else f"{path}: its manifest names {strange!r}, which is no file in it"


def read_state(path: Path) -> TrainerState:
    """The trainer's state of a whole checkpoint."""
    if fault := trainer_state.fault_in(path):
        raise CheckpointError(f"{fault}; no run writes such a file")
    return TrainerState(**json.loads((path / "trainer.json").read_text()))


def restore(path: Path, optimizer: Optimizer, updates: int) -> None:
    """Load the optimiser's moments of a whole checkpoint."""
    try:
        optimizer.load(load_file(path / TRAINER), updates)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / TRAINER}: {error}") from error


def _retire(folder: Path, keep: int, step: int) -> None:
    """Delete what is too old, and what saves that did not come to their end have left.

    A checkpoint of a later step was passed over when the run resumed, so it is not one of those that are kept instead."""
    own = [path for path in saved(folder) if _ours(path) and int(path.name) <= step]
    left = [p for p in folder.glob(".tmp-*") if _LEFT_OVER.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
    for path in left:
        shutil.rmtree(path)
    for path in own[:-keep] if keep else ():
        aside = folder / f".tmp-old-{path.name}"
        # What a kill leaves of it is then known as a leftover, and not taken for somebody else's folder.
        path.rename(aside)
        shutil.rmtree(aside)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

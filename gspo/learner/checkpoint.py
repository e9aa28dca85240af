"""Checkpoints: a model directory that transformers loads, plus the trainer's state, without pickle.

    000020/
      config.json, model.safetensors, tokenizer files   Hugging Face layout
                                                        (LoRA: adapter_config.json, adapter_model.safetensors)
      trainer.tensors                                   optimizer moments and float32 masters by parameter name;
                                                        safetensors format, but without that suffix, because vLLM
                                                        would load it as weights
                                                        (several ranks: trainer/, with a file of each rank's shards)
      trainer.json                                      `TrainerState`: step, rollout state, counters, file offsets
      difficulty.tensors                                measured pass rates, with data.sampling = "difficulty"
      in_flight.json, weights-NNNNNN.tensors            the batches of the next steps, with rollout.max_lag
                                                        (`rollout/in_flight.py`)
      manifest.json                                     size and SHA-256 of every other file

Invariant: a checkpoint is written to `.tmp-*`, read back, flushed to disk and renamed into place, so a directory
without that prefix is complete. A checkpoint that is replaced is swapped with the new one, so a complete one exists at
every instant. Loading verifies a checkpoint against its manifest, which names only plain files in the same directory.
A damaged checkpoint is reported and skipped, never loaded. Only files that this program wrote are ever deleted.
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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo import aliases
from gspo.errors import FLOAT16_HINT, CheckpointError, DiskError, NumericalError
from gspo.learner import state_validation
from gspo.learner.optimizer import Optimizer
from gspo.learner.weight_states import MOMENT_BYTES
from gspo.model.load import Policy
from gspo.model.save import disk_errors, save_model
from gspo.ranks.group import ONE, Ranks
from gspo.rollout import in_flight
from gspo.rollout.gather import RolloutState
from gspo.rollout.in_flight import InFlight

TRAINER = "trainer.tensors"
SHARDS = "trainer"
"""The directory with the optimizer's state of several ranks. Its files are in safetensors format. vLLM loads files of
that suffix as weights, but none in a directory below."""
_NAME = re.compile("[0-9]{6,18}")
"""Directory names of checkpoints."""
_LEFT_OVER = re.compile(r"\.tmp-(old-)?[0-9]{6,18}")
"""Directory names of unfinished saves."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state of a run after a step. With weights and moments, it is all that resuming needs.

    `step`, `updates` and the rest say how far learning has come. Sampling may be ahead (`rollout/in_flight.py`)."""

    step: int = 0
    """Steps finished. Each trained on one batch."""
    rollout: RolloutState = field(default_factory=RolloutState)
    """Where sampling stood after the last batch that was trained on, so where a resume starts to collect."""
    updates: int = 0
    """Optimizer steps applied, which is the version of the policy."""
    skipped_in_row: int = 0
    tokens: int = 0
    """Tokens of all completions of the batches up to `rollout`."""
    clip_scale: float = 1.0
    """Factor on the objective's clip range; 1 unless the range is adaptive."""
    rollbacks: int = 0
    """How many times an alarm has rolled the run back (`record/rollbacks.py`)."""
    rate_factor: float = 1.0
    """Factor of these rollbacks on the learning rate."""
    clip_factor: float = 1.0
    """Factor of these rollbacks on the clip range."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Lengths of `metrics.jsonl` and `timings.jsonl` when this was saved."""
    problems: str = ""
    """Fingerprint of the problems. Resuming with other problems would not be the same run."""
    model: str = ""
    """Fingerprint of the given model if resuming loads it again, for the same reason."""
    objective: str = ""
    """Fingerprint of the file of a custom objective, for the same reason; empty for a row of the table."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings by dotted key, for the same reason."""
    pending: Mapping[str, Any] | None = None
    """Metrics of a step that has trained but is not in `metrics.jsonl` yet, because its evaluation comes first. A
    resume evaluates and then writes them. None if there is no such step."""


def save(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    state: TrainerState,
    *,
    keep: int,
    ranks: Ranks = ONE,
    protected: Collection[int] = (),
    batches: InFlight | None = None,
    before_deletion: Callable[[], None] = lambda: None,
) -> Path:
    """Write `folder/STEP`, then delete all but the newest `keep` checkpoints and those of `protected` steps. `0` keeps
    all. `batches` are those of the next steps. `before_deletion` is called once the new checkpoint is in place."""
    target = folder / f"{state.step:06d}"
    partial = folder / f".tmp-{state.step:06d}"
    if os.path.lexists(target) and not _is_checkpoint(target):
        raise FileExistsError(f"{target} exists and is not a checkpoint; move it away")
    _delete_leftover(partial)
    try:
        _write(partial, policy, optimizer, state, ranks, batches)
    # Ctrl-C must not leave a partial save behind either.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _move_into_place(partial, target)
    # The rename is an entry of the folder, which must reach the disk, too.
    _flush(folder)
    before_deletion()
    _retire(folder, keep, state.step, protected)
    return target


def _write(
    partial: Path,
    policy: Policy,
    optimizer: Optimizer,
    state: TrainerState,
    ranks: Ranks,
    batches: InFlight | None,
) -> None:
    def check(name: str, weight: Tensor) -> None:
        # A saved NaN would make every later resume worthless, and retention would delete the good checkpoints.
        if not bool(torch.isfinite(weight).all()):
            hint = FLOAT16_HINT if policy.model.dtype == torch.float16 else ""
            raise NumericalError(
                f"step {state.step}: the weights of {name} are not finite, so they are not saved; resume from the last "
                f"checkpoint with a lower rate: gspo train --resume RUN --learner.learning_rate=VALUE{hint}"
            )

    save_model(policy, partial, ranks, check)
    if ranks.several:
        with ranks.together("write_shards", path=str(partial)):
            write_shards(partial, optimizer)
    with disk_errors():
        if not ranks.several:
            save_file({name: tensor.contiguous() for name, tensor in optimizer.state().items()}, partial / TRAINER)
        state_validation.save_difficulty(state.rollout.difficulty, partial)
        if batches is not None:
            in_flight.save(partial, batches)
    _write_json(partial / "trainer.json", _json_fields(state))
    with disk_errors():
        _read_back(partial, policy)
    files = files_of(partial)
    _write_json(
        partial / "manifest.json",
        {name: {"size": path.stat().st_size, "sha256": _digest(path)} for name, path in files.items()},
    )
    # Before the rename: a file system may write the rename to disk earlier than the data.
    for path in (*files.values(), partial / "manifest.json"):
        _flush(path)
    for path in filter(Path.is_dir, (partial / SHARDS, partial)):
        _flush(path)


def write_shards(partial: Path, optimizer: Optimizer) -> None:
    """Write what each rank holds of the optimizer's state. All ranks must call it, and all of them fail if one does."""
    import torch.distributed.checkpoint as dcp  # takes a second, and one rank does not need it

    try:
        # Safetensors, because the metadata of the default format is a pickle. The ranks exchange their plans by
        # themselves, and wait for each other at the end.
        dcp.save(
            optimizer.state(), storage_writer=dcp.HuggingFaceStorageWriter(str(partial / SHARDS), save_distributed=True)
        )
    except dcp.api.CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise DiskError(f"{partial / SHARDS}: cannot be written: {causes}") from error


def files_of(path: Path) -> dict[str, Path]:
    """The files of a checkpoint by the name that a manifest has for them, except for the manifest itself."""
    found = [*path.iterdir(), *((path / SHARDS).iterdir() if (path / SHARDS).is_dir() else ())]
    names = {str(file.relative_to(path)): file for file in found if not file.is_dir()}
    return {name: names[name] for name in sorted(names) if name != "manifest.json"}


def _json_fields(state: TrainerState) -> dict[str, Any]:
    """The fields of `trainer.json`. Pass rates have a file of their own, because there is one per problem."""
    rollout = {"batch": state.rollout.batch, "cursor": state.rollout.cursor}
    return {**dataclasses.asdict(dataclasses.replace(state, rollout=RolloutState())), "rollout": rollout}


def _delete_leftover(partial: Path) -> None:
    """Delete the leftovers of an earlier save. A file that stayed would be written in place, through any hard link."""
    shutil.rmtree(partial, ignore_errors=True)
    if os.path.lexists(partial):
        raise FileExistsError(f"{partial} is in the way and cannot be deleted; make it writable, or delete it yourself")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2) + "\n"
    path.write_text(text)
    # Read back, because a write can be lost without an error.
    if path.read_text() != text:
        raise OSError(f"{path.name} on disk differs from what was written")


def _read_back(partial: Path, policy: Policy) -> None:
    """Detect a write that was lost or truncated without an error, before the file is hashed as if correct. A tensor
    file must have the length that its header says. Tokenizer files can have any format, so they are written twice."""
    for path in (*partial.rglob("*.safetensors"), *partial.glob("*.tensors")):
        with safe_open(path, framework="pt"):
            pass
    again = partial / "again"
    policy.tokenizer.save_pretrained(again)
    for path in (*again.iterdir(), *partial.glob("*.json")):
        if path.read_bytes() != (partial / path.name).read_bytes() or not _is_json(path):
            raise OSError(f"{path.name} on disk differs from what was written")
    shutil.rmtree(again)


def _is_json(path: Path) -> bool:
    """Whether a file named `.json` parses. True for any other name."""
    try:
        return path.suffix != ".json" or json.loads(path.read_text(encoding="utf-8")) is not None
    except ValueError:
        return False


def _move_into_place(partial: Path, target: Path) -> None:
    """Rename into place. An existing checkpoint is swapped with the new one before it is deleted."""
    if target.exists() and not _swap(partial, target):
        aside = partial.with_name(f".tmp-old-{target.name}")
        _delete_leftover(aside)
        target.rename(aside)
    if not target.exists():
        partial.rename(target)


def _swap(one: Path, other: Path) -> bool:
    """Swap two directories atomically. False if the system cannot; Linux can on most file systems."""
    try:
        # Python has no function for it.
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at_fdcwd = -100
    rename_exchange = 2
    return bool(rename(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0)


def size_of(model: Any, optimizer: str, lag: int = 0) -> int:
    """Approximate bytes of a checkpoint: the trained weights, the moments of an optimizer, and float32 masters of
    weights in lower precision. With `rollout.max_lag`, it may also have the weights of that many earlier steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    n = sum(p.numel() for p in parameters)
    low = any(p.element_size() < 4 for p in parameters)
    state = MOMENT_BYTES[optimizer] + (4 if low else 0)
    return sum(p.numel() * p.element_size() for p in parameters) * (1 + lag) + int(state * n)


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones included. Directories with other names are ignored."""
    return sorted((p for p in folder.glob("*") if _NAME.fullmatch(p.name) and p.is_dir()), key=lambda p: int(p.name))


def _is_checkpoint(path: Path) -> bool:
    """Whether this program wrote a directory. A damaged checkpoint may lack one of its own files, but not two."""
    own = ("manifest.json", "trainer.json", TRAINER)
    return not path.is_symlink() and sum((path / name).is_file() for name in own) >= 2


def newest(
    folder: Path,
    unfit: Callable[[TrainerState], str | None] = lambda state: None,
    *,
    abandoned: Callable[[TrainerState], bool] = lambda state: False,
    last: int | None = None,
) -> tuple[Path, list[str]]:
    """The newest checkpoint that is intact and not `unfit`, and the reason for each newer one that was skipped.

    Those of `abandoned` steps, and of steps after `last`, are passed over without one."""
    complaints: list[str] = []
    for path in reversed([p for p in saved(folder) if last is None or int(p.name) <= last]):
        complaint = damage(path) or state_validation.fault_in(path) or in_flight_fault(path)
        if complaint is None and abandoned(read_state(path)):
            continue
        complaint = complaint or unfit(read_state(path))
        if complaint is None:
            return path, complaints
        complaints.append(f"{path.name}: {complaint}")
    reasons = "; ".join(complaints) or "the directory is empty"
    raise CheckpointError(f"{folder}: no intact checkpoint to resume from: {reasons}; start a new run")


def read_in_flight(path: Path) -> InFlight | None:
    """What an intact checkpoint has kept of the batches of the next steps; None if nothing."""
    return in_flight.read(path, int(path.name))


def in_flight_fault(path: Path) -> str | None:
    """Why the batches that a checkpoint has kept cannot be used, or None."""
    try:
        read_in_flight(path)
    except CheckpointError as error:
        return str(error)
    return None


def newest_of(run: Path) -> Path | None:
    """The newest intact checkpoint of a run, with a warning for each newer one; None if the directory is not a run."""
    if not (run / "config.toml").is_file() or not (run / "checkpoints").is_dir():
        return None
    path, complaints = newest(run / "checkpoints")
    for complaint in complaints:
        warnings.warn(f"skipped a damaged checkpoint: {complaint}; using {path.name}", stacklevel=3)
    return path


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((path / "manifest.json").read_text())
        # Before the files are hashed: a link could lead to somebody else's file, or to a pipe that blocks.
        complaint = _foreign_entry(path, files)
        for name, entry in () if complaint else files.items():
            # Size before content: a truncated file need not be hashed.
            if (path / name).stat().st_size != entry["size"]:
                return f"{path / name}: {(path / name).stat().st_size} bytes instead of {entry['size']}"
            if _digest(path / name) != entry["sha256"]:
                return f"{path / name}: contents differ from the manifest"
        return complaint
    except FileNotFoundError as error:
        return f"{error.filename}: missing"
    # The manifest may be any JSON: a list has no items, and deep nesting raises RecursionError.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{path}: unreadable manifest ({type(error).__name__})"


def _foreign_entry(path: Path, names: Iterable[str]) -> str | None:
    """What leads outside a checkpoint: a link, or a manifest entry that is a path; None if nothing does."""
    shards = path / SHARDS
    for file in (path, *sorted(path.iterdir()), *(sorted(shards.iterdir()) if shards.is_dir() else ())):
        if file.is_symlink() or (file not in (path, shards) and not file.is_file()):
            return f"{file}: not a plain file; a checkpoint contains only plain files"
    strange = next((name for name in names if Path(name).name != name.removeprefix(f"{SHARDS}/")), None)
    return None if strange is None else f"{path}: its manifest names {strange!r}, which is not a file in it"


def read_state(path: Path) -> TrainerState:
    """The trainer's state of an intact checkpoint."""
    if fault := state_validation.fault_in(path):
        raise CheckpointError(f"{fault}; no run writes such a file")
    fields = state_validation.saved_fields(path)
    pending = fields["pending"]
    current = {
        "rollout": RolloutState(**fields["rollout"], difficulty=state_validation.saved_difficulty(path)),
        "settings": aliases.settings(fields["settings"]),
        "pending": None if pending is None else aliases.metrics(pending),
    }
    return TrainerState(**fields | current)


def restore(path: Path, optimizer: Optimizer, updates: int) -> None:
    """Load the optimizer's moments from an intact checkpoint, which any number of ranks may have written."""
    sharded = (path / SHARDS).is_dir()
    try:
        optimizer.load(_read_shards(path, optimizer) if sharded else load_file(path / TRAINER), updates)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / (SHARDS if sharded else TRAINER)}: {error}") from error


def _read_shards(path: Path, optimizer: Optimizer) -> dict[str, Tensor]:
    """The part of the optimizer's state that this rank needs."""
    import torch.distributed.checkpoint as dcp

    try:
        reader = dcp.HuggingFaceStorageReader(str(path / SHARDS))
        saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
        state = optimizer.empty_state({name: (entry.size, entry.properties.dtype) for name, entry in saved.items()})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
            dcp.load(state, storage_reader=reader, no_dist=True)  # each rank reads for itself
    # Whatever a file that is no checkpoint makes it raise.
    except (dcp.api.CheckpointException, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path / SHARDS}: {str(error).splitlines()[0]:.300}") from error
    return state


def _retire(folder: Path, keep: int, step: int, protected: Collection[int]) -> None:
    """Delete old checkpoints, and the leftovers of unfinished saves."""
    # A checkpoint of a later step was skipped when the run resumed, so it must not count as one of the newest.
    own = [path for path in saved(folder) if _is_checkpoint(path) and int(path.name) <= step]
    leftovers = [p for p in folder.glob(".tmp-*") if _LEFT_OVER.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
    for path in leftovers:
        shutil.rmtree(path)
    delete(path for path in (own[:-keep] if keep else ()) if int(path.name) not in protected)


def delete(paths: Iterable[Path]) -> None:
    """Delete checkpoints. Directories that this program did not write stay."""
    for path in filter(_is_checkpoint, paths):
        aside = path.with_name(f".tmp-old-{path.name}")
        _delete_leftover(aside)
        # If the process is killed while it deletes, the rest has the name of a leftover and the next save deletes it.
        path.rename(aside)
        shutil.rmtree(aside)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    # fsync also works on a descriptor that was opened for reading, and so on folders.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The run directory: everything that a run writes, and everything that other commands read of it.

    run.json               the format of the directory, and what the objective does
    config.toml            resolved, complete
    environment.json       versions, device, commit
    metrics.jsonl          one object per step; deterministic, byte-identical after a resume
    timings.jsonl          one object per step; everything that depends on the clock or on the machine
    rollouts/000012.jsonl  every completion of the step
    evaluations/000010.jsonl  completions of the evaluations after the step
    reward_errors/01.txt   the first failure of a reward function in each place: traceback, output, completion
    reward_cache/          scores of judges and reward models behind an endpoint, so that none is paid for twice
    tokenizer/             the tokenizer, to decode the completions' token ids
    events.jsonl           what happened: start, resume, skip, checkpoint, stop, ...
    ledger.jsonl           what has become of every batch, with rollout.max_lag; see record/ledger.py
    sampler.log            what the sampling process has printed, with rollout.max_lag
    checkpoints/000020/    see learner/checkpoint.py
    trackers.json          the run's ids in wandb, trackio and MLflow, with log.sinks
    best.json              the step of the best checkpoint, with `checkpoint.keep_best`
    rollbacks.json         every rollback; see record/rollbacks.py
    abandoned/001/         metrics, timings and completions of the steps that the first rollback abandoned
    ranks/1.log            what rank 1 has printed, if the run has several ranks
    inputs/                rows and a model that the Python API was given as objects

In: the records of a run. Out: the files above. Invariant: a reader never sees a partial line, not even after a failed
write. A resume truncates metrics and timings to the checkpoint's offsets. Events and errors contain no secrets; a
setting that holds one is rejected before it is written. Nothing outside the directory is written or deleted, whatever
links someone has placed in it. Only one trainer at a time works in it.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from gspo import aliases
from gspo.config import Config, from_tree, read_toml, to_toml
from gspo.errors import ConfigError, DataError, DiskError, RunLockedError
from gspo.ranks.environment import resume_command
from gspo.record import held_out, rollbacks, run_format
from gspo.redact import known_secrets, redacted, redacted_values

STEP_FILES = ("metrics.jsonl", "timings.jsonl")
STEP_FOLDERS = ("rollouts", "evaluations")
"""Folders with a file of completions per step."""
FILES = (
    ".lock",
    run_format.FILE,
    "config.toml",
    "environment.json",
    "events.jsonl",
    "ledger.jsonl",
    "sampler.log",
    "curves.png",
    "trackers.json",
    held_out.FILE,
    rollbacks.FILE,
    *STEP_FILES,
)
FOLDERS = (
    *STEP_FOLDERS,
    "tokenizer",
    "checkpoints",
    "reference",
    "reward_errors",
    "reward_cache",
    "abandoned",
    "ranks",
    "tensorboard",
    "wandb",
    "inputs",
)
RENAMED = (*STEP_FOLDERS, "checkpoints")
"""Folders whose files are never written in place, so a hard link to one of them is harmless."""
LONGEST_ROW = 1 << 20
"""Upper bound on the bytes of one line of metrics."""
# At most 18 digits, so that a file with an absurd name is not parsed as a number.
_STEP = re.compile("[0-9]{6,18}")
_ABANDONED = re.compile(r"(\.tmp-)?[0-9]{3,18}")
"""Directory names in `abandoned/`, also of an unfinished move."""


def run_path(config: Config) -> Path:
    """Where a new run is written."""
    return Path(config.run_dir or f"runs/{config.name}-{datetime.now():%Y%m%d-%H%M%S}")


class RunDir:
    """Owns a run directory while a trainer works in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock = lock(path, busy="another trainer is working in this run directory", option="--run-dir")
        try:
            check_plain(path)
        except BaseException:
            self._lock.close()
            raise

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Create a directory. One that already holds a run is rejected, so nothing is overwritten."""
        path = run_path(config)
        if (path / "config.toml").exists():
            raise ConfigError(
                f"{path}: already holds a run; continue it with 'gspo train --resume {path}', "
                "or choose another --run-dir"
            )
        # A lock file may be left from a run that never started. Inputs are written before the run starts.
        if path.is_dir() and any(p.name not in (".lock", "inputs") for p in path.iterdir()):
            raise ConfigError(
                f"{path}: is not empty and holds no run; choose another --run-dir, so that nothing in it is lost"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot create the run directory: {error.strerror}; choose another --run-dir"
            ) from None
        return cls(path)

    def describe(self, config: Config, objective: Mapping[str, Any]) -> None:
        """Write the format, the resolved objective, the config and the environment. From then on the directory holds a
        run."""
        environment = redacted_values({"seed": config.seed, **_environment()}, known_secrets())
        with self.writing("environment.json"):
            (self.path / "rollouts").mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            replace_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        with self.writing(run_format.FILE):
            replace_text(self.path / run_format.FILE, run_format.to_json(objective))
        # config.toml comes last: it is what makes the directory a run (see `started`).
        with self.writing("config.toml"):
            replace_text(self.path / "config.toml", to_toml(config))

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunDir, Config]:
        """Open an existing run and read its config."""
        file = Path(path) / "config.toml"
        if not file.is_file():
            raise ConfigError(
                f"{path}: not a run directory (no config.toml); give the directory that 'gspo train' made"
            )
        run_format.read(Path(path))
        return cls(Path(path)), from_tree(read_toml(file), where=str(file))

    def check_held(self) -> None:
        """Raise if the directory was moved, replaced, or taken over by another trainer."""
        self._lock.check()

    def write_metrics(self, values: Mapping[str, Any]) -> None:
        """Append a step's metrics."""
        self._append("metrics.jsonl", values)

    def write_timings(self, values: Mapping[str, Any]) -> None:
        """Append a step's durations."""
        self._append("timings.jsonl", values)

    def event(self, kind: str, **values: Any) -> None:
        """Append an event. Secrets in its values are redacted."""
        redacted_event = redacted_values(values, known_secrets())
        now = datetime.now().isoformat(timespec="seconds")
        self._append("events.jsonl", {"time": now, "event": kind, **redacted_event})

    def write_ledger(self, values: Mapping[str, Any]) -> None:
        """Append what has become of a batch."""
        self._append("ledger.jsonl", values)

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write every completion of a step."""
        self._write_completions("rollouts", step, records)

    def write_evaluations(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write completions of the evaluations after a step."""
        self._write_completions("evaluations", step, records)

    def _write_completions(self, folder: str, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        file = self.path / folder / f"{step:06d}.jsonl"
        partial = file.with_suffix(".tmp")
        partial.unlink(missing_ok=True)
        try:
            # `x` refuses an existing file, so a link that appears after the unlink is not written through.
            with self.writing(f"{folder}/{file.name}"):
                file.parent.mkdir(exist_ok=True)
                with partial.open("x", encoding="utf-8") as out:
                    out.writelines(json_line(record) for record in records)
        except DiskError:
            partial.unlink(missing_ok=True)
            raise
        # A viewer that reads while the run writes sees the whole file or none.
        partial.rename(file)

    def reward_error(self, text: str) -> Path:
        """Write how a reward function failed. Its output and traceback may contain API keys, so they are redacted."""
        folder = self.path / "reward_errors"
        folder.mkdir(exist_ok=True)
        file = folder / f"{1 + len(list(folder.iterdir())):02d}.txt"
        file.write_text(redacted(text, known_secrets()), encoding="utf-8", errors="backslashreplace")
        return file

    def offsets(self) -> dict[str, int]:
        """Sizes of the step files once they are synced to disk; part of a checkpoint."""
        for name in STEP_FILES:
            if (self.path / name).exists():
                with self.writing(name), (self.path / name).open("rb") as file:
                    # A checkpoint that survives a power failure must find the lines that it refers to.
                    os.fsync(file.fileno())
        return {name: (self.path / name).stat().st_size for name in STEP_FILES if (self.path / name).exists()}

    def lacks(self, offsets: Mapping[str, int]) -> str | None:
        """What the step files are missing compared with a checkpoint's offsets; `None` if nothing."""
        for name, length in offsets.items():
            size = (self.path / name).stat().st_size if (self.path / name).exists() else 0
            if size < length:
                return f"{name} has {size} bytes, {length - size} fewer than when it was saved"
        return None

    def last_row(self, length: int) -> dict[str, Any] | None:
        """The last object in the first `length` bytes of the metrics; `None` if there is no complete one."""
        if not length:
            return None
        with (self.path / "metrics.jsonl").open("rb") as file:
            # Only the end: the metrics of a long run are large.
            file.seek(max(0, length - LONGEST_ROW))
            # `end` follows the last newline, so it is empty unless the last line is incomplete.
            *_, last, end = (b"", *file.read(min(length, LONGEST_ROW)).split(b"\n"))
        with suppress(ValueError, RecursionError):
            return _object(json.loads(last)) if not end else None
        return None

    def rewind(self, step: int, offsets: Mapping[str, int]) -> None:
        """Delete everything that was written after a checkpoint."""
        for name in STEP_FILES:
            if (self.path / name).exists():
                # By bytes, not by steps, so that the file is byte-identical to that of an uninterrupted run.
                os.truncate(self.path / name, offsets.get(name, 0))
        for file in self._completions_after(step):
            file.unlink()

    def _completions_after(self, step: int) -> list[Path]:
        """The files with completions of later steps."""
        files = (file for folder in STEP_FOLDERS for file in (self.path / folder).glob("*.jsonl"))
        # Only files that a run wrote: the folder may hold a user's own.
        return [file for file in files if _STEP.fullmatch(file.stem) and int(file.stem) > step]

    def write_rollbacks(self, records: Sequence[rollbacks.Rollback]) -> None:
        """Write all rollbacks of the run, in one step that also survives a power failure."""
        self.check_held()
        with self.writing(rollbacks.FILE):
            replace_text(self.path / rollbacks.FILE, rollbacks.to_json(records), durable=True)

    def abandon(self, number: int, step: int, offsets: Mapping[str, int]) -> None:
        """Copy or move what was written after a checkpoint to `abandoned/NUMBER`, unless that is done already.

        The directory gets its name last, so one of that name is complete, and later files belong to later steps."""
        target = self.path / "abandoned" / f"{number:03d}"
        if target.exists():
            return
        with self.writing(f"abandoned/{target.name}"):
            partial = target.with_name(f".tmp-{target.name}")
            folders = [partial / name for name in STEP_FOLDERS]
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            for name in STEP_FILES:
                # Copied: `rewind` truncates the file.
                _copy_tail(self.path / name, offsets.get(name, 0), partial / name)
            for file in self._completions_after(step):
                file.rename(partial / file.parent.name / file.name)
            for folder in (*folders, partial):
                _flush(folder)
            partial.rename(target)
            _flush(target.parent)

    def restart(self) -> None:
        """Delete what an earlier attempt has left behind that ended without a checkpoint, or whose checkpoints are
        gone."""
        self.rewind(-1, {})
        for name in (rollbacks.FILE, held_out.FILE, "ledger.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / "abandoned").glob("*"):
            if _ABANDONED.fullmatch(folder.name):
                shutil.rmtree(folder)

    def write_best(self, text: str | None) -> None:
        """Write the step of the best checkpoint; `None` removes it."""
        file = self.path / held_out.FILE
        if text is None:
            file.unlink(missing_ok=True)
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            with self.writing(held_out.FILE):
                replace_text(file, text)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    @property
    def format(self) -> int:
        """The format of the directory."""
        return run_format.read(self.path).format

    @property
    def started(self) -> bool:
        """Whether the directory holds a run."""
        return (self.path / "config.toml").exists()

    def discard_if_empty(self) -> None:
        """Remove the directory of a run that never started, unless it contains other files."""
        # Somebody else's directory may be at this path by now. It must not be emptied.
        if not self.started and self._lock.in_place():
            for name in (".lock", "environment.json", "trackers.json", run_format.FILE):
                (self.path / name).unlink(missing_ok=True)
            for file in (self.path / "ranks").glob("[0-9]*.log"):
                file.unlink(missing_ok=True)
            for folder in (self.path / "rollouts", self.checkpoints, self.path / "ranks", self.path):
                # rmdir refuses a directory that still contains something, which then stays.
                with suppress(OSError):
                    folder.rmdir()

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Wrap the writing of a file: an error names the file and how to continue."""
        how = resume_command(self.path) if self.started else "repeat the command"
        with writing(self.path / name, f"make room there, then: {how}"):
            yield

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        # Before each line: a run directory that was moved away must not be written to under its old path.
        self.check_held()
        with self.writing(name):
            _append_whole(self.path / name, json_line(values).encode("ascii"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file. A partial last line is ignored."""
    if not path.exists():
        return []
    try:
        # The trainer may be writing right now, so the text after the last newline is not a whole line yet.
        lines = path.read_text(encoding="utf-8").split("\n")
        return [_object(json.loads(line)) for line in lines[:-1] if line]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: a line is not a JSON object ({error}); gspo did not write this file") from None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl`, with today's names."""
    return [aliases.metrics(row) for row in read_jsonl(run / "metrics.jsonl")]


def abandoned_seconds(run: Path) -> float:
    """The time of all steps that rollbacks abandoned."""
    files = sorted((run / "abandoned").glob("[0-9]*/timings.jsonl"))
    return sum(row.get("time/step_s") or 0.0 for file in files for row in read_jsonl(file))


def read_events(run: Path) -> list[dict[str, Any]]:
    """The records of `events.jsonl`, with today's names."""
    return [aliases.event(row) for row in read_jsonl(run / "events.jsonl")]


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}")
    return value


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically: a reader finds the old text or the new one, never a part. If it is `durable`, that
    also holds after a power failure, and then for the new text once this returns."""
    partial = path.with_name(f".tmp-{path.name}")
    try:
        with writing(path, "make room there, or write to another place"):
            partial.unlink(missing_ok=True)  # It may be a symlink, or a hard link to a file elsewhere.
            # `x` refuses an existing file, so a link that appears after the unlink is not written through.
            with partial.open("x", encoding="utf-8") as out:
                out.write(text)
                if durable:
                    out.flush()
                    os.fsync(out.fileno())
            partial.rename(path)
            if durable:
                _flush(path.parent)
    except DiskError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Raise a failed write as a `DiskError` that names the path, which the system's error may not do."""
    try:
        yield
    except Exception as error:
        # The tokenizers library reports a full disk as a bare Exception with "(os error 28)" in its text.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        reason = error.__cause__ if isinstance(error, DiskError) else error
        raise DiskError(
            f"{path}: cannot be written: {getattr(reason, 'strerror', None) or reason}; {remedy}"
        ) from reason


def _copy_tail(source: Path, start: int, target: Path) -> None:
    """Copy a file from a byte on, and flush the copy to disk."""
    if not source.exists():
        return
    target.unlink(missing_ok=True)  # of an attempt that was killed
    with source.open("rb") as file, target.open("xb") as out:
        file.seek(start)
        shutil.copyfileobj(file, out)
        out.flush()
        os.fsync(out.fileno())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _append_whole(path: Path, data: bytes) -> None:
    """Append all bytes or, on failure, none: the next line would be lost in a partial one."""
    # Opened for each line, so that nothing stays in a buffer.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(file).st_size
        try:
            # A full disk may take a part of the data without an error. The next write then fails.
            while data:
                data = data[os.write(file, data) :]
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def json_line(values: Mapping[str, Any]) -> str:
    """A record as a line of JSON."""
    try:
        # ASCII: U+2028 and similar characters in a completion would split the line for some readers.
        return json.dumps(values, ensure_ascii=True, allow_nan=False) + "\n"
    except (ValueError, TypeError):
        # A NaN, or a mapping that is not a dict. These are rare, and converting every record would be slow.
        return json.dumps({k: finite(v) for k, v in values.items()}, ensure_ascii=True, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Replace NaN and infinity by `None`, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


class DirectoryLock:
    """An exclusive lock on a directory, held until it is closed or the process ends."""

    def __init__(self, path: Path, folder: int, file: int, *, by_folder: bool) -> None:
        self.path = path
        self._handles = [file, folder]
        self._locked = [(os.fstat(folder), path)]
        if not by_folder:
            self._locked.append((os.fstat(file), path / ".lock"))

    def in_place(self) -> bool:
        """Whether the path still leads to the locked directory."""
        try:
            return all(os.path.samestat(known, os.stat(path)) for known, path in self._locked)
        except OSError:
            return False

    def check(self) -> None:
        """Raise if the path no longer leads to the locked directory."""
        if not self.in_place():
            raise RunLockedError(
                f"{self.path}: was moved, deleted, or taken over while it was in use; nothing more is written there"
            )

    def close(self) -> None:
        """Release the lock."""
        while self._handles:
            os.close(self._handles.pop())

    # Also released when the object is dropped: a test or a notebook may not close it.
    __del__ = close

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def lock(path: Path, *, busy: str, option: str) -> DirectoryLock:
    """Lock a directory until the lock is closed or the process ends. `busy` says who else may hold it.

    The directory itself is locked, because a lock file can be deleted. `.lock` is locked too, as a visible sign and for
    file systems that cannot lock a directory."""
    with ExitStack() as undo:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            # No symlink is followed, a pipe of that name does not block, and child processes do not inherit the lock.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(path / ".lock", flags, 0o644)
            undo.callback(os.close, file)
            by_folder = _locks_folders(folder)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(f"{path}: {busy}; stop it first") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot write there: {error.strerror}; choose another {option}") from None
        undo.pop_all()
        return DirectoryLock(path, folder, file, by_folder=by_folder)


def is_idle(path: Path) -> bool:
    """Whether no trainer works in a run directory."""
    try:
        lock(path, busy="in use", option="--run-dir").close()
    except RunLockedError:
        return False
    return True


def _locks_folders(folder: int) -> bool:
    """Try to lock the folder. False if the file system cannot lock folders (NFS)."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def check_plain(path: Path, files: Sequence[str] = FILES, folders: Sequence[str] = FOLDERS) -> None:
    """Reject a directory in which a write could change something outside: symlinks, hard links, pipes."""
    for entry in (path / name for name in (*files, *folders)):
        if os.path.lexists(entry):
            found = entry.lstat()
            # A second hard link is the same file under another name, perhaps somebody else's.
            is_file = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
            if not (is_file if entry.name in files else stat.S_ISDIR(found.st_mode)):
                raise ConfigError(_leads_out(entry))
    for name in folders:
        # wandb itself places symlinks into its folder.
        for folder, inner, names in os.walk(path / name) if name != "wandb" else ():
            for entry in (Path(folder) / n for n in (*inner, *names)):
                found = entry.lstat()
                shared = stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and name not in RENAMED
                if shared or not _plain(found.st_mode):
                    raise ConfigError(_leads_out(entry))


def check_folder(path: Path) -> None:
    """Reject an existing path that is a symlink or anything other than a directory."""
    if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
        raise ConfigError(_leads_out(path))


def _plain(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _leads_out(entry: Path) -> str:
    return (
        f"{entry}: is a symlink, has a hard link elsewhere, or is not what a run writes under this name; gspo writes "
        "only to files of its own: replace it with a copy, or remove it"
    )


def _environment() -> dict[str, Any]:
    import torch

    packages = ("gspo", "torch", "transformers", "tokenizers", "safetensors", "datasets", "math-verify", "numpy")
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": found,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the code, if it runs from a checkout."""
    try:
        here = Path(__file__).parent
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()

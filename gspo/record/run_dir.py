"""The run directory: the one place where a run writes, and all that anything else reads of it.

    config.toml            resolved, complete
    environment.json       versions, device, commit
    metrics.jsonl          one object per step; deterministic, byte-identical after a resume
    timings.jsonl          one object per step; everything that depends on the clock
    rollouts/000012.jsonl  every reply of the step
    reward_errors/01.txt   the first failure of a reward function in each place: traceback, output, completion
    tokenizer/             what the replies' token ids mean
    events.jsonl           what happened: start, resume, skip, checkpoint, stop, ...
    checkpoints/000020/    see learner/checkpoint.py

Invariant: lines are whole or absent to a reader, also after a write that failed; a resume cuts metrics and timings back to the
checkpoint's offsets. Events and errors hold no secrets; settings that would are refused before they are written. Nothing outside
the directory is written or deleted, whatever links a stranger has put into it; one trainer at a time works in it.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from gspo.config import Config, from_tree, read_toml, to_toml
from gspo.errors import ConfigError, DataError, DiskError, RunLockedError
from gspo.redact import known_secrets, redacted, redacted_values

STEP_FILES = ("metrics.jsonl", "timings.jsonl")
FILES = (".lock", "config.toml", "environment.json", "events.jsonl", "curves.png", *STEP_FILES)
FOLDERS = ("rollouts", "tokenizer", "checkpoints", "reference", "reward_errors", "tensorboard", "wandb")
RENAMED = ("rollouts", "checkpoints")
"""Folders whose files are never written in place, so that a second name of a file is left alone."""
LONGEST_ROW = 1 << 20
_STEP = re.compile("[0-9]{6,18}")


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
        """A new directory; one that already holds a run is refused, so that nothing is overwritten."""
        path = Path(config.run_dir or f"runs/{config.name}-{datetime.now():%Y%m%d-%H%M%S}")
        if (path / "config.toml").exists():
            raise ConfigError(f"{path}: already holds a run; continue it with 'gspo train --resume {path}', or choose another --run-dir")  # fmt: skip
        if path.is_dir() and any(p.name != ".lock" for p in path.iterdir()):
            raise ConfigError(
                f"{path}: is not empty and holds no run; choose another --run-dir, so that nothing in it is lost"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot make the run directory: {error.strerror}; choose another --run-dir"
            ) from None
        return cls(path)

    def describe(self, config: Config) -> None:
        """Write the config and the environment; from now on the directory holds a run."""
        environment = redacted_values({"seed": config.seed, **_environment()}, known_secrets())
        with self.writing("environment.json"):
            (self.path / "rollouts").mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            replace_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        with self.writing("config.toml"):
            replace_text(self.path / "config.toml", to_toml(config))

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunDir, Config]:
        """An existing run and its config."""
        file = Path(path) / "config.toml"
        if not file.is_file():
            raise ConfigError(
                f"{path}: not a run directory (no config.toml); give the directory that 'gspo train' made"
            )
        return cls(Path(path)), from_tree(read_toml(file), where=str(file))

    def check_held(self) -> None:
        """Refuse to write where this run no longer is: its directory was moved, replaced, or taken by another trainer."""
        self._lock.check()

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Append a step's metrics."""
        self._append("metrics.jsonl", values)

    def timings(self, values: Mapping[str, Any]) -> None:
        """Append a step's durations."""
        self._append("timings.jsonl", values)

    def event(self, kind: str, **values: Any) -> None:
        """Append something that happened."""
        said = redacted_values(values, known_secrets())
        self._append("events.jsonl", {"time": datetime.now().isoformat(timespec="seconds"), "event": kind, **said})

    def rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write every reply of a step."""
        file = self.path / "rollouts" / f"{step:06d}.jsonl"
        partial = file.with_suffix(".tmp")
        partial.unlink(missing_ok=True)
        try:
            with self.writing(f"rollouts/{file.name}"), partial.open("x", encoding="utf-8") as out:
                out.writelines(_line(record) for record in records)
        except DiskError:
            partial.unlink(missing_ok=True)
            raise
        partial.rename(file)

    def reward_error(self, text: str) -> Path:
        """Write down how a reward function failed; what it printed and raised may hold the keys that it works with."""
        folder = self.path / "reward_errors"
        folder.mkdir(exist_ok=True)
        file = folder / f"{1 + len(list(folder.iterdir())):02d}.txt"
        file.write_text(redacted(text, known_secrets()), encoding="utf-8", errors="backslashreplace")
        return file

    def offsets(self) -> dict[str, int]:
        """How long the step files are now, on disk; part of a checkpoint."""
        for name in STEP_FILES:
            if (self.path / name).exists():
                with self.writing(name), (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())
        return {name: (self.path / name).stat().st_size for name in STEP_FILES if (self.path / name).exists()}  # fmt: skip

    def lacks(self, offsets: Mapping[str, int]) -> str | None:
        """What is missing of the step files that a checkpoint stands on, or None."""
        for name, length in offsets.items():
            size = (self.path / name).stat().st_size if (self.path / name).exists() else 0
            if size < length:
                return f"{name} has {size} bytes, {length - size} fewer than when it was saved"
        return None

    def last_row(self, length: int) -> dict[str, Any] | None:
        """The last object in the first `length` bytes of the metrics; None: there is none, or no whole one."""
        if not length:
            return None
        with (self.path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, length - LONGEST_ROW))
            *_, last, end = (b"", *file.read(min(length, LONGEST_ROW)).split(b"\n"))
        with suppress(ValueError, RecursionError):
            return _object(json.loads(last)) if not end else None
        return None

    def rewind(self, step: int, offsets: Mapping[str, int]) -> None:
        """Forget everything after a checkpoint."""
        for name in STEP_FILES:
            if (self.path / name).exists():
                os.truncate(self.path / name, offsets.get(name, 0))
        for file in (self.path / "rollouts").glob("*.jsonl"):
            if _STEP.fullmatch(file.stem) and int(file.stem) > step:
                file.unlink()

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.close()

    @property
    def started(self) -> bool:
        """Whether the directory holds a run."""
        return (self.path / "config.toml").exists()

    def discard_if_empty(self) -> None:
        """Remove the directory of a run that never started, unless something else is in it."""
        if not self.started and self._lock.in_place():
            for name in (".lock", "environment.json"):
                (self.path / name).unlink(missing_ok=True)
            for folder in (self.path / "rollouts", self.checkpoints, self.path):
                with suppress(OSError):
                    folder.rmdir()

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """A file of the run is being written: if that fails, the error says which, and how to go on."""
        how = f"gspo train --resume {self.path}" if self.started else "repeat the command"
        with writing(self.path / name, f"make room there, then: {how}"):
            yield

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        self.check_held()
        with self.writing(name):
            _append_whole(self.path / name, _line(values).encode("ascii"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a torn last line is passed over."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [_object(json.loads(line)) for line in lines[:-1] if line]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: a line is not a JSON object ({error}); no run writes such a file") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}")
    return value


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new one, never a part."""
    partial = path.with_name(f".tmp-{path.name}")
    try:
        with writing(path, "make room there, or write to another place"):
            partial.unlink(missing_ok=True)  # it may be a link, or another name of a file elsewhere
            with partial.open("x", encoding="utf-8") as out:
                out.write(text)
            partial.rename(path)
    except DiskError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Something is written to a path: if that fails, the error names it, which the system's own does not."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):  # tokenizers raises a bare Exception
            raise
        reason = error.__cause__ if isinstance(error, DiskError) else error
        raise DiskError(
            f"{path}: cannot be written: {getattr(reason, 'strerror', None) or reason}; {remedy}"
        ) from reason


def _append_whole(path: Path, data: bytes) -> None:
    """Add bytes to a file, all of them or, if that fails, none: a torn line would swallow the one after it."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(file).st_size
        try:
            while data:
                data = data[os.write(file, data) :]
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def _line(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, ensure_ascii=True, allow_nan=False) + "\n"
    except (ValueError, TypeError):  # a number that is none, or a mapping that is no dict: walking through all is slow
        return json.dumps({k: finite(v) for k, v in values.items()}, ensure_ascii=True, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same for JSON, which has no NaN: what could not be measured is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


class DirectoryLock:
    """A directory that this process alone works in, until it is closed or the process ends."""

    def __init__(self, path: Path, folder: int, file: int, *, by_folder: bool) -> None:
        self.path, self._handles = path, [file, folder]
        self._is = [(os.fstat(folder), path)] if by_folder else [(os.fstat(folder), path), (os.fstat(file), path / ".lock")]  # fmt: skip

    def in_place(self) -> bool:
        """Whether the path still leads to what is held."""
        try:
            return all(os.path.samestat(known, os.stat(path)) for known, path in self._is)
        except OSError:
            return False

    def check(self) -> None:
        """Raise if it does not."""
        if not self.in_place():
            raise RunLockedError(f"{self.path}: was moved, deleted, or taken over while it was worked in; nothing more is written there")  # fmt: skip

    def close(self) -> None:
        """Let go of it."""
        while self._handles:
            os.close(self._handles.pop())

    __del__ = close

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def lock(path: Path, *, busy: str, option: str) -> DirectoryLock:
    """Hold a directory until the handle is closed or the process ends; `busy` says who else may hold it.

    The directory itself is locked, because anyone may delete a lock file; `.lock` is for those who want to know, and for
    file systems that cannot lock a directory."""
    with ExitStack() as undo:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
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


def _locks_folders(folder: int) -> bool:
    """Whether the file system locks folders (NFS does not); if it does, this one is locked now."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def check_plain(path: Path, files: Sequence[str] = FILES, folders: Sequence[str] = FOLDERS) -> None:
    """Refuse a directory in which writing could change something outside: links, files with a second name, pipes."""
    for entry in (path / name for name in (*files, *folders)):
        if os.path.lexists(entry):
            found = entry.lstat()
            is_file = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
            if not (is_file if entry.name in files else stat.S_ISDIR(found.st_mode)):
                raise ConfigError(_leads_out(entry))
    for name in folders:
        for folder, inner, names in os.walk(path / name) if name != "wandb" else ():  # wandb puts links into its own
            for entry in (Path(folder) / n for n in (*inner, *names)):
                found = entry.lstat()
                shared = stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and name not in RENAMED
                if shared or not _plain(found.st_mode):
                    raise ConfigError(_leads_out(entry))


def check_folder(path: Path) -> None:
    """Refuse a link, or anything else that is not a directory, where there is something at all."""
    if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
        raise ConfigError(_leads_out(path))


def _plain(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _leads_out(entry: Path) -> str:
    return f"{entry}: is a link, has a second name elsewhere, or is not what a run writes under this name; gspo writes only to files of its own: put a copy in its place, or take it away"  # fmt: skip


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
    """The commit of the code in use, if it runs from a checkout."""
    try:
        here = Path(__file__).parent
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""The run directory: the one place where a run writes, and all that anything else reads of it.

    config.toml            resolved, complete
    environment.json       versions, device, commit
    metrics.jsonl          one object per step; deterministic, byte-identical after a resume
    timings.jsonl          one object per step; everything that depends on the clock
    rollouts/000012.jsonl  every reply of the step
    reward_errors/01.txt   the first failure of a reward function in each place: traceback, output, completion
    tokenizer/             what the replies' token ids mean
    events.jsonl           what happened: start, resume, skip, checkpoint, stop, ...
    checkpoints/000020/    see policy/checkpoint.py

Invariant: lines are whole or absent to a reader; a resume cuts metrics and timings back to the checkpoint's offsets.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from gspo.config import Config, from_tree, read_toml, to_toml
from gspo.errors import ConfigError

STEP_FILES = ("metrics.jsonl", "timings.jsonl")


class RunDir:
    """Owns a run directory while a trainer works in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock = lock(path, busy="another trainer is working in this run directory", option="--run-dir")

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
        (self.path / "rollouts").mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        replace_text(self.path / "config.toml", to_toml(config))
        replace_text(
            self.path / "environment.json", json.dumps({"seed": config.seed, **_environment()}, indent=2) + "\n"
        )

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunDir, Config]:
        """An existing run and its config."""
        file = Path(path) / "config.toml"
        if not file.is_file():
            raise ConfigError(
                f"{path}: not a run directory (no config.toml); give the directory that 'gspo train' made"
            )
        return cls(Path(path)), from_tree(read_toml(file), where=str(file))

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Append a step's metrics."""
        self._append("metrics.jsonl", values)

    def timings(self, values: Mapping[str, Any]) -> None:
        """Append a step's durations."""
        self._append("timings.jsonl", values)

    def event(self, kind: str, **values: Any) -> None:
        """Append something that happened."""
        self._append("events.jsonl", {"time": datetime.now().isoformat(timespec="seconds"), "event": kind, **values})

    def rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write every reply of a step."""
        file = self.path / "rollouts" / f"{step:06d}.jsonl"
        partial = file.with_suffix(".tmp")
        with partial.open("w", encoding="utf-8") as out:
            out.writelines(_line(record) for record in records)
        partial.rename(file)

    def reward_error(self, text: str) -> Path:
        """Write down how a reward function failed."""
        folder = self.path / "reward_errors"
        folder.mkdir(exist_ok=True)
        file = folder / f"{1 + len(list(folder.iterdir())):02d}.txt"
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
        return file

    def offsets(self) -> dict[str, int]:
        """How long the step files are now, on disk; part of a checkpoint."""
        for name in STEP_FILES:
            if (self.path / name).exists():
                with (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())
        return {name: (self.path / name).stat().st_size for name in STEP_FILES if (self.path / name).exists()}  # fmt: skip

    def lacks(self, offsets: Mapping[str, int]) -> str | None:
        """What is missing of the step files that a checkpoint stands on, or None."""
        for name, length in offsets.items():
            size = (self.path / name).stat().st_size if (self.path / name).exists() else 0
            if size < length:
                return f"{name} has {size} bytes, {length - size} fewer than when it was saved"
        return None

    def rewind(self, step: int, offsets: Mapping[str, int]) -> None:
        """Forget everything after a checkpoint."""
        for name in STEP_FILES:
            if (self.path / name).exists():
                os.truncate(self.path / name, offsets.get(name, 0))
        for file in (self.path / "rollouts").glob("*.jsonl"):
            if file.stem.isdecimal() and int(file.stem) > step:
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
        if not self.started:
            (self.path / ".lock").unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as out:
            out.write(_line(values))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a torn last line is passed over."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new one, never a part."""
    partial = path.with_name(f".tmp-{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


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


def lock(path: Path, *, busy: str, option: str) -> Any:
    """Hold a directory until the handle is closed or the process ends; `busy` says who else may hold it."""
    try:
        handle = (path / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write there: {error.strerror}; choose another {option}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise ConfigError(f"{path}: {busy}; stop it first") from None
    return handle


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

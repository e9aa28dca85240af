"""Scores that were paid for, in a file, so that a resumed run gets the same ones and pays for none twice.

In: a key (a hash of everything that determines the request) and what the model said. Out: the same, in this process and
in later ones. Invariant: JSON lines, one write per line, under a lock that all processes share. A process that is
killed leaves at most one partial line, which readers skip and the next write ends. The file holds hashes and numbers
but no text, so neither completions nor keys. When it exceeds its limit, the oldest half is dropped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["score", "abstained", "unparsable"]
KINDS = ("score", "abstained", "unparsable")
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, kw_only=True)
class CachedScore:
    """What a model said about one completion."""

    kind: Kind = "score"
    value: float = 0.0
    """Only for a score."""


def cache_key(*parts: Any) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


class ScoreCache:
    """One file of scores. Thread-safe. Without a directory, scores are kept in memory only."""

    def __init__(self, directory: str, name: str, *, most_bytes: int) -> None:
        self._file = Path(directory) / f"{name}.jsonl" if directory else None
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._scores: dict[str, CachedScore] = {}
        self.failure = ""
        """Why the last score could not be written; empty if it was."""
        if self._file is not None:
            self._scores = _scores(_tail(self._file, most_bytes))

    def get(self, key: str) -> CachedScore | None:
        with self._lock:
            return self._scores.get(key)

    def put(self, key: str, score: CachedScore) -> CachedScore:
        """Remember a score, and return the one to use: the first that this key ever got."""
        with self._lock:
            if key in self._scores:
                return self._scores[key]
            self._scores[key] = score
            if self._file is not None:
                try:
                    self._append(self._file, key, score)
                    self.failure = ""
                except OSError as error:  # a full disk must not end the run
                    self.failure = f"{self._file}: {error.strerror or error}"
            return score

    def _append(self, file: Path, key: str, score: CachedScore) -> None:
        line = json.dumps({"key": key, "kind": score.kind, "value": score.value}).encode() + b"\n"
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | _PLAIN, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                # End a partial line that a killed process left, so that this one can be read.
                torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
                line = b"\n" + line if torn else line
                if os.write(descriptor, line) < len(line):
                    raise OSError("the disk is full")
            finally:
                os.close(descriptor)
            if size + len(line) > self._most_bytes:
                self._drop_oldest(file)

    def _drop_oldest(self, file: Path) -> None:
        kept = _tail(file, self._most_bytes // 2)
        partial = file.with_suffix(".tmp")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(kept)
        partial.replace(file)
        self._scores = _scores(kept)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _PLAIN, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _tail(file: Path, most_bytes: int) -> bytes:
    """The whole lines among the last bytes of a file; nothing if it cannot be read."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | _PLAIN)
        with os.fdopen(descriptor, "rb") as opened:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return b""
            start = max(0, found.st_size - most_bytes)
            opened.seek(start)
            data = opened.read(most_bytes)
        return data if start == 0 else data.partition(b"\n")[2]
    return b""


def _scores(data: bytes) -> dict[str, CachedScore]:
    scores: dict[str, CachedScore] = {}
    for key, score in _entries(data):
        scores.setdefault(key, score)  # the first one counts, in this process and in every other
    return scores


def _entries(data: bytes) -> Iterator[tuple[str, CachedScore]]:
    """The valid lines. Anything else, such as a line that was cut, is skipped."""
    for line in data.split(b"\n"):
        try:
            entry = json.loads(line)
            key, kind, value = entry["key"], entry["kind"], entry["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if isinstance(key, str) and kind in KINDS and number:
            yield key, CachedScore(kind=kind, value=float(value))

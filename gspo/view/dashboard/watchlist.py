"""The runs that a page shows.

In: paths given by the user: run directories, or directories of runs, which are scanned for new ones. Out: runs by a
name that is safe in a URL. Invariant: a URL can only name a run in this list; a name is never used as a path.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gspo.errors import ConfigError
from gspo.view.completions import Completions
from gspo.view.evaluations import Evaluations
from gspo.view.run_reader import RunReader

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SCAN_EVERY_S = 5.0
REFRESH_EVERY_S = 0.5
"""Files are checked at most this often, however many pages are open."""
REFRESH_BYTES = 2 << 20
"""Bytes of a long file that are read while the lock is held, so that responses do not wait long."""
PAUSE_S = 0.005
MOST_RUNS = 500


class WatchedRun:
    """A run on the page. Its files are read by one thread at a time, which holds the lock."""

    def __init__(self, path: Path) -> None:
        self.run = RunReader(path)
        self.completions = Completions(path)
        self.evaluations = Evaluations(path)
        self.lock = threading.Lock()
        # The first call must read the files, and a monotonic clock may start at 0.
        self._refreshed = -REFRESH_EVERY_S

    def refresh(self) -> None:
        """Read what was added, unless that was just done. Call with the lock held.

        The remainder of a long file is read in the background.
        """
        if self.run.partial or time.monotonic() - self._refreshed < REFRESH_EVERY_S:
            return
        self.run.refresh(REFRESH_BYTES)
        self._refreshed = time.monotonic()
        if self.run.partial:
            # A daemon, so that a long file does not keep the server from exiting.
            threading.Thread(target=self._read_on, daemon=True).start()

    def _read_on(self) -> None:
        while self.run.partial:
            with self.lock:
                self.run.refresh(REFRESH_BYTES)
                self._refreshed = time.monotonic()
            time.sleep(PAUSE_S)  # lets waiting requests take the lock


class Watchlist:
    """The runs to show."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.runs: dict[str, WatchedRun] = {}
        self._parents: list[Path] = []
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        for path in map(Path, paths):
            self._add_argument(path)
        self._scanned = -SCAN_EVERY_S
        self.scan()

    def _add_argument(self, path: Path) -> None:
        if _is_run(path):
            self._add(path)
        elif path.is_dir():
            self._parents.append(path.resolve())
        else:
            raise ConfigError(
                f"{path}: not a run directory (no config.toml) nor a directory of runs; give a directory that "
                "'gspo train' wrote"
            )

    def scan(self) -> None:
        """Find new runs in directories of runs, without following links in them."""
        with self._lock:
            if time.monotonic() - self._scanned < SCAN_EVERY_S:
                return
            self._scanned = time.monotonic()
            for parent in self._parents:
                # A link in a directory of runs could lead to files that the user did not ask to show.
                found = [p for p in _children(parent) if p not in self._known and not p.is_symlink() and _is_run(p)]
                # Oldest first, so that names and colors do not change when a run is added.
                for path in sorted(found, key=_started)[: MOST_RUNS - len(self.runs)]:
                    self._add(path)

    def _add(self, path: Path) -> None:
        path = path.resolve()
        if path in self._known:
            return
        self._known.add(path)
        # 60 characters leave room for a suffix such as -501 within the 64 of `NAME`.
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name)[:60].strip(".-") or "run"
        names = (base, *(f"{base}-{i}" for i in range(2, MOST_RUNS + 2)))
        self.runs[next(n for n in names if n not in self.runs)] = WatchedRun(path)


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _children(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except OSError:
        return []


def _started(path: Path) -> float:
    try:
        return (path / "config.toml").stat().st_mtime
    except OSError:
        return 0.0

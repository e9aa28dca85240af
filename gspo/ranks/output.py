"""What a follower prints: the terminal belongs to the leader.

In: the output of this process, also that of libraries in C++. Out: the log of the follower, once the run has a
directory. Invariant: nothing reaches the terminal, unless this process fails before it has a log.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from gspo.ranks.environment import CLUSTER


class FollowerOutput:
    """Keeps what this process prints, until there is a log to append it to."""

    def __init__(self) -> None:
        self.logs = False
        """Whether there is a log."""
        self._terminal = os.dup(2)
        self._early = tempfile.TemporaryFile()  # noqa: SIM115 for as long as this process runs
        _redirect(self._early.fileno())

    def log_to(self, file: Path) -> None:
        """Write to a file from now on. It begins with what was printed so far."""
        try:
            file.parent.mkdir(exist_ok=True)
            log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        except OSError:  # a follower on another machine may not see the run directory
            if CLUSTER in os.environ:
                self.show()  # the launcher collects it, and writes the log
            return
        _redirect(log)
        os.write(log, self._read_early())
        os.close(log)
        self.logs = True

    def note(self, text: str) -> None:
        """Print a line. On a full disk it is lost, which must not end the run."""
        with suppress(OSError):
            print(text, flush=True)

    def show(self) -> None:
        """Write to the terminal, if there is no log."""
        if not self.logs:
            _redirect(self._terminal)
            os.write(2, self._read_early())

    def _read_early(self) -> bytes:
        size = os.fstat(self._early.fileno()).st_size
        return os.pread(self._early.fileno(), size, 0)


def _redirect(descriptor: int) -> None:
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(descriptor, number)

"""Where files lie that travel to a vLLM on the same machine: in shared memory if they fit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")


def memory_folder(size: int) -> str:
    """A new folder with room for so many bytes: in shared memory if they fit, else in the temporary directory."""
    fits = SHARED.is_dir() and shutil.disk_usage(SHARED).free > 1.2 * size
    return tempfile.mkdtemp(prefix="gspo-weights-", dir=SHARED if fits else None)

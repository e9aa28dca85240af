"""Published benchmarks with fixed protocols: one file each in `published/`, found by name."""

from __future__ import annotations

import pkgutil


def suite_names() -> list[str]:
    """The names of all suites: their file names."""
    # Imported here, so that a list of names costs nothing more.
    from gspo.suites import published

    return sorted(m.name for m in pkgutil.iter_modules(published.__path__))

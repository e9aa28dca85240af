"""Numbers for people."""

from __future__ import annotations


def digits(value: float, count: int) -> str:
    """A number with `count` significant digits, but never in exponent form: 0.12, 3.4, 105, not 1e+02."""
    return f"{value:.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:.{count}g}"


def human(size: float) -> str:
    """1.5 GB, 340 MB, 12 KB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{digits(size / scale, 3)} {unit}"
    return f"{size:.0f} B"


def pluralize(number: int, name: str) -> str:
    """1 warning, 2 warnings."""
    return f"{number} {name}{'s' * (number != 1)}"

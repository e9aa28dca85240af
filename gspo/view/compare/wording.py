"""Numbers as text.

In: `Number`s, plain numbers or `None`. Out: short text. Invariant: a value that was not measured is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo.view.compare.intervals import Number

NONE = "–"
Form = Callable[[float], str]


def share(value: float) -> str:
    """0.123 as 12.3 %; small shares with two significant digits."""
    percent = 100 * value
    if value and abs(percent) < 1:
        return f"{percent:.2g} %" if abs(percent) >= 1e-3 else f"{percent:.1e} %"
    return f"{percent:.1f} %"


def points(value: float) -> str:
    """A difference of shares, in percentage points."""
    # A minus sign, not a hyphen, next to the plus of other rows.
    return f"{100 * value:+.1f}".replace("-", "−")


def plain(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"


def whole(value: float) -> str:
    """An integer with thousands separators."""
    return f"{value:,.0f}"


def number(value: Number | float | None, form: Form, *, interval: bool = True) -> str:
    """A mean, with its interval if it has one."""
    if value is None:
        return NONE
    if not isinstance(value, Number):
        return form(value)
    if not interval or value.low is None or value.high is None:
        return form(value.value)
    return f"{form(value.value)} [{form(value.low)}, {form(value.high)}]"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1] if items else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns for a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

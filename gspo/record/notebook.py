"""Progress of a run in a notebook: a bar, the latest values, and curves that grow.

In: the metrics and timings of a step. Out: one output cell that is updated in place, and messages below it.
Invariant: nothing is imported from IPython unless this process is the kernel of a notebook.
"""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.record.metric_definitions import heading
from gspo.record.progress import RecentValues, duration
from gspo.safe_output import printed

SHOWN = ("reward/mean", "eval/accuracy", "eval/reward", "length/mean")
"""Metrics with a curve."""
WIDTH, HEIGHT = 260, 90
POINTS = 200
UPDATE_S = 0.5
"""Shortest time between two updates of the output."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookDisplay:
    """Shows the progress in the output of a cell."""

    def __init__(self) -> None:
        self._recent = RecentValues()
        self._rows: list[Mapping[str, Any]] = []
        self._handle: Any = None
        self._bar = ""
        self._shown = -math.inf
        self._pending = False

    def message(self, text: str) -> None:
        print(printed(text), flush=True)

    def cold_start(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        self._bar = _bar("cold start", step, steps, f"loss {loss:.3f}, sampled accuracy {accuracy:.0%}")
        self._show()

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._recent.evaluated(metrics)
        self._rows.append(metrics)

    def step(self, step: int, steps: int, metrics: Mapping[str, Any], timings: Mapping[str, float]) -> None:
        self._recent.update(step, metrics, timings)
        # After a rollback, the abandoned steps are gone.
        self._rows = [row for row in self._rows if row.get("step", 0) < step] + [metrics]
        self._bar = _bar("training", step, steps, f"{duration(self._recent.left(step, steps))} left")
        self._show()

    def close(self) -> None:
        if self._pending:
            self._show(last=True)

    def _show(self, *, last: bool = False) -> None:
        self._pending = True
        if not last and time.monotonic() - self._shown < UPDATE_S:
            return
        self._shown, self._pending = time.monotonic(), False
        cells = "".join(
            f'<td style="text-align:left;padding:0 1.2em 0 0"><span style="opacity:.65">{html.escape(title)}</span>'
            f"<br><b>{html.escape(text)}</b></td>"
            for title, text in self._recent.cells()
        )
        page = f"{self._bar}<table><tr>{cells}</tr></table>{curves_html(self._rows)}"
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(page), display_id=True)
        else:
            self._handle.update(HTML(page))


def _bar(name: str, step: int, steps: int, text: str) -> str:
    return (
        f'<div>{name} <progress value="{step}" max="{max(1, steps)}" style="width:20em"></progress> '
        f"{step}/{steps} &nbsp; {html.escape(text)}</div>"
    )


def curves_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """Small curves of the most important metrics that have at least two values."""
    found = []
    for key in SHOWN:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and "step" in row]
        # Without partial credit, it is the accuracy.
        if key == "eval/reward" and all(row.get(key) == row.get("eval/accuracy") for row in rows):
            continue
        if len(points) > 1:
            found.append(_curve(heading(key), points))
    return f'<div style="display:flex;flex-wrap:wrap;gap:1.5em;margin-top:.5em">{"".join(found)}</div>' if found else ""


def _curve(title: str, points: Sequence[tuple[float, float]]) -> str:
    every = math.ceil(len(points) / POINTS)
    kept = [*points[:-1:every], points[-1]]
    steps, values = zip(*kept, strict=True)
    low, high = min(*values, 0.0), max(values)
    across, up = (steps[-1] - steps[0]) or 1, (high - low) or 1
    line = " ".join(
        f"{(step - steps[0]) / across * WIDTH:.1f},{HEIGHT - (value - low) / up * HEIGHT:.1f}" for step, value in kept
    )
    return (
        f'<figure style="margin:0"><figcaption style="font-size:85%">{html.escape(title)} '
        f"<b>{values[-1]:.3g}</b></figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="-4 -4 {WIDTH + 8} {HEIGHT + 8}" role="img" '
        f'aria-label="{html.escape(title)} from step {steps[0]} to step {steps[-1]}">'
        f'<line x1="0" y1="{HEIGHT}" x2="{WIDTH}" y2="{HEIGHT}" stroke="currentColor" stroke-opacity=".3"/>'
        f'<polyline points="{line}" fill="none" stroke="#4c72d0" stroke-width="1.6"/></svg>'
        '<div style="font-size:75%;opacity:.65;display:flex;justify-content:space-between">'
        f"<span>step {steps[0]}</span><span>{low:.3g} to {high:.3g}</span><span>{steps[-1]}</span></div></figure>"
    )

"""The figure of a run's curves, or of chosen metrics, for a notebook.

In: a run directory. Out: a figure of matplotlib. Invariant: no backend is chosen, so nothing is shown twice and a
script needs no display.
"""

from __future__ import annotations

import difflib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.record.curves_image import curves_figure
from gspo.record.run_dir import read_jsonl, read_metrics

COLUMNS = 3
INCHES = 4.6


class Curves:
    """A figure that a notebook shows as an image. `figure` is the matplotlib figure; `save` writes it."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write the figure to a file; its ending decides about the format."""
        self.figure.savefig(path, **{"dpi": 110, **options})
        return Path(path)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


def figure(run: Path, metrics: Sequence[str]) -> Curves:
    """The panels of a run, or one panel for each of these metrics."""
    if not metrics:
        return Curves(curves_figure(run))
    from matplotlib.figure import Figure

    rows = read_metrics(run)
    timings = read_jsonl(run / "timings.jsonl")
    known = {key for row in (*rows, *timings) for key in row}
    for metric in metrics:
        if metric not in known:
            close = difflib.get_close_matches(metric, known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{run}: the run has not recorded {metric}{hint}")
    columns = min(COLUMNS, len(metrics))
    lines = math.ceil(len(metrics) / columns)
    shown = Figure(figsize=(INCHES * columns, 0.7 * INCHES * lines), layout="constrained")
    axes = list(shown.subplots(lines, columns, squeeze=False).flat)
    for axis, metric in zip(axes, metrics, strict=False):
        points = [(row["step"], row[metric]) for row in (*rows, *timings) if row.get(metric) is not None]
        axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 40 else None, markersize=3, linewidth=1.4)
        axis.set_title(metric, loc="left", fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    for axis in axes[len(metrics) :]:
        axis.set_axis_off()
    return Curves(shown)

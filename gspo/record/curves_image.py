"""Plot the training curves of a run.

In: a run directory. Out: a figure, or `curves.png`, with the panels that `metric_definitions.py` marks with `in_image`.
Invariant: reads only `metrics.jsonl`.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gspo.record.metric_definitions import PANELS, Metric, Panel, metrics_of
from gspo.record.run_dir import read_metrics

COLUMNS = 3


def draw_curves(run: Path) -> Path:
    """Plot the panels, with their titles and labels as on the page."""
    path = run / "curves.png"
    try:
        curves_figure(run).savefig(path, dpi=110)
    except OSError:
        # A full disk leaves a truncated image, which no viewer can open.
        path.unlink(missing_ok=True)
        raise
    return path


def curves_figure(run: Path) -> Any:
    """The panels as a figure of matplotlib."""
    # Imported here, because it is slow to import and most commands draw nothing. Without pyplot, which would choose a
    # backend for the whole process: a figure of its own needs no display.
    from matplotlib.figure import Figure

    rows = read_metrics(run)
    panels = [panel for panel in PANELS if panel.in_image]
    lines = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(14, 3.25 * lines), layout="constrained")
    axes = figure.subplots(lines, COLUMNS, squeeze=False)
    for axis, panel in zip_longest(axes.flat, panels):
        if panel is None:
            axis.set_axis_off()  # The last line has room for more panels.
        else:
            _draw(axis, rows, panel)
    figure.suptitle(run.name)
    return figure


def _draw(axis: Any, rows: list[dict[str, Any]], panel: Panel) -> None:
    for number, metric in enumerate(metrics_of(panel)):
        _curve(axis, rows, metric, f"C{number}")
    axis.set_title(panel.title, loc="left", fontsize=11)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.spines[["top"]].set_visible(False)
    if panel.log and any(row.get(m.key) for row in rows for m in metrics_of(panel)):
        axis.set_yscale("log")  # It has no range without a positive value.
    else:
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))  # From 0, so that noise does not look like a trend.
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)


def _curve(axis: Any, rows: list[dict[str, Any]], metric: Metric, color: str) -> None:
    points = [(r["step"], r[metric.key]) for r in rows if r.get(metric.key) is not None]
    repeats = metric.same_as and all(r.get(metric.same_as) == r.get(metric.key) for r in rows)
    if not points or repeats:
        return
    few = len(points) < 40  # A curve with a single point is invisible without a marker.
    axis.plot(
        *zip(*points, strict=True),
        label=metric.label,
        color=color,
        marker="o" if few else None,
        markersize=3,
        linewidth=1.4,
    )
    ends = [(r["step"], *map(r.get, metric.band)) for r in rows if r.get(metric.key) is not None] if metric.band else []
    if ends := [end for end in ends if None not in end]:  # Equal values have no interval.
        steps, low, high = zip(*ends, strict=True)
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)

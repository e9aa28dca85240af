"""`gspo watch --text`: runs as sparklines and findings, for a terminal over ssh.

In: run directories. Out: text that is redrawn while a run is in progress, or printed once without a terminal.
Invariant: text written by a model or a run is printed without control characters and secrets.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gspo.errors import ConfigError
from gspo.record.metric_definitions import named
from gspo.safe_output import line, terminal
from gspo.view.dashboard.watchlist import WatchedRun, Watchlist
from gspo.view.diagnosis import WINDOW, seconds
from gspo.view.panel_data import panels, phases
from gspo.view.run_reader import STEP_TIME

BARS = "▁▂▃▄▅▆▇█"
COLORS = {"bad": "red", "warn": "yellow", "note": "cyan", "good": "green"}
REDRAW_S = 2.0
WIDEST_SPARKLINE = 72
LABEL_WIDTH = 46
"""Columns for the name and the value of a metric."""


def watch_text(paths: Sequence[str | Path], console: Console | None = None) -> int:
    """Show runs until interrupted; only once without a terminal or if no run is in progress."""
    watchlist = Watchlist(paths)
    console = console or Console(file=terminal())
    if not watchlist.runs:
        raise ConfigError(f"{', '.join(map(str, paths))}: contains no run; give a directory that 'gspo train' wrote")
    if not (console.is_terminal and sys.stdout.isatty()):
        console.print(screen(watchlist, width=_width(console), height=None))
        return 0
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            watchlist.scan()
            live.update(screen(watchlist, width=_width(console), height=console.height), refresh=True)
            if all(watched.run.state != "running" for watched in watchlist.runs.values()):
                return 0
            time.sleep(REDRAW_S)


def screen(watchlist: Watchlist, *, width: int, height: int | None) -> Group:
    """All runs, one below the other: the findings first, then as many curves as fit."""
    parts: list[Any] = []
    for name, watched in watchlist.runs.items():
        try:
            parts += _run(name, watched, width, None if height is None else height // len(watchlist.runs))
        except Exception as error:
            # One damaged run must not prevent the display of the others.
            parts += [Text(line(f"{name}  unreadable: {type(error).__name__}: {error}")[:300], style="red"), Text("")]
    return Group(*parts)


def _run(name: str, watched: WatchedRun, width: int, height: int | None) -> list[Any]:
    """One run in about `height` lines."""
    watched.run.refresh()
    findings = _findings(watched)
    used = 4 + sum(1 + len(text.plain) // (width + LABEL_WIDTH) for text in findings)
    most = None if height is None else max(2, height - used)
    return [_title(name, watched), *findings, _curves(watched, width, most), _times(watched), *_logs(watched), Text("")]


def _width(console: Console) -> int:
    """Width of a sparkline."""
    return max(10, min(WIDEST_SPARKLINE, console.width - LABEL_WIDTH))


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """One character per value; blank for a missing value."""
    # Halved before subtracting: the difference of two large floats of opposite sign would overflow.
    span = high / 2 - low / 2
    top = len(BARS) - 1
    levels = [None if v is None else round((v / 2 - low / 2) / span * top) if span > 0 else 0 for v in values]
    return "".join(" " if level is None else BARS[level] for level in levels)


def _title(name: str, watched: WatchedRun) -> Text:
    run = watched.run
    of = run.planned_steps
    pace = run.pace()
    status = f"{name}  {run.state}, step {run.step:,}" + ("" if of is None else f" of {of:,}")
    return Text(line(status + (f", {seconds(pace)} per step" if pace else "")), style="bold")


def _curves(watched: WatchedRun, width: int, most: int | None) -> Table:
    """A line per metric, at most `most`: name, sparkline, last value."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    found = dict(watched.run.curves(width)["curves"])
    for shown in panels():
        for metric in (m for one in shown.metrics for m in named(one, list(found))):
            values = [v for v in found.get(metric.key, {"y": ()})["y"] if v is not None]
            if values and (any(values) or not shown.panel.hide_zero) and (most is None or table.row_count < most):
                points = found.pop(metric.key)["y"]  # a metric may be in several panels, and is listed once
                bars = sparkline(points, min(values), max(values))
                # A panel of mixed units, such as reward and accuracy, still has accuracies in percent.
                form = "share" if metric.form == "share" else shown.panel.form
                latest = _format(_latest(watched, metric.key), form)
                table.add_row(Text(line(metric.key), style="dim"), bars, latest)
    return table


def _latest(watched: WatchedRun, key: str) -> float:
    """The latest value of a metric; NaN for a training metric if the last step trained on nothing, or computed nothing
    of it."""
    last = next(iter(watched.run.metrics.last(1)), {})
    idle = last.get("samples/trained") == 0 or last.get("learner/uncomputed_fraction") == 1
    if idle and key in watched.run.metrics.columns and not key.startswith("eval/"):
        return last.get(key, math.nan)
    return watched.run.latest(key)


def _times(watched: WatchedRun) -> Text:
    """Time of the recent steps by phase, in percent."""
    rows = watched.run.timings.last(WINDOW)
    total = sum(row.get(STEP_TIME, 0.0) for row in rows)
    if not total:
        return Text("")
    shares = {m.label: sum(row.get(m.key, 0.0) for row in rows) / total for m in phases().metrics}
    listed = ", ".join(f"{label} {100 * share:.0f} %" for label, share in shares.items() if share >= 0.005)
    return Text(f"step time: {listed}", style="dim")


def _logs(watched: WatchedRun) -> list[Text]:
    """Where the other ranks of a run write what they print."""
    logs = watched.run.rank_logs
    if not logs:
        return []
    listed = logs[0] if len(logs) == 1 else f"{logs[0]} to {logs[-1]}"
    return [Text(line(f"logs of ranks: {watched.run.path / listed}"), style="dim")]


def _findings(watched: WatchedRun) -> list[Text]:
    texts = []
    for finding in watched.run.findings():
        text = Text("● ", style=COLORS[finding.level])
        text.append(line(finding.what), style="default")
        text.append(line(f" {finding.remedy}" if finding.remedy else ""), style="dim")
        texts.append(text)
    return texts


def _format(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "-"
    if form == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if form == "count" else f"{value:.4g}"

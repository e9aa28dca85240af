"""`gspo watch --text`: runs as sparklines and sentences, for a terminal over ssh.

In: run directories. Out: text that is drawn anew while a run goes on, or printed once where there is no terminal.
Invariant: what a model or a run wrote is printed without control characters and secrets.
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
from gspo.safe_output import line, terminal
from gspo.view.dashboard.watchlist import WatchedRun, Watchlist
from gspo.view.diagnosis import WINDOW, seconds
from gspo.view.panels import PANELS, PHASES
from gspo.view.run_reader import STEP_TIME

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"bad": "red", "warn": "yellow", "note": "cyan", "good": "green"}
REDRAW_S = 2.0
WIDEST, BESIDE = 72, 46


def watch_text(paths: Sequence[str | Path], console: Console | None = None) -> int:
    """Show runs until interrupted; once, if nothing is a terminal or no run goes on."""
    watchlist, console = Watchlist(paths), console or Console(file=terminal())
    if not watchlist.runs:
        raise ConfigError(f"{', '.join(map(str, paths))}: holds no run; give the directory that 'gspo train' made")
    if not (console.is_terminal and sys.stdout.isatty()):
        console.print(screen(watchlist, width=_width(console), height=None))
        return 0
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            watchlist.scan()
            live.update(screen(watchlist, width=_width(console), height=console.height), refresh=True)
            if all(shown.run.state != "running" for shown in watchlist.runs.values()):
                return 0
            time.sleep(REDRAW_S)


def screen(watchlist: Watchlist, *, width: int, height: int | None) -> Group:
    """Every run, one under the other: the sentences first, then as many curves as there is height for."""
    parts: list[Any] = []
    for name, shown in watchlist.runs.items():
        try:
            parts += _run(name, shown, width, None if height is None else height // len(watchlist.runs))
        except Exception as error:
            # A run that cannot be read must not take the others down with it.
            parts += [Text(line(f"{name}  unreadable: {type(error).__name__}: {error}")[:300], style="red"), Text("")]
    return Group(*parts)


def _run(name: str, shown: WatchedRun, width: int, height: int | None) -> list[Any]:
    """One run, in about so many lines."""
    shown.run.refresh()
    sentences = _sentences(shown)
    taken = 4 + sum(1 + len(s.plain) // (width + BESIDE) for s in sentences)
    most = None if height is None else max(2, height - taken)
    return [_title(name, shown), *sentences, _curves(shown, width, most), _times(shown), Text("")]


def _width(console: Console) -> int:
    """Characters of a sparkline, beside names and values."""
    return max(10, min(WIDEST, console.width - BESIDE))


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """One character per value; blank where nothing was measured."""
    span, top = high / 2 - low / 2, len(BARS) - 1
    levels = [None if v is None else round((v / 2 - low / 2) / span * top) if span > 0 else 0 for v in values]
    return "".join(" " if level is None else BARS[level] for level in levels)


def _title(name: str, shown: WatchedRun) -> Text:
    run = shown.run
    of = run.planned_steps
    pace = run.pace()
    said = f"{name}  {run.state}, step {run.step:,}" + ("" if of is None else f" of {of:,}")
    return Text(line(said + (f", {seconds(pace)} per step" if pace else "")), style="bold")


def _curves(shown: WatchedRun, width: int, most: int | None) -> Table:
    """A line per metric, at most so many: name, sparkline, last value."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    found = dict(shown.run.curves(width)["curves"])
    for panel in PANELS:
        for curve in panel.curves:
            values = [v for v in found.get(curve.key, {"y": ()})["y"] if v is not None]
            if values and (any(values) or not panel.hide_zero) and (most is None or table.row_count < most):
                points = found.pop(curve.key)["y"]  # a metric may be in several panels, and is listed once
                bars = sparkline(points, min(values), max(values))
                table.add_row(Text(curve.key, style="dim"), bars, _shown(_latest(shown, curve.key), panel.form))
    return table


def _latest(shown: WatchedRun, key: str) -> float:
    """The last number of a metric; NaN for what only training gives if the last step trained on nothing."""
    last = next(iter(shown.run.metrics.last(1)), {})
    if last.get("samples/trained") == 0 and not key.startswith("eval/"):
        return last.get(key, math.nan)
    return shown.run.metrics.latest(key)


def _times(shown: WatchedRun) -> Text:
    """Where the time of the recent steps goes, in percent."""
    rows = shown.run.timings.last(WINDOW)
    total = sum(row.get(STEP_TIME, 0.0) for row in rows)
    if not total:
        return Text("")
    shares = {c.label: sum(row.get(c.key, 0.0) for row in rows) / total for c in PHASES}
    said = ", ".join(f"{label} {100 * share:.0f} %" for label, share in shares.items() if share >= 0.005)
    return Text(f"time of a step: {said}", style="dim")


def _sentences(shown: WatchedRun) -> list[Text]:
    lines = []
    for finding in shown.run.findings():
        sentence = Text("● ", style=COLOURS[finding.level])
        sentence.append(line(finding.what), style="default")
        sentence.append(line(f" {finding.remedy}" if finding.remedy else ""), style="dim")
        lines.append(sentence)
    return lines


def _shown(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "-"
    if form == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if form == "count" else f"{value:.4g}"

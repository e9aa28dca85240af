"""`gspo report`: a self-contained HTML file with the figures and findings of runs.

In: run directories. Out: the dashboard's charts and findings, and example completions, in one file. Invariant: the page
loads nothing, runs only its own script (its hash is in the content security policy), and shows model output as text.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config import differing, flatten
from gspo.errors import ConfigError
from gspo.record.run_dir import replace_text, writing
from gspo.view.dashboard import handlers
from gspo.view.dashboard.server import PAGE
from gspo.view.dashboard.watchlist import WatchedRun, Watchlist
from gspo.view.diagnosis import Finding

# Enough for the width of a screen; the file stays small.
POINTS = 800
SCRIPTS = ("chart.js", "tokens.js", "evaluation.js", "report.js")
REPORTED_PROBLEMS = 100
"""Problems of an evaluation set that the file contains."""
PER_RUN_SETTINGS = ("name", "run_dir")
"""Settings that always differ."""


@dataclass(frozen=True, kw_only=True)
class CompletionKind:
    """A kind of completion that the report shows an example of."""

    why: str
    only: str
    order: str
    first: bool = False
    """Whether the example is from the first recorded step instead of the last."""


EXAMPLES = (
    CompletionKind(why="Correct with a high advantage, first step", only="right_short", order="advantage", first=True),
    CompletionKind(why="Wrong and long, first step", only="wrong_long", order="length", first=True),
    CompletionKind(why="Correct with a high advantage, last step", only="right_short", order="advantage"),
    CompletionKind(why="Wrong and long, last step", only="wrong_long", order="length"),
    CompletionKind(why="Clipped with a positive advantage, last step", only="clipped_positive", order="ratio"),
    CompletionKind(why="Clipped with the largest ratio change, last step", only="clipped", order="ratio"),
    CompletionKind(why="Truncated, last step", only="truncated", order="length"),
    CompletionKind(why="Unscored, last step", only="unscored", order=""),
)


def write_report(paths: Sequence[str | Path], out: Path) -> Path:
    """Write the report of these runs."""
    watchlist = Watchlist(paths)
    if not watchlist.runs:
        raise ConfigError(f"{', '.join(map(str, paths))}: contains no run; give a directory that 'gspo train' wrote")
    if out.is_dir():
        raise ConfigError(f"{out}: is a directory; give the name of a file, for example {out / 'report.html'}")
    with writing(out, "free disk space, or choose another -o"):
        replace_text(out, page(watchlist))
    return out


def page(watchlist: Watchlist) -> str:
    """The HTML page."""
    runs = [{"name": name, **_run_or_error(watched)} for name, watched in watchlist.runs.items()]
    data = handlers.encode({"setup": handlers.page_setup(), "runs": runs, "differences": _differences(runs)}).decode()
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    script = "\n".join(_script(name) for name in SCRIPTS)
    # Only this script and style may run, even if an escaping bug let markup from a completion into the page.
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    title = html.escape(", ".join(watchlist.runs))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main id="main"></main>
<script type="application/json" id="data">{_inert(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _run_or_error(watched: WatchedRun) -> dict[str, Any]:
    """A run, or a finding if it cannot be read: one damaged run must not prevent the report of the others."""
    try:
        return _run(watched)
    except Exception as error:
        problem = handlers.unreadable(error)
        finding = Finding(name="unreadable", level="bad", what=f"This run cannot be read: {problem['why']}")
        empty: dict[str, Any] = {
            "step": 0,
            "curves": {},
            "phases": {"x": [], "y": {}},
            "timeline": [],
            "events": [],
            "settings": {},
            "environment": {},
            "examples": [],
            "evaluated": [],
        }
        return {**empty, **problem, "findings": [dataclasses.asdict(finding)]}


def _run(watched: WatchedRun) -> dict[str, Any]:
    watched.run.refresh()
    return {
        **handlers.overview(watched, {"points": str(POINTS)}),
        "settings": watched.run.settings,
        "environment": watched.run.environment,
        "examples": _examples(watched),
        "evaluated": _last_evaluations(watched),
    }


def _examples(watched: WatchedRun) -> list[dict[str, Any]]:
    """One completion of each kind, none twice."""
    steps = watched.completions.steps()
    found = []
    used = set()
    for kind in EXAMPLES if steps else ():
        step = steps[0] if kind.first else steps[-1]
        matching = watched.completions.find(step, only=kind.only, order=kind.order)["completions"]
        example = next((c for c in matching if (step, c["group"], c["number"]) not in used), None)
        if example is not None:
            used.add((step, example["group"], example["number"]))
            found.append({"why": kind.why, **handlers.completion(watched, step, example["group"], example["number"])})
    return found


def _last_evaluations(watched: WatchedRun) -> list[dict[str, Any]]:
    """The problems of the evaluations after the last evaluated step, by set."""
    steps = watched.evaluations.steps()
    if not steps:
        return []
    sets = watched.evaluations.sets(steps[-1])
    found = [handlers.evaluation(watched, steps[-1], {"set": name}) for name in sets]
    return [{**one, "problems": one["problems"][:REPORTED_PROBLEMS]} for one in found]


def _differences(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings that differ between the runs."""
    per_run = [flatten(run["settings"]) for run in runs]
    keys = [key for key in differing(per_run) if key not in PER_RUN_SETTINGS]
    return [{"key": key, "values": [str(settings.get(key, "")) for settings in per_run]} for key in keys]


def _script(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(data: str) -> str:
    """JSON that cannot close the script element that contains it."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

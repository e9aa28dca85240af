"""`gspo report`: runs as one HTML file that needs nothing else, to send to a colleague.

In: run directories. Out: the dashboard's figures and findings, and the most telling replies, in one file. Invariant: the
page loads nothing, runs only its own script (its hash is in the page's policy), and shows what a model wrote as text.
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
from gspo.view.dashboard import handlers as answers
from gspo.view.dashboard.server import PAGE
from gspo.view.dashboard.watchlist import WatchedRun, Watchlist
from gspo.view.diagnosis import Finding

POINTS = 800
SCRIPTS = ("chart.js", "tokens.js", "report.js")
OWN = ("name", "run_dir")
"""Settings that always differ."""


@dataclass(frozen=True, kw_only=True)
class CompletionKind:
    """A kind of reply that says something about a run."""

    why: str
    only: str
    order: str
    first: bool = False
    """Taken from the first step with replies, not the last."""


TELLING = (
    CompletionKind(why="A well-paid reply of the first step", only="right_short", order="advantage", first=True),
    CompletionKind(why="A long wrong reply of the first step", only="wrong_long", order="length", first=True),
    CompletionKind(why="The best reply against its group, last step", only="right_short", order="advantage"),
    CompletionKind(why="A long wrong reply, last step", only="wrong_long", order="length"),
    CompletionKind(why="Clipped, although better than its group, last step", only="clipped_positive", order="ratio"),
    CompletionKind(why="The reply whose ratio moved most, last step", only="clipped", order="ratio"),
    CompletionKind(why="Cut at the limit, last step", only="truncated", order="length"),
    CompletionKind(why="Could not be scored, last step", only="unscored", order=""),
)


def write_report(paths: Sequence[str | Path], out: Path) -> Path:
    """Write the report of these runs."""
    watchlist = Watchlist(paths)
    if not watchlist.runs:
        raise ConfigError(f"{', '.join(map(str, paths))}: holds no run; give the directory that 'gspo train' made")
    if out.is_dir():
        raise ConfigError(f"{out}: is a directory; give the name of a file, for example {out / 'report.html'}")
    with writing(out, "make room there, or choose another -o"):
        replace_text(out, page(watchlist))
    return out


def page(watchlist: Watchlist) -> str:
    """The page as text."""
    runs = [{"name": name, **_run_or_why(shown)} for name, shown in watchlist.runs.items()]
    data = answers.encode({"setup": answers.page_setup(), "runs": runs, "differences": _differences(runs)}).decode()
    style, script = (PAGE / "style.css").read_text(encoding="utf-8"), "\n".join(_script(name) for name in SCRIPTS)
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


def _run_or_why(shown: WatchedRun) -> dict[str, Any]:
    """A run that cannot be read must not take the others down with it."""
    try:
        return _run(shown)
    except Exception as error:
        why = answers.unreadable(error)
        finding = Finding(name="unreadable", level="bad", what=f"This run cannot be read: {why['why']}")
        nothing = {"step": 0, "curves": {}, "phases": {"x": [], "y": {}}, "events": [], "settings": {}, "environment": {}, "telling": []}  # fmt: skip
        return {**nothing, **why, "findings": [dataclasses.asdict(finding)]}


def _run(shown: WatchedRun) -> dict[str, Any]:
    shown.run.refresh()
    return {
        **answers.overview(shown, {"points": str(POINTS)}),
        "settings": shown.run.settings,
        "environment": shown.run.environment,
        "telling": _telling(shown),
    }


def _telling(shown: WatchedRun) -> list[dict[str, Any]]:
    """One reply of each kind that there is, none twice."""
    steps, found, seen = shown.replies.steps(), [], set()
    for kind in TELLING if steps else ():
        step = steps[0] if kind.first else steps[-1]
        matching = shown.replies.find(step, only=kind.only, order=kind.order)["replies"]
        chosen = next((r for r in matching if (step, r["group"], r["number"]) not in seen), None)
        if chosen is not None:
            seen.add((step, chosen["group"], chosen["number"]))
            found.append({"why": kind.why, **answers.reply(shown, step, chosen["group"], chosen["number"])})
    return found


def _differences(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings in which the runs differ."""
    each = [flatten(run["settings"]) for run in runs]
    return [{"key": k, "values": [str(e.get(k, "")) for e in each]} for k in differing(each) if k not in OWN]


def _script(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(data: str) -> str:
    """JSON that cannot end the element it stands in."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

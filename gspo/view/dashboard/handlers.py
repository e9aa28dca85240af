"""What the page asks for, as JSON. In: the watch list and a query. Out: bytes. Every answer is a view of the run directory.

Invariant: answers hold no secrets that this process knows of, and no text longer than `replies.LONGEST`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.redact import known_secrets, redacted
from gspo.view.completions import FILTERS, ORDERS
from gspo.view.dashboard.watchlist import WatchedRun, Watchlist
from gspo.view.diagnosis import SEQUENCE_ROWS, TOKEN_ROWS, setting
from gspo.view.panels import PANELS, PHASES

MOST_POINTS = 2000


class NotFoundError(Exception):
    """There is no such run, step or reply."""


class BadQueryError(Exception):
    """A part of the query is not what it should be; the text says which."""


def encode(value: Any) -> bytes:
    """JSON without NaN and without known secrets."""
    import orjson

    return orjson.dumps(_plain(value, known_secrets()))


def _plain(value: Any, secrets: Sequence[str]) -> Any:
    """The same with texts that can be shown and numbers that JSON holds."""
    if isinstance(value, str):
        return redacted(value.encode("utf-8", "replace").decode(), secrets)
    if isinstance(value, Mapping):
        return {str(_plain(str(k), secrets)): _plain(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        # Curves are nearly all of an answer, and hold nothing that would have to change.
        return value if set(map(type, value)) <= {float, type(None)} else [_plain(v, secrets) for v in value]
    if isinstance(value, int) and abs(value) >= 1 << 53:
        return float(value) if abs(value) < 1 << 1000 else None
    return value


def page_setup() -> dict[str, Any]:
    """What the page needs once: panels, phases, filters."""
    return {
        "panels": [dataclasses.asdict(panel) for panel in PANELS],
        "phases": [*(dataclasses.asdict(curve) for curve in PHASES), {"key": "other", "label": "other"}],
        "filters": {name: f.label for name, f in FILTERS.items()},
        "orders": list(ORDERS),
    }


def runs(watchlist: Watchlist) -> dict[str, Any]:
    """Every run with its state."""
    watchlist.scan()
    return {"runs": [_line_or_why(name, shown) for name, shown in list(watchlist.runs.items())]}


def _line_or_why(name: str, shown: WatchedRun) -> dict[str, Any]:
    """A run that cannot be read must not take the others down with it."""
    try:
        return _line(name, shown)
    except Exception as error:
        return {"name": name, "version": "", "step": 0, "steps": None, "pace_s": None, **unreadable(error)}


def unreadable(error: Exception) -> dict[str, Any]:
    """What is said of a run that cannot be shown."""
    return {"state": "unreadable", "why": f"{type(error).__name__}: {error}"[:300]}


def _line(name: str, shown: WatchedRun) -> dict[str, Any]:
    with shown.lock:
        shown.refresh()
        run = shown.run
        return {
            "name": name,
            "state": run.state,
            "version": run.version,
            "step": run.step,
            "steps": run.planned_steps,
            "pace_s": run.pace(),
        }


def overview(shown: WatchedRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Curves, events and findings of a run."""
    points = min(MOST_POINTS, _whole(query, "points", 400))
    first, last = _real(query, "from", -math.inf), _real(query, "to", math.inf)
    x = "tokens/sampled" if query.get("x") == "tokens" else "step"
    with shown.lock:
        shown.refresh()
        run = shown.run
        return {
            "version": run.version,
            "partial": run.partial,
            "state": run.state,
            "step": run.step,
            **run.curves(points, x=x, first=first, last=last),
            "events": run.events,
            "findings": [dataclasses.asdict(f) for f in run.findings()],
        }


def about(shown: WatchedRun) -> dict[str, Any]:
    """Settings and environment of a run, and the steps whose replies are there."""
    with shown.lock:
        return {
            "path": str(shown.run.path),
            "settings": shown.run.settings,
            "environment": shown.run.environment,
            "rollouts": shown.replies.steps(),
        }


def step(shown: WatchedRun, number: int, query: Mapping[str, str]) -> dict[str, Any]:
    """The groups of a step, or the replies that match."""
    only, order = _name(query, "only", FILTERS), _name(query, "order", ORDERS)
    with shown.lock:
        shown.refresh()
        row, steps = shown.run.row_of(number), shown.replies.steps()
        if not row and number not in steps:
            raise NotFoundError(f"step {number}")
        text = query.get("text", "")[:1000]
        found = shown.replies.find(number, text=text, only=only, order=order) if only or order or text else None
        return {
            "step": number,
            "metrics": row,
            "previous": max((s for s in steps if s < number), default=None),
            "next": min((s for s in steps if s > number), default=None),
            "groups": shown.replies.groups(number) if found is None else None,
            "matching": found,
        }


def reply(shown: WatchedRun, number: int, group: int, sample: int) -> dict[str, Any]:
    """One reply with its tokens, and what it was judged by."""
    with shown.lock:
        shown.refresh()
        found = shown.replies.reply(number, group, sample)
        if found is None:
            raise NotFoundError(f"step {number}, group {group}, reply {sample}")
        row, name = shown.run.row_of(number), setting(shown.run.settings, "objective", "name", "")
    return {
        **found,
        "step": number,
        "range_of": "reply" if name in SEQUENCE_ROWS else "token" if name in TOKEN_ROWS else "",
        "clip_low": row.get("clip/low"),
        "clip_high": row.get("clip/high"),
    }


# ------------------------------------------------------------------------------------------------- queries


def _whole(query: Mapping[str, str], key: str, otherwise: int) -> int:
    text = query.get(key, str(otherwise))
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and int(text)):
        raise BadQueryError(f"{key}: not a whole number above 0")
    return int(text)


def _real(query: Mapping[str, str], key: str, otherwise: float) -> float:
    try:
        value = float(query.get(key, otherwise))
    except ValueError:
        raise BadQueryError(f"{key}: not a number") from None
    return otherwise if math.isnan(value) else value


def _name(query: Mapping[str, str], key: str, known: Mapping[str, Any]) -> str:
    name = query.get(key, "")
    if name and name not in known:
        raise BadQueryError(f"{key}: there are {', '.join(known)}")
    return name

"""The JSON responses of the dashboard.

In: the watch list and a query. Out: values to encode. Invariant: every response is computed from the run directory
alone, contains no secret known to this process, and no text longer than `completions.LONGEST_TEXT`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.record.metric_definitions import Section
from gspo.record.run_format import ObjectiveFacts
from gspo.redact import known_secrets, redacted
from gspo.view.completions import FILTERS, ORDERS
from gspo.view.dashboard.watchlist import WatchedRun, Watchlist
from gspo.view.evaluations import PROBLEM_FILTERS
from gspo.view.panel_data import panels, phases, step_headings

MOST_POINTS = 2000
MOST_EVALUATIONS = 200
"""Listed evaluations of a run."""


class NotFoundError(Exception):
    """The run, step or completion does not exist."""


class BadQueryError(Exception):
    """A part of the query is invalid; the message says which."""


def encode(value: Any) -> bytes:
    """Encode as JSON without NaN and without known secrets."""
    import orjson

    return orjson.dumps(_plain(value, known_secrets()))


def _plain(value: Any, secrets: Sequence[str]) -> Any:
    """The value with valid UTF-8, redacted secrets and integers that JSON can hold."""
    if isinstance(value, str):
        # JSON may escape half of a surrogate pair. It has no UTF-8 form, and orjson refuses it.
        return redacted(value.encode("utf-8", "replace").decode(), secrets)
    if isinstance(value, Mapping):
        return {str(_plain(str(k), secrets)): _plain(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        # Curves are most of a response and contain nothing to change.
        return value if set(map(type, value)) <= {float, type(None)} else [_plain(v, secrets) for v in value]
    # orjson refuses integers above 64 bits, and JavaScript represents integers exactly only below 2**53.
    if isinstance(value, int) and abs(value) >= 1 << 53:
        return float(value) if abs(value) < 1 << 1000 else None
    return value


def page_setup() -> dict[str, Any]:
    """Static data of the page: panels, phases, headings, filters."""
    times = phases().as_data()
    return {
        "sections": list(Section),
        "panels": [panel.as_data() for panel in panels()],
        "phases": {**times, "curves": [*times["curves"], {"key": "other", "label": "other"}]},
        "headings": step_headings(),
        "filters": {name: f.label for name, f in FILTERS.items()},
        "orders": list(ORDERS),
        "problem_filters": {name: label for name, (label, _) in PROBLEM_FILTERS.items()},
    }


def runs(watchlist: Watchlist) -> dict[str, Any]:
    """All runs with their state."""
    watchlist.scan()
    # A copy of the list: another request, in another thread, may add a run meanwhile.
    return {"runs": [_summary_or_error(name, watched) for name, watched in list(watchlist.runs.items())]}


def _summary_or_error(name: str, watched: WatchedRun) -> dict[str, Any]:
    """One damaged run must not prevent the display of the others."""
    try:
        return _summary(name, watched)
    except Exception as error:
        return {"name": name, "version": "", "step": 0, "steps": None, "pace_s": None, **unreadable(error)}


def unreadable(error: Exception) -> dict[str, Any]:
    """The state of a run that cannot be read."""
    return {"state": "unreadable", "why": f"{type(error).__name__}: {error}"[:300]}


def _summary(name: str, watched: WatchedRun) -> dict[str, Any]:
    with watched.lock:
        watched.refresh()
        run = watched.run
        return {
            "name": name,
            "state": run.state,
            "version": run.version,
            "step": run.step,
            "steps": run.planned_steps,
            "pace_s": run.pace(),
        }


def overview(watched: WatchedRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Curves, events and findings of a run."""
    points = min(MOST_POINTS, _positive_integer(query, "points", 400))
    first = _float(query, "from", -math.inf)
    last = _float(query, "to", math.inf)
    x = "tokens/sampled" if query.get("x") == "tokens" else "step"
    with watched.lock:
        watched.refresh()
        run = watched.run
        return {
            "version": run.version,
            "partial": run.partial,
            "state": run.state,
            "step": run.step,
            **run.curves(points, x=x, first=first, last=last),
            "events": run.events,
            "findings": [dataclasses.asdict(f) for f in run.findings()],
            "evaluations": watched.evaluations.steps()[-MOST_EVALUATIONS:],
        }


def about(watched: WatchedRun) -> dict[str, Any]:
    """Settings and environment of a run, and the steps with recorded completions."""
    with watched.lock:
        return {
            "path": str(watched.run.path),
            "settings": watched.run.settings,
            "environment": watched.run.environment,
            "rollouts": watched.completions.steps(),
            "rank_logs": watched.run.rank_logs,
        }


def step(watched: WatchedRun, number: int, query: Mapping[str, str]) -> dict[str, Any]:
    """The groups of a step, or the matching completions."""
    only = _name(query, "only", FILTERS)
    order = _name(query, "order", ORDERS)
    with watched.lock:
        watched.refresh()
        row = watched.run.row_of(number)
        steps = watched.completions.steps()
        if not row and number not in steps:
            raise NotFoundError(f"step {number}")
        # Every character costs time for each completion that is searched.
        text = query.get("text", "")[:1000]
        found = watched.completions.find(number, text=text, only=only, order=order) if only or order or text else None
        return {
            "step": number,
            "metrics": row,
            "previous": max((s for s in steps if s < number), default=None),
            "next": min((s for s in steps if s > number), default=None),
            "evaluated": number in watched.evaluations.steps(),
            "groups": watched.completions.groups(number) if found is None else None,
            "matching": found,
        }


def completion(watched: WatchedRun, number: int, group: int, sample: int) -> dict[str, Any]:
    """One completion with its tokens, and the step's clip range."""
    with watched.lock:
        watched.refresh()
        found = watched.completions.completion(number, group, sample)
        if found is None:
            raise NotFoundError(f"step {number}, group {group}, completion {sample}")
        row = watched.run.row_of(number)
        objective = watched.run.objective
    return {
        **found,
        "step": number,
        "range_of": _clipped_ratio(objective),
        "clip_low": row.get("clip/low"),
        "clip_high": row.get("clip/high"),
    }


def evaluation(watched: WatchedRun, number: int, query: Mapping[str, str]) -> dict[str, Any]:
    """The problems of an evaluation set, by default of the first one that was evaluated after the step."""
    with watched.lock:
        watched.refresh()
        steps, sets = watched.evaluations.steps(), watched.evaluations.sets(number)
        if not sets:
            raise NotFoundError(f"no completions of an evaluation after step {number}")
        name = _name(query, "set", dict.fromkeys(sets)) or sets[0]
        found = watched.evaluations.problems(number, name, text=query.get("text", "")[:1000])
        row = watched.run.row_of(number)
    return {
        **found,
        "sets": sets,
        "previous": max((s for s in steps if s < number), default=None),
        "next": min((s for s in steps if s > number), default=None),
        "numbers": _evaluation_numbers(row, name),
    }


def _evaluation_numbers(row: Mapping[str, Any], name: str) -> dict[str, list[float | None]]:
    """Accuracy and reward with their intervals, as far as they were measured."""
    family = f"eval/{name}" if name else "eval"
    found = {
        measure: [row.get(f"{family}/{measure}{end}") for end in ("", "_low", "_high")]
        for measure in ("accuracy", "accuracy_greedy", "reward")
    }
    return {measure: values for measure, values in found.items() if values[0] is not None}


def evaluated_completion(watched: WatchedRun, number: int, group: int, sample: int) -> dict[str, Any]:
    """One completion of an evaluation with its tokens."""
    with watched.lock:
        found = watched.evaluations.completion(number, group, sample)
    if found is None:
        raise NotFoundError(f"evaluation after step {number}, group {group}, completion {sample}")
    return {**found, "step": number}


def _clipped_ratio(objective: ObjectiveFacts) -> str:
    """The ratio that the clip range bounds: `sequence`, `token`, or empty if it bounds none."""
    return "" if objective.clips_log_ratio else {"sequences": "sequence", "tokens": "token"}.get(objective.clips, "")


# ------------------------------------------------------------------------------------------------- queries


def _positive_integer(query: Mapping[str, str], key: str, default: int) -> int:
    text = query.get(key, str(default))
    # `int` alone accepts digits of other scripts, underscores and a million digits.
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and int(text)):
        raise BadQueryError(f"{key}: not a positive integer")
    return int(text)


def _float(query: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(query.get(key, default))
    except ValueError:
        raise BadQueryError(f"{key}: not a number") from None
    # NaN compares as false with every step, so the range would be empty without an explanation.
    return default if math.isnan(value) else value


def _name(query: Mapping[str, str], key: str, known: Mapping[str, Any]) -> str:
    name = query.get(key, "")
    if name and name not in known:
        raise BadQueryError(f"{key}: choose one of {', '.join(known)}")
    return name

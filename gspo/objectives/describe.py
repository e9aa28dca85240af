"""The table of objectives as text or data, for `gspo objectives`, its JSON, and `docs/objectives.md`.

In: the table. Out: text or plain data. Invariant: everything is derived from the rows, so it cannot diverge from them.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass, replace
from typing import Any

from gspo.config import field_docs
from gspo.objectives.objective import COMPONENTS, OPTIONS, Objective, settings_of
from gspo.objectives.table import TABLE


def as_data() -> list[dict[str, Any]]:
    """One record per row."""
    return [_record(replace(row, name=name)) for name, row in TABLE.items()]


def resolved(objective: Objective) -> dict[str, Any]:
    """What an objective is and does, as `run.json` records it. Viewers of a run rely on it instead of on names."""
    region = objective.trust_region
    low, high = region.clip_range or (None, None)
    return {
        "name": objective.name,
        "settings": list(settings_of(objective)),
        # Without a summed reward there is nothing to subtract a penalty from.
        "takes_penalties": not objective.advantage.nonnegative_rewards and objective.normalize == "sum",
        "advantage": _name(objective.advantage),
        "advantage_scope": objective.advantage.scope,
        "ratio": _name(objective.ratio),
        "trust_region": _name(region),
        "aggregate": _name(objective.aggregate),
        "clips": "none" if low is None else "sequences" if objective.clips_sequences else "tokens",
        "clips_log_ratio": region.clips_log_ratio,
        "clip_low": low,
        "clip_high": high,
        "keep": objective.keep,
        # As text: files of earlier versions have one shaping, or `none`.
        "shape": ",".join(objective.shape) or "none",
        "kl": objective.kl,
        "kl_in": objective.kl_in,
    }


def as_text() -> str:
    """A table for the terminal."""
    header = ("objective", "paper", "advantage", "ratio", "trust region", "aggregate", "defaults")
    cells = [header, *(_cells(record) for record in as_data())]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n\n" + _options_text()


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    own = {k: v for k, v in record["settings"].items() if k not in OPTIONS and v is not None}
    defaults = ", ".join(f"{k}={_number(v)}" for k, v in (own | record["options"]).items())
    return (
        record["name"],
        record["paper"],
        record["advantage"],
        record["ratio"],
        record["trust_region"],
        record["aggregate"],
        defaults,
    )


def _record(row: Objective) -> dict[str, Any]:
    neutral = {f.name: f.default for f in fields(Objective)}
    settings = settings_of(row)
    return {
        "name": row.name,
        "paper": row.paper,
        "advantage": _name(row.advantage),
        "ratio": _name(row.ratio),
        "trust_region": _name(row.trust_region),
        "aggregate": _name(row.aggregate),
        "advantage_per": row.advantage_per,
        "formula": {part: _summary(getattr(row, part)) for part in COMPONENTS},
        "settings": settings,
        "options": {name: settings[name] for name in OPTIONS if name in settings and settings[name] != neutral[name]},
    }


def _name(part: Any) -> str:
    return type(part).__name__ if is_dataclass(part) else getattr(part, "__name__", type(part).__name__)


def _summary(part: Any) -> str:
    doc = inspect.getdoc(type(part) if is_dataclass(part) else part) or ""
    return " ".join(doc.split("\n\n")[0].split())


def _number(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _options_text() -> str:
    names = ", ".join(OPTIONS)
    return (
        f"Options of every objective (an option without effect is an error): {names}.\n"
        "To change settings, use gspo.objective('gspo', clip_low=3e-3) in Python or [objective] in a recipe."
    )


def option_help() -> dict[str, str]:
    """Option -> its help text, the docstring of the field."""
    docs = field_docs(Objective)
    return {name: " ".join(docs[name].split()) for name in OPTIONS}

"""Names that earlier versions used in recipes and run directories, and the names that replaced them.

In: a recipe, an override, or a record of a run directory. Out: the same with today's names. Invariant: files are read
through these tables and written without them, so a run writes only today's names. No new name is also an old one, so
records of both kinds can be in one file and form one curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.errors import ConfigError

SETTINGS = {
    "rollout.replies": "rollout.group_size",
    "rollout.engine_options.replies": "rollout.engine_options.completions",
    "reward.options.reply_format": "reward.options.completion_format",
}
"""Setting keys. Only the last part of a key changes."""

REWARDS = {"reply_format": "completion_format"}
"""Built-in reward functions."""

ALARMS = {
    "nothing trained": "no trainable samples",
    "length pinned": "truncation",
    "held-out falls": "held-out drop",
    "engine apart": "engine mismatch",
}
"""Alarms."""

VALUES = {"reward.functions": REWARDS, "alarms.stop": ALARMS}
"""Settings whose values are names."""

RECIPES = {"long-replies": "long-completions", "uneven-replies": "uneven-completions"}
"""Built-in recipes."""

EVAL_OPTIONS = {"--replies": "--completions"}
"""Options of `gspo eval`."""

COMMANDS = {"merge": ("save", "--merge")}
"""Sub-commands of `gspo`: the one that replaced it, and the option that it needs."""

FAILURES = {"nonsense": "invalid", "untried": "not_run"}
"""Kinds of failures to score a completion: the first word of the reason."""

METRICS = {
    "length/punished_fraction": "length/penalized_fraction",
    "padding/sampler": "sampler/idle_fraction",
    "sampler/live_mean": "sampler/running_mean",
    "sampler/steps": "sampler/decode_steps",
    "samples/left_out/not_mixed": "samples/dropped/uniform",
    "samples/left_out/": "samples/dropped/",
    **{f"samples/unscored/{old}": f"samples/unscored/{new}" for old, new in FAILURES.items()},
    **{f"reward/part/{old}": f"reward/part/{new}" for old, new in REWARDS.items()},
    **{f"reward/note/{old}/": f"reward/note/{new}/" for old, new in REWARDS.items()},
}
"""Metric keys. A key that ends with a slash stands for all keys that start with it."""

EVENTS = {
    "checkpoint failed": "checkpoint_failed",
    "clip range at its limit": "clip_range_limit",
    "cold start": "cold_start",
    "damaged checkpoint": "checkpoint_damaged",
    "fewer updates": "fewer_updates",
    "new end": "steps_changed",
    "nothing to learn": "no_trainable_samples",
    "out of memory": "out_of_memory",
    "reward failed": "reward_failed",
    "skipped update": "update_skipped",
}
"""Names of events."""

EVENT_FIELDS = {"replies": "completions", "what": "message", "why": "reason"}
"""Fields of events."""

RECORD_FIELDS = {"left_out": "drop_reason"}
"""Fields of the records in `rollouts/`."""

DROP_REASONS = {"not mixed": "uniform"}
"""Reasons why a completion was not trained on."""


def setting(key: str) -> str:
    """Today's name of a dotted setting key."""
    for old, new in SETTINGS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, as a checkpoint stores them."""
    return {(key := setting(old)): _value(key, value) for old, value in values.items()}


def tables(tree: Mapping[str, Any], *, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables of a recipe with today's names, and what was renamed: old name -> new name."""
    renamed: dict[str, str] = {}
    current = _tables(tree, "", renamed, where)
    return current, renamed


def _tables(tree: Mapping[str, Any], prefix: str, renamed: dict[str, str], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        old = f"{prefix}{name}"
        new = SETTINGS.get(old, old)
        if new != old and new.rpartition(".")[2] in tree:
            raise ConfigError(f"{where}: {duplicate_name_error(old, new)}")
        if new != old:
            renamed[old] = new
        if isinstance(value, Mapping) and any(key.startswith(f"{new}.") for key in (*SETTINGS, *VALUES)):
            value = _tables(value, f"{new}.", renamed, where)
        else:
            renamed |= {v: VALUES[new][v] for v in _listed(value) if v in VALUES.get(new, {})}
            value = _value(new, value)
        found[new.removeprefix(prefix)] = value
    return found


def duplicate_name_error(old: str, new: str) -> str:
    """What is wrong if a setting or an option is given under both of its names."""
    return f"{old} is the old name of {new}, and both are given; keep {new}"


def renamed_note(old: str, new: str) -> str:
    """Says that a name was replaced."""
    return f"{old} is now called {new}; the old name still works"


def _value(key: str, value: Any) -> Any:
    names = VALUES.get(key, {})
    if isinstance(value, list | tuple):
        return [names.get(v, v) if isinstance(v, str) else v for v in value]
    return names.get(value, value) if isinstance(value, str) else value


def _listed(value: Any) -> list[str]:
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, str)]


def metric(key: str) -> str:
    """Today's name of a metric."""
    if key in METRICS:
        return METRICS[key]
    for old, new in METRICS.items():
        if old.endswith("/") and key.startswith(old):
            return new + key[len(old) :]
    return key


def metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record of `metrics.jsonl`."""
    return {metric(key): value for key, value in row.items()}


def event(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record of `events.jsonl`."""
    found = {EVENT_FIELDS.get(key, key): value for key, value in row.items()}
    if "event" in found:
        found["event"] = _name(EVENTS, found["event"])
    if found.get("event") == "alarm" and "name" in found:
        found["name"] = _name(ALARMS, found["name"])
    if isinstance(found.get("reasons"), Mapping):
        found["reasons"] = _keys(DROP_REASONS, found["reasons"])
    return found


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record of `rollouts/`: one completion."""
    found = _keys(RECORD_FIELDS, row)
    if "drop_reason" in found:
        found["drop_reason"] = _name(DROP_REASONS, found["drop_reason"])
    if isinstance(found.get("failure"), str):
        kind, colon, reason = found["failure"].partition(":")
        found["failure"] = FAILURES.get(kind, kind) + colon + reason
    for field in ("parts", "notes"):
        if isinstance(found.get(field), Mapping):
            found[field] = _keys(REWARDS, found[field])
    return found


def _keys(names: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in row.items()}


def _name(names: Mapping[str, str], value: Any) -> Any:
    return names.get(value, value) if isinstance(value, str) else value

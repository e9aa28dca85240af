"""Settings by dotted key. In: a `Config` or its tables. Out: one flat dictionary, or the keys in which several differ."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.config import Config, to_toml


def flat(config: Config) -> dict[str, Any]:
    """Every setting of a config."""
    return flatten(tomllib.loads(to_toml(config)))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return values


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that are not the same in all of them; a missing key is not the same as any value."""
    keys = sorted({key for values in settings for key in values})
    return [k for k in keys if any(k not in s or s[k] != settings[0].get(k) for s in settings)]

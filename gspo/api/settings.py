"""Keyword arguments of the Python API as settings.

In: a recipe and keyword arguments: sections as dicts (`learner={"learning_rate": 1e-4}`) or dotted keys. Out: pairs of
a dotted key and a plain value, and a `Config`. Invariant: the same conversion and checks as for a recipe, and an error
names the argument. A setting that is given twice is an error.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from gspo import config as settings
from gspo.config import Config
from gspo.errors import ConfigError

Pairs = dict[str, Any]
"""Values by dotted key."""


def pairs_of(given: Mapping[str, Any], *, where: str) -> Pairs:
    """The settings that these arguments give."""
    found: Pairs = {}
    for key, value in _flat(given, "", where):
        if key in found:
            raise ConfigError(f"{where}: {key} is given twice; keep one")
        found[key] = value
    return found


def _flat(given: Mapping[str, Any], prefix: str, where: str) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        key = f"{prefix}{name}"
        kind = settings.type_of(key)
        section = dataclasses.is_dataclass(kind) or settings.named_section(kind) is not None
        if section and isinstance(value, Mapping):
            yield from _flat(value, f"{key}.", where)
        elif dataclasses.is_dataclass(kind):
            example = dataclasses.fields(kind)[0].name
            raise ConfigError(
                f"{where}: {key} is a section; give a dict, for example {key}={{{example!r}: ...}}, not {value!r:.80}"
            )
        else:
            yield key, plain(value, key, where)


def plain(value: Any, key: str, where: str) -> Any:
    """A value in the types of a recipe: paths become text, and numpy's numbers Python's."""
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{key}.{k}", where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, key, where) for v in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    hint = "; leave the argument out for the default" if value is None else ""
    raise ConfigError(f"{where}: {key}: a setting is text, a number, a list or a dict, not {value!r:.80}{hint}")


def config_of(recipe: str | os.PathLike[str] | None, pairs: Pairs, *, where: str) -> Config:
    """The config of a recipe, or of the defaults, with these settings."""
    tree: dict[str, Any] = {}
    if recipe is not None:
        path = settings.find_recipe(os.fspath(recipe))
        tree = settings.read_toml(path)
    # Without a recipe, every key comes from the arguments, and so does every error.
    source = where if recipe is None else str(recipe)
    return settings.with_settings(tree, list(pairs.items()), where=source, given_where=where)

"""Write a `Config` as TOML and as a flat mapping of dotted keys.

In: a `Config`. Out: TOML text, or a value for each dotted key.
Invariant: `load.from_tree` reads what `to_toml` wrote back to an equal `Config`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.config.schema import Config, ObjectiveConfig, named_section
from gspo.errors import ConfigError
from gspo.field_types import field_types


def to_toml(config: Config) -> str:
    """The resolved config as TOML; `from_tree` reads it back to an equal `Config`."""
    lines: list[str] = []
    _write_table(config, (), lines)
    return "\n".join(lines).strip() + "\n"


def get(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


def flat(config: Config) -> dict[str, Any]:
    """Every setting by dotted key, with the value that TOML reads back."""
    # Through TOML, so that a tuple of the config compares equal to the list of a file.
    return flatten(tomllib.loads(to_toml(config)))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into one table of dotted keys."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return values


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ. A missing key differs from any value."""
    keys = sorted({key for values in settings for key in values})
    return [k for k in keys if any(k not in s or s[k] != settings[0].get(k) for s in settings)]


def _write_table(value: Any, path: tuple[str, ...], lines: list[str]) -> None:
    items = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, ObjectiveConfig):
        # As a user writes them: next to the name, not in a table of their own.
        items = {"name": value.name, **value.settings}
    sections: dict[tuple[str, ...], Any] = {(k,): v for k, v in items.items() if dataclasses.is_dataclass(v)}
    named = [k for k, hint in field_types(type(value)).items() if named_section(hint)]
    sections |= {(k, _toml_key(name)): section for k in named for name, section in items[k].items()}
    if path:
        lines += ["", f"[{'.'.join(path)}]"]
    plain = {k: v for k, v in items.items() if k not in named and (k,) not in sections}
    lines += [f"{_toml_key(k)} = {toml_value(v)}" for k, v in plain.items()]
    for keys, section in sections.items():
        _write_table(section, (*path, *keys), lines)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else toml_value(key)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    # Before int, because a bool is an int.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is also a TOML basic string, except that TOML does not allow a raw DEL character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, int | float):
        # The shortest text that reads back as the same number.
        return repr(value)
    raise ConfigError(f"cannot write {value!r} to a config file")

"""A conversion as a recipe, and as a report.

In: a `Conversion`. Out: TOML with the origin of every line, and the lines of the report. Invariant: the recipe has
every setting that was given, and those defaults of the other trainer that differ from ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gspo.equivalents.equivalent import Conversion
from gspo.site import linked


def recipe(done: Conversion, default: Callable[[str], Any], value_text: Callable[[Any], str]) -> str:
    """The recipe. `default` is our default of a dotted key, `value_text` a value as TOML."""
    lines = [f"# From a config of {done.trainer} (gspo import-config).", *(f"# {line}" for line in report(done))]
    kept = {k: v for k, v in done.settings.items() if k in done.explicit or default(k) != v}
    tables: dict[str, dict[str, Any]] = {"": {}}
    for key, value in kept.items():
        section, _, name = key.rpartition(".")
        tables.setdefault(section, {})[name] = value
    for section, values in tables.items():
        if section:
            lines += ["", f"[{section}]"]
        elif values:
            lines.append("")
        for name, value in values.items():
            key = f"{section}.{name}" if section else name
            whose = "" if key in done.explicit else f"{done.trainer}'s default"
            origin = ", ".join(filter(None, (_one_line(done.origin[key]), whose)))
            lines.append(f"{name} = {value_text(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def report(done: Conversion) -> Iterator[str]:
    """What is lost, differs, or is still to be done."""
    for title, found in (
        ("No equivalent", list(done.lost.values())),
        ("Still to be set", done.todo),
        ("Different meaning", done.differences),
        ("Not needed", [", ".join(done.unneeded)] if done.unneeded else []),
    ):
        if found:
            yield f"{title}:"
            yield from (f"- {linked(_one_line(text))}" for text in found)


def _one_line(text: str) -> str:
    return " ".join(text.split())

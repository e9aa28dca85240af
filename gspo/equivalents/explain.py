"""A sentence about a name that is another trainer's, for errors about unknown settings.

In: a dotted key, as a recipe, a command line or Python gave it. Out: what it is here; empty for a name that neither TRL
nor verl has. Invariant: as in `equivalent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.equivalents import trl, verl

_VERL_BY_LAST = {name.rpartition(".")[2]: name for name in reversed(list(verl.TABLE))}
"""verl's names without their sections, in which they are often quoted. The first line wins."""


def explain(key: str, value: Any = None) -> str:
    """What a setting of TRL or verl is here. A table is explained by its first known key."""
    if isinstance(value, Mapping):
        return next((text for name, inner in value.items() if (text := explain(f"{key}.{name}", inner))), "")
    last = key.rpartition(".")[2]
    if key in verl.TABLE:
        return f"verl's {key} {verl.TABLE[key].sentence}"
    if last in trl.TABLE:
        return f"TRL's {last} {trl.TABLE[last].sentence}"
    if last in _VERL_BY_LAST:
        name = _VERL_BY_LAST[last]
        return f"verl's {name} {verl.TABLE[name].sentence}"
    return ""

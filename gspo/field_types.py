"""The types of a dataclass's fields.

In: a class. Out: the type of each field by name. Invariant: annotations, which are strings, are evaluated once per
class, because evaluating them takes much longer than looking them up, and settings are checked field by field.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Any


def field_types(cls: Any, *, markers: bool = False) -> Mapping[str, Any]:
    """The type of each field; with `markers`, including what `Annotated` adds to it."""
    return _evaluated(cls, markers)


@functools.cache
def _evaluated(cls: Any, markers: bool) -> Mapping[str, Any]:
    return typing.get_type_hints(cls, include_extras=markers)

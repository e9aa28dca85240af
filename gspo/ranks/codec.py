"""Values as bytes, for messages between ranks: JSON, and no pickle, so that a message can only be data.

In: dataclasses of this package, and what JSON knows. Out: bytes, and from bytes the same values, given their type.
Invariant: what is decoded equals what was encoded. Floats keep all their digits.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

import orjson

from gspo.field_types import field_types


def encode(value: Any) -> bytes:
    """A value as bytes."""
    return orjson.dumps(value, default=_plain)


def decode(kind: Any, data: bytes) -> Any:
    """The value of this type."""
    return convert(kind, orjson.loads(data))


def convert(kind: Any, value: Any) -> Any:
    """A JSON value as a value of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # `X | None`, and `str | Messages`, which JSON does not change.
        options = [option for option in arguments if option is not types.NoneType]
        return value if value is None or len(options) > 1 else convert(options[0], value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = field_types(kind)
        return kind(**{name: convert(hints[name], item) for name, item in value.items()})
    if kind is bytes:
        return base64.b64decode(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if origin is tuple:
        items = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(convert(item, entry) for item, entry in zip(items, value, strict=True))
    if origin in (Mapping, dict) or _is_a(origin, Mapping):
        return {key: convert(arguments[1], item) for key, item in value.items()}
    if arguments and isinstance(value, list):
        return [convert(arguments[0], item) for item in value]
    return value


def _is_a(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another rank")

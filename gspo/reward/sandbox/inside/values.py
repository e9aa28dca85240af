"""Typed JSON: plain Python values as text, and back, with limits.

In: a value, or text that a hostile process wrote. Out: text, or a value made of exact built-in types only. Invariant: what
is decoded runs no code of the other side; whatever is not plain data becomes a `{"r": number}`, a reference that means
something only where it came from.

JSON's own types stand for themselves. The rest: `{"t": [...]}` tuple, `s` set, `z` frozenset, `d` dict as pairs,
`i` large int in hexadecimal, `f` nan and infinities, `c` complex, `b` bytes, `a` bytearray, `g` range, `n` a built-in type by its name, `r` reference.
Uses `_json` directly: importing `json` costs a third of the start of an interpreter.
"""

from __future__ import annotations

import math

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

try:
    from _json import encode_basestring_ascii as _quoted
    from _json import make_scanner as _make_scanner
except ImportError:  # another Python than CPython
    from json.encoder import encode_basestring_ascii as _quoted
    from json.scanner import make_scanner as _make_scanner

DEPTH = 64
"""Containers within containers."""
LENGTH = 8 * 2**20
"""Characters of one message."""
_PLAIN_INT = 2**53
_TYPES = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set, frozenset, bytes, complex)}


class Refused(Exception):
    """Too deep, too long, or no value at all."""


class _Context:
    """What the scanner asks for."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float

    @staticmethod
    def parse_int(digits: str) -> int:
        if len(digits) > 20:
            raise Refused("a number with too many digits")
        return int(digits)

    @staticmethod
    def parse_constant(name: str) -> None:
        raise Refused("not JSON: " + name)


_scan = _make_scanner(_Context())  # type: ignore[arg-type]


def encode(value: Any, refer: Callable[[Any], int]) -> str:
    """A value as text. `refer` gives a number to an object that is no plain data."""
    parts: list[str] = []
    _write(value, refer, parts, 0)
    text = "".join(parts)
    if len(text) > LENGTH:
        raise Refused(f"a value of more than {LENGTH} characters")
    return text


def decode(text: str, resolve: Callable[[int], Any]) -> Any:
    """The value that a text stands for. `resolve` turns a reference's number into an object."""
    if len(text) > LENGTH:
        raise Refused(f"a message of more than {LENGTH} characters")
    try:
        parsed, end = _scan(text, 0)
    except (StopIteration, ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {type(error).__name__}") from None
    if end != len(text):
        raise Refused("not JSON: more than one value")
    return _read(parsed, resolve, 0)


def _write(value: Any, refer: Callable[[Any], int], parts: list[str], depth: int) -> None:
    if depth > DEPTH:
        raise Refused(f"a value nested more than {DEPTH} deep")
    if len(parts) > LENGTH:
        raise Refused(f"a value of more than {LENGTH} characters")
    if value is None or value is True or value is False:
        parts.append({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, str):
        parts.append(_quoted(str.__str__(value)))
    elif isinstance(value, int):
        number = int.__int__(value)
        parts.append(str(number) if -_PLAIN_INT < number < _PLAIN_INT else f'{{"i":"{number:x}"}}')
    elif isinstance(value, float):
        real = float.__float__(value)
        parts.append(float.__repr__(real) if math.isfinite(real) else f'{{"f":"{real!r}"}}')
    elif isinstance(value, list):
        _write_all("[", list.__iter__(value), "]", refer, parts, depth)
    else:
        _write_tagged(value, refer, parts, depth)


def _write_tagged(value: Any, refer: Callable[[Any], int], parts: list[str], depth: int) -> None:
    if isinstance(value, tuple):
        _write_all('{"t":[', tuple.__iter__(value), "]}", refer, parts, depth)
    elif isinstance(value, dict):
        pairs = ([k, v] for k, v in dict.items(value))
        _write_all('{"d":[', pairs, "]}", refer, parts, depth)
    elif isinstance(value, set):
        _write_all('{"s":[', set.__iter__(value), "]}", refer, parts, depth)
    elif isinstance(value, frozenset):
        _write_all('{"z":[', frozenset.__iter__(value), "]}", refer, parts, depth)
    elif isinstance(value, (bytes, bytearray)):
        tag = "b" if isinstance(value, bytes) else "a"
        parts.append(f'{{"{tag}":{_quoted(bytes(value).decode("latin-1"))}}}')
    elif type(value) is complex:
        _write_all('{"c":[', (value.real, value.imag), "]}", refer, parts, depth)
    elif type(value) is range:
        _write_all('{"g":[', (value.start, value.stop, value.step), "]}", refer, parts, depth)
    elif isinstance(value, type) and value in _TYPES.values():
        parts.append(f'{{"n":"{value.__name__}"}}')
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        _write(value.tolist(), refer, parts, depth + 1)
    else:
        parts.append(f'{{"r":{refer(value)}}}')


def _write_all(
    opening: str, values: Any, closing: str, refer: Callable[[Any], int], parts: list[str], depth: int
) -> None:
    parts.append(opening)
    first = True
    for value in values:
        if not first:
            parts.append(",")
        first = False
        _write(value, refer, parts, depth + 1)
    parts.append(closing)


def _read(parsed: Any, resolve: Callable[[int], Any], depth: int) -> Any:
    if depth > DEPTH:
        raise Refused(f"a value nested more than {DEPTH} deep")
    if type(parsed) is list:
        return [_read(item, resolve, depth + 1) for item in parsed]
    if type(parsed) is not dict:
        return parsed
    if len(parsed) != 1:
        raise Refused(f"an object with {len(parsed)} members")
    ((tag, body),) = parsed.items()
    try:
        return _tagged(tag, body, resolve, depth)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise Refused(f"a malformed {tag[:10]}: {type(error).__name__}") from None


def _tagged(tag: str, body: Any, resolve: Callable[[int], Any], depth: int) -> Any:
    if tag == "i" and type(body) is str:
        return int(body, 16)
    if tag == "f" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag in ("b", "a") and type(body) is str:
        return (bytes if tag == "b" else bytearray)(body.encode("latin-1"))
    if tag == "n":
        return _TYPES[body]
    if tag == "r" and type(body) is int:
        return resolve(body)
    make: Any = {"t": tuple, "s": set, "z": frozenset, "d": _dict, "c": _complex, "g": _range}.get(tag)
    if make is None or type(body) is not list:
        raise Refused("an unknown kind of value")
    return make([_read(item, resolve, depth + 1) for item in body])


def _dict(pairs: list[Any]) -> dict[Any, Any]:
    return dict(pairs)


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    return complex(float(real), float(imaginary))


def _range(parts: list[Any]) -> range:
    return range(*parts)

"""Typed JSON: encode plain Python values as text, and decode them, with limits.

In: a value, or text that a hostile process wrote. Out: text, or a value of exact built-in types only. Invariant:
decoding executes no code of the other side. Anything that is not plain data becomes `{"r": number}`, a reference that
only its origin can resolve.

JSON's own types are used as they are. The others are tagged: `{"t": [...]}` tuple, `s` set, `z` frozenset, `d` dict as
pairs, `i` large int in hexadecimal, `f` nan and infinities, `c` complex, `b` bytes, `a` bytearray, `g` range, `L`
slice, `V` keys, values or items of a dict, `n` a built-in type by its name, `r` reference, `l` any other reference (a
list whose first item is its kind). Types of the standard library that hold plain data: `F` Fraction, `D` Decimal, `T`
date, time, datetime, timedelta, `Q` deque, `C` Counter, `O` OrderedDict, `U` defaultdict, `P` namedtuple; they are
rebuilt from their parts. `N` is a numpy array of numbers, as its dtype and nested lists; if the receiver has not
imported numpy, it arrives as the lists. Empty arrays always do, because they broadcast to any shape and `all()` of
nothing is true. Uses `_json` directly: importing `json` takes a third of the interpreter's start-up time.
"""

from __future__ import annotations

import builtins
import math
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

try:
    from _json import encode_basestring_ascii as _quoted
    from _json import make_scanner as _make_scanner
except ImportError:  # not CPython
    from json.encoder import encode_basestring_ascii as _quoted
    from json.scanner import make_scanner as _make_scanner

DEPTH = 64
"""Maximum nesting depth of containers."""
LENGTH = 8 * 2**20
"""Maximum length of a message in characters."""
DIGITS = 10_000
"""Maximum number of digits of a Fraction or Decimal. Arithmetic with longer ones is slow."""
# Larger integers are sent in hexadecimal: decimal conversion takes quadratic time, and Python refuses over 4300 digits.
_PLAIN_INT = 2**53
_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set, frozenset, bytes, complex)
}
_TYPES.update({n: e for n, e in vars(builtins).items() if isinstance(e, type) and issubclass(e, Exception)})
_NAMES = {kind: name for name, kind in _TYPES.items()}
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_FIELDS = 64
"""Maximum number of fields of a namedtuple."""
_ARRAYS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
"""Allowed dtypes of arrays."""


class ValueRefused(Exception):
    """A value or message is too deep, too long, or malformed."""


class _Context:
    """Settings of the JSON scanner, as `json.JSONDecoder` provides them."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float

    @staticmethod
    def parse_int(digits: str) -> int:
        if len(digits) > 20:
            raise ValueRefused("a number with too many digits")
        return int(digits)

    @staticmethod
    def parse_constant(name: str) -> None:
        raise ValueRefused("not JSON: " + name)


_scan = _make_scanner(_Context())  # type: ignore[arg-type]


def encode(value: Any, refer: Callable[[Any], Any]) -> str:
    """Encode a value. `refer` maps an object that is not plain data to a number, or to the items of an `l`."""
    parts: list[str] = []
    _write(value, refer, parts, 0)
    text = "".join(parts)
    if len(text) > LENGTH:
        raise ValueRefused(f"a value of more than {LENGTH} characters")
    return text


def decode(text: str, resolve: Callable[[Any], Any]) -> Any:
    """Decode a text. `resolve` maps a reference's number, or the items of an `l`, to an object."""
    return _read(parse(text), resolve, 0)


def parse(text: str) -> Any:
    """Parse the JSON of a text without decoding tags, so nothing expensive is hashed or built."""
    if len(text) > LENGTH:
        raise ValueRefused(f"a message of more than {LENGTH} characters")
    try:
        parsed, end = _scan(text, 0)
    except (StopIteration, ValueError, RecursionError) as error:
        raise ValueRefused(f"not JSON: {type(error).__name__}") from None
    # The scanner stops after the first value.
    if end != len(text):
        raise ValueRefused("not JSON: more than one value")
    return parsed


def _write(value: Any, refer: Callable[[Any], Any], parts: list[str], depth: int) -> None:
    if depth > DEPTH:
        raise ValueRefused(f"a value nested more than {DEPTH} deep")
    # Checked while writing: a small value that contains itself twice at each level would fill the memory before its
    # end.
    if len(parts) > LENGTH:
        raise ValueRefused(f"a value of more than {LENGTH} characters")
    if value is None or value is True or value is False:
        parts.append({None: "null", True: "true", False: "false"}[value])
    # From here on, methods of the base class are called explicitly: a subclass that the program defines may override
    # them to lie about its value.
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


def _write_tagged(value: Any, refer: Callable[[Any], Any], parts: list[str], depth: int) -> None:
    if isinstance(value, tuple):
        fields = () if type(value) is tuple else _fields(value)
        opening = f'{{"P":[{_quoted(type(value).__name__)},{_names(fields)},' if fields else '{"t":'
        _write_all(opening + "[", tuple.__iter__(value), "]]}" if fields else "]}", refer, parts, depth)
    elif isinstance(value, dict):
        _write_dict(value, refer, parts, depth)
    elif isinstance(value, set):
        _write_all('{"s":[', set.__iter__(value), "]}", refer, parts, depth)
    elif isinstance(value, frozenset):
        _write_all('{"z":[', frozenset.__iter__(value), "]}", refer, parts, depth)
    elif isinstance(value, (bytes, bytearray)):
        tag = "b" if isinstance(value, bytes) else "a"
        parts.append(f'{{"{tag}":{_quoted(bytes(value).decode("latin-1"))}}}')
    elif type(value) is complex:
        _write_all('{"c":[', (value.real, value.imag), "]}", refer, parts, depth)
    elif type(value) in _VIEWS:
        _write_all(f'{{"V":["{_VIEWS[type(value)]}",[', iter(value), "]]}", refer, parts, depth)
    elif type(value) is slice:
        _write_all('{"L":[', (value.start, value.stop, value.step), "]}", refer, parts, depth)
    elif type(value) is range:
        _write_all('{"g":[', (value.start, value.stop, value.step), "]}", refer, parts, depth)
    elif isinstance(value, type) and value in _NAMES:
        parts.append(f'{{"n":"{_NAMES[value]}"}}')
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        array = _is(value, "numpy", "ndarray") and value.size and value.dtype.str[1:] in _ARRAYS
        parts.append(f'{{"N":["{value.dtype.str}",' if array else "")
        _write(value.tolist(), refer, parts, depth + 1)
        parts.append("]}" if array else "")
    else:
        _write_library(value, refer, parts, depth)


def _write_dict(value: Any, refer: Callable[[Any], Any], parts: list[str], depth: int) -> None:
    opening, closing = '{"d":[', "]}"
    if _is(value, "collections", "Counter"):
        opening = '{"C":['
    elif _is(value, "collections", "OrderedDict"):
        opening = '{"O":['
    elif _is(value, "collections", "defaultdict"):
        parts.append('{"U":[')
        _write(value.default_factory, refer, parts, depth + 1)
        opening, closing = ",[", "]]}"
    _write_all(opening, ([k, v] for k, v in dict.items(value)), closing, refer, parts, depth)


def _write_library(value: Any, refer: Callable[[Any], Any], parts: list[str], depth: int) -> None:
    """Encode the standard library's data types; anything else becomes a reference."""
    if _is(value, "collections", "deque"):
        kind = sys.modules["collections"].deque
        opening = f'{{"Q":[{"null" if value.maxlen is None else int(value.maxlen)},['
        _write_all(opening, kind.__iter__(value), "]]}", refer, parts, depth)
    elif _is(value, "fractions", "Fraction"):
        _write_all('{"F":[', (int(value.numerator), int(value.denominator)), "]}", refer, parts, depth)
    elif _is(value, "decimal", "Decimal"):
        parts.append(f'{{"D":{_quoted(str(value))}}}')
    elif _moment(value):
        _write_all('{"T":[', _moment(value), "]}", refer, parts, depth)
    else:
        reference = refer(value)
        if type(reference) is int:
            parts.append(f'{{"r":{reference}}}')
        else:
            _write_all('{"l":[', reference, "]}", refer, parts, depth)


def _is(value: Any, module: str, name: str) -> bool:
    """Whether a value has exactly this type. If its module was never imported, it cannot."""
    return module in sys.modules and type(value) is getattr(sys.modules[module], name, None)


def _fields(value: Any) -> tuple[str, ...]:
    names = getattr(type(value), "_fields", None)
    if type(names) is not tuple or not 0 < len(names) <= _FIELDS or len(names) != tuple.__len__(value):
        return ()
    return names if all(type(name) is str for name in names) else ()


def _names(fields: tuple[str, ...]) -> str:
    return "[" + ",".join(map(_quoted, fields)) + "]"


def _moment(value: Any) -> tuple[Any, ...]:
    """The kind and fields of a date, time, datetime or timedelta; empty for anything else, such as a time with a
    zone."""
    if _is(value, "datetime", "timedelta"):
        return "timedelta", value.days, value.seconds, value.microseconds
    if _is(value, "datetime", "date"):
        return "date", value.year, value.month, value.day
    if _is(value, "datetime", "time") and value.tzinfo is None:
        return ("time", *_clock(value))
    if _is(value, "datetime", "datetime") and (value.tzinfo is None or _is(value.tzinfo, "datetime", "timezone")):
        offset = None if value.tzinfo is None else value.utcoffset().total_seconds()
        return ("datetime", value.year, value.month, value.day, *_clock(value), offset)
    return ()


def _clock(value: Any) -> tuple[int, ...]:
    return value.hour, value.minute, value.second, value.microsecond


def _write_all(
    opening: str, values: Any, closing: str, refer: Callable[[Any], Any], parts: list[str], depth: int
) -> None:
    parts.append(opening)
    first = True
    for value in values:
        if not first:
            parts.append(",")
        first = False
        _write(value, refer, parts, depth + 1)
    parts.append(closing)


def _read(parsed: Any, resolve: Callable[[Any], Any], depth: int) -> Any:
    if depth > DEPTH:
        raise ValueRefused(f"a value nested more than {DEPTH} deep")
    if type(parsed) is list:
        return [_read(item, resolve, depth + 1) for item in parsed]
    if type(parsed) is not dict:
        return parsed
    if len(parsed) != 1:
        raise ValueRefused(f"an object with {len(parsed)} members")
    ((tag, body),) = parsed.items()
    try:
        return _tagged(tag, body, resolve, depth)
    except ValueRefused:
        raise
    except Exception as error:
        raise ValueRefused(f"a malformed {tag[:10]}: {type(error).__name__}") from None


def _tagged(tag: str, body: Any, resolve: Callable[[Any], Any], depth: int) -> Any:
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
    if tag == "D" and type(body) is str:
        return _decimal(body)
    # A fixed table: a text selects one of these constructors and can name no other.
    make = resolve if tag == "l" else _MAKERS.get(tag)
    if make is None or type(body) is not list:
        raise ValueRefused("an unknown kind of value")
    return make([_read(item, resolve, depth + 1) for item in body])


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    return complex(float(real), float(imaginary))


def _range(parts: list[Any]) -> range:
    return range(*parts)


def _slice(parts: list[Any]) -> slice:
    start, stop, step = parts
    return slice(start, stop, step)


def _view(parts: list[Any]) -> Any:
    """Build the keys, values or items view of a dictionary."""
    kind, items = parts
    pairs = items if kind == "items" else enumerate(items) if kind == "values" else ((item, None) for item in items)
    return {"keys": dict.keys, "values": dict.values, "items": dict.items}[kind](dict(pairs))


def _fraction(parts: list[Any]) -> Any:
    from fractions import Fraction

    numerator, denominator = parts
    if (
        type(numerator) is not int
        or type(denominator) is not int
        or max(numerator.bit_length(), denominator.bit_length()) > 3 * DIGITS
    ):
        raise ValueRefused("no fraction, or one with too many digits")
    return Fraction(numerator, denominator)


def _decimal(text: str) -> Any:
    from decimal import Decimal, InvalidOperation

    if len(text) > DIGITS:
        raise ValueRefused("a decimal with too many digits")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueRefused("a malformed decimal") from None


def _when(parts: list[Any]) -> Any:
    import datetime

    kind, *numbers = parts
    if kind == "datetime":
        *numbers, offset = numbers
        moment: Any = datetime.datetime(*numbers)
        if offset is None:
            return moment
        return moment.replace(tzinfo=datetime.timezone(datetime.timedelta(seconds=offset)))
    return {"date": datetime.date, "time": datetime.time, "timedelta": datetime.timedelta}[kind](*numbers)


def _array(parts: list[Any]) -> Any:
    kind, items = parts
    if type(kind) is not str or kind[1:] not in _ARRAYS or not _all_numbers(items):
        raise ValueRefused("no array of numbers")
    numpy = sys.modules.get("numpy")
    return items if numpy is None else numpy.array(items, dtype=kind)


def _all_numbers(items: Any) -> bool:
    if type(items) is list:
        return bool(items) and all(map(_all_numbers, items))
    return type(items) in (bool, int, float, complex)


def _deque(parts: list[Any]) -> Any:
    from collections import deque

    most, items = parts
    return deque(items, most)


def _counter(pairs: list[Any]) -> Any:
    from collections import Counter

    return Counter(dict(pairs))


def _ordered(pairs: list[Any]) -> Any:
    from collections import OrderedDict

    return OrderedDict(pairs)


def _defaultdict(parts: list[Any]) -> Any:
    from collections import defaultdict

    factory, pairs = parts
    return defaultdict(factory, pairs)


def _named(parts: list[Any]) -> Any:
    name, fields, values = parts
    if len(fields) > _FIELDS:
        raise ValueRefused("a tuple with too many names")
    key = (name, *fields)
    if key not in _named_types:
        from collections import namedtuple

        if len(_named_types) >= 1000:  # a hostile process could send ever new names
            _named_types.clear()
        _named_types[key] = namedtuple(name, fields)  # raises for names that are not identifiers
    return _named_types[key](*values)


_named_types: dict[Any, Any] = {}
_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    **{"t": tuple, "s": set, "z": frozenset, "d": dict, "c": _complex, "g": _range, "L": _slice},
    **{
        "V": _view,
        "F": _fraction,
        "T": _when,
        "Q": _deque,
        "C": _counter,
        "O": _ordered,
        "U": _defaultdict,
        "P": _named,
        "N": _array,
    },
}

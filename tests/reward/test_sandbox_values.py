"""Typed JSON: every plain value round-trips, and everything else is refused."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import math
import sys
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.reward.sandbox.inside.values import DEPTH, LENGTH, ValueRefused, decode, encode

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**300), max_value=2**300),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters()),  # lone surrogates too
    st.binary(),
    st.sampled_from([int, str, list, range(1, 9, 3)]),
)
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
plain = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.binary().map(bytearray)
    ),
    max_leaves=10,
)


def no_reference(value: Any) -> int:
    raise AssertionError(f"{value!r} is plain data")


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return dict, [(types(k), types(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    return type(value)


@settings(max_examples=200, deadline=None)
@given(plain)
def test_round_trip(value: Any) -> None:
    text = encode(value, no_reference)
    assert text.isascii()
    assert "\n" not in text
    back = decode(text, no_reference)
    assert back == value
    assert types(back) == types(value)


def test_special_floats() -> None:
    assert math.isnan(decode(encode(math.nan, no_reference), no_reference))
    assert decode(encode([math.inf, -math.inf], no_reference), no_reference) == [math.inf, -math.inf]
    assert math.copysign(1, decode(encode(-0.0, no_reference), no_reference)) == -1


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 42

    __index__ = __int__

    def __str__(self) -> str:
        return "42"

    __repr__ = __str__


class Color(enum.IntEnum):
    RED = 3


class Names(collections.Counter[str]):
    pass


class Row(collections.OrderedDict[str, int]):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Liar(7), 7),
        (Color.RED, 3),
        (Names("aab"), {"a": 2, "b": 1}),
        (Row(a=1), {"a": 1}),
    ],
)
def test_subclasses_are_encoded_as_their_base_type(value: Any, expected: Any) -> None:
    back = decode(encode(value, no_reference), no_reference)
    assert back == expected
    assert type(back) is type(expected)


MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 1, 5)


@pytest.mark.parametrize(
    "value",
    [
        fractions.Fraction(-3, 4),
        decimal.Decimal("1.10"),
        decimal.Decimal("NaN"),
        MOMENT.date(),
        MOMENT.time(),
        MOMENT,
        MOMENT.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        datetime.timedelta(days=-1, microseconds=3),
        collections.deque([1, [2]], 5),
        collections.Counter("aab"),
        collections.OrderedDict(a=1, b=2),
        collections.defaultdict(list, a=[1]),
        collections.defaultdict(None, a=1),
        Point(1, [2]),
        [Point((1,), None), ValueError],
    ],
    ids=repr,
)
def test_data_types_of_the_standard_library(value: Any) -> None:
    back = decode(encode(value, no_reference), no_reference)
    assert repr(back) == repr(value)
    assert back == value or back != back
    assert type(back).__name__ == type(value).__name__


def test_objects_are_encoded_as_references() -> None:
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    thing = object()
    assert encode([1, thing], refer) == '[1,{"r":0}]'
    assert decode('[1,{"r":0}]', objects.__getitem__) == [1, thing]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def recursive() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [nested(DEPTH + 1), recursive(), "x" * (LENGTH + 1), 1 << 8 * LENGTH],
    ids=["deep", "recursive", "long", "huge"],
)
def test_oversized_value_is_refused(value: Any) -> None:
    with pytest.raises(ValueRefused):
        encode(value, no_reference)


def test_nesting_up_to_the_limit_is_accepted() -> None:
    assert decode(encode(nested(DEPTH), no_reference), no_reference) == nested(DEPTH)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1 2", "[1", "{", "{}", "nul", "NaN", "Infinity", "'a'", "[1,]", "\x00", '"\x00"', "é", "1]"),
        *('{"x":1}', '{"t":1}', '{"t":[1],"s":[]}', '{"s":[[1]]}', '{"d":[1]}', '{"d":[[1]]}', '{"d":[[[],1]]}'),
        *('{"i":"zz"}', '{"i":5}', '{"f":"1"}', '{"b":"\\u0100"}', '{"c":[1]}', '{"c":["x",1]}', '{"g":[1,2,0]}'),
        *('{"n":"eval"}', '{"n":"type"}', '{"n":[1]}', '{"n":{}}', '{"r":"0"}', '{"r":0.5}', '{"r":true}'),
        *(
            '{"F":[1,0]}',
            '{"F":[1]}',
            '{"F":["1","2"]}',
            '{"F":[1.5,2]}',
            '{"D":"x"}',
            '{"D":1}',
            '{"D":"%s"}' % ("9" * 99_999),
        ),
        *(
            '{"T":["date",1]}',
            '{"T":["eval","1"]}',
            '{"T":[["date"]]}',
            '{"T":["datetime"]}',
            '{"Q":[-1,[]]}',
            '{"Q":[1]}',
        ),
        *(
            '{"P":["A",["x"],[1,2]]}',
            '{"P":["A",["import"],[1]]}',
            '{"P":["A",["x=print()"],[1]]}',
            '{"P":["A b",[],[]]}',
        ),
        *('{"U":[1,[]]}', '{"O":[1]}', '{"C":[[1]]}', '{"l":1}', '{"F":[{"i":"%s"},1]}' % ("f" * 99_999)),
        *("9" * 30, "[" * (DEPTH + 2) + "]" * (DEPTH + 2), "[" * 100_000, '{"t":[' * 5000 + "]}" * 5000),
        '"' + "x" * LENGTH + '"',
    ],
    ids=lambda text: repr(text[:25]),
)
def test_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(ValueRefused):
        decode(text, no_reference)


# ------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("kind", ["bool", "int64", "uint8", "float32", "float64", "complex128", ">i4"])
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (1, 2, 3)])
def test_array_of_numbers_keeps_its_dtype_and_shape(kind: str, shape: tuple[int, ...]) -> None:
    value = numpy.arange(math.prod(shape)).reshape(shape).astype(kind)
    found = decode(encode([value], no_reference), no_reference)[0]
    assert type(found) is numpy.ndarray
    assert (found.dtype, found.shape) == (value.dtype, shape)
    assert (found == value).all()


def test_without_numpy_an_array_arrives_as_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    text = encode(numpy.array([[1, 2], [3, 4]]), no_reference)
    monkeypatch.delitem(sys.modules, "numpy")
    assert decode(text, no_reference) == [[1, 2], [3, 4]]


def test_scalars_and_empty_arrays_are_plain_data() -> None:
    for value, expected in (
        (numpy.float64(2.5), 2.5),
        (numpy.int8(3), 3),
        (numpy.zeros((0, 2)), []),
        (numpy.zeros(0), []),
    ):
        found = decode(encode(value, no_reference), no_reference)
        assert type(found) is type(expected)
        assert found == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"N":["<f8",[]]}',
        '{"N":["<f8",[[],[]]]}',
        '{"N":["|O",[1]]}',
        '{"N":["<f8",["1"]]}',
        '{"N":["<f8",[{"r":1}]]}',
        '{"N":["<f8",[[1],[1,2]]]}',
        '{"N":["|i1",[1000]]}',
        '{"N":[["<f8"],[1]]}',
        '{"N":["<f8"]}',
    ],
)
def test_malformed_array_is_refused(text: str) -> None:
    with pytest.raises(ValueRefused):
        decode(text, lambda number: object())

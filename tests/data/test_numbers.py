"""The last number in a text."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.data.numbers import last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12, so Ann has 12 apples.", "12"),
        ("1,234", "1234"),
        ("1234.0", "1234"),
        ("it is 3.50.", "3.5"),
        ("-4", "-4"),
        ("9 - 4", "4"),
        ("9-4", "4"),
        ("(9) - 4", "4"),
        ("= -4", "-4"),
        ("x is -4.", "-4"),
        ("$12", "12"),
        ("12%", "12"),
        ("1,2", "2"),
        ("12,34", "34"),
        ("no number", None),
        ("", None),
        ("٣", "3"),
        ("3/4", "3/4"),
        ("it is 72 million", "72000000"),
        ("1.2e4", "12000"),
        ("−4", "-4"),
        ("\\frac{3}{4}", "3/4"),
        ("1\u202f234", "1234"),
        ("1/0", None),
        ("1" * 101, None),
        ("#### 72", "72"),
    ],
)
def test_examples(text, number):
    assert last_number(text) == (None if number is None else Fraction(number))


@given(st.text() | st.text("0123456789,.-$ "))
def test_any_text_has_a_last_number_or_none(text):
    found = last_number(text)
    assert found is None or isinstance(found, Fraction)


def test_long_texts_are_read_in_bounded_time():
    ordinary = cpu_seconds("word " * 200_000 + "12")
    for text in ("1" * 10**6, "1," * 10**6, "-" * 10**6, "1,111" * 10**5):
        assert cpu_seconds(text) < 100 * ordinary, "about as long as ordinary text; backtracking would take forever"


def cpu_seconds(text):
    start = time.process_time()
    last_number(text)
    return time.process_time() - start

"""Numbers as people and models write them.

In: any text. Out: exact values. Invariant: no text makes this slow or raise, and nothing is rounded.

It reads `1,234`, `1{,}234`, `-5`, `+5`, U+2212, `.5`, `1.2e4`, `1.2\\times 10^4`, `3/4`, `\\frac{3}{4}`, `1 1/2`,
`50%`, `$18`, `72 million`, `3 dozen`, `minus 5` and digits of other scripts; also `seventy-two` if it is the whole
text.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass, replace
from fractions import Fraction

READ = 20_000
"""Only this many characters at the end of a text are read."""
_LONGEST = 100
"""Limit on the characters of one number."""
SCALES: dict[str, int | Fraction] = {
    **{
        "hundred": 100,
        "thousand": 10**3,
        "million": 10**6,
        "billion": 10**9,
        "trillion": 10**12,
        "dozen": 12,
        "gross": 144,
    },
    **{"lakh": 10**5, "crore": 10**7, "mn": 10**6, "bn": 10**9, "k": 10**3},
    **{"tenth": Fraction(1, 10), "hundredth": Fraction(1, 100), "thousandth": Fraction(1, 1000)},
    **{"millionth": Fraction(1, 10**6), "billionth": Fraction(1, 10**9)},
}
"""Factors of words that follow a number."""
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: n for n, word in enumerate(_UNITS.split())}
_WORDS |= {word: 10 * n for n, word in enumerate(_TENS.split(), 2)}
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5}


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number and how it was written."""

    value: Fraction
    places: int = 0
    """Decimal places as written; 0 for a whole number or a fraction."""
    digits: int = 0
    """Significant digits as written, if it is a decimal."""
    percent: bool = False
    currency: str = ""
    start: int = 0
    end: int = 0
    """Its position in the plain text."""


# ------------------------------------------------------------------------------------------------- plain text

# Zero-width characters, variation selectors and marks of text direction.
_INVISIBLE = dict.fromkeys(
    [0x200B, 0x200C, 0x200D, 0x2060, 0xFE0F, 0xFEFF, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
_SIGNS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u2044\u2215÷", "/"),
    **dict.fromkeys("·⋅", "\\cdot "),
    **{"×": "\\times ", "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "∪": "\\cup "},
    **{"≈": "\\approx ", "≤": "\\le ", "≥": "\\ge ", "±": "\\pm "},
    **dict.fromkeys("→⇒⟹∴", " "),
    **{"’": "'", "‘": "'", "“": '"', "”": '"', "∶": ":"},
}
_FULL_WIDTH = {chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}
_VULGAR = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# Narrow spaces and LaTeX's \, between groups of three digits: 1 234 is one number.
_THIN = re.compile(r"(?<=[0-9])(?:[\u00a0\u2007\u2009\u200a\u202f]|,?\\[,;:!] ?|~|\{,\})(?=[0-9]{3}(?![0-9]))")
_SPACE = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|[^\S\n]+")
# Sizes of brackets and the like, which do not change a value.
_STYLE = re.compile(r"\\(?:left|right|bigg?[lr]?|Bigg?[lr]?|displaystyle|limits|mathstrut)(?![A-Za-z])")
# \dfrac, \tfrac and \cfrac differ from \frac in their size only.
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")


def plain(text: str) -> str:
    """The same text with ASCII digits, signs and spaces, without LaTeX that only changes the layout."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPT) + "}", text.translate(_INVISIBLE))
    if not text.isascii():
        text = _THIN.sub(",", "".join(map(_ascii, text)))
    text = _THIN.sub(",", text).replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
    text = _FRACTION.sub(r"\\frac", _STYLE.sub("", text))
    return _SPACE.sub(" ", text)


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    if character in _VULGAR:
        return f" {_VULGAR[character]}"
    if unicodedata.category(character) in ("So", "Sk") and character != "°":
        return " "  # an emoji
    digit = unicodedata.decimal(character, None)
    return str(digit) if digit is not None else _SIGNS.get(character) or _FULL_WIDTH.get(character, character)


# ------------------------------------------------------------------------------------------------- finding numbers

# With commas only in groups of three: "1,2" is two numbers.
_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INT}(?:\.[0-9]+)?|\.[0-9]+)"
# 1.2 \times 10^4, 1.2 x 10^{-4}, 1.2*10**4.
_POWER = (
    r"\s?(?:\\times|\\cdot|\*|x)\s?10\s?(?:\^|\*\*)\s?"
    r"(?:\{\s?(?P<p1>[+-]?[0-9]{1,3})\s?\}|(?P<p2>[+-]?[0-9]{1,3})(?![0-9]))"
)
_CURRENCY = r"(?:(?<![A-Za-z])(?:US|[ACR]))?\$|[€£¥₹¢₩₽₺₫]|(?:USD|EUR|GBP)\b"
_MONEY = rf"{_CURRENCY}|(?:dollars?|euros?|cents?)\b"
# Canadian, Australian and other dollars stay different from "$".
_SAME_MONEY = {**{"US$": "$", "USD": "$", "dollar": "$"}, **{"EUR": "€", "euro": "€", "GBP": "£", "cent": "¢"}}
# \frac12 without braces takes one digit each.
_TWO_DIGITS = r"[0-9]\s?[0-9](?![0-9])"
_LARGE = (
    r"(?:(?:ten|hundred|thousand|million|billion)th"
    r"|hundred|thousand|million|billion|trillion|dozen|gross|lakh|crore|bn|mn)s?\b"
)
_NUMBER = re.compile(
    # A sign counts only if nothing precedes it that it could subtract from: "9 - 4" ends with 4, "= -4" with -4.
    rf"(?P<sign>(?<![0-9A-Za-z)\]%.}}])(?<![0-9)}}] )(?:[+-]|(?i:minus|negative)\s)\s?)?"
    rf"(?P<before>{_CURRENCY})?\s?(?P<inner>(?<=[$€£¥₹])-)?"
    # Mixed numbers and fractions come before decimals: "1 1/2" must not be read as 1.
    rf"(?:(?P<whole>{_INT})(?:\s?|\s(?:and\s)?)"
    rf"(?P<f1>\\frac\s?(?:\{{\s?[0-9]+\s?\}}\s?\{{\s?[0-9]+\s?\}}|{_TWO_DIGITS}))"
    rf"|(?P<whole2>{_INT})\s(?:and\s)?(?P<f2>[0-9]+\s?/\s?[0-9]+(?!\.?[0-9]))"
    rf"|(?P<f3>\\frac\s?(?:\{{\s?[+-]?{_DECIMAL}\s?\}}\s?\{{\s?{_DECIMAL}\s?\}}|{_TWO_DIGITS}))"
    rf"|(?P<decimal>{_DECIMAL})"
    rf"(?:[eE](?P<e>[+-]?[0-9]{{1,3}})(?![0-9A-Za-z])|{_POWER}|(?P<over>\s?/\s?{_INT}(?!\.?[0-9])))?)"
    # "2 and a half", "50 percent", "72 million", "3k", "5 €".
    r"(?P<half>\sand\s(?:a|one)\s(?:half|quarter|third)\b)?(?:\s?(?P<percent>%|per\s?cent\b|pct\b|percentage\b))?"
    rf"(?P<scale>(?:[ -]?{_LARGE}|[kK]\b(?!\s?[/^]))*)(?:\s?(?P<after>{_MONEY}))?"
)


def numbers_in(text: str) -> list[Number]:
    """Every number in digits in a plain text, from left to right."""
    return [n for match in _NUMBER.finditer(text) if (n := _read(match))]


def last_number(text: str) -> Fraction | None:
    """The last number in a text; `None` if there is none, or if it is too long or divides by zero.

    `1,234` is one number, and so is `3/4`. A sign counts only if nothing precedes it that it could subtract from."""
    text = plain(text[-READ:])
    last = last_match(_NUMBER, text)
    number = _read(last) if last else None
    return number.value if number else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern."""
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def whole_number(text: str) -> Number | None:
    """The number if it is the whole plain text, also with groups of three digits (`1 234`)."""
    if re.fullmatch(r"[+-]?\s?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?", text):
        text = text.replace(" ", "")
    match = _NUMBER.match(text)
    if match and match.end() == len(text):
        return _read(match)
    words = numbers_spelled(text)
    return words[0] if words and (words[0].start, words[0].end) == (0, len(text)) else None


def _read(match: re.Match[str]) -> Number | None:
    # Exact arithmetic on a number of a million digits would be slow.
    if match.end() - match.start() > _LONGEST:
        return None
    try:
        number = _value(match)
    except ZeroDivisionError:
        return None
    value = number.value
    if match["half"]:
        value += Fraction(1, _PARTS[match["half"].split()[-1]])
    for word in re.findall(r"[A-Za-z]+", match["scale"]):
        value *= SCALES[word.lower().removesuffix("s") if word.lower() not in SCALES else word.lower()]
    if (match["sign"] or "").lower().startswith(("-", "minus", "negative")) != bool(match["inner"]):
        value = -value
    currency = (match["before"] or match["after"] or "").removesuffix("s")
    currency = _SAME_MONEY.get(currency, currency)
    return replace(
        number, value=value, percent=bool(match["percent"]), currency=currency, start=match.start(), end=match.end()
    )


def _value(match: re.Match[str]) -> Number:
    if fraction := match["f1"] or match["f2"] or match["f3"]:
        whole = _decimal(match["whole"] or match["whole2"] or "0").value
        return Number(value=whole + _quotient(fraction))
    number = _decimal(match["decimal"])
    if power := match["e"] or match["p1"] or match["p2"]:
        return replace(number, value=number.value * Fraction(10) ** int(power), places=0)
    return Number(value=number.value / _decimal(match["over"].strip(" /")).value) if match["over"] else number


def _quotient(text: str) -> Fraction:
    parts = re.findall(rf"[+-]?{_DECIMAL}", text)
    if len(parts) == 1:  # \frac12
        parts = list(parts[0])
    return _decimal(parts[0]).value / _decimal(parts[1]).value


def _decimal(text: str) -> Number:
    text = text.replace(",", "")
    places = len(text.partition(".")[2])
    # Fraction, not float: 0.1 + 0.2 must equal 0.3, and 2**60 + 1 must not equal 2**60.
    return Number(value=Fraction(text), places=places, digits=len(text.replace(".", "").strip("+-").lstrip("0")))


# ------------------------------------------------------------------------------------------------- number words

_ONE = "|".join(_WORDS)
_SPELLED = re.compile(
    rf"(?i)\b(?:(?:minus|negative)\s)?(?:{_ONE})"
    rf"(?:(?:[ -]|\sand\s)(?:{_ONE}|hundred|thousand|million|billion|dozen))*\b"
)


def numbers_spelled(text: str) -> list[Number]:
    """Every number in English words."""
    return [
        Number(value=_of_words(m[0].lower()), start=m.start(), end=m.end())
        for m in _SPELLED.finditer(text[:READ])
        if m.end() - m.start() <= 2 * _LONGEST
    ]


def _of_words(text: str) -> Fraction:
    total = Fraction(0)
    part = Fraction(0)
    for word in re.findall("[a-z]+", text):
        if word in _WORDS:
            part += _WORDS[word]
        elif word in ("hundred", "dozen"):
            part *= SCALES[word]
        elif word in SCALES:
            total += part * SCALES[word]
            part = Fraction(0)
    return -(total + part) if text.startswith(("minus", "negative")) else total + part

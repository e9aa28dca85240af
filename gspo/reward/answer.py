"""Parse an answer: a number, a multiple-choice letter, a list, or a formula.

In: the text of an answer, from the data or from a completion. Out: an `Answer`, or `None` if it cannot be parsed.
Invariant: a statement that hedges ("72 or 73") or negates ("not 72") is not an answer. Units are dropped; words that
change the value ("72 million") are not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gspo.data.numbers import Number, last_match, numbers_in, numbers_spelled, plain, whole_number
from gspo.reward.final_answer import FinalAnswer, final_answer
from gspo.reward.markup import without_asides, without_style
from gspo.reward.qualifiers import FUNCTION, altered, applied, compound, denied, spelled_otherwise

LONGEST = 2000
"""Maximum length of an answer in characters."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A parsed answer."""

    text: str
    """LaTeX if it is a formula."""
    number: Number | None = None
    choice: str = ""
    items: tuple[Answer, ...] = ()
    brackets: str = ""
    """Brackets of a list: `()`, `[)`, ...; `{}` for a set and for a list without brackets, whose order is ignored."""
    name: str = ""
    """The variable it is the value of: the x of `x = 5`."""
    base: int = 0
    """The base of a number, if it is given: `72_8`. The digits are in `text`."""


_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
# **72**, but not the power 2**72.
_EMPHASIS = re.compile(r"(?<![0-9A-Za-z)*])\*\*([^*\n]+)\*\*(?![0-9A-Za-z(*])")
# 45^\circ is the number 45: the unit of an angle does not change which number it is.
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|°|\\degree(?![A-Za-z])")
_NAMES = re.compile(rf"(?<![A-Za-z\\])({FUNCTION})(?![A-Za-z])")
_ROOT = re.compile(r"\\sqrt ?(?:\(([^()]*)\)|([0-9]+))")
_ENVIRONMENT = re.compile(r"\\(?:begin|end) ?\{[a-z]+\*?\}")
# A word shows that a text is a sentence. Two letters may be a product of variables (xy), so only these count.
_WORD = re.compile(
    r"(?<![A-Za-z\\])(?:[A-Za-z]{3,}|(?i:so|it|is|we|he|of|to|at|by|as|an|be|if|my|no|on|us)(?![A-Za-z]))"
)
# Units that may touch their number: 5cm, 3rd. Longer words are recognized by their length.
_SHORT = "cm|mm|km|kg|mg|ml|mL|ft|in|lb|oz|hr|st|nd|rd|th|am|pm|cc|hp|yd|mi"
_SQUARED = r"(?: ?\^ ?\{?-?[123]\}?)?[.,;:]?"
_LONG = r"[A-Za-z]+(?:['-][A-Za-z]+)*"
_SMALL = "of|to|a|an|at|by|on|is|as"
_UNIT = re.compile(
    rf"(?:(?<=[0-9}})])(?:{_SHORT}|[A-Za-z]{{4,}})|[ /](?:{_SHORT}|[mgslLhJNWVKCF]|(?=[A-Za-z]{{3}}){_LONG}|{_SMALL}))"
    rf"{_SQUARED}(?:(?:[ /]|\(s\))+{_LONG}{_SQUARED}|\(s\))*\s*"
)
_BEFORE = re.compile(r"(?:[A-Za-z]{2,}(?:['-][A-Za-z]+)*[,:]? ?)*")
_MEMBER = re.compile(r"[A-Za-z] ?\\in ?(?=[\[(\\])")
"""The variable of a set of solutions: x \\in [1, 2]."""
# 72_8, 72_{8}, 72_{eight}.
_BASED = re.compile(r"\(?([0-9][0-9A-Fa-f]*)\)? ?_ ?(?:\{ ?\(?([0-9]{1,2}|[a-z]+)\)? ?\}|([0-9]{1,2}))")
_CHOICE = re.compile(r"(?:(?i:option|choice) )?\(?([A-J])\)?[.:]?")
_LABEL = re.compile(r"[\s$*{]*\([A-J]\)[\s}*]*(?=\S)")
"""The letter of a choice before its value: (D) 4."""
_ROUNDED = re.compile(r"(?<=[0-9})])\s*(?:≈|\\approx|\\simeq)\s*[0-9]*\.[0-9]+")
"""The decimal after an exact value: 7/12 ≈ 0.583."""
# A choice inside a sentence: "the answer is (B)". Not the A of "A's" or "A(".
_CHOSEN = re.compile(r"(?<![A-Za-z0-9\\])(?:\(([A-J])\)|([A-J])(?![A-Za-z0-9'(]))")
_UNSURE = re.compile(r"(?i)\b(?:or|maybe|perhaps|possibly|alternatively)\b")
_RANGE = re.compile(r"(?i)\b(?:between|from)\s*(?:about\s+)?[$€£(]?\s*$")
_EXCLAIMED = re.compile(r"(?<=[0-9])!+(?=[\s*_\"')]*$)")
"""An exclamation mark that ends a sentence and is not a factorial."""
# The signs between the sides of an equation; <=, != and := are not.
_RELATION = re.compile(r"(?<![<>!:\\])=(?!=)|\\(?:approx|simeq|equiv)(?![A-Za-z])")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|leq|geq|lt|gt|ne|neq|pm|mp|in|not)(?![A-Za-z])")
_IDENTIFIER = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z0-9]\))?")
_SPAN = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# A calculation in a sentence: "it costs 3 * 4 + 5".
_RUN = re.compile(r"[-+*/^(). 0-9,$€£]*[0-9)]%?")
_JOINED = re.compile(r"(?:and|or)(?![A-Za-z])")


def read_expected(text: str) -> Answer | None:
    """Parse the expected answer as a whole. From words with a single number, take that number."""
    # Data sets such as MATH and GSM8K give the whole solution, with the answer in a box or after ####.
    stated = final_answer(text) if "\\boxed" in text or "####" in text else None
    text = stated.texts[-1] if stated else text
    said = _plain(text)
    if _doubtful(said):
        return None
    found = read_formula(text)
    if found is not None and not _worded(found):
        return found
    numbers = numbers_in(said)
    return Answer(text=said, number=numbers[0]) if len(numbers) == 1 and not _INEQUALITY.search(said) else None


def read_stated(text: str, stated: FinalAnswer, expected: Answer) -> Answer | None:
    """Parse one statement of a completion."""
    if len(text) > LONGEST:
        if stated.formula:
            return None
        # A marked answer stands at its start, an unmarked one in the last words.
        text = text[:LONGEST] if stated.marked else text[-LONGEST:]
    # "It is 72!" is no factorial, unless the expected answer has one.
    if not stated.formula and "!" not in expected.text:
        text = _EXCLAIMED.sub("", text)
    said = _plain(text)
    if expected.choice:
        return _chosen(said, stated)
    if not expected.number or (expected.number.value.denominator > 1 and not expected.number.places):
        text = _ROUNDED.sub("", text)
    # Multiple-choice answers repeat the letter before the value.
    if _LABEL.match(said) and not _LABEL.match(expected.text):
        text = _LABEL.sub("", without_style(text), count=1)
    said = _plain(text)
    if _doubtful(said, several=bool(expected.items)) or _contradictory(_sides(_trimmed(said))):
        return None
    found = read_formula(text)
    # An unmarked sentence with commas is no list, unless a list is expected.
    sentence = not stated.marked and found and found.items and not expected.items
    if found is not None and not sentence and not _worded(found):
        return found
    return None if stated.formula else _in_prose(text, said, stated)


def read_formula(text: str) -> Answer | None:
    """Parse a text that is an answer as a whole, except for words before it and units after it."""
    text = _trimmed(_DEGREES.sub(" ", _plain(text)))
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    if not text or len(text) > LONGEST:
        return None
    equations = _split(text)
    # x = 1, y = 2
    if len(equations) > 1 and all(len(_sides(part)) == 2 for part in equations):
        return _listed(text, "{}", equations)
    sides = _sides(text)
    name = sides[0] if len(sides) > 1 and _IDENTIFIER.fullmatch(sides[0]) else ""
    value = _trimmed(sides[-1])
    if based := _BASED.fullmatch(value):
        return _in_base(based, name)
    if number := _quantity(value):
        return Answer(text=value, number=number, name=name)
    if match := _CHOICE.fullmatch(text):
        return Answer(text=text, choice=match[1])
    brackets, parts = _parts(value)
    if brackets:
        return _listed(value, brackets, parts, name)
    if len(sides) > 1 and not name:
        # Of "3 + 4 = 7" the value counts; "2x + y = 5" is the answer as a whole.
        numeric = not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", sides[-1]))
        value = value if numeric and not re.search(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])", sides[0]) else text
    return Answer(text=_latex(_without_unit(value)), name=name)


def _in_base(found: re.Match[str], name: str = "") -> Answer | None:
    """A number with its base, `72_8`."""
    said = found[2] or found[3]
    spelled = numbers_spelled(said)
    base = int(said) if said.isdigit() else int(spelled[0].value) if spelled else 0
    if base == 10:
        return Answer(text=found[1], number=whole_number(found[1]), base=10, name=name)
    return Answer(text=found[1], base=base, name=name) if 2 <= base <= 36 else None


def _listed(text: str, brackets: str, parts: list[str], name: str = "") -> Answer | None:
    items = tuple(item for part in parts if (item := read_formula(part)))
    return Answer(text=text, items=items, brackets=brackets, name=name) if len(items) == len(parts) else None


# ------------------------------------------------------------------------------------------------- sentences


def _in_prose(text: str, said: str, stated: FinalAnswer) -> Answer | None:
    """The last number or formula of a sentence."""
    span = _last_span(text)
    if span is not None:
        return read_formula(span)
    numbers = numbers_in(said)
    based = last_match(_BASED, said)
    # Otherwise the number after it is the answer.
    if based and numbers and numbers[-1].start < based.end():
        return _in_base(based)
    if not numbers:
        spelled = numbers_spelled(said) if stated.marked else []
        return Answer(text=said, number=spelled[0]) if len(spelled) == 1 else None
    run = next((m[0] for m in _RUN.finditer(said) if m.end() >= numbers[-1].start + 1), "").strip(" ,+*/^.")
    if len(numbers_in(run)) > 1 and re.search(r"[0-9)%] ?[-+*/^(] ?[$€£]?[0-9(.]", run):
        return read_formula(re.sub("[$€£,]", "", run))
    if applied(said[: numbers[-1].start]):
        return None  # sin 72
    if re.match(r"[A-Za-z\\^_(]", said[numbers[-1].end :]) and not _UNIT.match(said, numbers[-1].end):
        return None  # part of a formula that is not delimited by dollar signs
    return Answer(text=run, number=numbers[-1])


def _doubtful(said: str, *, several: bool = True) -> bool:
    """Whether a sentence negates or changes its last number, or hedges between two."""
    numbers = numbers_in(said)
    if not numbers:
        return False
    last = numbers[-1]
    if altered(said[: last.start], said[last.end :]) or spelled_otherwise(said[last.end :], last.value):
        return True
    # The same number twice is no hedge.
    if len(numbers) < 2 or numbers[-1].value == numbers[-2].value:
        return False
    before, between = said[: numbers[-2].start], said[numbers[-2].end : numbers[-1].start]
    if compound(numbers[-2], between, last, said[last.end :]):
        return True
    ranged = bool(_RANGE.search(before)) and bool(re.search(r"(?i)\b(?:and|to)\b", between))
    # Two adjacent numbers are two answers, unless a space separates thousands (1 234).
    adjacent = not between.strip() and not re.match(r"[0-9]{3}(?![0-9])", said[numbers[-1].start :].lstrip())
    hedged = not several and (adjacent or (bool(_UNSURE.search(between)) and "=" not in between))
    ranged = ranged or bool(re.fullmatch(r"\s*to\s*", between))
    return len(between) < 40 and (ranged or hedged)


def _last_span(text: str) -> str | None:
    """The formula between the last pair of dollar signs or brackets, if no number follows it. Prices do not count."""
    # An escaped dollar sign is money and must not open a formula.
    text = text.replace("\\$", "USD ")
    last = last_match(_SPAN, text)
    if last is None:
        return None
    inside = next((group for group in last.groups() if group), "")
    money = last[0].startswith("$") and _WORD.search(_NAMES.sub("", plain(inside))) and "\\" not in inside
    return None if money or numbers_in(plain(text[last.end() :])) else inside


def _chosen(said: str, stated: FinalAnswer) -> Answer | None:
    match = _CHOICE.fullmatch(_trimmed(said))
    found = [m for m in _CHOSEN.finditer(said) if not denied(said[: m.start()])] if stated.marked else []
    letters = {m[1] or m[2] for m in found}
    if not match and len(letters) != 1:
        return None
    return Answer(text=said, choice=match[1] if match else letters.pop())


# ------------------------------------------------------------------------------------------------- formulas


def _plain(text: str) -> str:
    """Text without nested boxes, emphasis and other formatting."""
    return without_asides(plain(_EMPHASIS.sub(r"\1", without_style(_BOX.sub("", text)))).replace("\n", " "))


def _trimmed(text: str) -> str:
    """Text without surrounding dollar signs, emphasis, quotes and braces, and without a final period."""
    before = None
    while text != before:
        before, text = text, text.strip(" *_`\"'«»•∎").lstrip(":").rstrip(".,;:?")
        # Repeated until nothing changes, because **$72$.** has several layers.
        for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("{", "}")):
            inside = text[len(left) : len(text) - len(right)]
            whole = left != "{" or _closed_at(text) == len(text) - 1
            if text.startswith(left) and text.endswith(right) and len(text) >= len(left + right) and whole:
                text = inside
    return text.removeprefix("- ") if re.match(r"- [0-9$]", text) and len(text) < 20 else text


def _closed_at(text: str) -> int:
    """Index where the bracket at the start of a text is closed; `-1` if it is not."""
    depth = 0
    for at, character in enumerate(text):
        # \{ is a set's brace, not a group of LaTeX.
        if at and text[at - 1] == "\\" and character in "{}":
            continue
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return at
    return -1


def _quantity(text: str) -> Number | None:
    """The number that makes up a whole text, except for words before it and units after it."""
    if number := whole_number(text):
        return number
    numbers = numbers_in(text) or numbers_spelled(text)
    if len(numbers) != 1 or _INEQUALITY.search(text):
        return None
    before, after = text[: numbers[0].start].rstrip(), text[numbers[0].end :].rstrip()
    if applied(before):
        return None
    return numbers[0] if _BEFORE.fullmatch(before) and (not after or _unit_at(text, numbers[0].end)) else None


def _unit_at(text: str, at: int) -> bool:
    return bool(_UNIT.fullmatch(text, at)) and not _NAMES.search(text, at)


def _without_unit(text: str) -> str:
    for match in re.finditer(r"[ ]|(?<=[0-9})])(?=[A-Za-z])", text):
        if _unit_at(text, match.start()):
            return text[: match.start()]
    return text


def _sides(text: str) -> list[str]:
    """The sides of an equation; the text itself if it is not an equation, or is an inequality."""
    if _INEQUALITY.search(text):
        return [text]
    return [side.strip() for side in _RELATION.split(text) if side.strip()] or [text]


def _contradictory(sides: list[str]) -> bool:
    """Whether an equation equates two different whole numbers."""
    numbers = [whole_number(side) for side in sides] if len(sides) > 1 else []
    whole = {n.value for n in numbers if n and n.value.denominator == 1 and not n.percent}
    return len(whole) > 1


def _parts(text: str) -> tuple[str, list[str]]:
    """The brackets and items of a set, tuple, interval or list; empty brackets for anything else."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{}", _split(text[2:-2])
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and _closed_at(text) == len(text) - 1:
        # (1,234) has two items, but 1,234 is one number.
        parts = _split(text[1:-1], thousands=False)
        return (text[0] + text[-1], parts) if len(parts) > 1 else ("", [text])
    parts = _split(text)
    return ("{}", parts) if len(parts) > 1 else ("", parts)


def _split(text: str, *, thousands: bool = True) -> list[str]:
    """Items separated by commas, semicolons, "and" or "or" outside of brackets."""
    parts = []
    depth = start = at = 0
    while at < len(text):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        joined = _JOINED.match(text, at) if depth == 0 and (at == 0 or not text[at - 1].isalpha()) else None
        # The comma of 1,234 separates no items.
        grouped = thousands and re.match(r",[0-9]{3}(?![0-9])", text[at : at + 5]) and text[at - 1 : at].isdigit()
        if depth == 0 and (joined or (text[at] in ",;" and not grouped)):
            parts.append(text[start:at])
            start = at = joined.end() if joined else at + 1
        else:
            at += 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _latex(text: str) -> str:
    """Plain mathematics as LaTeX."""
    text = _NAMES.sub(r"\\\1 ", text)
    return _ROOT.sub(lambda m: "\\sqrt{" + (m[1] or m[2] or "") + "}", text).replace("**", "^").replace("*", "\\cdot ")


def _worded(answer: Answer) -> bool:
    """Whether a supposed formula still contains words: LaTeX would read them as products of variables."""
    if answer.number or answer.choice or answer.base:
        return False
    if answer.items:
        return any(map(_worded, answer.items))
    return bool(_WORD.search(_ENVIRONMENT.sub("", re.sub(r"\\[A-Za-z]+", " ", _ENVIRONMENT.sub("", answer.text)))))

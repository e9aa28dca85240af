"""Words that change a number next to them, or retract it.

In: the text before a number, the text after it, or the text after an answer. Out: whether the number is still the
stated value. Invariant: units and other words that do not change the value ("a total of 72 clips") pass.
"""

from __future__ import annotations

import re
from fractions import Fraction

from gspo.data.numbers import Number, numbers_spelled

_ONES = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    "|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|billion"
)
_FRACTION = "half|halves|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth"
FUNCTION = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|exp|ln|pi|infty|sqrt|cup|cap|mod|gcd|lcm|max|min"
)
"""Names that are functions or symbols in formulas even without a backslash."""
# Signs that may stand between a word and its number: "not $72", "at least **72**".
_OPEN = r"[$€£(*\\]*\s*$"
# "adds up to 72" and "left over 72" state the number; "up to 72" and "over 72" do not.
_DENIED = re.compile(
    r"(?i)(?:\b(?:not|cannot|can't|never|neither|nor|isn't|no longer|anything but|at least|at most|under|above|below"
    r"|(?<!add )(?<!adds )(?<!sum )(?<!sums )(?<!adding )(?<!comes )up to"
    r"|almost|nearly|twice|thrice|double|triple|half(?: of)?|(?<!left )over|beyond|exceeding|in excess of"
    r"|instead of|as opposed to|vs\.?|versus|besides|except(?: for)?|far from|away from|different from|nowhere near"
    r"|shy of|short of|all but|(?:more|less|other|rather|[a-z]+er) than|times as \w+ as)"
    r"|\\pm|\\mp)\s*"
    rf"(?:(?:equal to|exactly|about|be|the|option)(?:\s+|$))*{_OPEN}"
)
_OF = re.compile(
    rf"(?i)(?:(?:\b(?:{_FRACTION}|roots?|square|cube|reciprocal|inverse|negative|opposite|log(?:arithm)?|sine|cosine"
    r"|tangent|factorial|multiple|divisor|digits|predecessor|successor|percent|short|all but|out)s?|%)\s+of"
    r"|\blog base \w+ of|\b(?:root|det|lg|log base|to the power(?: of)?)|(?<!this )(?<!that )\bpoint)\b"
    rf"(?:\s+(?:the|number))*\s*{_OPEN}|\b(?:{_ONES}|raised|[0-9]) to the$"
)
"""Operations on the number that follows: the square root of 72 is not 72."""
_COUNTED = re.compile(
    rf"(?i)\b(?:(?:{_ONES}|trillion|dozen)(?:[ -]|\s+(?:and|plus|minus|times|point|over|in|out of|of|divided by"
    r"|multiplied by))?|multiplied by|divided by)\s*\$?$"
)
"""Number words and factors before a number: one hundred 72, three times 72."""
_APPLIED = re.compile(rf"(?<![A-Za-z\\])(?:{FUNCTION})\s*$")

_AFTER = r"[\s(\[*_-]*"
_BY = "plus|minus|less|times|point|divided by|multiplied by|remainder|to the power of|mod|modulo|choose"
_SOME = f"a (?:bit|little|few)|an?[\\s-](?:{_FRACTION})|some|{_ONES}"
# Words after a number that change its value: "72 or more", "72 squared", "72 times two", "72 and a half".
_CHANGED = re.compile(
    r"(?i)(?:\s+or (?:more|less|fewer|higher|lower)\b"
    rf"|{_AFTER}(?:in )?(?:squared|cubed|factorial|per mille|basis points?|at (?:least|most)|base [a-z]+|dozens|halves"
    r"|(?:ten|hundred|thousand|million|billion|lakh|crore|third|fourth|fifth|sixth|seventh|eighth|ninth)s"
    r"|(?:m|b|tr|quadr|quint|z)illions?)\b"
    rf"|{_AFTER}(?:in )?(?:negative|half|hex|hexadecimal|octal|binary|score|mil)\W*$"
    rf"|{_AFTER}(?:{_BY})[\s-]+(?:{_SOME})\b|{_AFTER}(?:and|over)[\s-]+(?:{_SOME})(?:[\s-](?:{_ONES}))*\W*$"
    rf"|\s+(?:{_ONES})[\s-](?:{_FRACTION})s?\b"
    rf"|(?:\s+[a-z]+){{0,2}}\s+(?:and|plus|minus|less)\s+(?:an?|{_ONES})[\s-](?:{_FRACTION})s?\b"
    r"|\s+to the \w+ power\b|\s+with a remainder\b)"
)
# Words after a number that reject it: "72 (no)", "72 was my first guess", "72 is too high".
_REFUTED = re.compile(
    r"(?i)(?:[\s(\[,;:.*_-]*(?:no|nope|not|wrong|incorrect|false|invalid|rejected|extraneous"
    r"|(?:maybe|probably|perhaps) not)\s*[.!)\]*_]*$"
    r"|\s+was (?:my|the|an?) (?:first|initial|earlier|original|previous)\b"
    r"|(?:,?\s+[a-z]+){0,2}\s+(?:is|was|seems|looks|must be|would be)\s+(?:wrong|incorrect|false|impossible|invalid"
    r"|extraneous|too (?:high|low|large|small|big|many|much|few))\b"
    r"|\s+(?:(?:is|was|does|did|can|could|would) ?(?:not|n't)|can't|cannot|won't|fails)\b)"
)
# Units of the first of two numbers that form one quantity: 1 hour 12 minutes, 5 feet 3 inches.
_LARGER = re.compile(
    r"(?i)\s*(?:years?|months?|weeks?|days?|hours?|hrs?|h|minutes?|mins?|feet|foot|ft|yards?|pounds?|lbs?|km|meters?"
    r"|m)?\s*(?:,\s*)?(?:and)?\s*"
)
_SMALLER = re.compile(
    r"(?i)\s*(?:months?|weeks?|days?|hours?|hrs?|h|minutes?|mins?|seconds?|secs?|s|inch(?:es)?|in|ft|feet|ounces?|oz"
    r"|m|meters?|cm|centimeters?)(?![a-z])"
)

ASIDE = (
    r"(?:in )?(?:(?:ten|hundred|thousand|million|billion|trillion)s?|dozens?|squared|cubed|negative|half|hex|octal"
    r"|binary|base [a-z]+|no|nope|not|wrong|incorrect|false|invalid|rejected|extraneous|at least|at most|minus \w+)"
)
"""Words that change a number even in parentheses after it."""
# What people and models write before they correct themselves.
_FILLER = r"(?:(?:oh|hm+|well|but|wait|um+|actually|sorry|ok|okay|oops)\b[\W_]*)*"
_IT = "it|that|this|the (?:right |correct |final )?answer"
_DIGIT = r"\s+[$€£(*\\-]*[0-9]"
# A sentence that retracts the answer before it: "No.", "Wait, it is 73", "Scratch that".
_TAKEN_BACK = re.compile(
    rf"(?i)[\W_]*{_FILLER}(?:"
    r"no(?=\s*(?:[.,!;:)—-]|$)|\s+wait)|nope\b|(?:wrong|incorrect|false|never)(?=\s*(?:[.,!;:)]|$))"
    r"|(?:(?:certainly|absolutely|definitely|of course|probably|clearly|obviously|surely)\s+)?not(?=\s*(?:[.!,)]|$)"
    r"|\s+(?:at all|really|quite|right|correct|true)\b)"
    r"|(?:that|this|it|which)(?:'s| is| was) (?:wrong|incorrect|false|impossible|a mistake|an error)\b"
    r"|(?:that|this|it|which)(?:'s not| is not| was not| isn't| wasn't| cannot be| can't be)(?=\s*(?:[.!,)]|$)"
    r"|\s+(?:right|correct|true|it|the (?:right |correct |final )?answer)\b)"
    r"|(?:that|this|it) (?:doesn't|does not) (?:work|fit|hold|add up|make sense)\b"
    r"|(?:scratch|strike|ignore|forget|disregard) (?:that|this|it)\b|(?:just |i'm |i am )*kidding\b"
    r"|correction(?=\s*[:,\u2014-])|or rather\b|i meant\b|on second thoughts?\b"
    rf"|(?:i mean|make that),?{_DIGIT}|(?:{_IT}) should (?:actually )?(?:be|have been){_DIGIT}"
    r"|i (?:was|am) (?:wrong|mistaken)\b|i made an? (?:mistake|error)\b|i take (?:that|it) back\b)"
    rf"|[\W_]*(?:hm+|wait|actually|sorry|oops)\b[\W_]*{_FILLER}(?:{_IT})(?:'s| is){_DIGIT}"
)
SENTENCE = re.compile(r"(?<=[.!?])(?=[\s*_\"')]|$)|\n")
_LATER = 500
"""Number of characters after an answer that are searched for a retraction."""


def altered(before: str, after: str) -> bool:
    """Whether the words around a number negate it or change its value."""
    # Bounded, because the patterns search the whole text.
    before, after = before[-100:], after[:100]
    if any(pattern.search(before) for pattern in (_DENIED, _OF, _COUNTED)):
        return True
    return bool(_CHANGED.match(after) or _REFUTED.match(after))


def denied(before: str) -> bool:
    """Whether the words before an answer negate it: not 72."""
    return bool(_DENIED.search(before[-100:]))


def spelled_otherwise(after: str, value: Fraction) -> bool:
    """Whether a number is followed only by a different number in words: 72 (seventy-three)."""
    words = after[:60].strip(" ().")
    found = numbers_spelled(words)
    return len(found) == 1 and found[0].end - found[0].start == len(words) and found[0].value != value


def compound(first: Number, between: str, last: Number, after: str) -> bool:
    """Whether two numbers are one quantity: 1 hour and 12 minutes, 5 dollars and 72 cents."""
    if not _LARGER.fullmatch(between):
        return False
    return (first.currency, last.currency) == ("$", "¢") or bool(
        re.search("[A-Za-z]", between) and _SMALLER.match(after)
    )


def applied(before: str) -> bool:
    """Whether the number that follows is the argument of a function: sin 72."""
    return bool(_APPLIED.search(before[-20:]))


def taken_back(after: str) -> bool:
    """Whether the text after an answer retracts it. A "No" that answers another question does not count."""
    first_number = re.search("[0-9]", after[:_LATER])
    remark = after[: first_number.end() if first_number else _LATER].replace("’", "'")
    for sentence in SENTENCE.split(remark):
        if _TAKEN_BACK.match(sentence):
            return True
        # The "No" after a question answers the question.
        if sentence.rstrip(" *_\"')").endswith("?") and re.search("[A-Za-z]", sentence):
            return False
    return False

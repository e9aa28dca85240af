"""1 if the completion equals the `answer` column, else 0.

The text after the last `marker` is compared, or the whole completion if no marker is set; a completion without the
marker is wrong. Thinking (`<think>`) and the tags of `<answer>` are ignored. Surrounding whitespace is stripped and
runs of whitespace count as one space. If both sides are numbers they are compared as numbers, so `1,234`, `1234`,
`1234.0` and `1.234e3` are equal; `numbers = false` disables that. `ignore_case` ignores case. The expected answer may
be text, a number, or a list of accepted answers. Without an expected answer (null, empty list) this abstains.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from gspo.data.numbers import plain
from gspo.reward.completion_text import completion_text
from gspo.reward.final_answer import whole_answer
from gspo.reward.traits import RewardTraits, in_form

EXAMPLE: dict[str, Any] = {
    "completion": "36 and 36 make\n#### 1,072",
    "columns": {"answer": 1072},
    "options": {"marker": "####"},
}
TRAITS = RewardTraits(known_answers=in_form("ANSWER"))

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
# With digits before the exponent: `e322` is a word, which Decimal refuses.
_NUMBER = re.compile(rf"[+-]?(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}})?")


def score(
    prompts: list[Any],
    completions: list[Any],
    answer: list[Any],
    *,
    marker: str = "",
    ignore_case: bool = False,
    numbers: bool = True,
    **columns: Any,
) -> list[float | None]:
    def value(text: str) -> str | Decimal:
        number = _number(text.strip()) if numbers else None
        text = " ".join(text.split())
        return number if number is not None else text.casefold() if ignore_case else text

    def score_one(completion: str, expected: Any) -> float | None:
        accepted = [e for e in (expected if isinstance(expected, list) else [expected]) if e is not None]
        if not accepted:
            return None
        said = whole_answer(completion, marker)
        return float(said is not None and value(said) in [value(str(e)) for e in accepted])

    return [score_one(completion_text(c), a) for c, a in zip(completions, answer, strict=True)]


def _number(text: str) -> Decimal | None:
    text = plain(text) if len(text) < 100 else text
    if not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))

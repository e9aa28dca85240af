"""1 when the completion is the `answer` column, else 0.

Compared is the completion's text after the last `marker`, or all of it without one; a completion that lacks the
marker is wrong. Thinking (`<think>`) is left out, and so are the tags of `<answer>`. White space at the ends is
dropped and runs of it count as one space. When both sides are numbers they are compared as numbers, so `1,234`,
`1234`, `1234.0` and `1.234e3` are equal (`numbers = false` switches that off). `ignore_case` ignores case. The
expected answer may be text, a number, or a list of which any will do; without one (null, empty list) this abstains.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from gspo.data.numbers import plain
from gspo.reward.final_answer import whole_answer
from gspo.reward.reply import reply_text

EXAMPLE: dict[str, Any] = {
    "reply": "36 and 36 make\n#### 1,072",
    "columns": {"answer": 1072},
    "options": {"marker": "####"},
}

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?")


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

    def one(reply: str, expected: Any) -> float | None:
        accepted = [e for e in (expected if isinstance(expected, list) else [expected]) if e is not None]
        if not accepted:
            return None
        said = whole_answer(reply, marker)
        return float(said is not None and value(said) in [value(str(e)) for e in accepted])

    return [one(reply_text(c), a) for c, a in zip(completions, answer, strict=True)]


def _number(text: str) -> Decimal | None:
    text = plain(text) if len(text) < 100 else text
    if not any(c in "0123456789" for c in text[-1:]) or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))

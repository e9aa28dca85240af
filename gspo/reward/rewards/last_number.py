"""1 if the last number in the completion equals the `answer` column, else 0.

For models that state the answer in a sentence ("so she has 12 apples left.") and follow no format yet. GSM8K and
similar data sets are often scored this way. `1,234`, `1234` and `1234.0` are equal, `3/4` is one number, and `72
million` is not 72. Thinking (`<think>`) is ignored, and a completion without a number after it is wrong. With `marker`,
only the text after its last occurrence is read, and a completion without it is wrong. An expected answer without a
number leaves the completion unscored; use `exact_answer`.
"""

from __future__ import annotations

from typing import Any

from gspo.data.numbers import last_number
from gspo.reward.completion_text import completion_text
from gspo.reward.final_answer import after_marker
from gspo.reward.traits import RewardTraits, in_form

EXAMPLE: dict[str, Any] = {"completion": "7 + 5 = 12, so Ann has 12 apples.", "columns": {"answer": 12}, "options": {}}
TRAITS = RewardTraits(known_answers=in_form("ANSWER"))


def score(
    prompts: list[Any], completions: list[Any], answer: list[Any], *, marker: str = "", **columns: Any
) -> list[float | Exception]:
    return [_score(completion_text(c), a, marker) for c, a in zip(completions, answer, strict=True)]


def _score(completion: str, expected: Any, marker: str) -> float | Exception:
    wanted = last_number(str(expected))
    if wanted is None:
        return ValueError(f"the expected answer {expected!r:.40} holds no number; use the reward exact_answer")
    said = after_marker(completion, marker)
    return float(said is not None and last_number(said) == wanted)

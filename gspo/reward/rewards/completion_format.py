"""1 if the whole completion matches the regular expression `pattern`, else 0.

`.` also matches line breaks: `<think>.*</think>.*` requires thinking followed by an answer. A completion on which the
pattern backtracks forever is stopped by the deadline and does not match.
"""

from __future__ import annotations

import re
from typing import Any

from gspo.errors import ConfigError
from gspo.reward.completion_text import completion_text
from gspo.reward.traits import RewardTraits

EXAMPLE: dict[str, Any] = {
    "completion": "<think>36\n+ 36</think>72",
    "columns": {},
    "options": {"pattern": "<think>.*</think>.*"},
}
TRAITS = RewardTraits()


def score(prompts: list[Any], completions: list[Any], *, pattern: str, **columns: Any) -> list[float]:
    compiled = re.compile(pattern, re.DOTALL)
    return [1.0 if compiled.fullmatch(completion_text(c)) else 0.0 for c in completions]


def check(pattern: Any) -> None:
    """Reject an invalid regular expression before the run starts."""
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"reward.options.completion_format.pattern: {pattern!r} is not a regular expression: {error}; fix it"
        ) from None

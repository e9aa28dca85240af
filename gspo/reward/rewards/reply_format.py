"""1 when the whole completion matches the regular expression `pattern`, else 0.

`.` also matches line breaks: `<think>.*</think>.*` asks for a thought and then an answer. A completion on which the pattern
backtracks for ever is stopped by the deadline and does not match.
"""

from __future__ import annotations

import re
from typing import Any

from gspo.errors import ConfigError
from gspo.reward.reply import reply_text

EXAMPLE: dict[str, Any] = {
    "reply": "<think>36\n+ 36</think>72",
    "columns": {},
    "options": {"pattern": "<think>.*</think>.*"},
}


def score(prompts: list[Any], completions: list[Any], *, pattern: str, **columns: Any) -> list[float]:
    compiled = re.compile(pattern, re.DOTALL)
    return [1.0 if compiled.fullmatch(reply_text(c)) else 0.0 for c in completions]


def check(pattern: Any) -> None:
    """Refuse what is no regular expression before the run starts."""
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"reward.options.reply_format.pattern: {pattern!r} is not a regular expression: {error}; fix it"
        ) from None

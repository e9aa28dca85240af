"""The text of a completion, in either form that a reward function receives it in.

In: a completion as a reward function gets it. Out: its text. Invariant: nothing is stripped or parsed.
"""

from __future__ import annotations

from typing import Any


def completion_text(completion: Any) -> str:
    """Return a string unchanged, and the last message's content of a chat."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])

"""The text of a reply, whichever form a reward function received it in."""

from __future__ import annotations

from typing import Any


def reply_text(completion: Any) -> str:
    """A string stays as it is; a chat's text is that of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])

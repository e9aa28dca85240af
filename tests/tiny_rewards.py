"""Reward functions in a file of their own, which a worker imports within milliseconds."""

from __future__ import annotations

from typing import Any


def spaces(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """More is better; the length breaks ties."""
    return [c.count(" ") + 0.1 * (len(c) % 5) for c in completions]

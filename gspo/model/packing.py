"""How sequences stand in one packed row, so that a prompt is stored once for all of its completions.

In: nothing; these are records that the learner's plan fills and packed attention reads. Invariant: a token attends to its own
prompt and to what came before it in its own completion, never to a neighbor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Span:
    """Stretches of the long row."""

    at: Tensor
    """The tokens that they hold, one stretch after the other."""
    starts: Tensor
    """Where each stretch begins among these; at last, their number."""
    longest: int

    def to(self, device: torch.device) -> Span:
        """The same on another device."""
        return replace(self, at=self.at.to(device), starts=self.starts.to(device))


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How rows stand in one long row: a prompt, its replies one after the other, the next prompt, ... A token sees its own
    prompt and what came before it in its own reply."""

    parts: Span
    """All tokens; each prompt and each reply is a stretch."""
    prompts: Span
    """The prompts."""
    replies: Span
    """The replies; all replies to one prompt are one stretch."""
    rows_RT: Tensor
    """Where each token of each row stands in the long one; a shared prompt in many rows. Filled with 0 on the right."""
    place_I: Tensor
    """Where each token of the long row stands among `rows_RT`, flattened: in one of its rows."""

    def to(self, device: torch.device) -> Packing:
        """The same on another device."""
        return Packing(**{k: v.to(device) for k, v in vars(self).items()})

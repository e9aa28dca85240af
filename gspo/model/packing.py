"""The layout of sequences in one packed row, in which a prompt is stored once for all of its completions.

In: nothing; the learner's plan fills these records and packed attention reads them. Invariant: a token attends to its
own prompt and to earlier tokens of its own completion, never to another completion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Span:
    """Segments of the packed row."""

    at: Tensor
    """Indices of their tokens in the packed row, segment by segment."""
    starts: Tensor
    """Where each segment begins in `at`, and as the last entry the length of `at` (cumulative sequence lengths)."""
    longest: int

    def to(self, device: torch.device) -> Span:
        """The same on another device."""
        return replace(self, at=self.at.to(device), starts=self.starts.to(device))


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Sequences in one packed row: a prompt, its completions one after the other, the next prompt, and so on."""

    parts: Span
    """All tokens; each prompt and each completion is a segment."""
    prompts: Span
    """The prompts."""
    replies: Span
    """The completions; all completions of one prompt are one segment."""
    rows_RT: Tensor
    """Index in the packed row of each token of each sequence; a shared prompt occurs in several. Padded with 0 on the
    right."""
    place_I: Tensor
    """Index in the flattened `rows_RT` of each token of the packed row, in one of its sequences."""

    def to(self, device: torch.device) -> Packing:
        """The same on another device."""
        return Packing(**{k: v.to(device) for k, v in vars(self).items()})

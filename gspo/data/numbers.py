"""The number that a text ends in. In: any text. Out: its last number, exactly, or None. Invariant: no text makes it slow or raise."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]%.])(?<![0-9)] )-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
_LONGEST = 100


def last_number(text: str) -> Decimal | None:
    """The last number that a text states; None: it states none, or one that is too long to mean anything.

    `1,234` is one number. A sign counts only where nothing that could be subtracted from stands before it."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found and len(found[-1]) <= _LONGEST else None

"""A reward for timing models with random weights, whose completions never earn one: a coin flip per completion.

In: completions. Out: 0 or 1 by a hash of the text, so that groups are mixed and everything a step does is done.

    gspo train RECIPE --model.path= --model.build=FOLDER --reward.functions=benchmarks/coin_flip.py:coin_flip
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


def coin_flip(completions: Sequence[str], **columns: Any) -> list[float]:
    """1.0 for about half of the completions."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]

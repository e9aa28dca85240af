"""The kinds of attention of a model's layers, from its config.

In: a transformers config. Out: the window of each kind. Invariant: None for any model with a kind that is not known
here.
"""

from __future__ import annotations

from typing import Any


def attention_kinds(config: Any) -> dict[str, int | None] | None:
    """The window of each kind of attention layer (None if unlimited); None if some layer is of another kind."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) or None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}

"""What kinds of attention a model's layers have, by its config."""

from __future__ import annotations

from typing import Any


def attention_kinds(config: Any) -> dict[str, int | None] | None:
    """Window of each kind of attention layer (None: unlimited), or None if some layer is of another kind."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) or None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}

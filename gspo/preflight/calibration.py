"""The constants that the models of memory and time were fitted with.

Out: `TIMES` and `ACTIVATIONS`. Invariant: one set, fitted on one H200 (benchmarks/RESULTS.md), used for every GPU. It
is assumed that other GPUs reach the same shares of their data sheets.

`TIMES` has the amounts of `speed.py`. For operations and bytes, the number is the time relative to that at the peak of
the data sheet: 1.5 means that two thirds of the peak are reached. For counts, it is seconds.
"""

from __future__ import annotations

ACTIVATIONS = {
    "hidden": 2.0,
    "attention": 3.0,
    "feed-forward": 4.0,
    "adapters": 1.2,
    "recomputed layer": 1.5,
}
"""What autograd keeps of a compiled layer: numbers per token, as multiples of its widths; the factor for layers with
adapters; and how many layers checkpointing holds at its peak."""

TIMES: dict[str, dict[str, float]] = {
    "sampling": {
        "products": 1.6,
        "reads": 1.2,
        "launches": 30e-6,
        "adapter launches": 10e-6,
        "captures": 3e-3,
        "tokens": 1e-6,
    },
    "training": {
        "products": 1.4,
        "experts": 2.0,
        "attention": 2.5,
        "head": 1.65,
        "traffic": 3.0,
        "plain traffic": 8.0,
        "adapter traffic": 1.5,
        "launches": 50e-6,
        "gradient traffic": 1.2,
    },
    "optimizer": {"traffic": 1.2, "updates": 5e-3},
    # Assumed, never measured: the share of the link that collectives reach.
    "communication": {"bytes": 1.4},
}

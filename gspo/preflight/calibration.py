"""The constants that the models of memory and time were fitted with.

Out: `TIMES` and `ACTIVATIONS`. Invariant: one set, fitted on one H200 (benchmarks/RESULTS.md), used for every GPU. It
is assumed that other GPUs reach the same shares of their data sheets.

`TIMES` has the amounts of `speed.py`. For operations and bytes, the number is the time relative to that at the peak of
the data sheet: 1.5 means that two thirds of the peak are reached. It can be below 1 for work that overlaps with other
work, as the products of a decoding step do with the reading of weights. For counts, it is seconds.
"""

from __future__ import annotations

ACTIVATIONS = {
    "hidden": 2.0,
    "attention": 3.0,
    "feed-forward": 3.75,
    "adapters": 1.25,
    "recomputed layer": 1.2,
}
"""What autograd keeps of a compiled layer: numbers per token, as multiples of its widths; the factor for layers with
adapters; and how many layers checkpointing holds at its peak."""

TIMES: dict[str, dict[str, float]] = {
    "sampling": {
        "products": 0.859,
        "reads": 1.02,
        "launches": 5.12e-05,
        "adapter launches": 1.45e-05,
        "captures": 0.000711,
        "tokens": 6.42e-07,
    },
    "training": {
        "products": 1.41,
        "experts": 1.87,
        "attention": 2.55,
        "head": 1.46,
        "traffic": 3.82,
        "plain traffic": 10.5,
        "adapter traffic": 1.18,
        "launches": 5.41e-05,
        "gradient traffic": 1.16,
    },
    "optimizer": {
        "traffic": 0.898,
        "updates": 0.00452,
        # Assumed, never measured: copies from and to host memory reach 70 % of PCIe.
        "host traffic": 1.43,
    },
    # Assumed, never measured: collectives reach 70 % of the link.
    "communication": {"bytes": 1.43},
}

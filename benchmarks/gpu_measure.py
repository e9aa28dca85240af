"""Time and memory of variants of one computation on a GPU.

In: functions that do the same work. Out: milliseconds (median, variants interleaved, after warm-ups) and peak memory
beyond what was allocated before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Variant = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and memory of one variant."""

    ms: float
    extra: float
    """Peak memory beyond what was allocated before, in bytes."""


def measure(variants: dict[str, Variant], repeats: int) -> dict[str, Cost]:
    """Time and memory of each variant.

    Repeats cycle through the variants, so that a card that warms up slows all equally. Each timed run follows an
    untimed run of the same variant, so that the power draw of the previous variant does not affect it.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in variants}
    extra: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, variant in variants.items():
            variant()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            variant()
            end.record()
            torch.cuda.synchronize()
            extra[name] = torch.cuda.max_memory_allocated() - before
            if repeat:
                times_ms[name].append(start.elapsed_time(end))
    return {name: Cost(ms=statistics.median(times), extra=extra[name]) for name, times in times_ms.items()}


def show(title: str, costs: dict[str, Cost], note: Callable[[str, Cost], str] = lambda name, cost: "") -> None:
    print(f"\n{title}")
    print(f"{'variant':<66} {'ms':>8} {'extra GiB':>10}")
    for name, cost in costs.items():
        print(f"{name:<66} {cost.ms:>8.1f} {cost.extra / 2**30:>10.2f}  {note(name, cost)}", flush=True)

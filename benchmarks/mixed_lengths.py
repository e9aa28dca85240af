"""How fast completions of mixed length can be decoded at best, by the time of a step with few rows.

In: nothing; the workloads are those of `gpu_decode.py`. Out: for several times of a step with 8 rows, relative to one
with 256, tokens per second as a share of those of equal lengths: in the order of the queue, and with the longest
completions first, which no engine can know. Invariant: only the times of steps are modeled, in between linear in the
rows of a batch size; prefill, admission and CUDA graphs cost nothing. So the results are upper bounds.

    python benchmarks/mixed_lengths.py
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

from gspo.rollout.local.paged import BATCH_SIZES

SLOTS = 256
WORKLOADS = {"0.6B: 1,024 of mean 256": (1024, 256), "8B: 768 of mean 128": (768, 128)}
RELATIVE = (1.0, 0.9, 0.78, 0.6, 0.34, 0.2, 8 / 256)
"""Times of a step with 8 rows. 0.78 was measured (2.5 of 3.2 ms, docs/log.md, attention over mixed lengths)."""
SEEDS = 20


def lengths(count: int, mean: int, seed: int) -> list[int]:
    """Geometric, at most 8 times the mean."""
    rng = random.Random(seed)
    most = 8 * mean
    return [next((n for n in range(1, most) if rng.random() < 1 / mean), most) for _ in range(count)]


def rate(queue: list[int], step: Callable[[int], float]) -> tuple[float, float]:
    """Tokens per unit of time, and the share of the time in steps of at most 64 rows."""
    waiting, live = queue[::-1], list[int]()
    time = few = 0.0
    while waiting or live:
        while waiting and len(live) < SLOTS:
            live.append(waiting.pop())
        rows = next(size for size in BATCH_SIZES if size >= len(live))
        time += step(rows)
        few += step(rows) if rows <= 64 else 0.0
        live = [left - 1 for left in live if left > 1]
    return sum(queue) / time, few / time


def main() -> None:
    for name, (count, mean) in WORKLOADS.items():
        print(name)
        print(f"{'8 rows / 256 rows':>18} {'of equal lengths':>17} {'least, most':>13} {'few rows':>9} longest first")
        for least in RELATIVE:

            def step(rows: int, least: float = least) -> float:
                return least + (1 - least) * (rows - 8) / (SLOTS - 8)

            queues = [lengths(count, mean, seed) for seed in range(SEEDS)]
            found, few = zip(*(rate(queue, step) for queue in queues), strict=True)
            shares = [share / SLOTS for share in found]  # with equal lengths, all slots are live, and a step takes 1
            first = [rate(sorted(queue, reverse=True), step)[0] / SLOTS for queue in queues]
            print(
                f"{least:>18.2f} {statistics.fmean(shares):>17.0%} {min(shares):>6.0%}, {max(shares):.0%}"
                f" {statistics.fmean(few):>9.0%} {statistics.fmean(first):>13.0%}"
            )


if __name__ == "__main__":
    main()

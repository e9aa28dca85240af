"""What each rank uses in a step: the seconds of its own work, and its peak memory.

In: the clock of this rank. Out: the usage of every rank, the same on all of them. Invariant: only numbers are
exchanged, in one collective per step, and they depend on the clock, so they never enter `metrics.jsonl`.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from gspo.ranks.group import Ranks


@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """What one rank has used since the previous exchange."""

    rollout_s: float
    """Sampling its own share of the completions. Ranks do not wait for each other meanwhile."""
    learn_s: float
    """Training, including the time that it waits for other ranks in collectives."""
    memory_bytes: float
    """Peak since the process started."""


def exchange_usage(ranks: Ranks, device: Any) -> list[RankUsage]:
    """The usage of all ranks, in their order. All ranks must call it. Their clocks start again from 0."""
    seconds = ranks.clock.take()
    own = RankUsage(
        rollout_s=seconds.get("train", 0.0), learn_s=seconds.get("learn", 0.0), memory_bytes=peak_memory(device)
    )
    # Every rank adds 0 to the rows of the others, so the sum is exact.
    values = torch.zeros(ranks.count, 3, dtype=torch.float64)
    values[ranks.rank] = torch.tensor(astuple(own), dtype=torch.float64)
    return [
        RankUsage(rollout_s=rollout_s, learn_s=learn_s, memory_bytes=memory_bytes)
        for rollout_s, learn_s, memory_bytes in ranks.sum(values).tolist()
    ]


def peak_memory(device: Any) -> int:
    """The most memory that this process has used so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # `getrusage` would also count the process that started this one: its peak is inherited.
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # In bytes on macOS, in KiB elsewhere.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10

"""What the machine has to give."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on a device, and that it has: for a CPU within the limits of its container."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo("MemAvailable") or total
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):  # fmt: skip
        most, now = _number(Path("/sys/fs/cgroup") / limit), _number(Path("/sys/fs/cgroup") / used)
        if most is not None and now is not None and most < total:
            total, free = most, min(free, most - now)
    return free, total


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def human(size: float) -> str:
    """1.5 GB, 340 MB, 12 KB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"

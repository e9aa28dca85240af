"""What the machine has to give."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on a device, and that it has: for a CPU within the limits of its container."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo("MemAvailable") or total
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):  # fmt: skip
        most, now = _number(CGROUP / limit), _number(CGROUP / used)
        if most is not None and now is not None and most < total:
            total, free = most, min(free, most - now + _page_cache((CGROUP / used).with_name("memory.stat")))
    return free, total


def _page_cache(stat: Path) -> int:
    """Bytes of files that a container's usage counts although the kernel gives them up when memory is needed: after a model was
    downloaded or read they can fill the whole limit. The totals of a tree of containers, where they are told, are the usage's."""
    try:
        values = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    names = ("inactive_file", "active_file")
    return sum(int(values.get(f"total_{name}", values.get(name, 0))) for name in names)


def _meminfo(name: str) -> int | None:
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def digits(value: float, count: int) -> str:
    """A number with so many leading digits, and all that stand before the point: 0.12, 3.4, 105, never 1e+02."""
    return f"{value:.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:.{count}g}"


def human(size: float) -> str:
    """1.5 GB, 340 MB, 12 KB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{digits(size / scale, 3)} {unit}"
    return f"{size:.0f} B"

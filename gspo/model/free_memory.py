"""Free memory of the machine.

In: a device. Out: bytes. Invariant: in a container the limits of its cgroup count, not those of the host.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
CGROUP_FILES = (
    ("memory.max", "memory.current"),  # cgroup v2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # cgroup v1
)


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a device; for a CPU within the limits of its container."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # MemAvailable, not MemFree: the page cache counts as available.
    free = _meminfo("MemAvailable") or total
    for limit, used in CGROUP_FILES:
        most = _number(CGROUP / limit)
        now = _number(CGROUP / used)
        # cgroup v1 reports a huge number instead of "no limit".
        if most is not None and now is not None and most < total:
            total = most
            free = min(free, most - now + _page_cache((CGROUP / used).with_name("memory.stat")))
    return free, total


def _page_cache(stat: Path) -> int:
    """Bytes of the page cache that count as usage of a container, although the kernel frees them on demand."""
    # After a model was downloaded or read, the page cache can fill the whole limit. cgroup v1 reports the sums over
    # nested containers as total_*, and its usage is such a sum.
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
    except (OSError, ValueError):  # missing, or "max" (no limit)
        return None

"""A broadcast from the learner to the workers of a server: gloo over TCP, or NCCL between GPUs; both ends use this file.

Invariant: the group is beside any other that a process has, and whatever the type, bytes are sent.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import Tensor


def group(kind: str, host: str, port: int, rank: int, size: int, timeout_s: float) -> Any:
    """A process group of the learner (rank 0, which listens) and the workers, beside any other that a process has."""
    from torch.distributed import PrefixStore, TCPStore

    limit = datetime.timedelta(seconds=timeout_s)
    store = TCPStore(host, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    shared = PrefixStore("gspo", store)
    if kind == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        return ProcessGroupNCCL(shared, rank, size, options)
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(shared, rank, size, limit)


def broadcast(among: Any, tensor: Tensor) -> None:
    """From rank 0 to all others, in place."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    among.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

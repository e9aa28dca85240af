"""A broadcast from the learner to the workers of a server, over TCP; both ends use this file.

Invariant: the group is beside any other that a process has, and whatever the type, bytes are sent.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import Tensor


def gloo_group(host: str, port: int, rank: int, size: int, timeout_s: float) -> Any:
    """A process group of the learner (rank 0, which listens) and the workers, beside any other that a process has."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    limit = datetime.timedelta(seconds=timeout_s)
    store = TCPStore(host, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    return ProcessGroupGloo(PrefixStore("gspo", store), rank, size, limit)


def broadcast(group: Any, tensor: Tensor) -> None:
    """From rank 0 to all others, in place."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

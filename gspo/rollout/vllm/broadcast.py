"""A broadcast from the learner to the workers of a server, over gloo (TCP) or NCCL (GPUs). Both sides use this file.

In: a rendezvous address, a tensor. Out: the tensor of rank 0 on all ranks. Invariant: the process group is independent
of any other that a process has, and tensors of any dtype are sent as bytes.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import Tensor


def process_group(kind: str, host: str, port: int, rank: int, size: int, timeout_s: float) -> Any:
    """A process group of the learner (rank 0, which listens) and the workers, independent of the default group."""
    from torch.distributed import PrefixStore, TCPStore

    limit = datetime.timedelta(seconds=timeout_s)
    # wait_for_workers would block the learner before the servers have been told to join.
    store = TCPStore(host, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    shared = PrefixStore("gspo", store)
    if kind == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        return ProcessGroupNCCL(shared, rank, size, options)
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(shared, rank, size, limit)


def broadcast(group: Any, tensor: Tensor) -> None:
    """Send a tensor from rank 0 to all others, in place."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    # As bytes, so that the backend need not support the dtype.
    group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

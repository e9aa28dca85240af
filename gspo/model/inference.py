"""What every forward pass outside of training needs: eval mode, and token ids as a padded matrix.

In: a model, or sequences of token ids. Out: the model in eval mode for the length of a block; `ids_BT`. Invariant: each
module has its own mode again afterwards, and padding is on the right, where no earlier position attends to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put every module into eval mode, and restore the mode of each afterwards.

    In train mode, models apply dropout, and with gradient checkpointing they also ignore the KV cache."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        # Not model.eval(): that would lose which modules were in training mode.
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def padded(ids_B: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Token ids, padded on the right. In a causal model no earlier position attends to the padding."""
    width = max(map(len, ids_B))
    return torch.tensor([ids + (0,) * (width - len(ids)) for ids in ids_B], dtype=torch.int64, device=device)

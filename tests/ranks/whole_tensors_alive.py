"""Counting the bytes of the whole tensors that a rank has gathered and still holds."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor


class WholeTensors:
    """Wraps a function that returns whole tensors. A tensor counts until nothing refers to it any more."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def counted(self, original: Any) -> Any:
        def whole(*args: Any, **options: Any) -> Tensor:
            tensor: Tensor = original(*args, **options)
            size = tensor.numel() * tensor.element_size()
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(tensor, self._forget, size)
            return tensor

        return whole

    def _forget(self, size: int) -> None:
        self.alive -= size

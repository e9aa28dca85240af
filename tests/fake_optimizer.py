"""What `learn` asks of an optimizer besides its step, for tests that replace the optimizer."""

from __future__ import annotations

from torch import Tensor


class FakeOptimizer:
    """Has no loss scale, so that no gradient overflows. A test adds the step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def retry_after_overflow(self, *, loss_finite: bool) -> bool:
        return False

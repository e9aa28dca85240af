"""Dynamic loss scaling (arXiv:1710.03740): float16 rounds gradients below 6e-8 to 0, so the loss is multiplied first.

In: which updates were applied, and which gradients overflowed. Out: the factor for the loss of the next backward pass.
Invariant: the scale is a power of two, so multiplying the loss and dividing the gradients by it rounds nothing. It
changes only gradients that would underflow or overflow. Its state is two numbers, which a checkpoint holds.
"""

from __future__ import annotations

from torch import Tensor, float64, tensor

INITIAL = 2.0**16
LARGEST = 2.0**24
"""A larger scale gains nothing: gradients that still underflow are below 4e-15."""
GROWTH_INTERVAL = 200
"""Applied updates without an overflow after which the scale doubles."""


class LossScale:
    """The scale and the updates since it last changed."""

    def __init__(self) -> None:
        self.value = INITIAL
        self.overflows = 0
        """How often the gradients of the current update have overflowed."""
        self._good_updates = 0

    def halve(self) -> bool:
        """Halve the scale after an overflow. False if it is at 1 already: then the gradient is not finite by itself,
        and the scale from before this update is restored."""
        if self.value <= 1:
            self.value *= 2.0**self.overflows
            self.overflows = 0
            return False
        self.value /= 2
        self.overflows += 1
        self._good_updates = 0
        return True

    def finish_update(self, *, applied: bool) -> None:
        """Count an update that was applied, and double the scale after enough of them."""
        self.overflows = 0
        self._good_updates += applied
        if self._good_updates >= GROWTH_INTERVAL:
            self.value = min(2 * self.value, LARGEST)
            self._good_updates = 0

    def state(self) -> Tensor:
        """Scale and counter, between two updates."""
        return tensor([self.value, self._good_updates], dtype=float64)

    def load(self, state: Tensor) -> None:
        """Restore the result of `state`."""
        self.value, good_updates = state.tolist()
        self._good_updates = int(good_updates)

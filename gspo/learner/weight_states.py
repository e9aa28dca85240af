"""Master weights and moments of an optimizer, and AdamW's update of them.

In: the weights to train, and their gradients. Out: updated weights. Invariant: a state is plain tensors, so that a
checkpoint holds it without pickle. An entry of a weight is updated independently of the others, with 8-bit moments a
block of entries. So a weight can be updated in parts that start at a multiple of `BLOCK`.

`AdamW32bit` and `DeviceStates` are the plain way. `adamw_8bit.py` has moments in 8 bits, and `host_states.py` holds
states in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gspo.config import LearnerConfig
from gspo.model.sharding import sharded_like

State = dict[str, Tensor]
"""The moments of a weight, and `step`, the number of its updates."""
EPSILON = 1e-8
BLOCK = 256
"""Entries that share a scale in 8 bits; fixed by bitsandbytes."""
ENTRIES: Mapping[str, int] = {
    "exp_avg": 1,
    "exp_avg_sq": 1,
    "exp_avg_8bit": 1,
    "exp_avg_sq_8bit": 1,
    "exp_avg_scale": BLOCK,
    "exp_avg_sq_scale": BLOCK,
}
"""The tensors of a state except `step`, and for how many entries of the weight each of their numbers stands."""
MOMENT_BYTES: Mapping[str, float] = {"adamw": 8.0, "adamw_8bit": 2 + 8 / BLOCK}
"""Bytes of both moments per weight, by `learner.optimizer`."""


class AdamW(Protocol):
    """An update rule."""

    def new_state(self, weight: Tensor) -> State:
        """The state of a weight before its first update, on its device."""

    def update(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], rate: float
    ) -> None:
        """Update the weights and their states."""


class AdamW32bit:
    """Moments in float32."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config

    def new_state(self, weight: Tensor) -> State:
        return {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }

    def update(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], rate: float
    ) -> None:
        adamw(
            list(weights),
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            # The fused kernel makes one pass over each tensor instead of a dozen small operations. It was measured on a
            # CPU only (docs/log.md); on other devices `None` leaves the choice to PyTorch. The kernel does not increase
            # the version counter of the tensors that it writes.
            fused=all(weight.device.type == "cpu" for weight in weights) or None,
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=rate,
            weight_decay=self._config.weight_decay,
            eps=EPSILON,
            maximize=False,
        )


class DeviceStates:
    """Float32 masters of weights that are stored in lower precision, and the moments of all, next to the weights."""

    def __init__(self, weights: Mapping[str, Tensor], rule: AdamW) -> None:
        self.weights = weights
        self._rule = rule
        # Most updates are smaller than the resolution of a bfloat16 weight. They accumulate in float32 and would be
        # rounded away otherwise.
        self.masters = {
            name: w if w.dtype == torch.float32 else self._kept(w.detach().float()) for name, w in weights.items()
        }
        self.moments: dict[str, State] = {}
        """Of the weights that were updated."""

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Update the weights that have a gradient, in float32."""
        names = list(gradients)
        self._add_moments(names)
        masters = [self.masters[name] for name in names]
        self._rule.update(masters, list(gradients.values()), [self.moments[name] for name in names], rate)
        for name, master in self.masters.items():
            if self.has_master(name):
                self.weights[name].copy_(master)

    def has_master(self, name: str) -> bool:
        """Whether a weight has a master besides itself."""
        return self.masters[name] is not self.weights[name]

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Copy the weights to the masters, after something else has changed them before the first update."""
        for name, master in self.masters.items():
            if self.has_master(name):
                master.copy_(self.weights[name])

    def state(self) -> dict[str, Tensor]:
        """Moments and masters by name."""
        found = {f"{key}/{name}": t for name, state in self.moments.items() for key, t in state.items()}
        return found | {f"master/{name}": m.detach() for name, m in self.masters.items() if self.has_master(name)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`. A state from before the first update has no moments."""
        for tensor in chain.from_iterable(state.values() for state in self.moments.values()):
            self._release(tensor)
        self.moments.clear()
        for name, master in self.masters.items():
            if f"master/{name}" in tensors:
                master.data.copy_(sharded_like(tensors[f"master/{name}"], master))
            found = {key: tensors[f"{key}/{name}"] for key in ("step", *ENTRIES) if f"{key}/{name}" in tensors}
            if found:
                # The number of updates is a scalar that all ranks share, so it is never sharded.
                self.moments[name] = {
                    key: value.clone() if key == "step" else self._kept(sharded_like(value, master).clone())
                    for key, value in found.items()
                }

    def _add_moments(self, names: list[str]) -> None:
        for name in names:
            if name not in self.moments:
                state = self._rule.new_state(self.masters[name])
                self.moments[name] = {k: t if k == "step" else self._kept(t) for k, t in state.items()}

    def _kept(self, tensor: Tensor) -> Tensor:
        """A new tensor where states are held."""
        return tensor

    def _release(self, tensor: Tensor) -> None:
        """Called before such a tensor is dropped."""


def part(state: State, start: int, stop: int) -> State:
    """Views of the moments of some entries of a weight. `start` is a multiple of `BLOCK`."""
    return {
        key: tensor.view(-1)[start // ENTRIES[key] : -(-stop // ENTRIES[key])]
        for key, tensor in state.items()
        if key in ENTRIES
    }

"""AdamW with warm-up and decay, float32 master weights, and steps that refuse non-finite gradients.

In: gradients accumulated on the model, in float32 whatever the weights are in. Out: an update, or a skip that leaves
weights and moments as they were.
Invariant: the learning rate is a pure function of the update count, and the whole state is plain tensors by parameter
name, so that it is saved and restored without pickle.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.config import LearnerConfig

WINDOW = 128
"""Gradient norms that a spike is judged by; an eighth of them must be known."""
LEAST_SPREAD = 0.5
"""Of the logarithms: norms that hardly vary would make a spike of every doubling."""


TUNABLE = ("learning_rate", "warmup_updates", "schedule", "final_fraction", "max_grad_norm", "spike")
"""Settings of the learner that a resumed run may change: moments and masters keep their meaning."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimiser step did."""

    applied: bool
    grad_norm: float
    learning_rate: float
    skipped: str = ""
    """Why it was not applied."""


class Optimizer:
    """Owns AdamW's state, and float32 copies of weights that are kept in less."""

    def __init__(self, model: Any, config: LearnerConfig, total_updates: int) -> None:
        self.config, self.total_updates, self.updates = config, total_updates, 0
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self._weights.items()
        }
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.grad_dtype = torch.float32  # micro-batches add up without rounding in between
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            # One pass over each tensor instead of a dozen small operations. (It does not count as a write to the tensor.)
            fused=all(master.device.type == "cpu" for master in self._masters.values()) or None,
        )

    def step(self, *, loss_finite: bool) -> Update:
        """Clip and apply the accumulated gradients; skip if loss or gradient is not finite, or the gradient a spike."""
        self._lift_gradients()
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), self.config.max_grad_norm))
        rate = learning_rate(self.config, self.updates, self.total_updates)
        skipped = self._why_skip(loss_finite, norm)
        if not skipped:
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            self._lower_weights()
            self.updates += 1
        for weight in self._weights.values():
            weight.grad = None
        self._adamw.zero_grad(set_to_none=True)
        return Update(applied=not skipped, grad_norm=norm, learning_rate=rate, skipped=skipped)

    def _why_skip(self, loss_finite: bool, norm: float) -> str:
        """A spike is judged by the logarithms of earlier norms, skipped ones included, so that a lasting change is accepted."""
        if not (loss_finite and math.isfinite(norm)):
            return "a loss or gradient that is not finite"
        if not norm:
            return ""
        known, log = list(self._norms), math.log(norm)
        self._norms.append(log)
        if not self.config.spike or len(known) < WINDOW // 8:
            return ""
        deviation = (log - statistics.fmean(known)) / max(statistics.pstdev(known), LEAST_SPREAD)
        return f"a spike, {deviation:.0f} standard deviations above the last {len(known)}" if deviation > self.config.spike else ""  # fmt: skip

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Take over weights that something else has changed, before the first step."""
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                master.copy_(self._weights[name])

    def state(self) -> dict[str, Tensor]:
        """Moments and masters, by parameter name."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value.detach().contiguous()
            if master is not self._weights[name]:
                tensors[f"master/{name}"] = master.detach()
        return tensors | {"norms": torch.tensor(self._norms, dtype=torch.float64)}

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Restore what `state` gave."""
        self.updates = updates
        self._norms.extend(tensors.get("norms", torch.zeros(0)).tolist())
        for name, master in self._masters.items():
            if f"master/{name}" in tensors:
                master.data.copy_(tensors[f"master/{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            found = {key: tensors[f"{key}/{name}"] for key in keys if f"{key}/{name}" in tensors}
            if found:
                self._adamw.state[master] = {
                    key: value.clone() if key == "step" else value.to(master.device).clone()
                    for key, value in found.items()
                }

    def _lift_gradients(self) -> None:
        for name, master in self._masters.items():
            master.grad = self._weights[name].grad

    @torch.no_grad()
    def _lower_weights(self) -> None:
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                self._weights[name].copy_(master)


def learning_rate(config: LearnerConfig, update: int, total: int) -> float:
    """Linear warm-up, then constant, linear or cosine down to `final_fraction` of the peak at the last update."""
    warmup = min(1.0, (update + 1) / config.warmup_updates) if config.warmup_updates else 1.0
    if config.schedule == "constant":
        return config.learning_rate * warmup
    span = max(1, total - 1 - config.warmup_updates)
    progress = min(1.0, max(0.0, (update - config.warmup_updates) / span))
    fall = progress if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return config.learning_rate * warmup * (1 - (1 - config.final_fraction) * fall)

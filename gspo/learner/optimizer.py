"""AdamW with warm-up and decay, float32 master weights, and steps that refuse non-finite gradients.

Master weights, moments and the update rule are in `weight_states.py`.

In: gradients accumulated on the model, in float32 for weights of any precision, multiplied by the loss scale if weights
are float16. Out: an update, or a skip that leaves weights and moments unchanged.
Invariant: the learning rate is a pure function of the update count and, with `ess_scaling`, of the completions of the
update. The whole state is plain tensors by parameter name, so that it is saved and restored without pickle. If weights
are sharded over ranks, so are masters and moments; the norm, the learning rate and the decision to skip are the same on
all ranks, and the state is the one that a single rank would have.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.config import LearnerConfig
from gspo.errors import FLOAT16_HINT, ConfigError
from gspo.learner.adamw_8bit import AdamW8bit, check_8_bits
from gspo.learner.host_states import HostStates
from gspo.learner.loss_scale import LossScale
from gspo.learner.weight_states import AdamW, AdamW32bit, DeviceStates
from gspo.model.sharding import is_sharded, total_norm

WINDOW = 128
"""How many earlier gradient norms a spike is compared with. Detection starts once an eighth of them is known."""
LEAST_SPREAD = 0.5
"""Lower bound on the standard deviation of the log norms. If norms hardly vary, every doubling would be a spike."""

TUNABLE = (
    "learning_rate",
    "warmup_updates",
    "schedule",
    "final_fraction",
    "ess_scaling",
    "max_grad_norm",
    "spike",
    "optimizer_offload",
)
"""Settings of the learner that a resumed run may change: moments and master weights stay valid."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The outcome of an optimizer step."""

    applied: bool
    grad_norm: float
    learning_rate: float
    """After scaling by the effective sample size."""
    skipped: str = ""
    """Why it was not applied; empty if it was."""
    ess: float = 1.0
    """Effective sample size of the completions' importance weights, as a share of their number."""
    ess_factor: float = 1.0
    """What it multiplied the learning rate by."""
    loss_scale: float | None = None
    """The scale of the loss in its backward pass; None without loss scaling."""
    overflows: int = 0
    """How often its gradients overflowed float16 and were computed again with half the loss scale."""


class Optimizer:
    """Owns AdamW's state and float32 master copies of weights that are stored in lower precision."""

    def __init__(self, model: Any, config: LearnerConfig, total_updates: int) -> None:
        self.config = config
        self.total_updates = total_updates
        self.updates = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)
        # Frozen weights count too: gradients of activations flow through them in their precision.
        self._loss_scale = LossScale() if any(p.dtype == torch.float16 for p in model.parameters()) else None
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        rule = rule_of(config, next(model.parameters()).device)
        self._states = (HostStates if config.optimizer_offload else DeviceStates)(self._weights, rule)
        for name, weight in self._weights.items():
            if self._states.has_master(name):
                # Micro-batches accumulate without rounding in between. FSDP assigns gradients of sharded weights, and
                # `None` lets it assign any.
                weight.grad_dtype = None if is_sharded(weight) else torch.float32
        self._reset_gradients()

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in a backward pass, a power of two; 1 unless weights are float16."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    def retry_after_overflow(self, *, loss_finite: bool) -> bool:
        """Whether the accumulated gradients overflowed because of the loss scale. If so, they are discarded and the
        scale is halved, and the caller must compute them again. All ranks get the same answer, if `loss_finite` is that
        of all ranks."""
        if self._loss_scale is None:
            return False
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        finite = math.isfinite(float(total_norm(gradients)))
        # The scale does not affect the loss: if that is not finite, `step` skips the update, as in any precision.
        if finite or not loss_finite or not self._loss_scale.halve():
            return False
        self._reset_gradients()
        return True

    def step(self, *, loss_finite: bool, log_weight_B: Tensor | None = None) -> Update:
        """Clip and apply the accumulated gradients. Skip if loss or gradient is not finite or the gradient spikes.

        `log_weight_B` are the log importance weights of the completions of this optimizer step; None without any. Both
        are those of all ranks, so that all ranks do the same."""
        self._finish_gradients()
        norm = self._clip()
        # A skipped update does not advance the schedule, which counts the updates that were applied.
        rate = learning_rate(self.config, self.updates, self.total_updates)
        ess = 1.0
        if log_weight_B is not None and len(log_weight_B):  # an update in which nothing is computed has none
            ess = effective_sample_size(log_weight_B)
        factor = ess_factor(self.config, ess)
        rate = rate * factor
        skipped = self._skip_reason(loss_finite, norm)
        if not skipped:
            gradients = {name: w.grad for name, w in self._weights.items() if w.grad is not None}
            self._states.update(gradients, rate)
            self.updates += 1
            del gradients
        self._reset_gradients()
        update = Update(
            applied=not skipped, grad_norm=norm, learning_rate=rate, skipped=skipped, ess=ess, ess_factor=factor
        )
        scale = self._loss_scale
        if scale is None:
            return update
        update = replace(update, loss_scale=scale.value, overflows=scale.overflows)
        scale.finish_update(applied=update.applied)
        return update

    def _clip(self) -> float:
        """Scale the gradients down to the largest norm that is allowed, and return their norm before."""
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        norm = total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(self._weights.values(), self.config.max_grad_norm, norm)
        return float(norm)

    def _skip_reason(self, loss_finite: bool, norm: float) -> str:
        """Why to skip the update; empty to apply it."""
        if not (loss_finite and math.isfinite(norm)):
            return "a loss or gradient that is not finite" + (FLOAT16_HINT if self._loss_scale else "")
        # A gradient of exactly 0, from a mini-batch without a signal, is not a spike and has no logarithm.
        if not norm:
            return ""
        known = list(self._norms)
        log = math.log(norm)
        # Norms of skipped updates count too. Otherwise a lasting change of scale would be skipped forever.
        self._norms.append(log)
        if not self.config.spike or len(known) < WINDOW // 8:
            return ""
        deviation = (log - statistics.fmean(known)) / max(statistics.pstdev(known), LEAST_SPREAD)
        if deviation <= self.config.spike:
            return ""
        return f"a spike, {deviation:.0f} standard deviations above the last {len(known)}"

    def adopt_weights(self) -> None:
        """Copy the model's weights to the masters, after something else has changed them before the first step."""
        self._states.adopt_weights()

    def state(self) -> dict[str, Tensor]:
        """Moments and master weights by parameter name, recent gradient norms, and the loss scale if there is one. They
        are sharded like the weights."""
        tensors = self._states.state()
        if self._loss_scale is not None:
            tensors["loss_scale"] = self._loss_scale.state()
        # float64, as Python's own floats, so that a resumed run skips the same spikes.
        return tensors | {"norms": torch.tensor(self._norms, dtype=torch.float64)}

    def empty_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """Tensors to load a state into, sharded like the weights, of which shapes and types are known."""
        empty: dict[str, Tensor] = {}
        for key, (shape, dtype) in shapes.items():
            master = self._states.masters.get(key.partition("/")[2])
            if master is not None and shape == master.shape and is_sharded(master):
                empty[key] = torch.empty_like(master, dtype=dtype)
            else:
                empty[key] = torch.empty(shape, dtype=dtype)
        return empty

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Restore the result of `state`, in place of the current state."""
        self.updates = updates
        self._norms.clear()
        self._norms.extend(tensors.get("norms", torch.zeros(0)).tolist())
        if self._loss_scale is not None and "loss_scale" in tensors:
            self._loss_scale.load(tensors["loss_scale"])
        self._states.load(tensors)

    def _finish_gradients(self) -> None:
        """Turn what was accumulated into gradients in float32, without the loss scale."""
        # Nothing was computed, because all advantages are 0. That is a gradient of 0: AdamW still applies its momentum,
        # and the moments decay. It would ignore weights without a gradient.
        nothing = all(weight.grad is None for weight in self._weights.values())
        for name, weight in self._weights.items():
            if nothing:
                weight.grad = torch.zeros_like(weight, dtype=self._states.masters[name].dtype, requires_grad=False)
            elif weight.grad is not None:
                weight.grad = weight.grad.to(self._states.masters[name].dtype)
            if self._loss_scale is not None and weight.grad is not None:
                weight.grad.div_(self._loss_scale.value)

    def _reset_gradients(self) -> None:
        for name, weight in self._weights.items():
            weight.grad = None
            if self._states.has_master(name) and is_sharded(weight):
                # FSDP adds to a gradient that is there, and otherwise makes one in the precision of the weight.
                weight.grad = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)


def rule_of(config: LearnerConfig, device: torch.device) -> AdamW:
    """The update rule of `learner.optimizer` for weights on a device."""
    return AdamW8bit(config, device) if config.optimizer == "adamw_8bit" else AdamW32bit(config)


def check_optimizer(config: LearnerConfig, device: torch.device) -> None:
    """Refuse an optimizer that does not work with weights on a device."""
    if config.optimizer_offload and device.type == "cpu":
        raise ConfigError(
            "learner.optimizer_offload: the model is on a CPU, so the optimizer state is in host memory already; leave "
            "it out"
        )
    if config.optimizer == "adamw_8bit":
        check_8_bits(device)


def effective_sample_size(log_weight_B: Tensor) -> float:
    """(sum w)^2 / (N sum w^2), from log w: 1 if all w are equal, 1/N if one dominates."""
    # Relative to the largest, which cancels: the ratio of a long completion may be e^100.
    relative_B = (log_weight_B.double() - log_weight_B.double().max()).exp()
    total, squares = float(relative_B.sum()), float(relative_B.square().sum())
    return total * total / (len(relative_B) * squares)


def ess_factor(config: LearnerConfig, ess: float) -> float:
    """What the effective sample size multiplies the learning rate by."""
    if config.ess_scaling == "off":
        return 1.0
    # A log-prob that is not finite makes it NaN. The loss is then not finite either, and the update is skipped.
    if not math.isfinite(ess):
        return 0.0
    return math.sqrt(ess) if config.ess_scaling == "sqrt" else ess


def learning_rate(config: LearnerConfig, update: int, total: int) -> float:
    """Linear warm-up, then constant, linear or cosine down to `final_fraction` of the peak at the last update."""
    warmup = min(1.0, (update + 1) / config.warmup_updates) if config.warmup_updates else 1.0
    if config.schedule == "constant":
        return config.learning_rate * warmup
    # The last update has index total - 1 and gets exactly `final_fraction` of the peak.
    span = max(1, total - 1 - config.warmup_updates)
    progress = min(1.0, max(0.0, (update - config.warmup_updates) / span))
    fall = progress if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return config.learning_rate * warmup * (1 - (1 - config.final_fraction) * fall)

"""AdamW with moments in 8 bits.

In: float32 weights with their gradients and states. Out: the weights and states, changed in place. Invariant: weights
stay float32; only moments are rounded, after each update.

A moment is a code of a dynamic 8-bit type per entry, and a float32 scale per block (arXiv:2110.02861). `bitsandbytes`
has the kernels. Small weights, such as those of norms, keep moments in float32, as it recommends.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.config import LearnerConfig
from gspo.errors import ConfigError
from gspo.learner.weight_states import BLOCK, EPSILON, AdamW32bit, State, part

SMALL = 4096
"""Weights with fewer entries keep moments in float32."""
MOST = 1 << 22
"""Entries that are updated at a time in 8 bits. On a CPU, bitsandbytes expands moments to float32."""


class AdamW8bit:
    """Moments in 8 bits, except for small weights."""

    def __init__(self, config: LearnerConfig, device: torch.device) -> None:
        check_8_bits(device)
        self._config = config
        self._small = AdamW32bit(config)
        self._signed, self._unsigned = (code.to(device) for code in _codes())

    def new_state(self, weight: Tensor) -> State:
        count = weight.numel()
        if count < SMALL:
            return self._small.new_state(weight)
        state = {"step": torch.zeros(())}
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment}_8bit"] = torch.zeros_like(weight, dtype=torch.uint8, requires_grad=False)
            state[f"{moment}_scale"] = torch.zeros(-(-count // BLOCK), device=weight.device)
        return state

    def update(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], rate: float
    ) -> None:
        small = [i for i, state in enumerate(states) if "exp_avg" in state]
        if small:
            self._small.update(
                [weights[i] for i in small], [gradients[i] for i in small], [states[i] for i in small], rate
            )
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            if "exp_avg" in state:
                continue
            state["step"].add_(1)
            entries, slopes = weight.view(-1), gradient.contiguous().view(-1)
            for start in range(0, len(entries), MOST):
                stop = min(start + MOST, len(entries))
                moments = part(state, start, stop)
                self._update(entries[start:stop], slopes[start:stop], moments, int(state["step"]), rate)

    def _update(self, entries: Tensor, gradient: Tensor, moments: State, step: int, rate: float) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        optimizer_update_8bit_blockwise(
            "adam",  # with weight decay decoupled from the gradient, which is AdamW
            gradient,
            entries,
            moments["exp_avg_8bit"],
            moments["exp_avg_sq_8bit"],
            self._config.beta1,
            self._config.beta2,
            0.0,
            0.0,
            EPSILON,
            step,
            rate,
            self._signed,
            self._unsigned,
            moments["exp_avg_scale"],
            moments["exp_avg_sq_scale"],
            self._config.weight_decay,
        )


def _codes() -> tuple[Tensor, Tensor]:
    """The numbers that the codes of the first and the second moment stand for. The second is never negative."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=True), create_dynamic_map(signed=False)


def _has_kernel(device: torch.device) -> bool:
    """Whether bitsandbytes can update 8-bit moments on a device, by a trial."""
    from bitsandbytes.functional import optimizer_update_8bit_blockwise

    weight, scale = torch.zeros(BLOCK, device=device), torch.zeros(1, device=device)
    first, second = (torch.zeros(BLOCK, dtype=torch.uint8, device=device) for _ in range(2))
    signed, unsigned = (code.to(device) for code in _codes())
    try:
        optimizer_update_8bit_blockwise(
            "adam",
            weight,
            weight,
            first,
            second,
            0.9,
            0.9,
            0.0,
            0.0,
            EPSILON,
            1,
            0.0,
            signed,
            unsigned,
            scale,
            scale.clone(),
        )
    except RuntimeError:  # also for an operator without a kernel
        return False
    return True


def check_8_bits(device: torch.device) -> None:
    """Refuse 8-bit moments where they do not work."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            'learner.optimizer: "adamw_8bit" needs the bitsandbytes package; run: pip install bitsandbytes, or set it '
            'to "adamw"'
        )
    if not _has_kernel(device):
        import bitsandbytes

        raise ConfigError(
            f"learner.optimizer: bitsandbytes {bitsandbytes.__version__} has no 8-bit AdamW for {device.type}; install "
            'a newer version, or set it to "adamw"'
        )

"""Adaptive clip range: `clip_low`/`clip_high = "auto:0.15"` scales the range until that fraction of tokens is clipped.

In: the tokens of a finished step. Out: the scale of the next step's range. Invariant: the state is one number, the
factor on the objective's own range. It is part of the checkpoint, so the range of a resumed run is bitwise identical.

A token is clipped if its ratio has left the range in the direction of its advantage. Let e be its move in units of the
range (move/high where A > 0, -move/low where A < 0). A range scaled by c clips the tokens with e > c. So the scale that
would have met the target on this step is a quantile of e, and the next step moves part of the way toward it:

    log c <- log c + GAIN (log quantile_{1 - target}(e) - log c)

If fewer tokens than the target fraction have moved in that direction at all (few groups with a signal), the step
gives no information about the range and does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gspo.errors import ConfigError
from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Tokens

GAIN = 0.3
"""Fraction of the distance, in log space, that one step moves. Below 1, because the quantile of one step is noisy and
the range itself changes how far the policy moves."""
MAX_LOG_CHANGE = 1.0
"""Bound on the change per step in log space: a factor of e."""
LIMITS = (1e-3, 1e3)
"""Bounds of the scale; with a target that cannot be met it ends at one of them."""
PREFIX = "auto:"
SIDES = ("clip_low", "clip_high")


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """What changes the clip range of a step: the scale of an adaptive range, and the factor of rollbacks."""

    scale: float = 1.0
    factor: float = 1.0

    def apply(self, objective: Objective, adaptive: AdaptiveClip | None) -> Objective:
        """The objective with the clip range of the step."""
        if adaptive is not None:
            return adaptive.scaled(objective, self.scale)
        # An objective without a clip range has none to scale.
        return objective if self.factor == 1 else with_scaled_range(objective, self.factor)


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Which sides adapt, and to what fraction of clipped tokens (both sides together)."""

    target: float
    sides: tuple[str, ...]

    def scaled(self, objective: Objective, scale: float) -> Objective:
        """The objective with its adapting sides scaled; every other setting is unchanged."""
        return with_scaled_range(objective, scale, self.sides)

    def next_scale(self, objective: Objective, scale: float, tokens: Tokens) -> float:
        """The scale after a step whose tokens were clipped by `objective` scaled by `scale`."""
        wanted = self._quantile(objective, tokens)
        # Negated, so that NaN (a diverged forward pass) leaves the scale unchanged, as do too few moved tokens.
        if not wanted > 0:
            return scale
        # In log space, because the scale is a factor: doubling and halving it are steps of equal size.
        change = max(-MAX_LOG_CHANGE, min(MAX_LOG_CHANGE, GAIN * math.log(wanted / scale)))
        return max(LIMITS[0], min(LIMITS[1], scale * math.exp(change)))

    def _quantile(self, objective: Objective, tokens: Tokens) -> float:
        """The smallest scale that would have clipped at most the target fraction of tokens; `objective` is unscaled."""
        region: Any = objective.trust_region
        a_N = tokens.advantage_N.double()
        length_N = tokens.sequences.expand(tokens.sequences.length_B)
        log_ratio_N = region.bounded(objective.ratio(tokens).detach().double(), length_N)
        move_N = log_ratio_N if region.clips_log_ratio else torch.expm1(log_ratio_N)
        # A token with A = 0 is clipped at no scale. It stays in the denominator, whether or not it was computed.
        ranges_N = torch.full_like(move_N, -math.inf)
        for side, pushed_N, along_N in (("clip_high", a_N > 0, move_N), ("clip_low", a_N < 0, -move_N)):
            own_N = along_N / getattr(region, side)
            if side not in self.sides:  # a fixed side clips a token at every scale or at none
                own_N = torch.where(own_N > 1, math.inf, -math.inf)
            ranges_N = torch.where(pushed_N, own_N, ranges_N)
        # NaN sorts before every number, so the quantile of a diverged step is NaN.
        allowed = int(self.target * len(ranges_N))
        return float(ranges_N.sort(descending=True).values[min(allowed, len(ranges_N) - 1)])


def with_scaled_range(objective: Objective, scale: float, sides: Sequence[str] = SIDES) -> Objective:
    """The objective with these sides of its clip range scaled; every other setting is unchanged."""
    region: Any = objective.trust_region
    scaled = {side: scale * getattr(region, side) for side in sides}
    return replace(objective, trust_region=replace(region, **scaled))


def at_limit(scale: float) -> str | None:
    """Why a range has stopped adapting; `None` if it has not."""
    if scale <= LIMITS[0]:
        return (
            "even a range a thousand times narrower clips less than the target; "
            "lower the target, or use more mini_batches"
        )
    if scale >= LIMITS[1]:
        return (
            "even a range a thousand times wider clips more than the target; "
            "raise the target, or lower the learning rate"
        )
    return None


def take_adaptive(objective: Objective, settings: Mapping[str, Any]) -> tuple[AdaptiveClip | None, dict[str, Any]]:
    """The adaptive range that the settings ask for, if any, and the other settings."""
    adaptive = {k: v for k, v in settings.items() if k in SIDES and isinstance(v, str) and v.startswith(PREFIX)}
    rest = {k: v for k, v in settings.items() if k not in adaptive}
    if not adaptive:
        return None, rest
    if objective.trust_region.clip_range is None:
        raise ConfigError(f"objective.{next(iter(adaptive))}: {objective.name!r} has no clip range; remove it")
    targets = {key: _target(key, text) for key, text in adaptive.items()}
    if len(set(targets.values())) > 1:
        raise ConfigError(
            "objective.clip_low, objective.clip_high: the target is for both sides together; "
            "give the same share to both"
        )
    return AdaptiveClip(target=next(iter(targets.values())), sides=tuple(adaptive)), rest


def _target(key: str, text: str) -> float:
    try:
        target = float(text.removeprefix(PREFIX))
    except ValueError:
        # NaN fails the comparison below, so one message covers text and numbers out of range.
        target = math.nan
    if not 0 < target < 1:
        raise ConfigError(
            f'objective.{key}: {text!r} is not "auto:SHARE" with a share of tokens between 0 and 1, '
            'for example "auto:0.15"'
        )
    return target

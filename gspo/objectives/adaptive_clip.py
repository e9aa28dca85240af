"""A clip range that finds itself: `clip_low`/`clip_high = "auto:0.15"` scales the range until that share of tokens is clipped.

In: the tokens of a finished step. Out: the scale of the next step's range. Invariant: the state is one number, the factor
on the row's own range; it is checkpointed, so a resumed run goes on with the same range to the bit.

A token is clipped when it has moved out of the range on the side its advantage pushes to. With e = how many ranges it has
moved (move/high where A > 0, -move/low where A < 0), a range scaled by c clips the share of tokens with e > c. So the
scale that would have met the target on this step is a quantile of e, and the next step takes a part of the way to it:

    log c <- log c + GAIN (log quantile_{1 - target}(e) - log c)

A step in which fewer tokens than the target share have moved that way at all (few groups with a signal) says nothing about
the range, and leaves it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gspo.errors import ConfigError
from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Tokens
from gspo.objectives.trust_region import LogClipThenMean

GAIN = 0.3
"""Part of the way, in log space, that a step takes: one step's quantile is noisy, and the range acts back on the movement."""
MOST_PER_STEP = 1.0
"""Bound on a step's way in log space: a factor of e."""
LIMITS = (1e-3, 1e3)
"""The scale stays within these; a target that cannot be met ends at one of them."""
PREFIX = "auto:"
SIDES = ("clip_low", "clip_high")


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Which sides adapt, and to what share of clipped tokens (both sides together)."""

    target: float
    sides: tuple[str, ...]

    def scaled(self, row: Objective, scale: float) -> Objective:
        """The row with its adapting sides scaled; every other setting as it is."""
        region: Any = row.trust_region
        return replace(
            row, trust_region=replace(region, **{side: scale * getattr(region, side) for side in self.sides})
        )

    def next_scale(self, row: Objective, scale: float, tokens: Tokens) -> float:
        """The scale after a step whose tokens were judged with `row` scaled by `scale`."""
        wanted = self._quantile(row, tokens)
        if not wanted > 0:  # too few have moved, or the numbers are none
            return scale
        way = math.log(wanted / scale)
        way = max(-MOST_PER_STEP, min(MOST_PER_STEP, GAIN * way))
        return max(LIMITS[0], min(LIMITS[1], scale * math.exp(way)))

    def _quantile(self, row: Objective, tokens: Tokens) -> float:
        """The smallest scale that would have clipped at most the target share of tokens; `row` is unscaled."""
        region: Any = row.trust_region
        a_N, log_ratio_N = tokens.advantage_N.double(), row.ratio(tokens).detach().double()
        move_N = log_ratio_N if isinstance(region, LogClipThenMean) else torch.expm1(log_ratio_N)
        ranges_N = torch.full_like(move_N, -math.inf)
        for side, pushed_N, along_N in (("clip_high", a_N > 0, move_N), ("clip_low", a_N < 0, -move_N)):
            own = along_N / getattr(region, side)
            if side not in self.sides:  # this side stays as it is: clipped at any scale, or at none
                own = torch.where(own > 1, math.inf, -math.inf)
            ranges_N = torch.where(pushed_N, own, ranges_N)
        allowed = int(self.target * len(ranges_N))
        return float(ranges_N.sort(descending=True).values[min(allowed, len(ranges_N) - 1)])


def at_limit(scale: float) -> str | None:
    """Why a range has stopped adapting, or None."""
    if scale <= LIMITS[0]:
        return "even a range a thousand times narrower clips less than the target; lower the target, or use more mini_batches"
    if scale >= LIMITS[1]:
        return "even a range a thousand times wider clips more than the target; raise the target, or lower the learning rate"
    return None


def take_adaptive(row: Objective, settings: Mapping[str, Any]) -> tuple[AdaptiveClip | None, dict[str, Any]]:
    """The adapting range that settings ask for, if any, and the settings without it."""
    asked = {k: v for k, v in settings.items() if k in SIDES and isinstance(v, str) and v.startswith(PREFIX)}
    rest = {k: v for k, v in settings.items() if k not in asked}
    if not asked:
        return None, rest
    for key in asked:
        if not hasattr(row.trust_region, key):
            raise ConfigError(f"objective.{key}: {row.name!r} has no clip range; leave it out")
    targets = {key: _target(key, text) for key, text in asked.items()}
    if len(set(targets.values())) > 1:
        raise ConfigError("objective.clip_low, objective.clip_high: one target holds for both sides together; give the same share to both")  # fmt: skip
    return AdaptiveClip(target=next(iter(targets.values())), sides=tuple(asked)), rest


def _target(key: str, text: str) -> float:
    try:
        target = float(text.removeprefix(PREFIX))
    except ValueError:
        target = math.nan
    if not 0 < target < 1:
        raise ConfigError(f'objective.{key}: {text!r} is not "auto:SHARE" with a share of tokens between 0 and 1, for example "auto:0.15"')  # fmt: skip
    return target

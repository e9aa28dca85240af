"""One setting of the run's objective, moved over a range.

In: `clip_high=1e-4..1e-1` or `clip_high=1e-4..1e-1:25`. Out: a `Sweep` and the objectives of its values. Invariant: values
are evenly spaced in the logarithm, both ends included; everything else stays as it was in the step.
"""

from __future__ import annotations

import math
import numbers
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.errors import ConfigError
from gspo.objectives.objective import Objective, ObjectiveWarning, change, settings_of

POINTS = 13
MOST_POINTS = 200
TEXTS = ("keep", "shape", "kl_estimator", "kl_in", "mismatch")
"""Settings that are words."""
COUNTS = ("max_length", "overlong_limit", "overlong_cache")
"""Settings that are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A setting and its values, rising."""

    setting: str
    values: tuple[float, ...]


def parse_sweep(text: str) -> Sweep:
    """A sweep from the command line."""
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\S+?)\s*\.\.\s*([^\s:]+)\s*(?::\s*(\d{1,9})\s*)?", text)
    example = "write for example --sweep clip_high=1e-4..1e-1 or clip_high=1e-4..1e-1:25"
    if not match:
        raise ConfigError(f"--sweep: {text!r} is no SETTING=LOW..HIGH[:COUNT]; {example}")
    setting, low, high, points = match[1], _number(text, match[2]), _number(text, match[3]), int(match[4] or POINTS)
    if not 0 < low < high < math.inf:
        raise ConfigError(f"--sweep: {text!r}: the values are spaced in the logarithm, so LOW must be above 0 and below HIGH; {example}")  # fmt: skip
    if not 2 <= points <= MOST_POINTS:
        raise ConfigError(f"--sweep: {text!r}: the count must be from 2 to {MOST_POINTS}, not {points}")
    ratio = math.log(high / low)
    values = [low * math.exp(ratio * i / (points - 1)) for i in range(points)]
    if setting in COUNTS:
        values = [float(v) for v in sorted({round(v) for v in values})]
    return Sweep(setting=setting, values=(*values[:-1], high) if setting not in COUNTS else tuple(values))


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ConfigError(f"--sweep: {text!r}: {part!r} is no number") from None


def swept(objective: Objective, sweep: Sweep) -> list[Objective]:
    """The objective with each of the values; a setting it does not have, or a value it cannot take, is an error."""
    known = settings_of(objective)
    if sweep.setting in TEXTS or sweep.setting not in known:
        can = [k for k in known if k not in TEXTS]
        raise ConfigError(f"--sweep: {objective.name} has no setting {sweep.setting!r} that is a number; it has: {', '.join(can)}")  # fmt: skip
    whole = sweep.setting in COUNTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)  # ranges that are too wide or narrow are what is looked for
        return [change(objective, {sweep.setting: int(v) if whole else v}) for v in sweep.values]


def value_in_force(objective: Objective, setting: str) -> float | None:
    """What the run had; None: it was off or unset."""
    value = settings_of(objective).get(setting)
    return float(value) if isinstance(value, numbers.Real) else None


def needs_reference(objectives: Sequence[Objective]) -> bool:
    """Whether one of them has a KL penalty."""
    return any(o.kl for o in objectives)

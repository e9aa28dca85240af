"""A sweep over one setting of the run's objective.

In: `clip_high=1e-4..1e-1` or `clip_high=1e-4..1e-1:25`. Out: a `Sweep` and one objective per value. Invariant: values
are log-spaced and include both ends; all other settings are those of the step.
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
STRING_SETTINGS = ("keep", "shape", "normalize", "kl_estimator", "kl_in", "mismatch")
INTEGER_SETTINGS = ("max_length", "overlong_limit", "overlong_cache")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A setting and its values in ascending order."""

    setting: str
    values: tuple[float, ...]


def parse_sweep(text: str) -> Sweep:
    """Parse a sweep from the command line."""
    # At most 9 digits for the count: `int` raises an error on thousands of digits.
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\S+?)\s*\.\.\s*([^\s:]+)\s*(?::\s*(\d{1,9})\s*)?", text)
    example = "write for example --sweep clip_high=1e-4..1e-1 or clip_high=1e-4..1e-1:25"
    if not match:
        raise ConfigError(f"--sweep: {text!r} is not SETTING=LOW..HIGH[:COUNT]; {example}")
    setting = match[1]
    low = _number(text, match[2])
    high = _number(text, match[3])
    points = int(match[4] or POINTS)
    if not 0 < low < high < math.inf:
        raise ConfigError(
            f"--sweep: {text!r}: the values are log-spaced, so LOW must be above 0 and below HIGH; {example}"
        )
    if not 2 <= points <= MOST_POINTS:
        raise ConfigError(f"--sweep: {text!r}: the count must be from 2 to {MOST_POINTS}, not {points}")
    # Log-spaced, because useful values of a setting such as a clip range span orders of magnitude.
    ratio = math.log(high / low)
    values = [low * math.exp(ratio * i / (points - 1)) for i in range(points)]
    if setting in INTEGER_SETTINGS:
        # A set: neighboring values may round to the same integer.
        return Sweep(setting=setting, values=tuple(float(v) for v in sorted({round(v) for v in values})))
    return Sweep(setting=setting, values=(*values[:-1], high))  # exp(log(high / low)) may round to a value next to high


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ConfigError(f"--sweep: {text!r}: {part!r} is not a number; write for example 1e-4") from None


def swept(objective: Objective, sweep: Sweep) -> list[Objective]:
    """One objective per value. An unknown setting or an invalid value is an error."""
    known = settings_of(objective)
    if sweep.setting in STRING_SETTINGS or sweep.setting not in known:
        numeric = [k for k in known if k not in STRING_SETTINGS]
        raise ConfigError(
            f"--sweep: {objective.name} has no numeric setting {sweep.setting!r}; choose one of: {', '.join(numeric)}"
        )
    integer = sweep.setting in INTEGER_SETTINGS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)  # a sweep goes beyond the usual range on purpose
        return [change(objective, {sweep.setting: int(v) if integer else v}) for v in sweep.values]


def value_in_run(objective: Objective, setting: str) -> float | None:
    """The run's value; `None` if it is disabled or unset."""
    value = settings_of(objective).get(setting)
    return float(value) if isinstance(value, numbers.Real) else None


def needs_reference(objectives: Sequence[Objective]) -> bool:
    """Whether one of the objectives has a KL penalty."""
    return any(o.kl for o in objectives)

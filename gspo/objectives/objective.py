"""What an objective is: the four choices of a row and the options any row may take.

In: a row of the table and changed settings. Out: a checked `Objective`. Invariant: a setting that would have no effect
with the row is refused with the reason, never ignored; a name is the same everywhere (recipes, Python, the table).
"""

from __future__ import annotations

import difflib
import math
import numbers
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives import advantage as advantages
from gspo.objectives import ratio as ratios
from gspo.objectives.penalty import KL_ESTIMATORS, MISMATCH_BOUNDS
from gspo.objectives.sequences import Tokens
from gspo.objectives.trust_region import (
    CappedWeight,
    Clip,
    CovarianceRegion,
    DropCovariance,
    GammaWeight,
    LogClipThenMean,
    MaskedWeight,
    TrustRegion,
)


class ObjectiveWarning(UserWarning):
    """An objective was set up in a way that is legal and almost surely not meant."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One row of the table, or a row with changed settings."""

    paper: str
    advantage: advantages.AdvantageRule
    ratio: Callable[[Tokens], Tensor]
    trust_region: TrustRegion
    aggregate: Callable[[Tensor], Tensor]
    per: Literal["sequence", "token"] = "token"
    """Whether advantages may differ between tokens of a reply."""

    name: str = ""
    keep: str = "all"
    """Which groups are trained on: `all`, or `mixed` (rewards differ before length shaping; of 0 and 1: 0 < #correct < G), refilled by dynamic sampling."""
    shape: str = "none"
    """Length shaping: `soft_overlong` (penalty near the limit) or `overlong_filter` (cut replies are left out)."""
    overlong_limit: int | None = None
    """L_max of the soft penalty; unset: the token limit of a reply."""
    overlong_cache: int | None = None
    """L_cache, the ramp before the limit; unset: a fifth of the limit, as in the paper."""
    kl: float = 0.0
    """Coefficient of the KL penalty to the reference policy."""
    kl_estimator: str | None = None
    """`k1`, `k2`, `k3`, `k3+` (value of k3, gradient of k2), `k3_ratio` (times pi/pi_old); unset: k3, or k1 in the reward."""
    kl_in: str = "loss"
    """Add the KL penalty to the `loss`, or subtract it (detached, summed over the reply) from the `reward`."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    off_policy_mask: float | None = None
    """Drop replies with A < 0 whose mean log(mu/pi) is above this."""
    mismatch: str = "none"
    """Correct for the sampler's numerics: `token_tis`, `icepop`, `sequence_mask`, `sequence_tis`."""
    mismatch_low: float | None = None
    """Lower bound of the correction on pi_old/mu; unset: its published value."""
    mismatch_high: float | None = None
    """Upper bound of the correction on pi_old/mu; unset: its published value."""
    given: frozenset[str] = frozenset()
    """The settings that were changed from the row's own."""

    @property
    def estimator(self) -> str:
        """The KL estimator in force."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The mismatch correction's bounds in force."""
        low, high = MISMATCH_BOUNDS[self.mismatch]
        return (low if self.mismatch_low is None else self.mismatch_low, high if self.mismatch_high is None else self.mismatch_high)  # fmt: skip

    @property
    def selects_tokens(self) -> bool:
        """Whether the objective singles out tokens by statistics of the whole optimizer step."""
        return isinstance(self.trust_region, CovarianceRegion)

    @property
    def clips_sequences(self) -> bool:
        """Whether the clip range is on the length-normalised ratio of a reply, which moves by ~1e-3, not ~1e-1."""
        return self.ratio is ratios.sequence


OPTIONS = tuple(f.name for f in fields(Objective))[7:-1]
"""The settings any row may take, as far as they make sense with it."""


def settings_of(row: Objective) -> dict[str, Any]:
    """The settings a row understands, with their values."""
    values: dict[str, Any] = {}
    for part in (row.trust_region, row.aggregate):
        if is_dataclass(part):
            values.update({f.name: getattr(part, f.name) for f in fields(part)})
    refused = _refusals(row)
    return values | {name: getattr(row, name) for name in OPTIONS if name not in refused}


def change(row: Objective, settings: dict[str, Any]) -> Objective:
    """The row with changed settings, checked."""
    refused = _refusals(row)
    for key in settings:
        if key in refused:
            raise ConfigError(f"objective {row.name!r}: {key} makes no sense here: {refused[key]}")
        if key not in settings_of(row):
            raise ConfigError(_unknown(row, key))
    _check_types(row, settings)
    changed = replace(
        row,
        trust_region=_change_part(row.trust_region, settings),
        aggregate=_change_part(row.aggregate, settings),
        given=row.given | settings.keys(),
        **{k: v for k, v in settings.items() if k in OPTIONS},
    )
    _check(changed)
    _warn_about_range(changed)
    return changed


def _change_part(part: Any, settings: dict[str, Any]) -> Any:
    if not is_dataclass(part):
        return part
    mine = {f.name for f in fields(part)}
    return replace(part, **{k: v for k, v in settings.items() if k in mine})  # type: ignore[type-var]


def _unknown(row: Objective, key: str) -> str:
    known = list(settings_of(row))
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"objective {row.name!r} has no setting {key!r}; {hint}valid settings: {', '.join(known)}"


def _refusals(row: Objective) -> dict[str, str]:
    """Options that make no sense with the row, and why."""
    refused: dict[str, str] = {}
    if not hasattr(row.trust_region, "dual_clip"):
        refused["dual_clip"] = "it bounds a clipped ratio (min(r A, clip(r) A)) from below, and this row has none"
    if isinstance(row.trust_region, GammaWeight | MaskedWeight):
        reason = "this row divides by the sampler's probability already, so a correction would count twice"
        refused |= dict.fromkeys(("mismatch", "mismatch_low", "mismatch_high"), reason)
    if row.advantage is advantages.external:
        reason = "its advantages come from outside, so rewards and groups are not seen"
        refused |= dict.fromkeys(("keep", "shape", "overlong_limit", "overlong_cache"), reason)
    return refused


def _check_types(row: Objective, settings: dict[str, Any]) -> None:
    words = {"keep", "shape", "kl_estimator", "kl_in", "mismatch"}
    for key, value in settings.items():
        if value is None and key in ("dual_clip", "off_policy_mask", "mismatch_low", "mismatch_high", "kl_estimator", "overlong_limit", "overlong_cache"):  # fmt: skip
            continue
        wanted: Any = str if key in words else numbers.Real
        if not isinstance(value, wanted) or isinstance(value, bool):
            hint = "; a range that adapts is for runs (objective.clip_low in a recipe)" if str(value).startswith("auto:") else ""  # fmt: skip
            raise ConfigError(
                f"objective {row.name!r}: {key} must be {'text' if key in words else 'a number'}, not {value!r}{hint}"
            )


def _check(row: Objective) -> None:
    choices = {
        "keep": ("all", "mixed"),
        "shape": ("none", "soft_overlong", "overlong_filter"),
        "kl_in": ("loss", "reward"),
        "kl_estimator": (None, *KL_ESTIMATORS),
        "mismatch": tuple(MISMATCH_BOUNDS),
    }
    for key, allowed in choices.items():
        if getattr(row, key) not in allowed:
            names = ", ".join(a for a in allowed if a)
            raise ConfigError(f"objective {row.name!r}: {key} must be one of {names}, not {getattr(row, key)!r}")
    for key in ("kl", "entropy", "off_policy_mask"):
        value = getattr(row, key)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"objective {row.name!r}: {key} must be a finite number, 0 or more, not {value}")
    for key in ("overlong_limit", "overlong_cache"):
        value = getattr(row, key)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ConfigError(
                f"objective {row.name!r}: {key} must be a whole number of tokens, at least 1, not {value}"
            )
    if row.overlong_limit and row.overlong_cache and row.overlong_cache > row.overlong_limit:
        raise ConfigError(
            f"objective {row.name!r}: overlong_cache={row.overlong_cache} is above overlong_limit={row.overlong_limit}"
        )
    for key in ("mismatch_low", "mismatch_high"):
        value = getattr(row, key)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"objective {row.name!r}: {key} must be a finite number above 0, not {value}")
    _check_pairs(row)


def _check_pairs(row: Objective) -> None:
    """Settings that only act together with another one."""

    def refuse(key: str, why: str) -> None:
        if key in row.given and getattr(row, key) is not None:
            raise ConfigError(f"objective {row.name!r}: {key} has no effect: {why}")

    if row.kl == 0:
        refuse("kl_estimator", "kl is 0; set kl, for example kl=0.001")
        refuse("kl_in", "kl is 0; set kl, for example kl=0.001")
    if row.kl_in == "reward" and row.advantage is advantages.external:
        raise ConfigError(
            f"objective {row.name!r}: kl_in=reward makes no sense here: its advantages come from outside; use loss"
        )
    if row.kl_in == "reward" and row.estimator in ("k3+", "k3_ratio"):
        raise ConfigError(f"objective {row.name!r}: kl_estimator={row.estimator} differs from k3 only in its gradient, and a KL in the reward has none; use k1")  # fmt: skip
    if row.shape != "soft_overlong":
        refuse("overlong_limit", 'set shape="soft_overlong"')
        refuse("overlong_cache", 'set shape="soft_overlong"')
    low, high = MISMATCH_BOUNDS[row.mismatch]
    if low is None:
        refuse("mismatch_low", f"mismatch={row.mismatch} has no lower bound")
    if high is None:
        refuse("mismatch_high", 'mismatch is "none"')
    low, high = row.bounds
    if low is not None and high is not None and not 0 <= low < high:
        raise ConfigError(f"objective {row.name!r}: mismatch_low={low:g} must be below mismatch_high={high:g}")


def _warn_about_range(row: Objective) -> None:
    """The commonest mistakes: GRPO's range on a sequence ratio, GSPO's on a token ratio, 1 + cap meant for cap."""
    region = row.trust_region
    if isinstance(region, Clip | MaskedWeight | DropCovariance | LogClipThenMean):
        narrow, wide, usual = _usual_range(row)
        low, high = region.clip_low, region.clip_high
        if max(low, high) >= wide:
            _warn(
                row,
                f"clip range {low:g}/{high:g} is so wide for {_ratio_name(row)} that it hardly ever clips; use about {usual}",
            )
        if min(low, high) < narrow:
            _warn(
                row,
                f"clip range {low:g}/{high:g} is so narrow for {_ratio_name(row)} that it clips nearly everything that moves; use about {usual}",
            )
    if isinstance(region, CappedWeight | MaskedWeight) and region.weight_cap < 1:
        _warn(
            row,
            f"weight_cap={region.weight_cap:g} is the bound on the ratio itself, not 1 + it, and scales down on-policy tokens; use about 5",
        )
    if row.clips_sequences and row.mismatch == "sequence_tis":
        _warn(
            row,
            "the product of pi_old/mu over a long reply is heavy-tailed and undoes the length normalisation; use mismatch=token_tis or sequence_mask",
        )


def _usual_range(row: Objective) -> tuple[float, float, str]:
    """(too narrow below, too wide from, what to use)."""
    if row.clips_sequences:
        return 1e-5, 0.01, "3e-4/4e-4 (small models with short replies: 3e-3/4e-3)"
    if isinstance(row.trust_region, LogClipThenMean):
        return 0.01, 3.0, "0.4, in log space"
    return 0.01, math.inf, "0.2"


def _ratio_name(row: Objective) -> str:
    return "a sequence ratio" if row.clips_sequences else "a token ratio"


def _warn(row: Objective, text: str) -> None:
    warnings.warn(f"objective {row.name!r}: {text}", ObjectiveWarning, stacklevel=6)

"""What an objective is: four components, and the options of any objective.

In: a row of the table and changed settings. Out: a checked `Objective`. Invariant: a setting without an effect on the
objective is refused with the reason, never ignored. A name is the same everywhere (recipes, Python, the table).
"""

from __future__ import annotations

import difflib
import math
import numbers
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args

from torch import Tensor

from gspo.equivalents.explain import explain
from gspo.errors import ConfigError
from gspo.field_types import field_types
from gspo.objectives.advantage import AdvantageRule
from gspo.objectives.kl import KL_ESTIMATORS
from gspo.objectives.mismatch import MISMATCH_BOUNDS
from gspo.objectives.ratio import Ratio
from gspo.objectives.trust_region import TrustRegion, UsualRange

SEQUENCE_RANGE = UsualRange(1e-5, 0.01, "3e-4/4e-4 (small models with short completions: 3e-3/4e-3)")
"""Sensible clip ranges for a length-normalized sequence ratio, which moves by ~1e-3 where a token ratio moves by
~1e-1."""
SHAPES = ("overlong_filter", "soft_overlong")
"""The kinds of length shaping."""


class ObjectiveWarning(UserWarning):
    """The settings of an objective are valid, but almost certainly not intended."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One row of the table, a row with changed settings, or your own combination of components."""

    advantage: AdvantageRule
    ratio: Ratio
    trust_region: TrustRegion
    aggregate: Callable[[Tensor], Tensor]
    """(tokens per completion `[B]`) -> the loss weight `[B]` of each of its tokens, over the whole optimizer step."""
    paper: str = ""
    advantage_per: Literal["sequence", "token"] = "token"
    """Whether a completion has one advantage, or each of its tokens may have its own."""

    name: str = ""
    keep: str = "all"
    """Which groups are trained on: `all`, or those with `mixed` rewards (before length shaping; with rewards of 0 and
    1: 0 < #correct < G). Dynamic sampling replaces the others."""
    shape: tuple[str, ...] = ()
    """Length shaping, one or both of: `overlong_filter` (truncated completions are dropped) and `soft_overlong`
    (penalty near the limit). `"none"` or an empty list disables it."""
    normalize: str = "sum"
    """How several reward functions are compared within a group: by the weighted `sum` of their values, or each function
    `separate`ly, as in GDPO (arXiv:2601.05242). Then the advantage is the weighted sum of each function's own
    advantages, divided by its standard deviation over the batch."""
    credit: str = "completion"
    """Which tokens a reward counts for. `completion`: all of them. `steps`: rewards of turns or marked steps count for
    the tokens up to their step, as in GRPO with process supervision (arXiv:2402.03300, section 4.1.3): the group's step
    rewards are compared with each other, and the advantage of a token is the sum of those from there on. Without step
    rewards it is the same as `completion`."""
    overlong_limit: int | None = None
    """L_max of the soft penalty; by default the token limit of a completion."""
    overlong_cache: int | None = None
    """L_cache, the ramp before the limit; by default a fifth of the limit, as in the paper."""
    kl: float = 0.0
    """Coefficient of the KL penalty to the reference policy."""
    kl_estimator: str | None = None
    """`k1`, `k2`, `k3`, `k3+` (value of k3, gradient of k2) or `k3_ratio` (k3 times pi/pi_old). The default is k3 in
    the loss and k1 in the reward."""
    kl_in: str = "loss"
    """Add the KL penalty to the `loss`, or subtract it (detached, summed over the completion) from the `reward`."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    off_policy_mask: float | None = None
    """Drop completions with A < 0 whose mean log(mu/pi) is above this value."""
    mismatch: str = "none"
    """Correction for the sampler's numerics: `none`, `token_tis`, `icepop`, `sequence_mask` or `sequence_tis`."""
    mismatch_low: float | None = None
    """Lower bound of the correction on pi_old/mu; by default its published value."""
    mismatch_high: float | None = None
    """Upper bound of the correction on pi_old/mu; by default its published value."""
    reward_weights: tuple[float, ...] = ()
    """Weights of the reward functions, for `normalize = "separate"`; all 1 if empty. A run takes them from
    `reward.weights`."""
    given: frozenset[str] = frozenset()
    """Names of the settings that differ from the row of the table."""

    def __post_init__(self) -> None:
        for name, kind, made in (
            ("advantage", AdvantageRule, "decorate a function with @advantage_rule"),
            ("ratio", Ratio, "decorate a function with @ratio"),
            ("trust_region", TrustRegion, "derive a frozen dataclass from TrustRegion"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"Objective: {name} must be an instance of {kind.__name__} ({made})")
        if not callable(self.aggregate):
            raise ConfigError("Objective: aggregate must be a function, for example aggregate.token_mean")

    @property
    def needs_sampler(self) -> bool:
        """Whether it compares the policy with the sampler, and so already corrects for its numerics."""
        return self.ratio.needs_sampler or self.trust_region.needs_sampler

    @property
    def resolved_kl_estimator(self) -> str:
        """The KL estimator: the setting, or its default."""
        # In the reward, a detached k1 has the expected gradient of k2 in the loss, which is that of the reverse KL. In
        # the loss, the expected gradient of k1 is 0, so the default there is k3, as in GRPO.
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def mismatch_bounds(self) -> tuple[float | None, float | None]:
        """The bounds of the mismatch correction: the settings, or its published values."""
        low, high = MISMATCH_BOUNDS[self.mismatch]
        low = low if self.mismatch_low is None else self.mismatch_low
        high = high if self.mismatch_high is None else self.mismatch_high
        return low, high

    @property
    def clips_sequences(self) -> bool:
        """Whether the clip range bounds the ratio of a whole completion."""
        return self.ratio.per_sequence

    @property
    def needs_zero_advantage(self) -> bool:
        """Whether a completion whose advantages are all 0 matters for the gradient beyond its place in denominators."""
        # KL and entropy terms act on every token. A KL penalty in the reward is part of the advantages themselves.
        return bool(self.kl or self.entropy) or self.trust_region.needs_zero_advantage

    @property
    def usual_range(self) -> UsualRange | None:
        """Sensible clip ranges; `None` without a clip range."""
        usual = self.trust_region.usual_range
        means = self.clips_sequences or self.ratio.length_normalized
        if usual is None or not means or self.trust_region.clips_log_ratio:
            return usual
        # Without 1/T the ratio of a completion grows with its length, and no range is usual for it.
        return SEQUENCE_RANGE if self.ratio.length_normalized else None


COMPONENTS = ("advantage", "ratio", "trust_region", "aggregate")
"""The parts of an objective. A part that is a dataclass makes its fields settings of the objective."""
OPTIONS = tuple(
    f.name
    for f in fields(Objective)
    if f.name not in (*COMPONENTS, "paper", "advantage_per", "name", "reward_weights", "given")
)
"""The settings of any objective, as far as they make sense with it."""


def settings_of(objective: Objective) -> dict[str, Any]:
    """The settings that an objective has, with their values."""
    values: dict[str, Any] = {}
    for part in _parts(objective):
        values.update({f.name: getattr(part, f.name) for f in fields(part)})
    refused = _refusals(objective)
    return values | {name: getattr(objective, name) for name in OPTIONS if name not in refused}


def text_settings(objective: Objective) -> set[str]:
    """The settings whose values are text."""
    return {name for name, kinds in _declared_types(objective).items() if str in kinds}


def change(objective: Objective, settings: dict[str, Any]) -> Objective:
    """The objective with changed settings, checked."""
    known = settings_of(objective) | dict.fromkeys(_refusals(objective))
    for key in settings:
        if key not in known:
            raise ConfigError(_unknown(objective, key))
    options = {k: v for k, v in settings.items() if k in OPTIONS}
    _check_types(objective, {k: v for k, v in settings.items() if k not in options})
    parts = {name: _change_part(getattr(objective, name), settings) for name in COMPONENTS}
    changed = replace(objective, **parts)
    # After the components: one of their settings can decide whether an option makes sense. A refusal gives the reason;
    # without it the setting would only be reported as unknown.
    refused = _refusals(changed)
    for key in settings:
        if key in refused:
            raise ConfigError(f"objective {objective.name!r}: {key} makes no sense here: {refused[key]}")
    # Also if it is not given: a custom objective may have any.
    options["shape"] = _parse_shape(objective, options.get("shape", objective.shape))
    _check_types(objective, options)
    changed = replace(changed, given=objective.given | settings.keys(), **options)
    _check(changed)
    for text in _unusual_settings(changed):
        # Level 3 is the caller of `gspo.objective`.
        warnings.warn(f"objective {changed.name!r}: {text}", ObjectiveWarning, stacklevel=3)
    return changed


def _parts(objective: Objective) -> list[Any]:
    """The components that have settings."""
    return [part for name in COMPONENTS if is_dataclass(part := getattr(objective, name))]


def _change_part(part: Any, settings: dict[str, Any]) -> Any:
    if not is_dataclass(part):
        return part
    mine = {f.name for f in fields(part)}
    own = {k: v for k, v in settings.items() if k in mine}
    return replace(part, **own) if own else part  # type: ignore[type-var]


def _unknown(objective: Objective, key: str) -> str:
    known = list(settings_of(objective))
    close = difflib.get_close_matches(key, known, n=1)
    about = explain(key)
    hint = f"{about}; " if about else f"did you mean {close[0]}? " if close else ""
    return f"objective {objective.name!r} has no setting {key!r}; {hint}valid settings: {', '.join(known)}"


def _refusals(objective: Objective) -> dict[str, str]:
    """Settings that make no sense with the objective, and why."""
    refused: dict[str, str] = {}
    if "dual_clip" not in {f.name for f in fields(objective.trust_region)}:
        refused["dual_clip"] = "it bounds a clipped ratio (min(r A, clip(r) A)) from below, and this objective has none"
    if objective.needs_sampler:
        reason = "this objective already divides by the sampler's probability, so a correction would count twice"
        refused |= dict.fromkeys(("mismatch", "mismatch_low", "mismatch_high"), reason)
    if objective.advantage.scope == "external":
        reason = "its advantages come from outside, so it sees no rewards and no groups"
        refused |= dict.fromkeys(("keep", "shape", "normalize", "overlong_limit", "overlong_cache"), reason)
    if objective.advantage_per == "sequence":
        refused["credit"] = "it has one advantage per completion; use gspo_token or gspo_turn"
    elif objective.advantage.scope != "group":
        refused["credit"] = "it compares step rewards within a group, and this objective has no groups"
    if objective.advantage.scope == "batch":
        refused["normalize"] = "it compares completions across the batch, and separate rewards are compared in groups"
    return refused


def _declared_types(objective: Objective) -> dict[str, tuple[Any, ...]]:
    """The types that each setting accepts, by the annotation of its field: (float, NoneType) for `float | None`."""
    hints = {name: hint for part in (objective, *_parts(objective)) for name, hint in field_types(type(part)).items()}
    return {name: get_args(hint) or (hint,) for name, hint in hints.items()}


def _check_types(objective: Objective, settings: dict[str, Any]) -> None:
    declared = _declared_types(objective)
    for key, value in settings.items():
        if key not in declared:  # a setting of other components, which is refused with the reason
            continue
        if value is None and NoneType in declared[key]:
            continue
        wanted: Any = tuple if key == "shape" else str if str in declared[key] else numbers.Real
        # bool is a Real, but `kl=True` is a mistake.
        if not isinstance(value, wanted) or isinstance(value, bool):
            kind = "text" if wanted is str else "a number"
            adaptive = str(value).startswith("auto:")
            hint = "; a range that adapts is for runs (objective.clip_low in a recipe)" if adaptive else ""
            raise ConfigError(f"objective {objective.name!r}: {key} must be {kind}, not {value!r}{hint}")


def _parse_shape(objective: Objective, value: Any) -> tuple[str, ...]:
    """Shapings in the order of `SHAPES`, which is that of DAPO's ablation: their effects do not depend on it.

    Text is one shaping, `none`, or several separated by commas: that is how a command line gives a list."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if names == ["none"]:
        return ()
    if not isinstance(names, list | tuple) or any(name not in SHAPES for name in names):
        raise ConfigError(
            f"objective {objective.name!r}: shape must be none, or a list of {' and '.join(SHAPES)}, not {value!r}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"objective {objective.name!r}: shape names one of {list(names)} twice; name each once")
    return tuple(name for name in SHAPES if name in names)


def _check(objective: Objective) -> None:
    choices = {
        "keep": ("all", "mixed"),
        "normalize": ("sum", "separate"),
        "credit": ("completion", "steps"),
        "kl_in": ("loss", "reward"),
        "kl_estimator": (None, *KL_ESTIMATORS),
        "mismatch": tuple(MISMATCH_BOUNDS),
    }
    for key, allowed in choices.items():
        value = getattr(objective, key)
        if value not in allowed:
            names = ", ".join(a for a in allowed if a)
            raise ConfigError(f"objective {objective.name!r}: {key} must be one of {names}, not {value!r}")
    for key in ("kl", "entropy", "off_policy_mask"):
        value = getattr(objective, key)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"objective {objective.name!r}: {key} must be a finite number, 0 or more, not {value}")
    for key in ("mismatch_low", "mismatch_high"):
        value = getattr(objective, key)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"objective {objective.name!r}: {key} must be a finite number above 0, not {value}")
    _check_overlong(objective)
    _check_pairs(objective)
    _check_rewards(objective)


def _check_overlong(objective: Objective) -> None:
    limit, cache = objective.overlong_limit, objective.overlong_cache
    for key, value in (("overlong_limit", limit), ("overlong_cache", cache)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ConfigError(
                f"objective {objective.name!r}: {key} must be a whole number of tokens, at least 1, not {value}"
            )
    if limit and cache and cache > limit:
        raise ConfigError(f"objective {objective.name!r}: overlong_cache={cache} is above overlong_limit={limit}")


def _check_pairs(objective: Objective) -> None:
    """Check settings that have an effect only together with another setting."""

    values = settings_of(objective)

    def refuse(key: str, why: str) -> None:
        # Only what the user has set: a row's own default may be without effect after another setting has changed.
        if key in objective.given and values.get(key) is not None:
            raise ConfigError(f"objective {objective.name!r}: {key} has no effect: {why}")

    for part in (objective.advantage, objective.ratio, objective.trust_region):
        for key, why in part.ineffective().items():
            refuse(key, why)
    if objective.kl == 0:
        refuse("kl_estimator", "kl is 0; set kl, for example kl=0.001")
        refuse("kl_in", "kl is 0; set kl, for example kl=0.001")
    if objective.kl_in == "reward":
        _check_kl_in_reward(objective)
    if objective.normalize == "separate":
        _check_separate(objective)
    if "soft_overlong" not in objective.shape:
        refuse("overlong_limit", 'set shape="soft_overlong"')
        refuse("overlong_cache", 'set shape="soft_overlong"')
    low, high = MISMATCH_BOUNDS[objective.mismatch]
    if low is None:
        refuse("mismatch_low", f"mismatch={objective.mismatch} has no lower bound")
    if high is None:
        refuse("mismatch_high", 'mismatch is "none"')
    low, high = objective.mismatch_bounds
    if low is not None and high is not None and not 0 <= low < high:
        raise ConfigError(f"objective {objective.name!r}: mismatch_low={low:g} must be below mismatch_high={high:g}")
    # pi_old/mu is 1 where engine and learner agree. A range without 1 would drop or scale down exactly those tokens.
    if low is not None and low > 1:
        raise ConfigError(f"objective {objective.name!r}: mismatch_low must be at most 1, not {low:g}")
    if high is not None and high < 1:
        raise ConfigError(f"objective {objective.name!r}: mismatch_high must be at least 1, not {high:g}")


def _check_rewards(objective: Objective) -> None:
    """A rule that needs rewards of 0 or more cannot have a penalty subtracted from them."""
    if not objective.advantage.nonnegative_rewards:
        return
    why = "would make rewards negative, and this objective divides by the mean reward of a group"
    if "soft_overlong" in objective.shape:
        raise ConfigError(f'objective {objective.name!r}: shape=soft_overlong {why}; use "overlong_filter"')
    if objective.kl and objective.kl_in == "reward":
        raise ConfigError(f'objective {objective.name!r}: kl_in=reward {why}; use "loss"')


def _check_separate(objective: Objective) -> None:
    """Penalties are parts of the summed reward. Without a sum there is nothing that they could be added to."""
    no_sum = f"objective {objective.name!r}: normalize=separate has no summed reward to subtract"
    if objective.credit == "steps":
        raise ConfigError(
            f"objective {objective.name!r}: normalize=separate compares the functions' values for whole completions; "
            'set credit="completion"'
        )
    if "soft_overlong" in objective.shape:
        raise ConfigError(
            f'{no_sum} the length penalty from; set shape="none" or "overlong_filter", and give a penalty as a reward '
            "function of its own"
        )
    if objective.kl and objective.kl_in == "reward":
        raise ConfigError(f"{no_sum} the KL penalty from; set kl_in=loss")


def _check_kl_in_reward(objective: Objective) -> None:
    if objective.advantage.scope == "external":
        raise ConfigError(
            f"objective {objective.name!r}: kl_in=reward makes no sense here: its advantages come from outside; "
            "use loss"
        )
    estimator = objective.resolved_kl_estimator
    if estimator in ("k3+", "k3_ratio"):
        raise ConfigError(
            f"objective {objective.name!r}: kl_estimator={estimator} differs from k3 only in its gradient, "
            "and a KL in the reward has none; use k1"
        )


def _unusual_settings(objective: Objective) -> Iterator[str]:
    """Common mistakes: GRPO's range on a sequence ratio, GSPO's on a token ratio, `1 + cap` instead of `cap`."""
    usual, clip_range = objective.usual_range, objective.trust_region.clip_range
    if usual and clip_range:
        low, high = clip_range
        means = objective.clips_sequences or objective.ratio.length_normalized
        ratio = "a sequence ratio" if means else "a token ratio"
        if max(low, high) >= usual.too_wide_from:
            yield (
                f"clip range {low:g}/{high:g} is so wide for {ratio} that it hardly ever clips; "
                f"use about {usual.advice}"
            )
        if min(low, high) < usual.too_narrow_below:
            yield (
                f"clip range {low:g}/{high:g} is so narrow for {ratio} that it clips nearly everything that moves; "
                f"use about {usual.advice}"
            )
    if text := objective.trust_region.warning():
        yield text
    if objective.trust_region.range_grows_with_length and objective.ratio.length_normalized:
        yield (
            "the clip range grows with the length of a completion and length_norm=mean divides by it, so nothing is "
            "clipped; use length_norm=none"
        )
    if objective.ratio.length_normalized and objective.mismatch == "sequence_tis":
        yield (
            "the product of pi_old/mu over a long completion is heavy-tailed and undoes the length normalization; "
            "use mismatch=token_tis or sequence_mask"
        )

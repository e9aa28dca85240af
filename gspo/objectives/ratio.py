"""The importance ratio of the policy to an older one, as a log-ratio per token.

In: packed tokens. Out: `log_ratio_N`, with the value of the log-ratio and the gradient of `logp_N`. Invariant: a
sequence-level ratio has one value for all tokens of a sequence. Its gradient flows through the token's own log-prob
only (GSPO-token's form, eq. 14 of arXiv:2507.18071), so no collective needs to be differentiated. With
`length_norm = "mean"` and equal weights for all tokens of a sequence, value and gradient equal those of the plain
sequence form. Without it, the plain form has the gradient of the token form times T (`fspo` aggregates by
`sequence_sum` for that reason).

A ratio is a function with the decorator `@ratio`, or a frozen dataclass whose fields are settings of the objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, ClassVar

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.sequences import Sequences, Tokens

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before exp. e^20 is beyond every trust region and still finite."""

LENGTH_NORMS = ("mean", "sqrt", "none")


class Ratio:
    """Packed tokens -> `log_ratio_N`."""

    per_sequence: ClassVar[bool] = False
    """Whether all tokens of a completion have the same ratio."""
    changed_from: ClassVar[Mapping[str, str]] = {}
    """The names that it had in runs of earlier versions, if it was another ratio then -> what is different now. The
    name is empty where a run does not record it."""

    @property
    def length_normalized(self) -> bool:
        """Whether it is a mean over the completion, so that it moves far less than the ratio of a token."""
        return False

    @property
    def needs_sampler(self) -> bool:
        """Whether it divides by the sampler's probability, and so already corrects for its numerics."""
        return False

    def __call__(self, tokens: Tokens) -> Tensor:
        raise NotImplementedError

    def combine(self, sequences: Sequences, x_N: Tensor) -> Tensor:
        """The log-ratios `[B]` of sequences whose tokens have log-ratios `x_N`; only if `per_sequence`."""
        raise NotImplementedError

    def ineffective(self) -> dict[str, str]:
        """Settings that have no effect with the values of the others, and why."""
        return {}


class FunctionRatio(Ratio):
    """A ratio made by `@ratio` from a function."""

    __name__: str

    def __init__(self, compute: Callable[[Tokens], Tensor], *, needs_sampler: bool) -> None:
        self.compute = compute
        self._needs_sampler = needs_sampler
        update_wrapper(self, compute)

    @property
    def needs_sampler(self) -> bool:
        return self._needs_sampler

    def __call__(self, tokens: Tokens) -> Tensor:
        return self.compute(tokens)

    def __reduce__(self) -> str:
        # Pickle and copy by name, as functions are: rows of the table stay equal to their copies.
        return self.__name__

    def __repr__(self) -> str:
        return self.__name__


def ratio(*, needs_sampler: bool = False) -> Callable[[Callable[[Tokens], Tensor]], FunctionRatio]:
    """Turn a function into a ratio of each token."""
    return lambda compute: FunctionRatio(compute, needs_sampler=needs_sampler)


@ratio()
def token(tokens: Tokens) -> Tensor:
    """r_t = pi(y_t) / pi_old(y_t)."""
    return (tokens.logp_N - tokens.logp_old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@ratio(needs_sampler=True)
def token_to_sampler(tokens: Tokens) -> Tensor:
    """r_t = pi(y_t) / mu(y_t)."""
    return (tokens.logp_N - tokens.logp_behavior_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class SequenceRatio(Ratio):
    """s = exp(mean_t log pi/pi_old), one ratio for the whole completion. `length_norm` divides the sum of the T
    log-ratios by T (`mean`), by the square root of T (`sqrt`), or not at all (`none`)."""

    per_sequence: ClassVar[bool] = True
    length_norm: str = "mean"

    def __post_init__(self) -> None:
        check_choice("length_norm", self.length_norm, LENGTH_NORMS)

    @property
    def length_normalized(self) -> bool:
        return self.length_norm == "mean"

    def __call__(self, tokens: Tokens) -> Tensor:
        log_ratio_N = (tokens.logp_N - tokens.logp_old_N).detach()
        log_s_B = self.combine(tokens.sequences, log_ratio_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return with_gradient_of(tokens.sequences.expand(log_s_B), tokens.logp_N)

    def combine(self, sequences: Sequences, x_N: Tensor) -> Tensor:
        if self.length_norm == "mean":
            return sequences.mean(x_N)
        total_B = sequences.sum(x_N)
        return total_B if self.length_norm == "none" else total_B / sequences.length_B.clamp(min=1).sqrt().to(x_N.dtype)


@dataclass(frozen=True)
class TurnRatio(Ratio):
    """s_k = exp(mean_t log pi/pi_old) over the tokens t of turn k, one ratio for each turn of a conversation. Without
    turns it is the ratio of the completion."""

    @property
    def length_normalized(self) -> bool:
        return True

    def __call__(self, tokens: Tokens) -> Tensor:
        log_ratio_N = (tokens.logp_N - tokens.logp_old_N).detach()
        turns = tokens.turns
        log_s = turns.mean(log_ratio_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return with_gradient_of(turns.expand(log_s), tokens.logp_N)


@dataclass(frozen=True)
class ProductRatio(SequenceRatio):
    """W = prod_t pi/pi_old, the exact ratio of the whole completion (`length_norm` can change that). With
    `denominator = "sampler"` it is prod_t (pi/pi_old) min(pi_old/mu, sampler_cap)."""

    changed_from: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("product", ""), "measured against the sampler; from here on it measures against the recomputed old policy"
    )
    length_norm: str = "none"
    # The learner's own log-probs, as in VESPO's scripts. The engine's differ from them by rounding, which the product
    # multiplies up over the completion until it outweighs what the policy has changed.
    denominator: str = "old"
    sampler_cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("denominator", self.denominator, ("old", "sampler"))
        # A cap below 1 would lower the weight of tokens on which engine and learner agree, once per token.
        if not (self.sampler_cap >= 1 and math.isfinite(self.sampler_cap)):
            raise ConfigError(f"sampler_cap: must be a finite number of at least 1, not {self.sampler_cap:g}")

    @property
    def needs_sampler(self) -> bool:
        return self.denominator == "sampler"

    def ineffective(self) -> dict[str, str]:
        return {} if self.needs_sampler else {"sampler_cap": 'set denominator="sampler"'}

    def __call__(self, tokens: Tokens) -> Tensor:
        log_ratio_N = (tokens.logp_N - tokens.logp_old_N).detach()
        if self.needs_sampler:
            log_ratio_N = log_ratio_N + (tokens.logp_old_N - tokens.logp_behavior_N).clamp(
                max=math.log(self.sampler_cap)
            )
        # Not clamped: the sum over a long completion easily exceeds MAX_LOG_RATIO, and GammaWeight computes in log
        # space.
        log_w_B = self.combine(tokens.sequences, log_ratio_N)
        return with_gradient_of(tokens.sequences.expand(log_w_B), tokens.logp_N)


@ratio()
def prefix_minimum(tokens: Tokens) -> Tensor:
    """r_t min_{k<t} r_k, r = pi / pi_old: the smallest ratio before the token in place of the product of all of them.
    The first token of a completion has r_1. The minimum has no gradient."""
    log_ratio_N = token(tokens)
    smallest_N = tokens.sequences.minimum_before(log_ratio_N.detach())
    return (log_ratio_N + smallest_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@ratio()
def none(tokens: Tokens) -> Tensor:
    """No correction: the sample is treated as on-policy."""
    return with_gradient_of(torch.zeros_like(tokens.logp_N), tokens.logp_N)


def with_gradient_of(value_N: Tensor, logp_N: Tensor) -> Tensor:
    """sg[value] + logp - sg[logp]: the value of the first, the gradient of the second."""
    # The parentheses make the second term exactly 0, so the value does not lose a bit.
    return value_N + (logp_N - logp_N.detach())


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a `ConfigError` for a value that is not one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}: must be one of {', '.join(choices)}, not {value!r}")

"""How far the objective trusts a move of the policy.

In: packed tokens and their log-ratio (`ratio.py`). Out: the per-token term of the objective J (to maximize), and which
tokens the bound acted on. Invariant: at ratio 1, with the sampler's log-probs equal to the policy's, every region gives
a token that it has not selected the gradient A * grad log pi.

A region is a frozen dataclass. Its fields are the objective's settings of the same name, and their defaults are the
published constants. What other code must know about a region is an attribute of `TrustRegion`. Soft regions have no
bound that a token either hits or does not hit, and report no clipped tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.ratio import MAX_LOG_RATIO, with_gradient_of
from gspo.objectives.sequences import Tokens


@dataclass(frozen=True)
class Surrogate:
    """What a trust region returns."""

    objective_N: Tensor
    ratio_N: Tensor
    """The ratio that the region judged, detached."""
    clipped_N: Tensor
    """Where the bound acted."""


class UsualRange(NamedTuple):
    """Clip ranges outside of these limits are legal and almost surely a mistake."""

    too_narrow_below: float
    too_wide_from: float
    advice: str
    """The range to use instead."""


@dataclass(frozen=True)
class TrustRegion:
    """Base of all regions."""

    usual_range: ClassVar[UsualRange | None] = None
    """Sensible clip ranges for a token-level ratio; `None` without a clip range."""
    clips_log_ratio: ClassVar[bool] = False
    """Whether the clip range bounds log r instead of r - 1."""
    range_grows_with_length: ClassVar[bool] = False
    """Whether the clip range is for a sum over the completion, and so far too wide for a mean."""
    needs_sampler: ClassVar[bool] = False
    """Whether the region compares the policy with the sampler mu, and so already corrects for its numerics."""
    selects_tokens: ClassVar[bool] = False
    """Whether the region selects tokens over the whole optimizer step, before it is split into micro-batches."""
    needs_zero_advantage: ClassVar[bool] = True
    """Whether a completion whose advantages are all 0 may have a gradient, or may change the gradient of others. False
    for regions whose term is proportional to the advantage, and depends on no other completion."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or isinstance(value, str):
                continue
            # Written as a negation, so that NaN is refused, too.
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{f.name}: must be a finite number, 0 or more, not {value}")
        # Rollbacks and adaptive ranges scale these fields.
        if self.clip_range is not None and not {"clip_low", "clip_high"} <= {f.name for f in fields(self)}:
            raise ConfigError(
                f"{type(self).__name__}: a trust region with a clip_range has the fields clip_low and clip_high; "
                "derive it from ClipRange and TrustRegion, and declare both"
            )

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        raise NotImplementedError

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """(clip_low, clip_high); `None` if the region has no clip range."""
        return None

    @property
    def log_range(self) -> tuple[float, float] | None:
        """The lowest and highest log-ratio inside the clip range; `None` if the region has no clip range."""
        if self.clip_range is None:
            return None
        low, high = self.clip_range
        if self.clips_log_ratio:
            return -low, high
        # From clip_low = 1 on, the range allows every ratio down to 0, whose log is -inf.
        return (math.log1p(-low) if low < 1 else -math.inf), math.log1p(high)

    def bounded(self, log_ratio: Tensor, length: Tensor) -> Tensor:
        """The part of a log-ratio that the clip range bounds, for completions of that length."""
        return log_ratio

    @property
    def noise_limit(self) -> float | None:
        """The largest log-ratio that rounding alone may cause; `None` if the region has no bound that it could hit."""
        return None if self.log_range is None else min(-self.log_range[0], self.log_range[1])

    def ineffective(self) -> dict[str, str]:
        """Settings that have no effect with the values of the others, and why."""
        return {}

    def warning(self) -> str | None:
        """What is legal about the settings and almost surely not meant, apart from the clip range."""
        return None

    def selection_count(self, tokens: int) -> int:
        """How many of a step's tokens the region selects."""
        return 0

    def select(self, tokens: Tokens, log_ratio_N: Tensor, generator: torch.Generator) -> Tensor:
        """Which of the step's tokens the region selects; `tokens` holds all of them."""
        raise NotImplementedError


class ClipRange:
    """Mixin of the regions with a clip range. They declare the two fields, each with its published default."""

    usual_range: ClassVar[UsualRange | None] = UsualRange(0.01, math.inf, "0.2")
    clip_low: float
    clip_high: float

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


@dataclass(frozen=True)
class Clip(ClipRange, TrustRegion):
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with `dual_clip` = c also max(..., c A) where A < 0."""

    needs_zero_advantage: ClassVar[bool] = False

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip: must be above 1 (3 is usual), not {self.dual_clip:g}")

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, ratio_N = tokens.advantage_N, log_ratio_N.exp()
        # The minimum has no gradient exactly where the ratio has left the range in the direction of A.
        inside_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective_N = torch.minimum(ratio_N * a_N, inside_N * a_N)
        clipped_N = pushed_out(ratio_N, a_N, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            # Where A < 0 the minimum does not bound a ratio above the range, so the loss of such a token is unbounded
            # without this.
            objective_N = torch.where(a_N < 0, torch.maximum(objective_N, self.dual_clip * a_N), objective_N)
            clipped_N = clipped_N | ((a_N < 0) & (ratio_N > self.dual_clip))
        return Surrogate(objective_N, ratio_N.detach(), clipped_N)


@dataclass(frozen=True)
class LogClipThenMean(ClipRange, TrustRegion):
    """A exp(mean_t d_t), d_t = log r_t bounded by +clip_high where A > 0 and by -clip_low where A < 0 (GMPO)."""

    needs_zero_advantage: ClassVar[bool] = False
    usual_range: ClassVar[UsualRange | None] = UsualRange(0.01, 3.0, "0.4, in log space")
    clips_log_ratio: ClassVar[bool] = True
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, sequences = tokens.advantage_N, tokens.sequences
        upper_N = torch.where(a_N > 0, log_ratio_N.clamp(max=self.clip_high), log_ratio_N)
        bounded_N = torch.where(a_N < 0, upper_N.clamp(min=-self.clip_low), upper_N)
        # As in ratio.sequence, the gradient flows through each token's own log-prob; a bounded token has none.
        mean_N = sequences.expand(sequences.mean(bounded_N.detach()))
        ratio_N = with_gradient_of(mean_N, bounded_N).exp()
        clipped_N = ((a_N > 0) & (log_ratio_N > self.clip_high)) | ((a_N < 0) & (log_ratio_N < -self.clip_low))
        return Surrogate(ratio_N * a_N, ratio_N.detach(), clipped_N)


@dataclass(frozen=True)
class LengthBand(ClipRange, TrustRegion):
    """min(W A, W' A), log W' = log W bounded by -clip_low sqrt(T) and +clip_high sqrt(T) for a completion of T tokens
    (FSPO)."""

    needs_zero_advantage: ClassVar[bool] = False
    usual_range: ClassVar[UsualRange | None] = UsualRange(1e-3, 1.0, "0.03, in log space and times sqrt(T)")
    clips_log_ratio: ClassVar[bool] = True
    range_grows_with_length: ClassVar[bool] = True
    # A sum of T independent log-ratios spreads by sqrt(T), so a fixed range would clip long completions more often.
    clip_low: float = 0.03
    clip_high: float = 0.03

    def bounded(self, log_ratio: Tensor, length: Tensor) -> Tensor:
        return log_ratio / length.clamp(min=1).sqrt().to(log_ratio.dtype)

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, sequences = tokens.advantage_N, tokens.sequences
        root_N = sequences.expand(sequences.length_B).sqrt().to(log_ratio_N.dtype)
        low_N, high_N = -self.clip_low * root_N, self.clip_high * root_N
        ratio_N = log_ratio_N.exp()
        inside_N = torch.minimum(torch.maximum(log_ratio_N, low_N), high_N).exp()
        clipped_N = ((a_N > 0) & (log_ratio_N > high_N)) | ((a_N < 0) & (log_ratio_N < low_N))
        objective_N = torch.where(clipped_N, inside_N.detach(), ratio_N) * a_N
        return Surrogate(objective_N, ratio_N.detach(), clipped_N)


@dataclass(frozen=True)
class SoftGate(TrustRegion):
    """(4/tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg (SAPO).
    The gradient weight is sech^2(tau (r - 1) / 2) r."""

    needs_zero_advantage: ClassVar[bool] = False

    tau_pos: float = 1.0
    # A negative advantage raises the many tokens that were not sampled, which is noisier, so its gate is narrower.
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.tau_pos, self.tau_neg) <= 0:
            raise ConfigError("tau_pos, tau_neg: must be above 0")

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, ratio_N = tokens.advantage_N, log_ratio_N.exp()
        tau_N = _either(a_N > 0, self.tau_pos, self.tau_neg, ratio_N)
        # The factor 4/tau makes the gradient weight 1 at ratio 1 for every tau.
        gate_N = 4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0))
        return _soft(gate_N * a_N, ratio_N)


@dataclass(frozen=True)
class SoftGateThenMean(SoftGate):
    """A exp(mean_t log f_t), f_t = (4/tau) sigmoid(tau (r_t - 1)), tau = tau_pos where A > 0, else tau_neg (SSPO): the
    geometric mean of SAPO's gates."""

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, ratio_N, sequences = tokens.advantage_N, log_ratio_N.exp(), tokens.sequences
        tau_N = _either(a_N > 0, self.tau_pos, self.tau_neg, ratio_N)
        # In log space: the sigmoid of a very large negative number is 0, and its logarithm would be -inf.
        log_gate_N = torch.log(4.0 / tau_N) + torch.nn.functional.logsigmoid(tau_N * (ratio_N - 1.0))
        # As in LogClipThenMean, the gradient flows through each token's own gate.
        mean_N = sequences.expand(sequences.mean(log_gate_N.detach()))
        return _soft(with_gradient_of(mean_N, log_gate_N).exp() * a_N, ratio_N)


@dataclass(frozen=True)
class GammaWeight(TrustRegion):
    """sg[W^k exp(lambda (1 - W))] A log pi, (k, lambda) by the sign of A (VESPO). Computed in log space."""

    needs_zero_advantage: ClassVar[bool] = False

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    @property
    def noise_limit(self) -> float:
        # At log W = 0.2 the default weight is off by a quarter.
        return 0.2

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, log_w_N = tokens.advantage_N, log_ratio_N.detach()
        k_N = _either(a_N >= 0, self.k_pos, self.k_neg, log_w_N)
        lambda_N = _either(a_N >= 0, self.lambda_pos, self.lambda_neg, log_w_N)
        # Bounded from above only: a very small W underflows to 0, which is its limit.
        w_N = log_w_N.clamp(max=MAX_LOG_RATIO).exp()
        # exp of a sum, not a product of powers: W^k alone overflows for a long completion.
        # The first term makes the weight 1 at W = 1.
        phi_N = (lambda_N + k_N * log_w_N - lambda_N * w_N).exp()
        return _soft(phi_N * a_N * tokens.logp_N, w_N)


@dataclass(frozen=True)
class MassGate(TrustRegion):
    """sg[F] r A, F = exp(-(r - 1)^2 / (2 sigma^2)) where r has moved in the direction of A, else 1 (MASPO).
    sigma is wider for rare tokens and depends on the sign and size of A."""

    needs_zero_advantage: ClassVar[bool] = False

    sigma_base: float = 1.0
    mass_power: float = 0.3
    beta_pos: float = 0.03
    beta_neg: float = 0.03
    sigma_high: float = 10.0
    factor_low: float = 0.1
    factor_high: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor_low > self.factor_high or not self.sigma_base:
            raise ConfigError("factor_low must not be above factor_high, and sigma_base not 0")

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, ratio_N = tokens.advantage_N, log_ratio_N.exp()
        r_N = ratio_N.detach()
        mass_N = self.sigma_base * torch.exp(-self.mass_power * tokens.logp_old_N)
        # Without the upper bound, sigma of a very rare token would be so wide that the gate never acts.
        mass_N = mass_N.clamp(self.sigma_base, self.sigma_high)
        by_sign_N = torch.where(a_N > 0, 1 + self.beta_pos * a_N, 1 / (1 - self.beta_neg * a_N.clamp(max=0)))
        sigma_N = mass_N * by_sign_N.clamp(self.factor_low, self.factor_high)
        pushed_N = ((a_N > 0) & (r_N > 1)) | ((a_N < 0) & (r_N < 1))
        gate_N = torch.where(pushed_N, torch.exp(-((r_N - 1) ** 2) / (2 * sigma_N**2)), 1.0)
        return _soft(gate_N * ratio_N * a_N, ratio_N)


@dataclass(frozen=True)
class CappedWeight(TrustRegion):
    """sg[min(r, weight_cap)] A log pi (CISPO). The weight is bounded and no token is dropped.
    `weight_cap` bounds the ratio itself; it is not 1 + weight_cap."""

    needs_zero_advantage: ClassVar[bool] = False

    # MiniMax-M1 does not disclose its bound. 5 is that of ScaleRL.
    weight_cap: float = 5.0

    def warning(self) -> str | None:
        return _low_cap(self.weight_cap)

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        # The gradient flows through log pi and not through the ratio, so a capped token still has one.
        ratio_N = log_ratio_N.detach().exp()
        weight_N = ratio_N.clamp(max=self.weight_cap)
        return Surrogate(weight_N * tokens.advantage_N * tokens.logp_N, ratio_N, ratio_N > self.weight_cap)


@dataclass(frozen=True)
class MaskedWeight(ClipRange, TrustRegion):
    """M sg[min(pi/mu, weight_cap)] A log pi, M = 0 where pi/pi_old has left the clip range in the direction of A
    (MiniRL)."""

    needs_zero_advantage: ClassVar[bool] = False
    needs_sampler: ClassVar[bool] = True
    clip_low: float = 0.2
    clip_high: float = 0.27
    weight_cap: float = 5.0

    def warning(self) -> str | None:
        return _low_cap(self.weight_cap)

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        # Two ratios: pi/pi_old decides what is dropped, pi/mu weights what is kept.
        ratio_N = log_ratio_N.detach().exp()
        log_weight_N = (tokens.logp_N.detach() - tokens.logp_behavior_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        weight_N = log_weight_N.exp().clamp(max=self.weight_cap)
        dropped_N = pushed_out(ratio_N, tokens.advantage_N, self.clip_low, self.clip_high)
        objective_N = weight_N * tokens.advantage_N * tokens.logp_N
        return Surrogate(torch.where(dropped_N, 0.0, objective_N), ratio_N, dropped_N)


@dataclass(frozen=True)
class DivergenceMask(TrustRegion):
    """Base of the regions that drop a token whose probability has moved too far from the sampler's in the direction of
    A. The ratio of the others is not bounded."""

    needs_zero_advantage: ClassVar[bool] = False
    needs_sampler: ClassVar[bool] = True
    delta_low: float
    delta_high: float

    def divergence(self, logp_N: Tensor, log_mu_N: Tensor) -> Tensor:
        """How far the distributions of a token are apart, 0 or more."""
        raise NotImplementedError

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        a_N, ratio_N = tokens.advantage_N, log_ratio_N.exp()
        logp_N, log_mu_N = tokens.logp_N.detach(), tokens.logp_behavior_N
        far_N = self.divergence(logp_N, log_mu_N)
        up_N = (a_N > 0) & (logp_N > log_mu_N) & (far_N > self.delta_high)
        down_N = (a_N < 0) & (logp_N < log_mu_N) & (far_N > self.delta_low)
        dropped_N = up_N | down_N
        return Surrogate(torch.where(dropped_N, 0.0, ratio_N * a_N), ratio_N.detach(), dropped_N)


@dataclass(frozen=True)
class TotalVariationMask(DivergenceMask):
    """M r A, r = pi/mu, M = 0 where |pi - mu| of the sampled token is above delta_high (A > 0) or delta_low (A < 0) and
    the token has moved in the direction of A (DPPO-Binary-TV)."""

    # The authors' example; prime-rl and SkyRL use 0.2.
    delta_low: float = 0.15
    delta_high: float = 0.15

    def divergence(self, logp_N: Tensor, log_mu_N: Tensor) -> Tensor:
        return (logp_N.exp() - log_mu_N.exp()).abs()

    def warning(self) -> str | None:
        if max(self.delta_low, self.delta_high) < 1:
            return None
        return (
            f"|pi - mu| is never above 1, so delta_low={self.delta_low:g} and delta_high={self.delta_high:g} do not "
            "bound both sides; use about 0.15"
        )


@dataclass(frozen=True)
class BinaryKlMask(DivergenceMask):
    """M r A, r = pi/mu, M = 0 where the KL from mu to pi of "this token or another" is above delta_high (A > 0) or
    delta_low (A < 0) and the token has moved in the direction of A (DPPO-Binary-KL)."""

    delta_low: float = 0.05
    delta_high: float = 0.05

    def divergence(self, logp_N: Tensor, log_mu_N: Tensor) -> Tensor:
        mu_N = log_mu_N.exp()
        others_N = (1 - mu_N) * (_log_of_rest(log_mu_N) - _log_of_rest(logp_N))
        return mu_N * (log_mu_N - logp_N) + others_N


@dataclass(frozen=True)
class CompletionMask(TrustRegion):
    """M r A, r = pi/mu, M = 0 for a whole completion with a token whose (log pi/mu)^2 / 2 is above max_divergence
    (TRM). The square estimates the KL from mu to pi and treats both directions alike."""

    needs_zero_advantage: ClassVar[bool] = False
    needs_sampler: ClassVar[bool] = True
    # The value in verl's example of this mask, whose authors are those of the paper.
    max_divergence: float = 2.5

    def warning(self) -> str | None:
        # Differences of 0.1 between the log-probs of engine and learner are common in bfloat16.
        if self.max_divergence >= 0.01:
            return None
        return f"max_divergence={self.max_divergence:g} drops completions for rounding alone; use about 2.5"

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        sequences, ratio_N = tokens.sequences, log_ratio_N.exp()
        square_N = 0.5 * (tokens.logp_N.detach() - tokens.logp_behavior_N) ** 2
        # A sum instead of a maximum, so that processes that share a sequence can add up their parts. NaN counts as far.
        far_B = sequences.sum((~(square_N <= self.max_divergence)).to(ratio_N.dtype)) > 0
        dropped_N = sequences.expand(far_B)
        objective_N = torch.where(dropped_N, 0.0, ratio_N * tokens.advantage_N)
        return Surrogate(objective_N, ratio_N.detach(), dropped_N)


@dataclass(frozen=True)
class Unbounded(TrustRegion):
    """A log pi: the plain score function, no ratio and no bound."""

    needs_zero_advantage: ClassVar[bool] = False

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        return _soft(tokens.advantage_N * tokens.logp_N, log_ratio_N.exp())


@dataclass(frozen=True)
class CovarianceRegion(TrustRegion):
    """A region that selects tokens by Cov_j = (log pi_j - mean log pi)(A_j - mean A) over the whole optimizer step."""

    selects_tokens: ClassVar[bool] = True
    select_fraction: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select_fraction > 1:
            raise ConfigError(f"select_fraction: must be between 0 and 1, not {self.select_fraction:g}")

    def selection_count(self, tokens: int) -> int:
        """The fraction of the tokens, rounded down; a small step may select none."""
        # 1e-9 restores counts that the product just misses: 0.29 * 100 is 28.999... in float64.
        return int(self.select_fraction * tokens + 1e-9)

    def _selected(self, tokens: Tokens) -> Tensor:
        assert tokens.selected_N is not None, "select() the step's tokens before splitting it into micro-batches"
        return tokens.selected_N


@dataclass(frozen=True)
class DropCovariance(ClipRange, CovarianceRegion):
    """Clip, and zero the loss of a random `select_fraction` of the tokens, among those with Cov in [cov_low, cov_high]
    (Clip-Cov)."""

    select_fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    # As in the official code, the clip range is almost disabled: covariance takes its place.
    clip_low: float = 1.0
    clip_high: float = 1.0
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cov_low >= self.cov_high:
            raise ConfigError(f"cov_low={self.cov_low:g}: must be below cov_high={self.cov_high:g}")

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        inner = self._clip(tokens, log_ratio_N)
        dropped_N = self._selected(tokens)
        objective_N = torch.where(dropped_N, 0.0, inner.objective_N)
        return Surrogate(objective_N, inner.ratio_N, inner.clipped_N | dropped_N)

    def select(self, tokens: Tokens, log_ratio_N: Tensor, generator: torch.Generator) -> Tensor:
        cov_N = covariance(tokens)
        # A clipped token has no gradient left to drop, so it is not a candidate.
        allowed_N = (cov_N >= self.cov_low) & (cov_N <= self.cov_high) & ~self._clip(tokens, log_ratio_N).clipped_N
        candidates = allowed_N.nonzero().squeeze(-1)
        # The permutation is made on the CPU, so the same seed selects the same tokens on every device.
        order = torch.randperm(len(candidates), generator=generator)[: self.selection_count(len(cov_N))]
        return torch.zeros_like(allowed_N).index_fill(0, candidates[order.to(candidates.device)], True)

    def _clip(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        return Clip(self.clip_low, self.clip_high, self.dual_clip)(tokens, log_ratio_N)


@dataclass(frozen=True)
class PenalizeCovariance(CovarianceRegion):
    """r A - cov_kl |log pi - log pi_old| on the `select_fraction` of tokens with the largest Cov (KL-Cov). No clip."""

    # The published value for 7B models; it is 2e-4 for 32B.
    select_fraction: float = 2e-3
    cov_kl: float = 1.0

    def __call__(self, tokens: Tokens, log_ratio_N: Tensor) -> Surrogate:
        ratio_N = log_ratio_N.exp()
        penalty_N = self.cov_kl * (tokens.logp_N - tokens.logp_old_N).abs()
        chosen_N = self._selected(tokens)
        objective_N = ratio_N * tokens.advantage_N - torch.where(chosen_N, penalty_N, 0.0)
        return _soft(objective_N, ratio_N)

    def select(self, tokens: Tokens, log_ratio_N: Tensor, generator: torch.Generator) -> Tensor:
        cov_N = covariance(tokens)
        # The largest ones, not a random choice, so the generator is not needed.
        top = torch.topk(cov_N, self.selection_count(len(cov_N))).indices
        return torch.zeros_like(cov_N, dtype=torch.bool).index_fill(0, top, True)


def covariance(tokens: Tokens) -> Tensor:
    """Cov_j over all tokens given, without gradient."""
    logp_N, a_N = tokens.logp_N.detach(), tokens.advantage_N
    return (logp_N - logp_N.mean()) * (a_N - a_N.mean())


def pushed_out(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> Tensor:
    """Whether the ratio has left [1 - low, 1 + high] in the direction of the advantage."""
    return ((advantage_N > 0) & (ratio_N > 1 + high)) | ((advantage_N < 0) & (ratio_N < 1 - low))


def _either(where_N: Tensor, yes: float, no: float, like_N: Tensor) -> Tensor:
    """torch.where of two numbers in the dtype of `like_N`."""
    # torch.where of two Python numbers would return float32, also for float64 inputs.
    return torch.where(where_N, like_N.new_tensor(yes), like_N.new_tensor(no))


def _log_of_rest(logp_N: Tensor) -> Tensor:
    """log(1 - p), with 1 - p at least about 1e-8, so that nothing is infinite."""
    return torch.log(-torch.expm1(logp_N.clamp(max=-1e-8)))


def _soft(objective_N: Tensor, ratio_N: Tensor) -> Surrogate:
    return Surrogate(objective_N, ratio_N.detach(), torch.zeros_like(ratio_N, dtype=torch.bool))


def _low_cap(weight_cap: float) -> str | None:
    if weight_cap >= 1:
        return None
    return (
        f"weight_cap={weight_cap:g} bounds the ratio itself, not 1 + weight_cap, and scales down on-policy tokens; "
        "use about 5"
    )

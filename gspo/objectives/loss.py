"""From packed tokens to a loss.

In: packed tokens with the weights of their optimizer step. Out: the loss and its parts, and statistics of the update.
Invariant: the losses of micro-batches, with the weights of their optimizer step, add up to the loss of that step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.objectives.kl import KL_ESTIMATORS
from gspo.objectives.mismatch import mismatch_weight, off_policy_keep
from gspo.objectives.objective import Objective
from gspo.objectives.ratio import MAX_LOG_RATIO
from gspo.objectives.sequences import Tokens
from gspo.objectives.trust_region import Surrogate
from gspo.reduction import Gather, Max, Mean, Reduced, std

UNLIKELY, CERTAIN = 0.1, 0.9
"""Bounds on the old policy's probability of a token, for the metrics of clipping by probability."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of packed tokens, and its parts, whose sum it is."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    surrogate: Surrogate

    def detached(self) -> Loss:
        """The same values without their graph."""
        surrogate = replace(self.surrogate, objective_N=self.surrogate.objective_N.detach())
        parts = {name: getattr(self, name).detach() for name in ("total", "policy", "kl", "entropy")}
        return Loss(**parts, surrogate=surrogate)


def loss_of(objective: Objective, tokens: Tokens, weight_N: Tensor) -> Loss:
    """-(weight * J).sum() + kl * (weight * KL).sum() - entropy * (weight * H).sum()."""
    assert weight_N.shape == tokens.logp_N.shape
    surrogate = objective.trust_region(tokens, objective.ratio(tokens))
    # The corrections act on the policy term only: KL and entropy terms keep the plain token weights.
    term_N = surrogate.objective_N
    if objective.mismatch != "none":
        term_N = term_N * mismatch_weight(objective.mismatch, *objective.mismatch_bounds, tokens)
    if objective.off_policy_mask is not None:
        term_N = term_N * off_policy_keep(objective.off_policy_mask, tokens)
    # A sum: the denominator is part of the weights and covers the whole optimizer step. A mean over a micro-batch would
    # depend on how the step is split.
    policy = -(weight_N * term_N).sum()
    kl = entropy = torch.zeros_like(policy)
    # Without a reference there is no KL term. `policy_loss` has refused that, or warned about it.
    if objective.kl and objective.kl_in == "loss" and tokens.logp_ref_N is not None:
        kl = objective.kl * (weight_N * KL_ESTIMATORS[objective.resolved_kl_estimator](tokens)).sum()
    if objective.entropy:
        assert tokens.entropy_N is not None
        entropy = -objective.entropy * (weight_N * tokens.entropy_N).sum()
    return Loss(total=policy + kl + entropy, policy=policy, kl=kl, entropy=entropy, surrogate=surrogate)


def select(objective: Objective, tokens: Tokens, seed: int) -> Tensor | None:
    """The tokens of a whole optimizer step that the objective selects; `None` if it selects none."""
    region = objective.trust_region
    if not region.selects_tokens:
        return None
    with torch.no_grad():
        return region.select(tokens, objective.ratio(tokens), torch.Generator().manual_seed(seed))


def loss_statistics(objective: Objective, tokens: Tokens, ratio_N: Tensor, clipped_N: Tensor) -> dict[str, Reduced]:
    """Statistics of the update over these tokens. Names are those of docs/metrics.md, with `_` for `/`."""
    sequences = tokens.sequences
    present_B = sequences.length_B > 0
    log_ratio_N = (tokens.logp_N - tokens.logp_old_N).detach()
    ratio_B = sequences.mean(ratio_N)[present_B]
    # A sequence counts as clipped if any of its tokens is: with a token-level region only some of them are.
    clipped_B = sequences.sum(clipped_N.double())[present_B] > 0
    log_s_B = sequences.mean(log_ratio_N)[present_B]
    stats: dict[str, Reduced] = {
        "clip_fraction_tokens": Mean.of(clipped_N.double()),
        "clip_fraction_sequences": Mean.of(clipped_B.double()),
        # Of the ratio that is clipped. A sequence ratio counts once per completion, however long that is.
        "ratio_mean": Mean.of((ratio_B if objective.clips_sequences else ratio_N).double()),
        "ratio_max": Max.of(ratio_N),
        "ratio_token_log_std": Gather(log_ratio_N, std),
        "ratio_sequence_log_std": Gather(log_s_B, std),
        # The spread says nothing about a drift that all completions share. Token clipping bounds neither.
        "ratio_sequence_log_abs_mean": Mean.of(log_s_B.abs()),
        "ratio_sequence_log_abs_max": Max.of(log_s_B.abs()),
        "kl_old_new": _k3(log_ratio_N),
        **_clipped_by_probability(tokens, clipped_N),
    }
    if tokens.logp_sampler_N is not None:
        stats["mismatch_k3"] = _k3(tokens.logp_old_N - tokens.logp_sampler_N)
    if tokens.logp_ref_N is not None:
        stats["kl_ref"] = _k3((tokens.logp_ref_N - tokens.logp_N).detach())
    return stats


def _clipped_by_probability(tokens: Tokens, clipped_N: Tensor) -> dict[str, Reduced]:
    """Share of clipped tokens among those that the old policy considered unlikely, possible and nearly certain.

    A token of probability 0.01 leaves a range of 20 % at 0.012, and one of 0.95 can never leave it upward. So a clip
    range acts on the tokens by which a policy explores (DAPO's argument for a higher `clip_high`)."""
    probability_N = tokens.logp_old_N.exp()
    unlikely_N, certain_N = probability_N < UNLIKELY, probability_N > CERTAIN
    bins = {"low": unlikely_N, "middle": ~(unlikely_N | certain_N), "high": certain_N}
    return {
        f"clip_probability_{name}": Mean((clipped_N & in_N).double().sum(), int(in_N.sum()))
        for name, in_N in bins.items()
    }


def _k3(log_ratio_N: Tensor) -> Mean:
    """Mean of r - 1 - log r."""
    # The exponent is bounded, so that one broken token makes the mean large but not infinite.
    return Mean.of(torch.expm1(log_ratio_N.clamp(max=MAX_LOG_RATIO)) - log_ratio_N)

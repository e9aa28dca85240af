"""From tokens to a loss, and the public functions for other people's training loops.

In: packed tokens with their weights (`loss_of`), or padded `[B, T]` tensors (`policy_loss`), which are packed at the
border so that nothing at a masked position, NaN included, can reach the loss or the gradient.
Invariant: losses of micro-batches that carry the step's fixed weights add up to the loss of the step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objective.advantage import apply_rule, external
from gspo.objective.objective import Objective, ObjectiveWarning, change
from gspo.objective.penalty import KL_ESTIMATORS, mismatch_weight, off_policy_keep
from gspo.objective.sequences import Sequences, Tokens
from gspo.objective.table import TABLE
from gspo.objective.trust_region import CovarianceRegion, Surrogate


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of packed tokens, and its parts, which add up to it."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    surrogate: Surrogate


def loss_of(objective: Objective, tokens: Tokens, weight_N: Tensor) -> Loss:
    """-(weight * J).sum() + kl * (weight * KL).sum() - entropy * (weight * H).sum()."""
    assert weight_N.shape == tokens.logp_N.shape
    surrogate = objective.trust_region(tokens, objective.ratio(tokens))
    term_N = surrogate.objective_N
    if objective.mismatch != "none":
        term_N = term_N * mismatch_weight(objective.mismatch, *objective.bounds, tokens)
    if objective.off_policy_mask is not None:
        term_N = term_N * off_policy_keep(objective.off_policy_mask, tokens)
    policy = -(weight_N * term_N).sum()
    kl = entropy = torch.zeros_like(policy)
    if objective.kl and objective.kl_in == "loss" and tokens.logp_ref_N is not None:
        kl = objective.kl * (weight_N * KL_ESTIMATORS[objective.estimator](tokens)).sum()
    if objective.entropy:
        assert tokens.entropy_N is not None
        entropy = -objective.entropy * (weight_N * tokens.entropy_N).sum()
    return Loss(total=policy + kl + entropy, policy=policy, kl=kl, entropy=entropy, surrogate=surrogate)


def select(objective: Objective, tokens: Tokens, seed: int) -> Tensor | None:
    """The tokens of a whole optimiser step that the objective singles out; None if it does not."""
    region = objective.trust_region
    if not isinstance(region, CovarianceRegion):
        return None
    with torch.no_grad():
        return region.select(tokens, objective.ratio(tokens), torch.Generator().manual_seed(seed))


STATISTICS = (
    "clip_fraction_tokens", "clip_fraction_sequences", "ratio_mean", "ratio_max", "ratio_token_log_std",
    "ratio_sequence_log_std", "kl_old_new",
)  # fmt: skip
"""What `statistics` always gives; NaN without tokens."""


def statistics(objective: Objective, tokens: Tokens, ratio_N: Tensor, clipped_N: Tensor) -> dict[str, float]:
    """What the update did, over the tokens given. Names as in docs/metrics.md, with `_` for `/`."""
    if not len(ratio_N):
        return dict.fromkeys(STATISTICS, math.nan)
    sequences, present_B = tokens.sequences, tokens.sequences.length_B > 0
    log_ratio_N = (tokens.logp_N - tokens.logp_old_N).detach()
    log_s_B = sequences.mean(log_ratio_N)[present_B]
    ratio_B = sequences.mean(ratio_N)[present_B]
    clipped_B = sequences.sum(clipped_N.double())[present_B] > 0
    stats = {
        "clip_fraction_tokens": clipped_N.double().mean(),
        "clip_fraction_sequences": clipped_B.double().mean(),
        "ratio_mean": (ratio_B if objective.clips_sequences else ratio_N).double().mean(),
        "ratio_max": ratio_N.max(),
        "ratio_token_log_std": log_ratio_N.std(correction=0),
        "ratio_sequence_log_std": log_s_B.std(correction=0),
        "kl_old_new": (torch.expm1(log_ratio_N.clamp(max=20)) - log_ratio_N).mean(),
    }
    if tokens.logp_sampler_N is not None:
        log_rho_N = tokens.logp_old_N - tokens.logp_sampler_N
        stats["mismatch_k3"] = (torch.expm1(log_rho_N.clamp(max=20)) - log_rho_N).mean()
    if tokens.logp_ref_N is not None:
        log_r_N = (tokens.logp_ref_N - tokens.logp_N).detach()
        stats["kl_ref"] = (torch.expm1(log_r_N.clamp(max=20)) - log_r_N).mean()
    return {name: float(value) for name, value in stats.items()}


# ------------------------------------------------------------------------------------------------- public interface


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """`loss` to call backward on, and `stats` as plain numbers."""

    loss: Tensor
    stats: dict[str, float]


def build(name: str, **settings: Any) -> Objective:
    """A row of the table with changed settings; public as `gspo.objective("gspo", clip_low=3e-4, clip_high=4e-4)`."""
    if not isinstance(name, str) or name not in TABLE:
        raise ConfigError(f"no objective {name!r}; there are: {', '.join(TABLE)}")
    return change(replace(TABLE[name], name=name), settings)


def objective_names() -> list[str]:
    """The rows of the table."""
    return list(TABLE)


def group_advantage(
    objective: Objective | str, reward_B: Sequence[float | None] | Tensor, group_B: Sequence[Hashable] | Tensor
) -> Tensor:
    """Advantages `[B]` by the objective's rule. None or NaN marks an unscored reply: 0, and in nobody's mean."""
    row = _row(objective)
    if row.advantage is external:
        raise ConfigError(
            f"objective {row.name!r} takes advantages from outside (one per token): pass them to policy_loss yourself"
        )
    return apply_rule(row.advantage, reward_B, group_B)


def token_weights(objective: Objective | str, mask: Tensor) -> Tensor:
    """Fixed weights `[B, T]` for a whole optimiser step; give their rows to `policy_loss(weights=...)`."""
    mask = _bool_mask(mask)
    weight_B = _row(objective).aggregate(mask.sum(-1).double())
    return torch.where(mask, weight_B.unsqueeze(-1), 0.0)


def select_tokens(
    objective: Objective | str, logp: Tensor, logp_old: Tensor, advantage: Tensor, mask: Tensor, seed: int = 0
) -> Tensor:
    """The tokens `[B, T]` of a whole step that `clip_cov` or `kl_cov` single out; rows go to `policy_loss(selected=...)`."""
    row, mask = _row(objective), _bool_mask(mask)
    selected_N = select(row, _pack(row, mask, logp=logp, logp_old=logp_old, advantage=advantage), seed)
    if selected_N is None:
        raise ConfigError(f"objective {row.name!r} singles out no tokens; only clip_cov and kl_cov do")
    return torch.zeros_like(mask).masked_scatter(mask, selected_N)


def policy_loss(
    objective: Objective | str,
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    logp_sampler: Tensor | None = None,
    logp_ref: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
    selected: Tensor | None = None,
) -> PolicyLoss:
    """Loss of padded tensors: log-probabilities `[B, T]`, advantages `[B]` or `[B, T]`, a bool mask `[B, T]`.

    Computes in the inputs' precision, at least float32. Without `weights` the tensors are taken to be the whole step;
    a micro-batch of a larger step passes its rows of `token_weights` (and of `select_tokens`, for the rows that need it).
    """
    row, mask = _row(objective), _bool_mask(mask)
    advantage = torch.as_tensor(advantage, device=mask.device)
    tokens = _pack(
        row, mask, logp=logp, logp_old=logp_old, advantage=advantage, logp_sampler=logp_sampler, logp_ref=logp_ref,
        entropy=entropy, selected=selected,
    )  # fmt: skip
    _check_inputs(row, tokens)
    weight_N = _at("weights", token_weights(row, mask) if weights is None else weights, mask).to(tokens.logp_N.dtype)
    if isinstance(row.trust_region, CovarianceRegion) and selected is None:
        tokens = replace(tokens, selected_N=_select_whole_step(row, row.trust_region, tokens, weights, weight_N))
    loss = loss_of(row, tokens, weight_N)
    stats = statistics(row, tokens, loss.surrogate.ratio_N, loss.surrogate.clipped_N)
    return PolicyLoss(loss=loss.total, stats=stats)


def _row(objective: Objective | str) -> Objective:
    return objective if isinstance(objective, Objective) else build(objective)


def _bool_mask(mask: Tensor) -> Tensor:
    if mask.dim() != 2:
        raise ConfigError(f"mask: must have shape [B, T], not {list(mask.shape)}")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ConfigError("mask: must be bool (True at tokens to train on), or hold only 0 and 1")
    return mask.bool()


def _pack(
    row: Objective, mask: Tensor, *, advantage: Tensor, selected: Tensor | None = None, **logps: Tensor | None
) -> Tokens:
    """Keep what the mask shows. Indexing, not multiplying: garbage at masked positions must not leak (inf * 0 is NaN)."""
    given = {name: value for name, value in logps.items() if value is not None}
    dtype = torch.float32
    for value in given.values():
        dtype = torch.promote_types(dtype, value.dtype)
    packed = {f"{name}_N": _at(name, value, mask).to(dtype) for name, value in given.items()}
    for name in ("logp_old_N", "logp_sampler_N", "logp_ref_N"):
        if name in packed:
            packed[name] = packed[name].detach()
    index_N = torch.arange(mask.shape[0], device=mask.device).unsqueeze(-1).expand_as(mask)[mask]
    sequences = Sequences(index_N, mask.shape[0])
    advantage_N = _advantage(row, advantage, mask, sequences).to(dtype)
    if selected is not None:
        packed["selected_N"] = _at("selected", selected, mask).bool()
    return Tokens(advantage_N=advantage_N, sequences=sequences, **packed)


def _at(name: str, value: Tensor, mask: Tensor) -> Tensor:
    if value.shape != mask.shape:
        raise ConfigError(f"{name}: shape {list(value.shape)} does not match the mask's {list(mask.shape)}")
    return value[mask]


def _advantage(row: Objective, advantage: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    advantage = advantage.detach()
    if advantage.shape == mask.shape[:1]:
        return advantage[sequences.index_N]
    advantage_N = _at("advantage", advantage, mask)
    if row.per == "sequence":
        first_B = torch.zeros(sequences.count, dtype=advantage_N.dtype, device=advantage_N.device)
        first_B = first_B.scatter(0, sequences.index_N, advantage_N)
        if not torch.equal(first_B[sequences.index_N], advantage_N):
            raise ConfigError(f"objective {row.name!r} has one advantage per reply, but it differs between tokens of a reply; per-token advantages need a token-level row, for example gspo_token")  # fmt: skip
    return advantage_N


def _check_inputs(row: Objective, tokens: Tokens) -> None:
    if tokens.selected_N is not None and not isinstance(row.trust_region, CovarianceRegion):
        raise ConfigError(f"selected: objective {row.name!r} singles out no tokens; only clip_cov and kl_cov do")
    if row.mismatch != "none" and tokens.logp_sampler_N is None:
        raise ConfigError(f"mismatch={row.mismatch}: needs logp_sampler, the sampling engine's log-probabilities")
    if row.entropy and tokens.entropy_N is None:
        raise ConfigError("entropy: the bonus needs entropy=, the policy's entropy at each token")
    if row.kl and row.kl_in == "loss" and tokens.logp_ref_N is None:
        if "kl" in row.given:
            raise ConfigError(f"kl={row.kl:g}: needs logp_ref, the reference policy's log-probabilities; or set kl=0")
        warnings.warn(f"objective {row.name!r} has kl={row.kl:g} by default, but no logp_ref was given: no KL term; set kl=0 to say so", ObjectiveWarning, stacklevel=3)  # fmt: skip
    if row.kl and row.kl_in == "reward" and tokens.logp_ref_N is not None:
        warnings.warn(f"objective {row.name!r} has its KL penalty in the reward: policy_loss adds none; subtract kl * sum(log pi - log pi_ref) from the rewards, or set kl_in=loss", ObjectiveWarning, stacklevel=3)  # fmt: skip
    sampler_N = tokens.logp_sampler_N
    if (
        row.clips_sequences
        and row.mismatch == "none"
        and sampler_N is not None
        and torch.equal(sampler_N, tokens.logp_old_N)
    ):
        warnings.warn(f"objective {row.name!r}: logp_old is the sampler's, so engine numerics count as policy movement and can exceed the clip range before any update; recompute logp_old with the learner, or set mismatch", ObjectiveWarning, stacklevel=3)  # fmt: skip


def _select_whole_step(
    row: Objective, region: CovarianceRegion, tokens: Tokens, weights: Tensor | None, weight_N: Tensor
) -> Tensor:
    """Without `weights` the batch is the step and is selected from; a micro-batch must bring the step's selection."""
    if weights is None:
        selected_N = select(row, tokens, seed=0)
        assert selected_N is not None
        return selected_N
    step_tokens = round(1 / float(weight_N.max())) if len(weight_N) else 0
    if region.selection_count(step_tokens):
        raise ConfigError(f"objective {row.name!r} singles out tokens over the whole step: with weights= also pass selected=, the rows of select_tokens(...)")  # fmt: skip
    return torch.zeros_like(tokens.logp_N, dtype=torch.bool)

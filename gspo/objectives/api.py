"""The losses for other training loops: `gspo.policy_loss` and its companions.

In: padded `[B, T]` tensors. They are packed here, so that nothing at a masked position, NaN included, reaches the loss or
the gradient. Out: a loss to call backward on, advantages, token weights. Invariant: losses of micro-batches that carry the
weights of their optimizer step add up to the loss of that step.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives import table
from gspo.objectives.advantage import apply_rule, external
from gspo.objectives.loss import loss_of, select, statistics
from gspo.objectives.objective import Objective, ObjectiveWarning
from gspo.objectives.sequences import Sequences, Tokens
from gspo.objectives.trust_region import CovarianceRegion


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """`loss` to call backward on, and `stats` as plain numbers."""

    loss: Tensor
    stats: dict[str, float]


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
    return objective if isinstance(objective, Objective) else table.objective(objective)


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

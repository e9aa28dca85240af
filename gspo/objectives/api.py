"""The losses for your own training loop: `gspo.policy_loss`, `group_advantage`, `token_weights` and `select_tokens`.

In: padded `[B, T]` tensors. They are packed here, so that nothing at a masked position, NaN included, reaches the
loss or the gradient. Out: a loss to call backward on, advantages, token weights. Invariant: the losses of
micro-batches, with the weights of their optimizer step, add up to the loss of that step.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives import table
from gspo.objectives.advantage import apply_rule
from gspo.objectives.aggregate import token_mean
from gspo.objectives.loss import loss_of, loss_statistics, select
from gspo.objectives.objective import Objective, ObjectiveWarning, settings_of
from gspo.objectives.sequences import Sequences, Tokens
from gspo.reduction import combined


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A `loss` to call backward on, and `stats` as Python floats."""

    loss: Tensor
    stats: dict[str, float]


def group_advantage(
    objective: Objective | str,
    reward_B: Sequence[float | None] | Sequence[Sequence[float | None]] | Tensor,
    group_B: Sequence[Hashable] | Tensor,
    *,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Advantages `[B]` by the objective's rule.

    `None` or NaN marks an unscored completion. Its advantage is 0, and means and standard deviations exclude it. With
    `normalize="separate"`, rewards are `[B, K]`, one per reward function, and `weights` are those of the functions (all
    1 by default); `None` or NaN then marks a function that abstained."""
    objective = _resolve(objective)
    if objective.advantage.scope == "external":
        raise ConfigError(
            f"objective {objective.name!r} takes advantages from outside (one per token): "
            "pass them to policy_loss yourself"
        )
    if objective.normalize == "sum":
        if weights is not None:
            raise ConfigError('weights: have an effect only with normalize="separate"; add up the rewards yourself')
        return apply_rule(objective.advantage, reward_B, group_B)
    return apply_rule(objective.advantage, reward_B, group_B, weights or ())


def token_weights(objective: Objective | str, mask: Tensor) -> Tensor:
    """Per-token weights `[B, T]` of a whole optimizer step; pass a micro-batch's rows to `policy_loss(weights=...)`."""
    mask = _bool_mask(mask)
    weight_B = _resolve(objective).aggregate(mask.sum(-1).double())
    return torch.where(mask, weight_B.unsqueeze(-1), 0.0)


def select_tokens(
    objective: Objective | str, logp: Tensor, logp_old: Tensor, advantage: Tensor, mask: Tensor, seed: int = 0
) -> Tensor:
    """The tokens `[B, T]` of a whole optimizer step that the objective selects, if it does (`clip_cov`, `kl_cov`).

    Pass a micro-batch's rows to `policy_loss(selected=...)`."""
    objective = _resolve(objective)
    mask = _bool_mask(mask)
    tokens = _pack(objective, mask, logp=logp, logp_old=logp_old, advantage=advantage)
    selected_N = select(objective, tokens, seed)
    if selected_N is None:
        raise ConfigError(f"objective {objective.name!r} selects no tokens; only {_selecting()} do")
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
    turn: Tensor | None = None,
) -> PolicyLoss:
    """Compute the loss of padded tensors: log-probs `[B, T]`, advantages `[B]` or `[B, T]`, a bool mask `[B, T]`.

    The loss is computed in the precision of the inputs, at least float32. Without `weights` the tensors are the whole
    optimizer step. A micro-batch of a larger step passes its rows of `token_weights`, and of `select_tokens` for
    objectives that select tokens. `turn`: the number `[B, T]` of each token's turn in a conversation, for `gspo_turn`.
    """
    objective = _resolve(objective)
    mask = _bool_mask(mask)
    advantage = torch.as_tensor(advantage, device=mask.device)
    tokens = _pack(
        objective,
        mask,
        logp=logp,
        logp_old=logp_old,
        advantage=advantage,
        logp_sampler=logp_sampler,
        logp_ref=logp_ref,
        entropy=entropy,
        selected=selected,
    )
    if turn is not None:
        tokens = replace(tokens, turn_N=_at("turn", turn, mask).long())
    _check_inputs(objective, tokens)
    weight_BT = token_weights(objective, mask) if weights is None else weights
    weight_N = _at("weights", weight_BT, mask).to(tokens.logp_N.dtype)
    if objective.trust_region.selects_tokens and selected is None:
        tokens = replace(tokens, selected_N=_select_whole_step(objective, tokens, weights, weight_N))
    loss = loss_of(objective, tokens, weight_N)
    stats = loss_statistics(objective, tokens, loss.surrogate.ratio_N, loss.surrogate.clipped_N)
    return PolicyLoss(loss=loss.total, stats=combined([stats]))


def _resolve(objective: Objective | str) -> Objective:
    return objective if isinstance(objective, Objective) else table.objective(objective)


def _selecting() -> str:
    return " and ".join(name for name, row in table.TABLE.items() if row.trust_region.selects_tokens)


def _bool_mask(mask: Tensor) -> Tensor:
    if mask.dim() != 2:
        raise ConfigError(f"mask: must have shape [B, T], not {list(mask.shape)}")
    # A mask of fractions may be meant as weights, and `bool()` would silently turn each of them into 1.
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ConfigError("mask: must be bool (True at tokens to train on), or hold only 0 and 1")
    return mask.bool()


def _pack(
    objective: Objective, mask: Tensor, *, advantage: Tensor, selected: Tensor | None = None, **logps: Tensor | None
) -> Tokens:
    """The tokens at the positions of the mask."""
    # Indexing instead of multiplying by the mask: values at masked positions must not leak (inf * 0 is NaN).
    given = {name: value for name, value in logps.items() if value is not None}
    # At least float32: in bfloat16 the mean log-prob of a short completion can be off by 2e-4, which is most of
    # GSPO's clip range.
    dtype = torch.float32
    for value in given.values():
        dtype = torch.promote_types(dtype, value.dtype)
    packed = {f"{name}_N": _at(name, value, mask).to(dtype) for name, value in given.items()}
    # Callers may pass tensors with a graph; only `logp` (and the entropy) may receive a gradient.
    for name in ("logp_old_N", "logp_sampler_N", "logp_ref_N"):
        if name in packed:
            packed[name] = packed[name].detach()
    index_N = torch.arange(mask.shape[0], device=mask.device).unsqueeze(-1).expand_as(mask)[mask]
    sequences = Sequences(index_N, mask.shape[0])
    advantage_N = _advantage(objective, advantage, mask, sequences).to(dtype)
    if selected is not None:
        packed["selected_N"] = _at("selected", selected, mask).bool()
    return Tokens(advantage_N=advantage_N, sequences=sequences, **packed)


def _at(name: str, value: Tensor, mask: Tensor) -> Tensor:
    if value.shape != mask.shape:
        raise ConfigError(f"{name}: shape {list(value.shape)} does not match the mask's {list(mask.shape)}")
    return value[mask]


def _advantage(objective: Objective, advantage: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    advantage = advantage.detach()
    if advantage.shape == mask.shape[:1]:
        return advantage[sequences.index_N]
    advantage_N = _at("advantage", advantage, mask)
    if objective.advantage_per == "sequence":
        # scatter keeps the value of any one token per sequence; all tokens equal it iff they are all the same.
        any_B = torch.zeros(sequences.count, dtype=advantage_N.dtype, device=advantage_N.device)
        any_B = any_B.scatter(0, sequences.index_N, advantage_N)
        if not torch.equal(any_B[sequences.index_N], advantage_N):
            raise ConfigError(
                f"objective {objective.name!r} has one advantage per completion, but it differs between tokens of a "
                "completion; per-token advantages need a token-level objective, for example gspo_token"
            )
    return advantage_N


def _check_inputs(objective: Objective, tokens: Tokens) -> None:
    if tokens.selected_N is not None and not objective.trust_region.selects_tokens:
        raise ConfigError(f"selected: objective {objective.name!r} selects no tokens; only {_selecting()} do")
    if objective.mismatch != "none" and tokens.logp_sampler_N is None:
        raise ConfigError(f"mismatch={objective.mismatch}: needs logp_sampler, the sampling engine's log-probs")
    if settings_of(objective).get("denominator") == "sampler" and tokens.logp_sampler_N is None:
        raise ConfigError('denominator="sampler": needs logp_sampler, the sampling engine\'s log-probs')
    if objective.entropy and tokens.entropy_N is None:
        raise ConfigError("entropy: the bonus needs entropy=, the policy's entropy at each token")
    # A coefficient that the caller has set needs its reference. The default of a row is only a warning below, so that
    # `policy_loss("grpo", ...)` works without a reference.
    if objective.kl and objective.kl_in == "loss" and tokens.logp_ref_N is None and "kl" in objective.given:
        raise ConfigError(f"kl={objective.kl:g}: needs logp_ref, the reference policy's log-probs; or set kl=0")
    for text in _doubtful_inputs(objective, tokens):
        # Level 3 is the caller of `gspo.policy_loss`.
        warnings.warn(f"objective {objective.name!r}{text}", ObjectiveWarning, stacklevel=3)


def _doubtful_inputs(objective: Objective, tokens: Tokens) -> Iterator[str]:
    if objective.kl and objective.kl_in == "loss" and tokens.logp_ref_N is None:
        yield f" has kl={objective.kl:g} by default, but without logp_ref there is no KL term; pass it, or set kl=0"
    if objective.kl and objective.kl_in == "reward" and tokens.logp_ref_N is not None:
        yield (
            " has its KL penalty in the reward, so policy_loss adds none; "
            "subtract kl * sum(log pi - log pi_ref) from the rewards, or set kl_in=loss"
        )
    means = objective.clips_sequences or objective.ratio.length_normalized
    uncorrected = means and objective.mismatch == "none" and tokens.logp_sampler_N is not None
    if uncorrected and torch.equal(tokens.logp_behavior_N, tokens.logp_old_N):
        yield (
            ": logp_old is the sampler's, so engine numerics count as policy movement and can exceed the clip range "
            "before any update; recompute logp_old with the learner, or set mismatch"
        )


def _select_whole_step(objective: Objective, tokens: Tokens, weights: Tensor | None, weight_N: Tensor) -> Tensor:
    """The selected tokens of a batch that is the whole step (no `weights`), or of a step that is too small to select
    any."""
    if weights is None:
        selected_N = select(objective, tokens, seed=0)
        assert selected_N is not None
        return selected_N
    # With a token mean, as in the table, a weight is 1 / (tokens of the step). Other weights do not tell their number.
    known = objective.aggregate is token_mean
    step_tokens = round(1 / float(weight_N.max())) if len(weight_N) else 0
    if not known or objective.trust_region.selection_count(step_tokens):
        raise ConfigError(
            f"objective {objective.name!r} selects tokens over the whole optimizer step: with weights= also pass "
            "selected=, the rows of select_tokens(...)"
        )
    return torch.zeros_like(tokens.logp_N, dtype=torch.bool)

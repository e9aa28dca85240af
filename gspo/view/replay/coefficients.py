"""What an objective makes of a mini-batch: the coefficient that each token's log-probability gets in the gradient.

In: the packed tokens of a rollout batch at the weights of one of its optimiser steps. Out: `Coefficients`. Invariant: no
model is needed here. A loss depends on the weights through the tokens' log-probabilities (and, with a bonus, entropies)
alone, so its gradient is sum_t dL/dlogp_t grad logp_t, and all objectives share grad logp_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.objectives.credit import token_advantages
from gspo.objectives.loss import loss_of, select
from gspo.objectives.objective import Objective
from gspo.objectives.samples import TrainSample, keeps_group, trainable
from gspo.objectives.sequences import Sequences, Tokens
from gspo.types import Group


@dataclass(frozen=True, kw_only=True)
class View:
    """A rollout batch at the weights of one optimiser step."""

    tokens: Tokens
    """All its tokens; `logp_N` and `entropy_N` hold for those of the mini-batch."""
    replies: Sequence[TrainSample]
    """Sequence i of the tokens; the replies that the run learned from."""
    rows: frozenset[int]
    """The sequences of the mini-batch."""
    max_tokens: int
    """The run's limit of a reply."""
    seed: int
    """Of objectives that single tokens out at random."""


@dataclass(frozen=True, kw_only=True)
class RatioSides:
    """A share, and the parts of it whose ratio is above and below 1."""

    share: float
    above: float
    below: float


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """One objective on one mini-batch. Tensors are over all tokens or sequences of the batch, 0 where they play no part."""

    loss: float
    policy: float
    kl: float
    entropy: float
    logp_N: Tensor
    """dLoss/dlogp."""
    entropy_N: Tensor | None
    """dLoss/dentropy; None without a bonus."""
    clipped_tokens: RatioSides
    clipped_replies: RatioSides
    advantage_B: Tensor
    counted_B: Tensor
    """Which sequences of the mini-batch the objective counts."""
    tokens: int
    """Tokens it counts."""

    def weight_B(self, sequences: Sequences) -> Tensor:
        """-sum_t dLoss/dlogp_t of each reply: above 0 the reply is made likelier."""
        return -sequences.sum(self.logp_N.double())


def coefficients(objective: Objective, view: View) -> Coefficients:
    """Put an objective to a mini-batch, by its own rules of what counts, rewards and advantages."""
    mine = _counts(objective, view)
    advantage_N = _advantages(objective, view, mine)
    rows = [i for i, _ in mine if i in view.rows]
    sequences = view.tokens.sequences
    counted_B = torch.zeros(sequences.count, dtype=torch.bool, device=advantage_N.device)
    counted_B[rows] = True
    at_N = sequences.expand(counted_B).nonzero().squeeze(-1)
    weight_B = torch.zeros(sequences.count, dtype=torch.float64, device=advantage_N.device)
    weight_B[rows] = objective.aggregate(sequences.length_B[rows])
    tokens = _leaves(_part(replace(view.tokens, advantage_N=advantage_N), at_N))
    chosen_N = select(objective, tokens, view.seed)
    loss = loss_of(objective, replace(tokens, selected_N=chosen_N), sequences.expand(weight_B)[at_N].float())
    logp_n, entropy_n = _gradients(loss.total, tokens)
    zeros_N = torch.zeros_like(view.tokens.logp_N)
    clipped_N = loss.surrogate.clipped_N
    log_ratio_N = objective.ratio(tokens).detach()
    return Coefficients(
        loss=loss.total.item(),
        policy=loss.policy.item(),
        kl=loss.kl.item(),
        entropy=loss.entropy.item(),
        logp_N=zeros_N.index_put((at_N,), logp_n),
        entropy_N=zeros_N.index_put((at_N,), entropy_n) if objective.entropy else None,
        clipped_tokens=_sides(clipped_N, log_ratio_N, None),
        clipped_replies=_sides(clipped_N, log_ratio_N, tokens.sequences),
        advantage_B=sequences.mean(advantage_N),
        counted_B=counted_B,
        tokens=len(at_N),
    )


def _counts(objective: Objective, view: View) -> list[tuple[int, TrainSample]]:
    """The batch's replies that this objective learns from, with the reward as it shapes it."""
    members: dict[int, list[int]] = {}
    for i, reply in enumerate(view.replies):
        members.setdefault(reply.group, []).append(i)
    groups = [(m, _group([view.replies[i] for i in m])) for m in members.values()]
    kept = [(m, g) for m, g in groups if keeps_group(objective, g)]
    found = trainable([g for _, g in kept], objective, max_tokens=view.max_tokens)
    return [(kept[reply.group][0][reply.sample], reply) for reply in found]


def _group(replies: Sequence[TrainSample]) -> Group:
    return Group(
        prompt=replies[0].prompt, completions=[r.completion for r in replies], scores=[r.score for r in replies]
    )


def _advantages(objective: Objective, view: View, mine: Sequence[tuple[int, TrainSample]]) -> Tensor:
    """The advantage of every token, by the objective's rule over all its replies of the batch."""
    advantage_N = torch.zeros_like(view.tokens.logp_old_N)
    if not mine:
        return advantage_N
    number_B = torch.full((view.tokens.sequences.count,), -1, device=advantage_N.device)
    number_B[[i for i, _ in mine]] = torch.arange(len(mine), device=advantage_N.device)
    number_N = view.tokens.sequences.expand(number_B)
    at_N = (number_N >= 0).nonzero().squeeze(-1)
    part = _part(replace(view.tokens, logp_N=view.tokens.logp_old_N), at_N)  # a KL in the reward is the old policy's
    part = replace(part, sequences=Sequences(number_N[at_N], len(mine)))
    return advantage_N.index_put((at_N,), token_advantages(objective, part, [reply for _, reply in mine])[1])


def _part(tokens: Tokens, at_N: Tensor) -> Tokens:
    values: dict[str, Any] = {k: v[at_N] for k, v in vars(tokens).items() if isinstance(v, Tensor)}
    return replace(tokens, **values, sequences=Sequences(tokens.sequences.index_N[at_N], tokens.sequences.count))


def _leaves(tokens: Tokens) -> Tokens:
    assert tokens.entropy_N is not None
    logp_N, entropy_N = tokens.logp_N.detach().requires_grad_(), tokens.entropy_N.detach().requires_grad_()
    return replace(tokens, logp_N=logp_N, entropy_N=entropy_N)


def _gradients(loss: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    assert tokens.entropy_N is not None
    found = torch.autograd.grad(loss, (tokens.logp_N, tokens.entropy_N), allow_unused=True)
    logp_N, entropy_N = (torch.zeros_like(tokens.logp_N) if g is None else g for g in found)
    return logp_N, entropy_N


def _sides(clipped_N: Tensor, log_ratio_N: Tensor, sequences: Sequences | None) -> RatioSides:
    """Shares of tokens, or of replies with such a token. A token that was singled out at ratio 1 is on neither side."""
    if not len(clipped_N):
        return RatioSides(share=0.0, above=0.0, below=0.0)

    def share(flag_N: Tensor) -> float:
        if sequences is None:
            return float(flag_N.double().mean())
        present_B = sequences.length_B > 0
        return float((sequences.sum(flag_N.double())[present_B] > 0).double().mean())

    return RatioSides(share=share(clipped_N), above=share(clipped_N & (log_ratio_N > 0)), below=share(clipped_N & (log_ratio_N < 0)))  # fmt: skip

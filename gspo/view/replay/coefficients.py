"""The coefficient dL/dlogp_t of each token under an objective.

In: the packed tokens of a rollout batch at the weights of one of its optimizer steps. Out: `Coefficients`. Invariant:
no model is needed. A loss depends on the weights only through the tokens' log-probs (and, with an entropy bonus,
entropies), so its gradient is sum_t dL/dlogp_t grad logp_t, and all objectives share grad logp_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.objectives.advantage import token_advantages
from gspo.objectives.loss import loss_of, select
from gspo.objectives.objective import Objective
from gspo.objectives.samples import TrainSample, keeps_group, train_samples
from gspo.objectives.sequences import Sequences, Tokens
from gspo.types import Group


@dataclass(frozen=True, kw_only=True)
class MiniBatchView:
    """A rollout batch at the weights of one optimizer step."""

    tokens: Tokens
    """All tokens of the batch; `logp_N` and `entropy_N` are valid for those of the mini-batch."""
    samples: Sequence[TrainSample]
    """The completions that the run trained on; sample i is sequence i of the tokens."""
    rows: frozenset[int]
    """Indices of the mini-batch's sequences."""
    max_tokens: int
    """The run's completion length limit."""
    seed: int
    """For objectives that select tokens at random."""


@dataclass(frozen=True, kw_only=True)
class RatioSides:
    """A share, split into importance ratios above and below 1."""

    share: float
    above: float
    below: float


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """One objective on one mini-batch. Tensors cover the whole batch and are 0 outside the mini-batch."""

    loss: float
    policy: float
    kl: float
    entropy: float
    logp_N: Tensor
    """dLoss/dlogp."""
    entropy_N: Tensor | None
    """dLoss/dentropy; `None` without an entropy bonus."""
    clipped_tokens: RatioSides
    clipped_completions: RatioSides
    advantage_B: Tensor
    trainable_B: Tensor
    """Which sequences of the mini-batch the objective trains on."""
    tokens: int
    """Number of tokens the objective trains on."""

    def weight_B(self, sequences: Sequences) -> Tensor:
        """-sum_t dLoss/dlogp_t of each completion. A positive weight makes the completion more likely."""
        return -sequences.sum(self.logp_N.double())


def coefficients(objective: Objective, view: MiniBatchView) -> Coefficients:
    """Evaluate an objective on a mini-batch, with its own filters, reward shaping and advantages."""
    trainable = _trainable(objective, view)
    advantage_N = _advantages(objective, view, trainable)
    rows = [i for i, _ in trainable if i in view.rows]
    sequences = view.tokens.sequences
    trainable_B = torch.zeros(sequences.count, dtype=torch.bool, device=advantage_N.device)
    trainable_B[rows] = True
    at_N = sequences.expand(trainable_B).nonzero().squeeze(-1)
    # float64 until the end, as the learner does it, so that the run's own row has the run's own weights.
    weight_B = torch.zeros(sequences.count, dtype=torch.float64, device=advantage_N.device)
    # The aggregate normalizes over the whole mini-batch, so it must see all of its lengths at once.
    weight_B[rows] = objective.aggregate(sequences.length_B[rows])
    tokens = _as_leaves(replace(view.tokens, advantage_N=advantage_N).take(at_N))
    # With the run's own seed, so that the run's row selects the tokens that the run selected.
    selected_N = select(objective, tokens, view.seed)
    loss = loss_of(objective, replace(tokens, selected_N=selected_N), sequences.expand(weight_B)[at_N].float())
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
        clipped_completions=_sides(clipped_N, log_ratio_N, tokens.sequences),
        advantage_B=sequences.mean(advantage_N),
        trainable_B=trainable_B,
        tokens=len(at_N),
    )


def _trainable(objective: Objective, view: MiniBatchView) -> list[tuple[int, TrainSample]]:
    """The batch's completions that this objective trains on, by sequence index, with its shaped rewards."""
    rows_by_group: dict[int, list[int]] = {}
    for i, sample in enumerate(view.samples):
        rows_by_group.setdefault(sample.group, []).append(i)
    groups = [(rows, _group([view.samples[i] for i in rows])) for rows in rows_by_group.values()]
    # Each objective applies its own filters, as it would in a run of its own.
    kept = [(rows, group) for rows, group in groups if keeps_group(objective, group)]
    samples = train_samples([group for _, group in kept], objective, max_tokens=view.max_tokens)
    return [(kept[sample.group][0][sample.sample], sample) for sample in samples]


def _group(samples: Sequence[TrainSample]) -> Group:
    return Group(
        prompt=samples[0].prompt, completions=[s.completion for s in samples], scores=[s.score for s in samples]
    )


def _advantages(objective: Objective, view: MiniBatchView, trainable: Sequence[tuple[int, TrainSample]]) -> Tensor:
    """The advantage of every token, over all completions of the batch that the objective trains on."""
    advantage_N = torch.zeros_like(view.tokens.logp_old_N)
    if not trainable:
        return advantage_N
    number_B = torch.full((view.tokens.sequences.count,), -1, device=advantage_N.device)
    number_B[[i for i, _ in trainable]] = torch.arange(len(trainable), device=advantage_N.device)
    number_N = view.tokens.sequences.expand(number_B)
    at_N = (number_N >= 0).nonzero().squeeze(-1)
    # A KL penalty in the reward uses the old policy's log-probs, as in the run, not those at the current weights.
    tokens = replace(view.tokens, logp_N=view.tokens.logp_old_N).take(at_N)
    tokens = replace(tokens, sequences=Sequences(number_N[at_N], len(trainable)))
    return advantage_N.index_put((at_N,), token_advantages(objective, tokens, [sample for _, sample in trainable])[1])


def _as_leaves(tokens: Tokens) -> Tokens:
    """The tokens with log-probs and entropies as autograd leaves, so that dL/dlogp needs no model."""
    assert tokens.entropy_N is not None
    logp_N = tokens.logp_N.detach().requires_grad_()
    entropy_N = tokens.entropy_N.detach().requires_grad_()
    return replace(tokens, logp_N=logp_N, entropy_N=entropy_N)


def _gradients(loss: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    assert tokens.entropy_N is not None
    # Unused is allowed, because without an entropy bonus the loss does not depend on the entropy.
    gradients = torch.autograd.grad(loss, (tokens.logp_N, tokens.entropy_N), allow_unused=True)
    logp_N, entropy_N = (torch.zeros_like(tokens.logp_N) if g is None else g for g in gradients)
    return logp_N, entropy_N


def _sides(clipped_N: Tensor, log_ratio_N: Tensor, sequences: Sequences | None) -> RatioSides:
    """Shares of tokens, or of completions with such a token. A token clipped at ratio exactly 1 is on neither side."""
    if not len(clipped_N):
        return RatioSides(share=0.0, above=0.0, below=0.0)

    def share(flag_N: Tensor) -> float:
        if sequences is None:
            return float(flag_N.double().mean())
        present_B = sequences.length_B > 0
        return float((sequences.sum(flag_N.double())[present_B] > 0).double().mean())

    return RatioSides(
        share=share(clipped_N),
        above=share(clipped_N & (log_ratio_N > 0)),
        below=share(clipped_N & (log_ratio_N < 0)),
    )

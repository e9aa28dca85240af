"""Results of training on a batch: per optimizer step while it runs, and for the whole batch at the end.

In: each micro-batch's log-probs and loss. Out: a `GradientResult` per optimizer step, from before the optimizer acts,
and a `LearnResult` per batch, both frozen. Invariant: token i of every tensor here is token i of the batch's packed
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gspo.learner.optimizer import Update
from gspo.learner.plan import Positions
from gspo.learner.routing_replay import RoutingStats
from gspo.model.micro_batch import MicroBatch
from gspo.objectives.loss import Loss
from gspo.objectives.rounding import Noise
from gspo.objectives.samples import TrainSample
from gspo.objectives.sequences import Tokens
from gspo.objectives.trust_region import Surrogate
from gspo.ranks.group import Ranks

if TYPE_CHECKING:
    from gspo.learner.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class GradientResult:
    """The forward and backward passes of one optimizer step. `Update` says what the optimizer then did."""

    loss: Loss
    """Sums over its micro-batches."""
    at_N: Tensor
    """Indices of its tokens among those of the batch."""
    logp_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor

    @property
    def finite(self) -> bool:
        """Whether the loss is a finite number."""
        return math.isfinite(float(self.loss.total))

    def log_weight_B(self, tokens: Tokens) -> Tensor:
        """log prod_t pi/mu of each of its completions, before the optimizer acts; `tokens` are those of the batch."""
        own = replace(tokens.take(self.at_N), logp_N=self.logp_N)
        log_ratio_B = own.sequences.sum((own.logp_N - own.logp_behavior_N).double())
        return log_ratio_B[own.sequences.length_B > 0]


@dataclass(frozen=True, kw_only=True)
class LearnResult:
    """The learning half of a step: packed tokens of all optimizer steps, and the result of each."""

    samples: tuple[TrainSample, ...]
    """The completions that were trained on; sequence i of `tokens`. They include those that were not computed, because
    their advantages are 0."""
    reward_B: Tensor
    """The rewards that the advantages are computed from: shaped, and minus the KL penalty with `kl_in = "reward"`."""
    advantage_B: Tensor
    """Per completion; the mean over its tokens if they differ."""
    tokens: Tokens
    """`logp_N` is the policy's at the moment each token was trained on. NaN where nothing was computed."""
    computed_N: Tensor
    """Which tokens a training forward has computed: all of a completion, or none."""
    entropy_M: Tensor
    """Entropy of the old policy at the tokens that the learner computed with the old weights: all of these, or those
    of one mini-batch."""
    log_rho_M: Tensor
    """log pi_old - log mu at these tokens: the mismatch between sampling engine and learner."""
    ratio_N: Tensor
    """NaN where nothing was computed."""
    clipped_N: Tensor
    losses: tuple[Loss, ...]
    updates: tuple[Update, ...]
    positions: Positions
    """How many positions one pass over the batch computes."""
    routed: RoutingStats | None = None
    """Routing statistics; None for a dense model."""
    halvings: int = 0
    """The most halvings that any optimizer step needed to fit into memory."""
    rounding_M: Tensor | None = None
    """log pi_old - log mu of the computed tokens if the engine sampled with the learner's own weights, so that only
    rounding makes them differ; None otherwise."""
    noise: Noise | None = None
    """The noise of ratios to the engine's log-probs, where those are the old log-probs (`learner.old_logp`)."""
    excess: str = ""
    """Why that noise is too large, if `learner.allow_mismatch` accepted it; empty otherwise."""


class GradientStats:
    """Collects the micro-batches of one optimizer step, before the optimizer acts."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Tensor, Tensor, Loss]] = []

    def add(self, micro: MicroBatch, logp_N: Tensor, loss: Loss) -> None:
        """Add a micro-batch after its backward pass."""
        self._micro_batches.append((micro.at_N, logp_N.detach(), loss.detached()))

    def result(self, ranks: Ranks, batch: TrainBatch, update_index: int) -> GradientResult:
        """All micro-batches of the optimizer step, of all ranks."""
        if not self._micro_batches:
            return _no_gradient()
        at, logp, losses = zip(*self._micro_batches, strict=True)
        own = GradientResult(
            loss=_sum(losses),
            at_N=torch.cat(at),
            logp_N=torch.cat(logp),
            ratio_N=torch.cat([loss.surrogate.ratio_N for loss in losses]),
            clipped_N=torch.cat([loss.surrogate.clipped_N for loss in losses]),
        )
        return _exchanged(own, ranks, batch, update_index) if ranks.several else own


class LearnStats:
    """Collects the optimizer steps of a batch."""

    def __init__(self, batch: TrainBatch, ranks: Ranks) -> None:
        self._positions = _all_positions(batch.plan.positions, ranks)  # of the original plan, before any halving
        self._results: list[GradientResult] = []
        self._updates: list[Update] = []
        self._halvings = 0

    def add(self, result: GradientResult, update: Update, halvings: int) -> None:
        """Add an optimizer step, what the optimizer did with it, and how often its micro-batches were halved."""
        self._halvings = max(self._halvings, halvings)
        self._results.append(result)
        self._updates.append(update)

    def result(self, batch: TrainBatch, model: Any) -> LearnResult:
        """The whole batch."""
        tokens = batch.tokens
        # Every token that is computed is in exactly one optimizer step, which sets its values below.
        logp_N = torch.full_like(tokens.logp_old_N, torch.nan)
        ratio_N = logp_N.clone()
        clipped_N = torch.zeros_like(logp_N, dtype=torch.bool)
        for r in self._results:
            logp_N[r.at_N] = r.logp_N
            ratio_N[r.at_N] = r.ratio_N
            clipped_N[r.at_N] = r.clipped_N
        return LearnResult(
            samples=batch.samples,
            reward_B=batch.reward_B,
            advantage_B=tokens.sequences.mean(tokens.advantage_N).cpu(),
            tokens=replace(tokens, logp_N=logp_N),
            computed_N=batch.plan.computed_N.to(logp_N.device),
            entropy_M=batch.old.entropy_M,
            log_rho_M=batch.old.log_rho_M,
            ratio_N=ratio_N,
            clipped_N=clipped_N,
            losses=tuple(r.loss for r in self._results),
            updates=tuple(self._updates),
            routed=batch.routing.outcome(model),
            positions=self._positions,
            halvings=self._halvings,
            rounding_M=batch.old.log_rho_M if batch.only_rounding else None,
            noise=batch.old.noise,
            excess=batch.old.excess,
        )


def _exchanged(own: GradientResult, ranks: Ranks, batch: TrainBatch, update_index: int) -> GradientResult:
    """The result of all ranks. The log-probs of their tokens become known to all of them, too, if they are the old
    ones."""
    at_N = batch.plan.at_N(update_index).to(own.at_N.device)
    if update_index == 0 and batch.old.by_training:
        batch.old.exchange(ranks, own.at_N, at_N)
    values = own.logp_N.new_zeros(3, batch.plan.tokens)
    values[:, own.at_N] = torch.stack([own.logp_N, own.ratio_N, own.clipped_N.to(own.logp_N.dtype)])
    logp_N, ratio_N, clipped_N = ranks.sum_micro_batches(values)[:, at_N]
    terms = ("total", "policy", "kl", "entropy")
    sums = ranks.sum_micro_batches(torch.stack([getattr(own.loss, name) for name in terms]))
    loss = replace(own.loss, **dict(zip(terms, sums, strict=True)))
    return GradientResult(loss=loss, at_N=at_N, logp_N=logp_N, ratio_N=ratio_N, clipped_N=clipped_N.bool())


def _all_positions(own: Positions, ranks: Ranks) -> Positions:
    computed, empty = ranks.sum(torch.tensor([own.computed, own.empty])).tolist()
    return replace(own, computed=computed, empty=empty)


def _no_gradient() -> GradientResult:
    """The result of an optimizer step without micro-batches, because all of its advantages are 0."""
    none, zero = torch.zeros(0), torch.zeros(())
    clipped_N = torch.zeros(0, dtype=torch.bool)
    surrogate = Surrogate(objective_N=none, ratio_N=none, clipped_N=clipped_N)
    return GradientResult(
        loss=Loss(total=zero, policy=zero, kl=zero, entropy=zero, surrogate=surrogate),
        at_N=torch.zeros(0, dtype=torch.long),
        logp_N=none,
        ratio_N=none,
        clipped_N=clipped_N,
    )


def _sum(losses: tuple[Loss, ...]) -> Loss:
    """The terms of a loss add up over micro-batches, because token weights belong to the optimizer step."""
    names = ("total", "policy", "kl", "entropy")
    sums = {name: torch.stack([getattr(loss, name) for loss in losses]).sum() for name in names}
    # Per-token surrogates do not add up. `GradientResult` holds those of all micro-batches.
    return Loss(**sums, surrogate=losses[-1].surrogate)

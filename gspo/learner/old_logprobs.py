"""The old policy's log-probabilities: what ratios are measured against.

In: a planned batch and the engine's log-probabilities. Out: `OldLogprobs`. Two ways (`learner.old_logp`):

    recompute   the learner's own forward over all tokens: exact, whatever the engine computes
    sampler     the engine's own numbers, which the GSPO paper suggests because sequence ratios bear more noise: one forward
                less. The learner still computes the tokens of the first mini-batch, which tells how far the two are apart.

Invariant: engine noise that would use up the clip range before any update is an error, never silently trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.errors import MismatchError
from gspo.learner.forward import plan_logprobs
from gspo.learner.plan import Plan
from gspo.learner.routing_replay import NoRouting
from gspo.learner.update import CachedForward, old_logprobs
from gspo.model.load import Policy
from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Sequences, Tokens


@dataclass(frozen=True, kw_only=True)
class OldLogprobs:
    """The old policy of a batch."""

    logp_N: Tensor
    logp_sampler_N: Tensor
    entropy_M: Tensor
    """Its entropy at the tokens that the learner has computed."""
    log_rho_M: Tensor
    """log pi_old - log mu at these tokens, pi_old by the learner's forward, mu the engine's."""
    ahead: CachedForward | None = None
    """The first learning forward, where computing this was that already."""


def recomputed(
    policy: Policy, plan: Plan, temperature: float, sampler_N: Tensor, objective: Objective, routing: NoRouting, *, keep: bool
) -> OldLogprobs:  # fmt: skip
    """By the learner's forward; `keep`: the first update may use a part of it."""
    logp_N, entropy_N, ahead = old_logprobs(policy, objective, plan, temperature, routing, keep=keep)
    return OldLogprobs(
        logp_N=logp_N, logp_sampler_N=sampler_N, entropy_M=entropy_N, log_rho_M=logp_N - sampler_N, ahead=ahead
    )


def from_sampler(
    policy: Policy, plan: Plan, temperature: float, sampler_N: Tensor, objective: Objective
) -> OldLogprobs:
    """The engine's numbers, after a look at how far they are from the learner's; `MismatchError` if too far."""
    logp_N, entropy_N = plan_logprobs(policy.model, plan, temperature, policy.device, step=0)
    at_M = torch.cat([micro.at_N for micro in plan.steps[0]]).sort().values.to(policy.device)
    tokens = Tokens(
        logp_N=logp_N[at_M], logp_old_N=sampler_N[at_M], logp_sampler_N=sampler_N[at_M], advantage_N=torch.zeros_like(logp_N[at_M]),
        sequences=Sequences(plan.sequence_N.to(policy.device)[at_M], len(plan.rows)),
    )  # fmt: skip
    _check(objective, tokens)
    return OldLogprobs(
        logp_N=sampler_N,
        logp_sampler_N=sampler_N,
        entropy_M=entropy_N[at_M],
        log_rho_M=tokens.logp_N - tokens.logp_old_N,
    )


def _check(objective: Objective, tokens: Tokens) -> None:
    """The root mean square of the log-ratio that the trust region would judge, with no update yet, against its range."""
    limit = clip_limit(objective)
    noise = float(objective.ratio(tokens).double().square().mean().sqrt())
    if limit is not None and not noise <= limit:
        raise MismatchError(
            f'learner.old_logp: with "sampler" the ratios of {objective.name} are off by {noise:.2g} before any update (root mean '
            f"square of the log-ratio between learner and engine), more than its clip range of {limit:.2g}: the engine's rounding "
            'would be clipped as if the policy had moved; set learner.old_logp = "recompute"'
        )


def clip_limit(objective: Objective) -> float | None:
    """The narrower side of the clip range, as a log-ratio; None: the row has no range."""
    region: Any = objective.trust_region
    if not hasattr(region, "clip_low"):
        return None
    low = -math.log1p(-region.clip_low) if region.clip_low < 1 else math.inf
    return min(low, math.log1p(region.clip_high))

"""The old policy's log-probs, the denominator of importance ratios.

In: a planned batch and the engine's log-probs. Out: `OldLogprobs`. `learner.old_logp` chooses the source:

    recompute   a learner forward over all tokens. Exact for every engine.
    sampler     the engine's log-probs, which saves that forward. The GSPO paper suggests it, because sequence ratios
                tolerate more noise. The learner still computes the first mini-batch, to measure the mismatch.

Invariant: engine noise that exceeds the clip range before any update is an error, never silently trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.errors import MismatchError
from gspo.learner.forward import completion_logprobs, plan_logprobs
from gspo.learner.plan import Plan
from gspo.learner.routing_replay import NoRouting
from gspo.model.load import Policy
from gspo.model.micro_batch import MicroBatch
from gspo.model.out_of_memory import out_of_memory, release_memory
from gspo.objectives.objective import Objective
from gspo.objectives.sequences import Sequences, Tokens


class CachedForward:
    """The forward of one micro-batch with its graph. It can be taken once, so the backward pass frees the graph."""

    def __init__(self, micro: MicroBatch, logp_N: Tensor, entropy_N: Tensor) -> None:
        self._rows = micro.rows
        self._outputs: tuple[Tensor, Tensor] | None = (logp_N, entropy_N)

    def take(self, micro: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """(logp_N, entropy_N), or None if this is another micro-batch or they have been taken already."""
        if self._outputs is None or micro.rows != self._rows:
            return None
        outputs = self._outputs
        self.drop()
        return outputs

    def drop(self) -> None:
        """Free the graph."""
        self._outputs = None


@dataclass(frozen=True, kw_only=True)
class OldLogprobs:
    """The old policy's log-probs of a batch."""

    logp_N: Tensor
    logp_sampler_N: Tensor
    entropy_M: Tensor
    """Entropy of the old policy at the tokens that the learner has computed."""
    log_rho_M: Tensor
    """log pi_old - log mu at these tokens, with pi_old from the learner's forward and mu from the engine."""
    cached: CachedForward | None = None
    """The first training forward; None if computing the old log-probs has not run it."""


def recomputed(
    policy: Policy,
    plan: Plan,
    temperature: float,
    sampler_N: Tensor,
    objective: Objective,
    routing: NoRouting,
    *,
    reuse_forward: bool,
) -> OldLogprobs:
    """Old log-probs from a learner forward. The first update may reuse a part of it."""
    logp_N, entropy_N, cached = _old_forward(policy, objective, plan, temperature, routing, reuse_forward=reuse_forward)
    return OldLogprobs(
        logp_N=logp_N, logp_sampler_N=sampler_N, entropy_M=entropy_N, log_rho_M=logp_N - sampler_N, cached=cached
    )


def _old_forward(
    policy: Policy, objective: Objective, plan: Plan, temperature: float, routing: NoRouting, *, reuse_forward: bool
) -> tuple[Tensor, Tensor, CachedForward | None]:
    """(logp_N, entropy_N) under the current weights. The first update has the same weights, so with `reuse_forward` its
    first micro-batch is computed once for both."""
    device = policy.device
    first = plan.updates[0][0]
    # An objective that selects tokens needs a forward over the whole update first, so it cannot reuse this one.
    reuse = reuse_forward and routing.repeats and not objective.selects_tokens
    rest = replace(plan, updates=(plan.updates[0][1:], *plan.updates[1:])) if reuse else plan
    logp_N, entropy_N = plan_logprobs(policy.model, rest, temperature, device, routed=routing.old)
    if not reuse:
        return logp_N, entropy_N, None
    # The micro-batch with the graph comes last, so that no other forward runs while the graph occupies memory.
    micro = first.to(device)
    outputs = None
    try:
        with routing.old(micro):
            outputs = completion_logprobs(policy.model, micro, temperature, entropy_gradient=bool(objective.entropy))
    except Exception as error:
        if not out_of_memory(error):
            raise
    if outputs is None:
        # Outside the handler: the traceback of the error holds the tensors that did not fit.
        release_memory()
        alone = replace(plan, updates=((first,),))
        first_logp_N, first_entropy_N = plan_logprobs(policy.model, alone, temperature, device, routed=routing.old)
        return logp_N + first_logp_N, entropy_N + first_entropy_N, None
    logp_N[micro.at_N] = outputs[0].detach()
    entropy_N[micro.at_N] = outputs[1].detach()
    return logp_N, entropy_N, CachedForward(first, *outputs)


def from_sampler(
    policy: Policy, plan: Plan, temperature: float, sampler_N: Tensor, objective: Objective
) -> OldLogprobs:
    """Old log-probs from the engine. Raises `MismatchError` if they are too far from the learner's."""
    logp_N, entropy_N = plan_logprobs(policy.model, plan, temperature, policy.device, update=0)
    at_M = torch.cat([micro.at_N for micro in plan.updates[0]]).sort().values.to(policy.device)
    tokens = Tokens(
        logp_N=logp_N[at_M],
        logp_old_N=sampler_N[at_M],
        logp_sampler_N=sampler_N[at_M],
        advantage_N=torch.zeros_like(logp_N[at_M]),
        sequences=Sequences(plan.sequence_N.to(policy.device)[at_M], len(plan.rows)),
    )
    _check(objective, tokens)
    return OldLogprobs(
        logp_N=sampler_N,
        logp_sampler_N=sampler_N,
        entropy_M=entropy_N[at_M],
        log_rho_M=tokens.logp_N - tokens.logp_old_N,
    )


def _check(objective: Objective, tokens: Tokens) -> None:
    """Compare the mismatch with the clip range: the root mean square of the objective's log-ratio before any update."""
    limit = clip_limit(objective)
    noise = float(objective.ratio(tokens).double().square().mean().sqrt())
    if limit is not None and not noise <= limit:  # `not <=` also catches NaN
        raise MismatchError(
            f'learner.old_logp: with "sampler" the ratios of {objective.name} are off by {noise:.2g} before any update '
            f"(root mean square of the log-ratio between learner and engine), more than its clip range of {limit:.2g}: "
            "the engine's rounding would be clipped as if the policy had changed; "
            'set learner.old_logp = "recompute"'
        )


def clip_limit(objective: Objective) -> float | None:
    """The narrower side of the clip range, as a log-ratio; None if the objective has no clip range."""
    log_range = objective.trust_region.log_range
    return None if log_range is None else min(-log_range[0], log_range[1])

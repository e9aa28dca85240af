"""Supervised fine-tuning on demonstrations, so that some sampled completions earn a reward. `cold_start.py` calls it.

In: a policy and an endless stream of demonstrations. Out: the same policy, able to solve some problems.
Invariant: it stops at a sampled accuracy on problems that it does not train on, not after a fixed number of steps.
Accuracy rises fast here: after a weak cold start no completion earns a reward, and after a strong one RL has nothing
left to improve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from gspo.config import ColdStartConfig, LearnerConfig
from gspo.learner.forward import completion_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.learner.plan import Plan, make_plan
from gspo.model.load import Policy
from gspo.model.micro_batch import TokenSequence


@dataclass(frozen=True, kw_only=True)
class FineTuneResult:
    """How fine-tuning ended."""

    steps: int
    accuracy: float
    """Sampled accuracy at the last check."""


def fine_tune(
    policy: Policy,
    config: ColdStartConfig,
    demonstrations: Iterator[TokenSequence],
    accuracy: Callable[[int], float],
    report: Callable[[int, float, float], None],
) -> FineTuneResult:
    """Fine-tune until `accuracy(step)` reaches the target or the steps run out.

    `report(step, loss, accuracy)` is called at every check; the last step always has one."""
    settings = LearnerConfig(learning_rate=config.learning_rate, weight_decay=0.01, spike=0.0)
    optimizer = Optimizer(policy.model, settings, config.steps)
    reached = 0.0
    step = 0
    for step in range(1, config.steps + 1):
        loss = _train_step(policy, optimizer, list(islice(demonstrations, config.batch)))
        if step % config.check_every == 0 or step == config.steps:
            reached = accuracy(step)
            report(step, loss, reached)
            if reached >= config.stop_accuracy:
                break
    return FineTuneResult(steps=step, accuracy=reached)


def _train_step(policy: Policy, optimizer: Optimizer, sequences: list[TokenSequence]) -> float:
    plan = make_plan(
        sequences, range(len(sequences)), mini_batches=1, token_budget=65536, pad_id=policy.pad_id, seed=""
    )
    loss = _accumulate_gradients(policy, optimizer, plan)
    while optimizer.retry_after_overflow(loss_finite=math.isfinite(loss)):
        loss = _accumulate_gradients(policy, optimizer, plan)
    optimizer.step(loss_finite=math.isfinite(loss))
    return loss


def _accumulate_gradients(policy: Policy, optimizer: Optimizer, plan: Plan) -> float:
    total = 0.0
    for micro in plan.updates[0]:
        logp_N, _ = completion_logprobs(policy.model, micro.to(policy.device), temperature=1.0)
        # Divided by the tokens of the whole step, so that the split into micro-batches does not change the gradient.
        loss = -logp_N.sum() / plan.tokens
        optimizer.scale_loss(loss).backward()
        total += float(loss.detach())
    return total

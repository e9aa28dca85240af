"""Supervised fine-tuning on demonstrations, so that some sampled completions earn a reward. `cold_start.py` calls it.

In: a policy and an endless stream of demonstrations. Out: the same policy, able to solve some problems.
Invariant: it stops at a sampled accuracy on problems that it does not train on, not after a fixed number of steps.
Accuracy rises fast here: after a weak cold start no completion earns a reward, and after a strong one RL has nothing
left to improve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from gspo.activity import counted
from gspo.config import ColdStartConfig, LearnerConfig
from gspo.learner.forward import completion_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.learner.plan import Plan, make_plan
from gspo.model.load import Policy
from gspo.model.micro_batch import TokenSequence
from gspo.model.sharding import synchronize_gradients
from gspo.ranks.group import ONE, Ranks


@dataclass(frozen=True, kw_only=True)
class FineTuneResult:
    """How fine-tuning ended."""

    steps: int
    accuracy: float
    """Sampled accuracy at the last check."""


class FineTuner:
    """Takes supervised steps, on all ranks that share the policy."""

    def __init__(self, policy: Policy, config: ColdStartConfig, learner: LearnerConfig, ranks: Ranks = ONE) -> None:
        settings = LearnerConfig(
            learning_rate=config.learning_rate,
            weight_decay=0.01,
            spike=0.0,
            # It must fit into memory, as the optimizer of the run does.
            optimizer=learner.optimizer,
            optimizer_offload=learner.optimizer_offload,
        )
        self._policy = policy
        self._ranks = ranks
        self._token_budget = learner.micro_batch_tokens
        self._optimizer = Optimizer(policy.model, settings, config.steps)

    def step(self, sequences: Sequence[TokenSequence]) -> float:
        """Train on these sequences; their loss."""
        plan = make_plan(
            sequences,
            range(len(sequences)),
            mini_batches=1,
            token_budget=self._token_budget,
            pad_id=self._policy.pad_id,
            seed="",
            ranks=self._ranks,
        )
        loss = self._accumulate_gradients(plan)
        while self._optimizer.retry_after_overflow(loss_finite=math.isfinite(loss)):
            loss = self._accumulate_gradients(plan)
        self._optimizer.step(loss_finite=math.isfinite(loss))
        return loss

    def _accumulate_gradients(self, plan: Plan) -> float:
        model, device, own = self._policy.model, self._policy.device, plan.updates[0]
        total = torch.zeros((), dtype=torch.float64)
        for index, micro in enumerate(own, start=1):
            synchronize_gradients(model, index == len(own))
            logp_N, _ = completion_logprobs(model, micro.own.to(device), temperature=1.0)
            # Divided by the tokens of the whole step, so that the split into micro-batches does not change the
            # gradient.
            loss = -logp_N.sum() / plan.tokens
            self._optimizer.scale_loss(loss).backward()
            total += float(loss.detach())
        return float(self._ranks.sum(total))


def fine_tune(
    policy: Policy,
    config: ColdStartConfig,
    learner: LearnerConfig,
    demonstrations: Iterator[TokenSequence],
    accuracy: Callable[[int], float],
    report: Callable[[int, float, float], None],
    ranks: Ranks = ONE,
) -> FineTuneResult:
    """Fine-tune until `accuracy(step)` reaches the target or the steps run out.

    `report(step, loss, accuracy)` is called at every check; the last step always has one."""
    tuner = FineTuner(policy, config, learner, ranks)
    reached = 0.0
    step = 0
    for step in counted(range(1, config.steps + 1), "cold start", total=config.steps, unit="steps"):
        sequences = list(islice(demonstrations, config.batch))
        with ranks.together("fine_tune", sequences=sequences, first=step == 1):
            loss = tuner.step(sequences)
        if step % config.check_every == 0 or step == config.steps:
            reached = accuracy(step)
            report(step, loss, reached)
            if reached >= config.stop_accuracy:
                break
    return FineTuneResult(steps=step, accuracy=reached)

"""What the checks of one recipe share: its settings, and the components of the run as far as they could be built.

In: a config. Out: components and measurements that later checks read. Invariant: nothing is built that a run would not
build, and nothing outlives the `stack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from gspo.config import Config
from gspo.data.problems import Problems
from gspo.environment.rewards import ConversationRewards
from gspo.environment.setup import RunEnvironment
from gspo.model.lm_head import lm_head
from gspo.model.load import Policy
from gspo.model.packed_forward import supports_packing
from gspo.objectives.objective import Objective
from gspo.preflight.workload import Workload
from gspo.reward.reward import RewardPool
from gspo.rollout.engine import Engine
from gspo.suites.suite import SuiteSource
from gspo.types import Group

PATIENCE_S = 20.0
"""After this time the checks start no further chunk of prompts and no further micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Measured times for a few completions."""

    completions: int
    rollout_s: float
    reward_s: float
    trained: int = 0
    """Completions that went through a training forward and backward pass."""
    train_s: float = 0.0


@dataclass(kw_only=True)
class PreflightContext:
    """A recipe under examination. A component is `None` until its check has built it, and stays `None` if that
    failed."""

    config: Config
    prompts: int | None = None
    """Groups to sample; `None` samples as many as fit in a few seconds."""
    suites: Sequence[SuiteSource] = ()
    """Benchmarks whose problems the training data should not contain."""
    # Processes and engines are closed in reverse order, also if a check fails.
    stack: ExitStack = field(default_factory=ExitStack)
    objective: Objective | None = None
    tokenizer: Any = None
    skeleton: Any = None
    """The model without its weights: shapes, names, stop tokens."""
    problems: Problems | None = None
    environment: RunEnvironment | None = None
    """None without `environment.name`, too."""
    rewards: RewardPool | ConversationRewards | None = None
    policy: Policy | None = None
    engine: Engine | None = None
    groups: list[Group] | None = None
    """A few groups of the first step, sampled and scored as in the run."""
    logprobs: Any = None
    """Log-probs of those completions (`ratio.LogprobsByPolicy`)."""
    timings: Timings | None = None
    activation_bytes: float | None = None
    """Measured bytes per token of a micro-batch; `None` if not measured."""
    device: torch.device | None = None
    free: tuple[int, int] | None = None
    """(free, total) bytes of memory on the model's device before the model was loaded."""

    @property
    def completions(self) -> int:
        """Completions of one step, without refills."""
        return self.config.rollout.prompts * self.config.rollout.group_size

    @property
    def cold(self) -> bool:
        """Whether the run starts with SFT on demonstrations, so that today's completions say little about it."""
        return self.config.cold_start.steps > 0

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; the limit if the prompts are unknown."""
        if self.problems is None or self.tokenizer is None:
            return max(section.max_prompt_tokens for section in self.config.problem_sections.values())
        return max(len(p.token_ids) for p in self.problems.everything)

    @property
    def completion_length(self) -> float:
        """Mean tokens of the sampled completions; the limit if there are none."""
        lengths = [len(c.token_ids) for g in self.groups or () for c in g.completions]
        return sum(lengths) / len(lengths) if lengths else self.config.rollout.max_tokens

    @property
    def workload(self) -> Workload:
        """What a step computes, for the models of memory and time."""
        model = self.policy.model if self.policy else None
        return Workload(
            config=self.config,
            skeleton=self.skeleton,
            prompt_tokens=self.longest_prompt,
            completion_tokens=self.completion_length,
            kl=self.objective is not None and bool(self.objective.kl),
            gpu=self.device is not None and self.device.type == "cuda",
            # Padded batches of a model that was not loaded: they need more memory.
            packed=model is not None and supports_packing(model),
            whole_logits=model is not None and lm_head(model) is None,
            memory=self.free[0] if self.free else None,
            activation_bytes=self.activation_bytes,
        )

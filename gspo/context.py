"""The components of a run, built once by `build.py` and passed to every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo.config import Config
from gspo.data.order import SamplingOrder
from gspo.data.problems import Problems
from gspo.environment.engine import ConversationEngine
from gspo.environment.rewards import ConversationRewards
from gspo.learner.optimizer import Optimizer
from gspo.model.load import Policy
from gspo.objectives.adaptive_clip import AdaptiveClip
from gspo.objectives.objective import Objective
from gspo.ranks.group import ONE, Ranks
from gspo.reward.reward import RewardPool
from gspo.rollout.engine import Engine
from gspo.rollout.sampling_process import SamplingProcess


@dataclass(frozen=True, kw_only=True)
class LearnContext:
    """The components that `learn` needs."""

    config: Config
    objective: Objective
    policy: Policy
    reference: Any
    """The frozen reference model; None without a KL penalty. With LoRA it is the policy's own model, used with its
    adapters disabled."""
    optimizer: Optimizer
    ranks: Ranks = ONE
    """The processes that share the policy's weights. All of them call `learn` with the same groups."""


@dataclass(frozen=True, kw_only=True)
class RunContext(LearnContext):
    """The components that a whole step needs: sampling, scoring and learning."""

    problems: Problems
    order: SamplingOrder
    engine: Engine
    rewards: RewardPool | ConversationRewards
    conversations: ConversationEngine | None = None
    """The engine, if an environment answers the model."""
    sampler: SamplingProcess | None = None
    """Samples training batches while the learner trains. None if sampling and training take turns."""
    adaptive_clip: AdaptiveClip | None = None
    """Adapts the clip range from step to step. None if the range is fixed."""

"""What the checks of one recipe share: its settings, and the parts of the run as far as they could be built.

Invariant: nothing is built that a run would not build, and nothing of it outlives the `stack`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from gspo.config import Config
from gspo.data.problems import Problems
from gspo.model.load import Policy
from gspo.objectives.objective import Objective
from gspo.reward.reward import RewardPool
from gspo.rollout.engine import Engine
from gspo.types import Group

PATIENCE_S = 20.0
"""After this long no further chunk of prompts is sampled, and no further micro-batch learned from."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """How long things took on a few replies."""

    replies: int
    rollout_s: float
    reward_s: float
    learned: int = 0
    """Replies that went through a learning forward and backward."""
    learn_s: float = 0.0


@dataclass(kw_only=True)
class Case:
    """One recipe under examination. A part is None until its check has built it, and stays so if that failed."""

    config: Config
    prompts: int | None = None
    """Groups to sample; None: as many as can be had in a few seconds."""
    stack: ExitStack = field(default_factory=ExitStack)
    objective: Objective | None = None
    tokenizer: Any = None
    skeleton: Any = None
    """The model without its weights: shapes, names, end tokens."""
    problems: Problems | None = None
    rewards: RewardPool | None = None
    policy: Policy | None = None
    engine: Engine | None = None
    groups: list[Group] | None = None
    """A few prompts of the first step, sampled and scored as the run would."""
    fresh: Any = None
    """Log-probabilities of those replies (`batch.LogprobsByPolicy`)."""
    pace: Timings | None = None
    activation_bytes: float | None = None
    """Per token of a micro-batch, measured; None: not measured."""
    device: torch.device | None = None
    free: tuple[int, int] | None = None
    """Bytes of memory on the model's device before it was loaded: free, and in all."""

    @property
    def replies(self) -> int:
        """Replies of one step, before any refill."""
        return self.config.rollout.prompts * self.config.rollout.replies

    @property
    def cold(self) -> bool:
        """Whether the run trains the model on demonstrations first, so that its replies now say little."""
        return self.config.cold_start.steps > 0

    @property
    def longest_prompt(self) -> int:
        """Tokens; the limit where the prompts are not known."""
        if self.problems is None or self.tokenizer is None:
            return self.config.data.max_prompt_tokens
        return max(len(p.token_ids) for p in (*self.problems.train, *self.problems.held_out))

    @property
    def reply_length(self) -> float:
        """Mean tokens of the sampled replies; the limit where there are none."""
        lengths = [len(c.token_ids) for g in self.groups or () for c in g.completions]
        return sum(lengths) / len(lengths) if lengths else self.config.rollout.max_tokens

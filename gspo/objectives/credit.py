"""Credit assignment: from the rewards of a batch to the advantage of every token.

In: packed tokens and the samples they belong to. Out: the reward that entered each advantage, and `advantage_N`.
Invariant: a KL penalty that belongs to the reward is detached and is part of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.objectives.advantage import apply_rule
from gspo.objectives.objective import Objective
from gspo.objectives.penalty import KL_ESTIMATORS
from gspo.objectives.samples import TrainSample
from gspo.objectives.sequences import Tokens


def token_advantages(objective: Objective, tokens: Tokens, samples: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """(reward_B, advantage_N). The reward is shaped, and less the KL penalty where that belongs to the reward."""
    sequences = tokens.sequences
    penalty_N = torch.zeros_like(tokens.logp_old_N)
    if objective.kl and objective.kl_in == "reward":
        penalty_N = objective.kl * KL_ESTIMATORS[objective.estimator](tokens)
    shaped_B = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    reward_B = shaped_B - sequences.sum(penalty_N.double()).cpu()
    if objective.advantage.per_token is not None:
        return reward_B, objective.advantage.per_token(shaped_B, penalty_N, sequences).float()
    advantage_B = apply_rule(objective.advantage, reward_B, [s.group for s in samples]).float()
    return reward_B, sequences.expand(advantage_B.to(penalty_N.device))

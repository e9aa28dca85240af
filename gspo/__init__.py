"""Critic-free RL post-training for language models: GSPO and its family.

The losses for your own training loop are here: `objective`, `group_advantage`, `policy_loss`, `token_weights`. Names
are resolved on first use, so that `import gspo` does not import torch in processes that do not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.objectives.api import PolicyLoss, group_advantage, policy_loss, select_tokens, token_weights
    from gspo.objectives.objective import Objective, ObjectiveWarning
    from gspo.objectives.samples import soft_overlong
    from gspo.objectives.table import objective, objective_names

__version__ = "0.1.0"

_HOME = {
    "objective": "gspo.objectives.table",
    "objective_names": "gspo.objectives.table",
    "group_advantage": "gspo.objectives.api",
    "policy_loss": "gspo.objectives.api",
    "token_weights": "gspo.objectives.api",
    "select_tokens": "gspo.objectives.api",
    "PolicyLoss": "gspo.objectives.api",
    "Objective": "gspo.objectives.objective",
    "ObjectiveWarning": "gspo.objectives.objective",
    "soft_overlong": "gspo.objectives.samples",
}

__all__ = [
    "Objective",
    "ObjectiveWarning",
    "PolicyLoss",
    "group_advantage",
    "objective",
    "objective_names",
    "policy_loss",
    "select_tokens",
    "soft_overlong",
    "token_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

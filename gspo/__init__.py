"""Critic-free reinforcement learning of language models: GSPO and its family.

The losses for your own training loop are here: `objective`, `group_advantage`, `policy_loss`, `token_weights`. Names are
resolved on first use, so that `import gspo` stays light for processes that need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.objective.loss import (
        PolicyLoss,
        group_advantage,
        objective_names,
        policy_loss,
        select_tokens,
        token_weights,
    )
    from gspo.objective.loss import build as objective
    from gspo.objective.objective import Objective, ObjectiveWarning
    from gspo.objective.penalty import soft_overlong

__version__ = "0.1.0"

_HOME = {
    "objective_names": "gspo.objective.loss",
    "group_advantage": "gspo.objective.loss",
    "policy_loss": "gspo.objective.loss",
    "token_weights": "gspo.objective.loss",
    "select_tokens": "gspo.objective.loss",
    "PolicyLoss": "gspo.objective.loss",
    "Objective": "gspo.objective.objective",
    "ObjectiveWarning": "gspo.objective.objective",
    "soft_overlong": "gspo.objective.penalty",
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
    if name == "objective":
        return importlib.import_module("gspo.objective")
    if name not in _HOME:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

"""Critic-free RL post-training for language models: GSPO and its family.

Train and evaluate from Python: `train`, `evaluate`, `compare`, `doctor`, `replay`, `Run`, `Callback`. The losses for
your own training loop: `objective`, `group_advantage`, `policy_loss`, `token_weights`. Names are resolved on first use,
so that `import gspo` does not import torch in processes that do not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.api.evaluation import EvaluationResult, evaluate
    from gspo.api.run import Run
    from gspo.api.studies import Comparison, Findings, ReplayResult, compare, doctor, replay
    from gspo.api.training import train
    from gspo.callbacks import Callback, Training
    from gspo.errors import GspoError
    from gspo.objectives.api import PolicyLoss, group_advantage, policy_loss, select_tokens, token_weights
    from gspo.objectives.objective import Objective, ObjectiveWarning
    from gspo.objectives.samples import soft_overlong
    from gspo.objectives.table import objective, objective_names

__version__ = "0.1.0"

_HOME = {
    "train": "gspo.api.training",
    "evaluate": "gspo.api.evaluation",
    "compare": "gspo.api.studies",
    "doctor": "gspo.api.studies",
    "replay": "gspo.api.studies",
    "Run": "gspo.api.run",
    "Callback": "gspo.callbacks",
    "Training": "gspo.callbacks",
    "EvaluationResult": "gspo.api.evaluation",
    "Comparison": "gspo.api.studies",
    "Findings": "gspo.api.studies",
    "ReplayResult": "gspo.api.studies",
    "GspoError": "gspo.errors",
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
    "Callback",
    "Comparison",
    "EvaluationResult",
    "Findings",
    "GspoError",
    "Objective",
    "ObjectiveWarning",
    "PolicyLoss",
    "ReplayResult",
    "Run",
    "Training",
    "compare",
    "doctor",
    "evaluate",
    "group_advantage",
    "objective",
    "objective_names",
    "policy_loss",
    "replay",
    "select_tokens",
    "soft_overlong",
    "token_weights",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""The settings of a run.

`schema.py` defines them, `load.py` reads recipes and overrides, `checks.py` rejects combinations that cannot work, and
`toml.py` writes a config back as TOML.
"""

from gspo.config.checks import check, check_single_process, problem_sections
from gspo.config.load import anchored, find_recipe, from_flat, from_tree, load, override, read_toml, recipe_dir
from gspo.config.schema import (
    TINY_MODELS,
    AlarmsConfig,
    CheckpointConfig,
    ColdStartConfig,
    Config,
    DataConfig,
    EvalConfig,
    EvalSetConfig,
    LearnerConfig,
    LogConfig,
    LoraConfig,
    MixConfig,
    ModelConfig,
    ObjectiveConfig,
    ProblemsConfig,
    RanksConfig,
    RewardConfig,
    RolloutConfig,
    RoutingConfig,
    SourceConfig,
    field_docs,
    help_texts,
)
from gspo.config.toml import differing, flat, flatten, get, to_toml

__all__ = [
    "TINY_MODELS",
    "AlarmsConfig",
    "CheckpointConfig",
    "ColdStartConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "EvalSetConfig",
    "LearnerConfig",
    "LogConfig",
    "LoraConfig",
    "MixConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ProblemsConfig",
    "RanksConfig",
    "RewardConfig",
    "RolloutConfig",
    "RoutingConfig",
    "SourceConfig",
    "anchored",
    "check",
    "check_single_process",
    "differing",
    "field_docs",
    "find_recipe",
    "flat",
    "flatten",
    "from_flat",
    "from_tree",
    "get",
    "help_texts",
    "load",
    "override",
    "problem_sections",
    "read_toml",
    "recipe_dir",
    "to_toml",
]

"""A model or run as a server needs it: its settings, its weights and an engine.

In: a model, or a run and one of its checkpoints. Out: the config, the policy and the engine. Invariant: settings of a
run that say how to train, score or evaluate are not used, and code that only the run directory names needs
`--trust-run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo import config as settings
from gspo.commands.arguments import checkpoint_of
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.record import run_format

if TYPE_CHECKING:
    from gspo.model.load import Policy
    from gspo.rollout.engine import Engine

USED = ("model.", "rollout.engine", "rollout.max_tokens")
"""The settings that a server uses."""
MAX_TOKENS = 2048
"""`rollout.max_tokens` of a model that comes from no run."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is ready to be served."""

    config: Config
    policy: Policy
    engine: Engine


def open_model(
    model: str, *, checkpoint: str, overrides: Sequence[str], trust_run: bool, stack: ExitStack
) -> ServedModel:
    """Load a model. `stack` closes its engine."""
    from gspo.build import engine_for, policy_for, tokenizer_for

    config = _config(model, checkpoint, overrides, trust_run)
    policy = policy_for(config, tokenizer_for(config), routers=False)
    engine = engine_for(config, policy)
    stack.callback(engine.close)
    return ServedModel(config=config, policy=policy, engine=engine)


def _config(model: str, checkpoint: str, overrides: Sequence[str], trust_run: bool) -> Config:
    from gspo import trust
    from gspo.model.adapter import base_of

    for override in overrides:
        if not override.removeprefix("--").startswith(USED):
            raise ConfigError(
                f"{override}: has no effect on a served model; settings of [model], rollout.engine, "
                "rollout.engine_options and rollout.max_tokens have one"
            )
    run = Path(model)
    tree: dict[str, Any] = {"model": {}, "rollout": {"max_tokens": MAX_TOKENS}}
    if (of_run := checkpoint_of(run, checkpoint)) is not None:
        # Refuses a run directory of a later format before its settings are misread.
        run_format.read(run)
        recipe = settings.read_toml(run / "config.toml")
        dropped = {"build", "build_options", "path"} | ({"lora", "quantize"} if base_of(str(of_run)) is None else set())
        tree["model"] = {key: value for key, value in recipe.get("model", {}).items() if key not in dropped}
        tree["rollout"] = {k: v for k, v in recipe.get("rollout", {}).items() if k == "max_tokens"}
        model = str(of_run)
    elif trust_run:
        raise ConfigError("--trust-run: has no effect on a model that is not a run; leave it out")
    tree["model"]["path"] = model
    config = settings.override(tree, overrides, where=str(run), report_old_names=False)
    settings.check_without_problems(config)
    if of_run is not None:
        named = settings.from_tree(tree, where=str(run))
        # Code that an override on the command line allows was allowed by the user.
        trust.check(run, trust.model_code(named.model, [model]), trust=trust_run)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, gradient_checkpointing=False))

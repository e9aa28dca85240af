"""`gspo demo`: the built-in example."""

from __future__ import annotations

import argparse

from gspo.commands.arguments import add_run_options
from gspo.commands.command import Command
from gspo.commands.train import train_recipe
from gspo.config import recipe_dir


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    # By its full path: a file demo.toml in the current directory has precedence over the name `demo`.
    return train_recipe(str(recipe_dir() / "demo.toml"), options, overrides)


COMMAND = Command(
    name="demo",
    help="Train a small MoE model on addition, offline and on this machine.",
    add_arguments=add_run_options,
    run=run,
    epilog="Any setting of 'gspo train --help' can be overridden.",
    single_process=True,
)

"""Arguments that several sub-commands have, and the list of all settings for their help."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gspo.config import help_texts
from gspo.errors import ConfigError


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are short forms of settings."""
    parser.add_argument("--run-dir", help="directory of the run (default: runs/NAME-DATE-TIME)")
    parser.add_argument("--seed", type=int, help="random seed")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument(
        "--model", dest="model_path", metavar="MODEL", help="model directory, hub name or .gguf file (model.path)"
    )


def given_settings(options: argparse.Namespace) -> list[str]:
    """The options of `add_run_options` as overrides."""
    common = {
        "run_dir": options.run_dir,
        "seed": options.seed,
        "steps": options.steps,
        "model.path": options.model_path,
    }
    return [f"{key}={value}" for key, value in common.items() if value is not None]


def add_trust_run(parser: argparse._ActionsContainer) -> None:
    """Add `--trust-run`."""
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="run the code (rewards, objective, model) and contact the endpoints that the run directory names; not "
        "needed for runs started here",
    )


def add_checkpoint(parser: argparse._ActionsContainer) -> None:
    """Add `--checkpoint`."""
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        default="newest",
        help="checkpoint of a run: newest, best (checkpoint.keep_best) or a step (default: newest)",
    )


def checkpoint_of(path: Path, which: str) -> Path | None:
    """The checkpoint of a run that `--checkpoint` selects, intact; None if the directory is not a run."""
    from gspo.learner import checkpoint
    from gspo.record.held_out import best_step

    if which == "newest":
        return checkpoint.newest_of(path)
    if which != "best" and not which.isdecimal():
        raise ConfigError(f"--checkpoint: {which!r} is neither newest nor best nor a step")
    if not (path / "config.toml").is_file():
        raise ConfigError(f"--checkpoint: {path} is not a run directory; leave the option out")
    found = path / "checkpoints" / f"{best_step(path) if which == 'best' else int(which):06d}"
    if not found.is_dir():
        steps = ", ".join(str(int(p.name)) for p in checkpoint.saved(path / "checkpoints"))
        raise ConfigError(f"--checkpoint: {found} does not exist; the run has checkpoints of these steps: {steps}")
    if complaint := checkpoint.damage(found):
        raise ConfigError(f"--checkpoint: {found.name} is damaged: {complaint}; choose another")
    return found


def positive(text: str) -> int:
    """Argument type: a positive integer."""
    # `int` alone also accepts signs, spaces and underscores.
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def non_negative(text: str) -> int:
    """Argument type: a non-negative integer."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)


def settings_help() -> str:
    """Every setting with its type, default and help, for an epilog."""
    lines = []
    for key, kind, default, text in help_texts():
        shown = json.dumps(default) if isinstance(default, str | bool | int | float) else str(default or "none")
        lines.append(f"  {key} ({kind}, default {shown})\n      {text}")
    # argparse formats the epilog, so a percent sign must be doubled.
    return "\n".join(lines).replace("%", "%%")

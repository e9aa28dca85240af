"""`gspo train`: train a model with a recipe, or resume a run."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING

from gspo import config
from gspo.commands.arguments import add_run_options, add_trust_run, given_settings, settings_help
from gspo.commands.command import Command, quiet_libraries
from gspo.errors import ConfigError
from gspo.record.held_out import continue_options

if TYPE_CHECKING:
    from gspo.trainer import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a .toml recipe, or the name of a built-in recipe")
    parser.add_argument("--resume", metavar="RUN", help="resume the run in this directory")
    add_trust_run(parser)
    add_run_options(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.resume:
        return _resume(options, overrides)
    if options.trust_run:
        raise ConfigError(
            "--trust-run: has no effect without --resume, because a recipe that you name is trusted; leave it out"
        )
    if not options.recipe:
        raise ConfigError("train: give a recipe (a .toml file), or --resume RUN")
    return train_recipe(options.recipe, options, overrides)


def train_recipe(recipe: str, options: argparse.Namespace, overrides: list[str]) -> int:
    """Start a run and report how it ended."""
    # Before torch is imported, which takes seconds, so that a mistake in a setting is reported immediately.
    settings = config.load(recipe, given_settings(options) + overrides)
    quiet_libraries()
    from gspo.record.progress import make_display
    from gspo.trainer import train

    return _report(train(settings, make_display()))


def _resume(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.recipe or options.run_dir or options.model_path or options.seed is not None:
        raise ConfigError(
            "train --resume: a run continues with its own model, seed and directory; "
            "leave out all but --steps and settings"
        )
    quiet_libraries()
    from gspo.record.progress import make_display
    from gspo.trainer import resume

    display = make_display()
    return _report(
        resume(options.resume, display, steps=options.steps, overrides=overrides, trust_run=options.trust_run)
    )


def _report(outcome: Outcome) -> int:
    taken = outcome.step - outcome.start_step
    print()
    if outcome.stopped_by is not None:
        where = f"after step {outcome.step} of {outcome.steps}" if outcome.step else "before the first step"
        print(f"Stopped {where}. Continue with:  {_resume_command(outcome)}")
    else:
        total = f" ({outcome.step} in total)" if outcome.start_step else ""
        print(f"Finished {taken} step{'s' * (taken != 1)}{total} in {outcome.seconds / 60:.1f} minutes.")
    if outcome.ended_early:
        print(
            f"It ended early (eval.patience). Continue with:  {_resume_command(outcome)} {_without_patience(outcome)}"
        )
    if outcome.rollbacks:
        print(f"It was rolled back {outcome.rollbacks} time{'s' * (outcome.rollbacks != 1)}; see events.jsonl.")
    _report_accuracy(outcome)
    if outcome.idle:
        print(f"{outcome.idle} of {taken} steps trained on nothing and left the policy unchanged; see events.jsonl.")
    if outcome.unscored:
        print(
            f"{outcome.unscored} completions could not be scored and were not trained on; "
            "see rollouts/ for the reasons."
        )
    if outcome.picture:
        print(f"Picture:        {outcome.picture}")
    print(f"Run directory:  {outcome.run}")
    # The exit code that shells give to a process that a signal ended.
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _report_accuracy(outcome: Outcome) -> None:
    if outcome.before and not outcome.evaluated_at:
        print(f"Held-out accuracy, sampled, with its 95 % interval, before the first step: {outcome.before}")
    elif outcome.before and outcome.after:
        gain = 100 * (outcome.after.value - outcome.before.value)
        print(f"Held-out accuracy, sampled, with 95 % intervals, before and after {outcome.evaluated_at} steps:")
        print(f"  before  {outcome.before}")
        print(f"  after   {outcome.after}   ({gain:+.1f} points)")
        if outcome.greedy:
            print(f"  greedy  {outcome.greedy[0]:.1%} before, {outcome.greedy[1]:.1%} after")
    if outcome.best:
        score = f"{outcome.best.value:.1%}"
        print(f"Best checkpoint: step {outcome.best.step} with {score}; the best of several scores is biased upward.")


def _resume_command(outcome: Outcome) -> str:
    return f"{_program()} train --resume {outcome.run}"


def _without_patience(outcome: Outcome) -> str:
    file = outcome.run / "config.toml"
    run = config.from_tree(config.read_toml(file), where=str(file))
    return continue_options(metric=run.eval.metric, min_gain=run.eval.min_gain, keep_best=run.checkpoint.keep_best)


def _program() -> str:
    """The command that started this process: `gspo` if it is on the PATH."""
    if sys.argv[0].endswith(".py"):
        return "python -m gspo.cli"
    return "gspo" if shutil.which("gspo") else os.path.relpath(sys.argv[0])


COMMAND = Command(
    name="train",
    help="Train a model with a recipe, or resume a run.",
    add_arguments=add_arguments,
    run=run,
    epilog="settings, given as --section.key=value:\n" + settings_help(),
    single_process=True,
)

"""`gspo train`: train a model with a recipe, or resume a run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from gspo import config
from gspo.activity import activity
from gspo.cluster.connect import membership
from gspo.commands.arguments import add_run_options, add_trust_run, given_settings, settings_help
from gspo.commands.command import Command, quiet_libraries
from gspo.config import Config, RanksConfig
from gspo.errors import ConfigError, GspoError, RankError
from gspo.ranks.environment import LAUNCHED, RANK_LOST, is_follower, resume_command, world_size
from gspo.record.run_dir import is_idle, run_path

if TYPE_CHECKING:
    from gspo.trainer import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a .toml recipe, or the name of a built-in recipe")
    parser.add_argument("--resume", metavar="RUN", help="resume the run in this directory")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="train on N ranks of this machine, as torchrun --nproc-per-node N does"
    )
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="place ranks, reward workers and vLLM servers on a Ray cluster: HOST:PORT of its head node, or auto for "
        "the one in RAY_ADDRESS, or else one that is started on this machine",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="with --cluster: how often the run is resumed after a rank or a node was lost (default: 2)",
    )
    add_trust_run(parser)
    add_run_options(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.cluster is None and options.restarts is not None:
        raise ConfigError("--restarts: has no effect without --cluster; leave it out")
    if options.cluster is not None:
        return _launch_on_cluster(options, overrides)
    if options.nproc is not None:
        from gspo.ranks.launch import check_count, launch

        check_count(options.nproc)
        if options.nproc > 1:
            # Before ranks start, which takes seconds, so that a mistake is reported immediately, and once.
            config.check_number_of_ranks(_given_config(options, overrides), options.nproc)
            return launch(options.nproc)
    if is_follower():
        # The leader reads the recipe and reports what is wrong with it, once.
        return _follow()
    try:
        return _lead(options, overrides)
    except RankError as error:
        if membership() is None:
            raise
        print(f"gspo: {error}", file=sys.stderr)
        return RANK_LOST  # the launcher resumes the run


def _lead(options: argparse.Namespace, overrides: list[str]) -> int:
    _check_options(options)
    if options.resume:
        return _resume(options, overrides)
    return train_recipe(options.recipe, options, overrides)


def _check_options(options: argparse.Namespace) -> None:
    if options.resume:
        if options.recipe or options.run_dir or options.model_path or options.seed is not None:
            raise ConfigError(
                "train --resume: a run continues with its own model, seed and directory; "
                "leave out all but --steps and settings"
            )
        return
    if options.trust_run:
        raise ConfigError(
            "--trust-run: has no effect without --resume, because a recipe that you name is trusted; leave it out"
        )
    if not options.recipe:
        raise ConfigError("train: give a recipe (a .toml file), or --resume RUN")


def _given_config(options: argparse.Namespace, overrides: list[str]) -> Config:
    """The settings of the run that these arguments start or resume, for a launcher of ranks."""
    _check_options(options)
    if options.resume:
        return _settings_of(options.resume, overrides)
    return config.load(options.recipe, given_settings(options) + overrides)


RESTARTS = 2
"""The default of `--restarts`."""


def _launch_on_cluster(options: argparse.Namespace, overrides: list[str]) -> int:
    """Start the ranks on a cluster. Mistakes that this process can see are reported before anything is reserved."""
    from gspo.cluster.connect import check_address
    from gspo.cluster.launch import Order, launch_on_cluster
    from gspo.ranks.launch import check_count, without_options

    count = 1 if options.nproc is None else options.nproc
    restarts = RESTARTS if options.restarts is None else options.restarts
    check_count(count)
    if restarts < 0:
        raise ConfigError(f"--restarts: must be at least 0, is {restarts}")
    if world_size() > 1:
        raise ConfigError("--cluster: a launcher has already started several processes (WORLD_SIZE); unset WORLD_SIZE")
    check_address(options.cluster)
    settings = _given_config(options, overrides)
    arguments = without_options(sys.argv[1:], ("--nproc", "--cluster", "--restarts"))
    if options.resume:
        run = Path(options.resume)
    else:
        run = run_path(settings)
        # Named here, because the run is resumed by its name, and a default name has the time in it.
        arguments = [*without_options(arguments, ("--run-dir",)), "--run-dir", str(run)]
    config.check_number_of_ranks(settings, count)
    return launch_on_cluster(
        Order(
            config=settings,
            arguments=arguments,
            run=run,
            cluster=options.cluster,
            ranks=count,
            restarts=restarts,
            idle=is_idle,
        )
    )


def train_recipe(recipe: str, options: argparse.Namespace, overrides: list[str]) -> int:
    """Start a run and report how it ended."""
    # Before torch is imported, which takes seconds, so that a mistake in a setting is reported immediately.
    settings = config.load(recipe, given_settings(options) + overrides)
    from gspo.record.progress import make_display

    with closing(make_display()) as display:
        with activity("importing torch and transformers"):
            quiet_libraries()
            from gspo.ranks.start import join_ranks
            from gspo.trainer import check_recipe, train

        check_recipe(settings)  # before it waits for the other ranks
        with join_ranks(settings.ranks.timeout_s) as ranks:
            outcome = train(settings, display, ranks)
    return _report(outcome)


def _resume(options: argparse.Namespace, overrides: list[str]) -> int:
    from gspo.record.progress import make_display

    with closing(make_display()) as display:
        with activity("importing torch and transformers"):
            quiet_libraries()
            from gspo.ranks.start import join_ranks
            from gspo.trainer import resume

        timeout = RanksConfig().timeout_s
        if world_size() > 1:  # the ranks need it before the leader opens the run
            timeout = _settings_of(options.resume, [o for o in overrides if o.startswith("--ranks.")]).ranks.timeout_s
        with join_ranks(timeout) as ranks:
            given = {"steps": options.steps, "overrides": overrides, "trust_run": options.trust_run}
            outcome = resume(options.resume, display, **given, ranks=ranks)
    return _report(outcome)


def _settings_of(run: str, overrides: Sequence[str]) -> Config:
    """The settings of a run that is resumed."""
    file = Path(run) / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{run}: not a run directory (no config.toml); give the directory that 'gspo train' made")
    return config.load(str(file), overrides)


def _follow() -> int:
    from gspo.ranks.output import FollowerOutput

    output = FollowerOutput()
    joined = False
    try:
        quiet_libraries()
        from gspo.follower import follow
        from gspo.ranks.start import join_ranks

        with join_ranks() as ranks:
            joined = True
            follow(ranks, output)
        return 0
    except Exception as error:
        if isinstance(error, GspoError):
            print(f"gspo: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        # The leader prints why the run has ended, if another rank was the cause.
        if not (joined and isinstance(error, RankError)):
            output.show()
        return 1


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
        print(f"It ended early (eval.patience). Continue with:  {_resume_command(outcome)} --eval.patience=0")
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
    print(f"Look at it:     gspo watch {shlex.quote(str(outcome.run))}")
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
            print(f"  greedy  {outcome.greedy[0]} before, {outcome.greedy[1]} after")
    if outcome.reward and not outcome.evaluated_at:
        print(f"Mean held-out reward: {outcome.reward[0]}")
    elif outcome.reward:
        print(f"  reward  {outcome.reward[0]} before, {outcome.reward[1]} after")
    if outcome.best:
        form = ".3f" if outcome.best_metric == "reward" else ".1%"
        score = format(outcome.best.value, form) + (" reward" if outcome.best_metric == "reward" else "")
        print(f"Best checkpoint: step {outcome.best.step} with {score}; the best of several scores is biased upward.")


def _resume_command(outcome: Outcome) -> str:
    return resume_command(outcome.run, program=_program())


def _program() -> str:
    """The command that started this process: `gspo` if it is on the PATH."""
    if sys.argv[0].endswith(".py") and not (LAUNCHED in os.environ and shutil.which("gspo")):
        return "python -m gspo"
    return "gspo" if shutil.which("gspo") else os.path.relpath(sys.argv[0])


COMMAND = Command(
    name="train",
    help="Train a model with a recipe, or resume a run.",
    add_arguments=add_arguments,
    run=run,
    epilog="settings, given as --section.key=value:\n" + settings_help(),
)

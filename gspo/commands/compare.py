"""`gspo compare`: several objectives on one recipe, at equal sampled tokens, with a report."""

from __future__ import annotations

import argparse

from gspo.commands.arguments import add_trust_run
from gspo.commands.command import Command, no_overrides
from gspo.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", help="a .toml recipe, or the name of a built-in recipe")
    add(
        "--objectives",
        metavar="ARMS",
        help="arms, separated by commas: NAME[+replay][+KEY=VALUE][+SECTION.KEY=VALUE], "
        "for example grpo,grpo+replay,gspo; your own objective as file.py:name",
    )
    add("--seeds", default="0,1,2", help="seeds, for example 0,1,2 or 0-4 (default: 0,1,2)")
    add(
        "--tokens",
        type=int,
        help="completion tokens that each run samples (default: estimated from the recipe's steps and the completion "
        "length after the cold start)",
    )
    add(
        "--steps",
        type=int,
        help="training steps, which determine the learning-rate schedule and, without --tokens, the token budget",
    )
    add("--out", metavar="DIR", help="directory of the comparison (default: runs/compare-NAME)")
    add("--jobs", type=int, help="concurrent runs (default: as many as the CPU cores allow; 1 on a GPU)")
    add_trust_run(parser)
    add("--report", metavar="DIR", help="rewrite the report of an existing comparison, without training")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from gspo.view.compare.comparison import Request, compare, report

    if options.report:
        # A report only reads runs, so an option that would change them is a mistake.
        no_overrides([*overrides, *filter(None, (options.recipe, options.objectives))])
        return report(options.report)
    if not options.recipe or not options.objectives:
        raise ConfigError(
            "compare: give a recipe and --objectives, for example gspo compare demo --objectives grpo,gspo"
        )
    steps = [f"--steps={options.steps}"] if options.steps is not None else []
    request = Request(
        recipe=options.recipe,
        objectives=options.objectives,
        seeds=options.seeds,
        tokens=options.tokens,
        out=options.out,
        jobs=options.jobs,
        overrides=steps + overrides,
        trust_run=options.trust_run,
    )
    return compare(request)


COMMAND = Command(
    name="compare",
    help="Compare objectives at equal numbers of sampled tokens and from the same cold start, and write a report.",
    add_arguments=add_arguments,
    run=run,
    epilog="Repeat the command to resume unfinished runs. Settings of 'gspo train --help' apply to all arms. "
    "See docs/compare.md.",
    single_process=True,
)

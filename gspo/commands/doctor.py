"""`gspo doctor`: pre-flight checks of a recipe."""

from __future__ import annotations

import argparse

from gspo.commands.arguments import add_run_options, given_settings, positive
from gspo.commands.command import Command, quiet_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", help="a .toml recipe, or the name of a built-in recipe")
    add("--quick", action="store_true", help="check files and settings only, without loading weights")
    add("--prompts", type=positive, help="groups of completions to sample (default: up to 16, as time allows)")
    add(
        "--suite",
        metavar="NAME[=FILE]",
        action="append",
        default=[],
        help="check whether the training problems contain those of a published benchmark, from a file or the hub; "
        "may be repeated (docs/evaluation.md)",
    )
    add("--json", action="store_true", help="print the findings as JSON")
    add_run_options(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    quiet_libraries()
    from gspo.preflight.report import doctor

    overrides = given_settings(options) + overrides
    return doctor(
        options.recipe,
        overrides,
        quick=options.quick,
        as_json=options.json,
        prompts=options.prompts,
        suites=options.suite,
    )


COMMAND = Command(
    name="doctor",
    help="Run pre-flight checks on a recipe. The exit code is 1 if the run would fail.",
    add_arguments=add_arguments,
    run=run,
    epilog="All settings of 'gspo train --help' work here. docs/doctor.md lists every check.",
    single_process=True,
)

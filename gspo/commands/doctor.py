"""`gspo doctor`: pre-flight checks of a recipe."""

from __future__ import annotations

import argparse

from gspo.commands.common import Command, add_run_options, given_settings, positive, quiet_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", help="a .toml recipe, or the name of a shipped one")
    add("--quick", action="store_true", help="load no weights: only what files and settings can tell")
    add("--prompts", type=positive, help="groups of completions to sample (default: up to 16, as time allows)")
    add("--json", action="store_true", help="for programs")
    add_run_options(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    quiet_libraries()
    from gspo.preflight.report import doctor

    overrides = given_settings(options) + overrides
    return doctor(options.recipe, overrides, quick=options.quick, as_json=options.json, prompts=options.prompts)


COMMAND = Command(
    name="doctor",
    help="Check a recipe before it runs; exit code 1 if something would fail.",
    add_arguments=add_arguments,
    run=run,
    epilog="Settings are given as to 'gspo train'; docs/doctor.md lists every check.",
    single_process=True,
)

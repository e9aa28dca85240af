"""`gspo objectives`: the table of objectives."""

from __future__ import annotations

import argparse
import json

from gspo.commands.command import Command, no_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    from gspo.objectives import describe

    print(json.dumps(describe.as_data(), indent=2) if options.json else describe.as_text())
    return 0


COMMAND = Command(
    name="objectives",
    help="Print the table of objectives, with papers and defaults.",
    add_arguments=add_arguments,
    run=run,
)

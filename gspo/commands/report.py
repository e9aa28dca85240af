"""`gspo report`: write a self-contained HTML report of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo.commands.command import Command, no_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or directories of runs")
    parser.add_argument(
        "-o", "--out", default="report.html", metavar="FILE", help="the file to write (default: report.html)"
    )


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    from gspo.view.report import write_report

    print(f"Report:  {write_report(options.runs, Path(options.out))}")
    return 0


COMMAND = Command(
    name="report",
    help="Write a self-contained HTML report of runs, with figures, findings and sample completions.",
    add_arguments=add_arguments,
    run=run,
)

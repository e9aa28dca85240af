"""`gspo import-config`: a config of TRL or verl as a recipe, with a list of what has no equivalent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gspo import config
from gspo.commands.command import Command, no_overrides
from gspo.equivalents import trl, verl
from gspo.equivalents.equivalent import Conversion
from gspo.equivalents.recipe import recipe, report
from gspo.equivalents.sources import Trainer, read_source
from gspo.errors import ConfigError

TRAINERS: dict[str, Trainer] = {"trl": "TRL", "verl": "verl"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        help="TRL: a GRPOConfig as .yaml or .json, or a script (.py) that calls GRPOConfig; verl: a config (.yaml), a "
        "script (.sh), or overrides (key=value ...)",
    )
    parser.add_argument("--from", dest="trainer", choices=[*TRAINERS], help="whose config it is (default: recognized)")
    parser.add_argument("--out", metavar="RECIPE", help="the recipe to write (default: print it)")
    parser.add_argument("--rows", type=int, metavar="N", help="number of training rows, which turns epochs into steps")
    parser.add_argument(
        "--processes", type=int, metavar="N", default=1, help="number of processes that TRL ran with (default: 1)"
    )


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    for name in ("rows", "processes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: must be at least 1, is {value}")
    found = read_source(options.source, TRAINERS[options.trainer] if options.trainer else None)
    convert = verl.convert if found.trainer == "verl" else trl.convert
    done = convert(found.values, rows=options.rows, processes=options.processes)
    done.todo += found.unread
    complaint = _complaint(done)
    # Without a reward, the list may say already which one.
    if complaint and not any(line.partition(":")[0] == complaint.partition(":")[0] for line in done.todo):
        done.todo.append(complaint)
    text = recipe(done, _default, config.toml_value)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    out = Path(options.out)
    if out.exists():
        raise ConfigError(f"--out: {out} already exists; choose another name")
    out.write_text(text, encoding="utf-8")
    print(f"Recipe: {out}")
    print("\n".join(report(done)))
    print(f"Next:\n  gspo doctor {out}\n  gspo train {out}")
    return 0


def _default(key: str) -> Any:
    """Our default of a setting; None for the settings of objectives and engines, which have their own."""
    try:
        return config.flat(config.Config())[key]
    except KeyError:
        return None


def _complaint(done: Conversion) -> str:
    """What the recipe still needs before it can be trained; empty if nothing."""
    try:
        config.check(config.from_flat(done.settings, where="recipe"))
    except ConfigError as error:
        return str(error)
    return ""


COMMAND = Command(
    name="import-config",
    help="Turn a config of TRL or verl into a recipe, and list what has no equivalent.",
    add_arguments=add_arguments,
    run=run,
    epilog="See docs/from-trl.md and docs/from-verl.md.",
)

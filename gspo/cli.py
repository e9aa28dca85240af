"""The `gspo` command. Each sub-command is a module of `commands/`.

Any setting can be given as `--section.key=value`. Errors that the user can fix are printed as one line.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

# Idle OpenMP threads must sleep: on small models spinning is many times slower. torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The tokenizers library warns, and may deadlock, if a process forks after its threads have started.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from gspo import __version__, aliases
from gspo.commands import (
    compare,
    demo,
    doctor,
    eval,
    import_config,
    init,
    objectives,
    plan,
    push,
    replay,
    report,
    save,
    serve,
    train,
    watch,
)
from gspo.config import check_single_process
from gspo.equivalents.explain import explain
from gspo.errors import GspoError
from gspo.safe_output import safe_output
from gspo.site import linked

COMMANDS = [
    module.COMMAND
    for module in (
        init,
        train,
        demo,
        eval,
        compare,
        replay,
        doctor,
        plan,
        push,
        save,
        watch,
        report,
        serve,
        objectives,
        import_config,
    )
]
# A full disk, a quota, and a file size limit: all are for the user to fix, so no traceback.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command. Exit code: 0, 1 for an error, 2 for wrong usage, 128 + signal if a signal stopped it."""
    with safe_output():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 2
    options, overrides = parser.parse_known_args(_renamed(sys.argv[1:] if arguments is None else arguments))
    stray = [o for o in overrides if not o.startswith("--")]
    if stray:
        about = explain(stray[0].partition("=")[0])
        hint = f"; {about}" if about else ""
        parser.error(f"unexpected argument {stray[0]!r}; settings are given as --section.key=value{hint}")
    warnings.showwarning = _show_warning
    try:
        if options.command.single_process:
            check_single_process()
        return int(options.command.run(options, overrides))
    except GspoError as error:
        print(f"gspo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gspo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in DISK_FULL:
            traceback.print_exc()
            return 1
        where = f"{error.filename}: " if error.filename else ""
        print(f"gspo: {where}{error.strerror}; make room on the disk, then repeat the command", file=sys.stderr)
        return 1
    except Exception:
        # A bug. Printed here, inside `safe_output`, which removes secrets and control characters from the message.
        traceback.print_exc()
        return 1


def _renamed(arguments: Sequence[str]) -> list[str]:
    """The arguments with today's name of the sub-command."""
    if not arguments or arguments[0] not in aliases.COMMANDS:
        return list(arguments)
    old, (new, option) = arguments[0], aliases.COMMANDS[arguments[0]]
    print(f"warning: {aliases.renamed_note(f'gspo {old}', f'gspo {new} {option}')}", file=sys.stderr)
    return [new, option, *arguments[1:]]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help texts with the addresses of the pages that they name."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return linked(super()._fill_text(text, width, indent))

    def _expand_help(self, action: argparse.Action) -> str:
        return linked(super()._expand_help(action))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands."""
    parser = argparse.ArgumentParser(prog="gspo", description="Critic-free RL post-training for language models.")
    parser.add_argument("--version", action="version", version=f"gspo {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = parsers.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            epilog=command.epilog or None,
            # An abbreviated option is more likely a misspelled setting.
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {linked(str(message))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

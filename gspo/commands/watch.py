"""`gspo watch`: a live dashboard of runs, in the browser or in the terminal."""

from __future__ import annotations

import argparse

from gspo.commands.command import Command, no_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        default=["runs"],
        metavar="RUN",
        help="run directories, or directories of runs (default: runs)",
    )
    parser.add_argument("--text", action="store_true", help="show sparklines in the terminal instead of the dashboard")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free port)")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    if options.text:
        from gspo.view.terminal import watch_text

        return watch_text(options.runs)
    from gspo.view.dashboard.server import watch

    # Flushed, because nobody can open the page before the link is printed, and a pipe is buffered.
    return watch(options.runs, port=options.port, ready=lambda text: print(text, flush=True))


COMMAND = Command(
    name="watch",
    help="Serve a local dashboard that shows runs live, from curves down to single tokens.",
    add_arguments=add_arguments,
    run=run,
    epilog="See docs/watch.md.",
)

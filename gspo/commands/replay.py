"""`gspo replay`: what every objective would have done on a recorded step of a run."""

from __future__ import annotations

import argparse

from gspo.commands.arguments import add_trust_run, non_negative, positive
from gspo.commands.command import Command, no_overrides, quiet_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="the directory of the run")
    add("--step", type=positive, help="step to replay (default: the last step that can be replayed)")
    add(
        "--from",
        dest="start",
        type=non_negative,
        metavar="STEP",
        help="checkpoint to start from; all steps after it are recomputed and compared with the run (default: the "
        "newest one before the step)",
    )
    add(
        "--objectives",
        default="all",
        metavar="LIST",
        help="objectives, separated by commas: NAME[+KEY=VALUE...], for example grpo,gspo+clip_high=1e-3; "
        "your own as file.py:name (default: all)",
    )
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="SETTING=LOW..HIGH[:COUNT]",
        help="sweep a setting of the run's objective, for example clip_high=1e-4..1e-1; may be repeated",
    )
    add(
        "--mini-batch",
        type=positive,
        metavar="K",
        help="evaluate at update K of the step, counted from 1 (default: the last update)",
    )
    add("-o", "--out", metavar="DIR", help="directory to write to (default: runs/replay-NAME-STEP)")
    add("--device", help="auto, cpu, cuda or cuda:N (default: the run's)")
    add_trust_run(parser)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    no_overrides(overrides)
    quiet_libraries()
    from gspo.view.replay.replay import Request, replay

    request = Request(
        run=options.run_dir,
        step=options.step,
        start=options.start,
        objectives=options.objectives,
        sweeps=options.sweep,
        mini_batch=options.mini_batch,
        out=options.out,
        device=options.device,
        trust_run=options.trust_run,
    )
    return replay(request)


COMMAND = Command(
    name="replay",
    help="Show what every objective would have done on a recorded step of a run.",
    add_arguments=add_arguments,
    run=run,
    epilog="The run directory is only read, so the run may still be training. See docs/replay.md.",
    single_process=True,
)

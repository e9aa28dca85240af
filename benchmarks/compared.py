"""Arms that `gspo compare` trains, and their numbers: what the experiments in this folder share.

In: the directory of a comparison, and the labels of its arms. Out: metrics of its runs, by seed, and means as text.
Invariants: a number is of runs that have ended; a difference is paired by seed; an interval is that of `gspo compare`,
Student's t over seeds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspo.view.compare.curves import Run, read_run
from gspo.view.compare.intervals import Number, over_seeds
from gspo.view.compare.record import run_path


def train(out: Path, recipe: str, arms: Sequence[str], seeds: str, settings: Sequence[str], jobs: int | None) -> None:
    """Train the arms, or continue to."""
    command = [sys.executable, "-m", "gspo", "compare", recipe, f"--objectives={','.join(arms)}", f"--seeds={seeds}"]
    command += [f"--out={out}", *settings] + ([] if jobs is None else [f"--jobs={jobs}"])
    subprocess.run(command, check=True)


def finished(out: Path, label: str, seeds: Sequence[int]) -> dict[int, Run]:
    """The runs of an arm that have ended, by seed."""
    runs = {seed: read_run(run_path(out, label, seed)) for seed in seeds}
    return {seed: run for seed, run in runs.items() if run is not None and run.finished}


def ends(runs: Mapping[int, Run]) -> dict[int, float]:
    """Held-out accuracy after training."""
    return {seed: run.values("eval/accuracy")[-1] for seed, run in runs.items()}


def late(runs: Mapping[int, Run], metric: str, steps: int | None = None) -> dict[int, float]:
    """Mean of a metric over the last steps, or over the last quarter of them; without runs that did not measure it."""
    found = {}
    for seed, run in runs.items():
        values = [row[metric] for row in run.rows if metric in row][-(steps or -(-run.step // 4)) :]
        if values and None not in values:
            found[seed] = statistics.fmean(values)
    return found


def shown(values: Sequence[float]) -> str:
    """Mean of the seeds with its 95 % interval, for a share."""
    return text(over_seeds(values, lowest=0, highest=1), "{:.1%}")


def change(fresh: Mapping[int, float], old: Mapping[int, float]) -> str:
    """Paired difference in points."""
    return text(over_seeds([100 * (old[seed] - fresh[seed]) for seed in fresh if seed in old]), "{:+.1f}")


def text(number: Number | None, form: str) -> str:
    """A mean with its interval."""
    if number is None:
        return "-"
    interval = "" if number.low is None else f" [{form.format(number.low)}, {form.format(number.high)}]"
    return f"{form.format(number.value)}{interval}".replace("%", " %")

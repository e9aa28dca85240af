"""Objectives on rollouts of older weights: held-out accuracy after training at ages of 0 to 64 optimizer updates.

    python benchmarks/staleness.py --out /tmp/staleness --seeds 0-2
    python benchmarks/staleness.py --out /tmp/staleness --seeds 0-2 --report     # the table of what is there

In: a recipe. Out: two comparisons (`gspo compare`) and a table. The first comparison trains every objective at lag 0
with every learning rate, the same ones for all. The second one trains each at its own best rate on other seeds, with
ratios to the policy that sampled (`learner.old_logp = "sampler"`) and `rollout.max_lag` = age / updates per step.
Invariant: every objective has the same number of trials, seeds and sampled tokens, and a comparison that was stopped
continues.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo.record.run_dir import read_jsonl
from gspo.view.compare.arms import parse_seeds
from gspo.view.compare.record import run_path

ROOT = Path(__file__).resolve().parents[1]
OBJECTIVES = ("grpo+kl=0", "gspo", "sapo", "vespo", "dppo_tv")
AGES = {"0": (4, 0), "4": (4, 1), "16": (4, 4), "64": (4, 16), "0 of 1": (1, 0), "1 of 1": (1, 1)}
"""Age in updates -> (learner.mini_batches, rollout.max_lag). An age of 1 needs steps of one update ("of 1"), which
train less than steps of four; so these steps have an age of 0 of their own to compare with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "demo.toml"))
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 2e-4, 5e-4, 1e-3])
    parser.add_argument("--ages", nargs="+", choices=list(AGES), default=list(AGES))
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--tuning-seeds", default="10", help="seeds on which the learning rates are chosen")
    parser.add_argument("--jobs", type=int, help="concurrent runs")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("overrides", nargs="*", help="more settings, such as --steps=20 (after --)")
    options = parser.parse_args()
    best = {}
    rated = {(name, rate): arm(name, rate) for name in options.objectives for rate in options.rates}
    compare(options, "rates", list(rated.values()), options.tuning_seeds)
    for name in options.objectives:
        found = {rate: accuracies(options, "rates", rated[name, rate], options.tuning_seeds) for rate in options.rates}
        best[name] = max(found, key=lambda rate: statistics.fmean(found[rate] or [0.0]))
        print(f"{name}: {', '.join(f'{rate:g}: {shown(values)}' for rate, values in found.items())}", flush=True)
    aged = {(name, age): arm(name, best[name], age) for name in options.objectives for age in options.ages}
    compare(options, "ages", list(aged.values()), options.seeds)
    print(f"\n| objective | rate | {' | '.join(f'{age} updates' for age in options.ages)} |")
    print(f"|---|---|{'---|' * len(options.ages)}")
    for name in options.objectives:
        cells = [shown(accuracies(options, "ages", aged[name, age], options.seeds)) for age in options.ages]
        print(f"| `{name}` | {best[name]:g} | {' | '.join(cells)} |")
    return 0


def arm(objective: str, rate: float, age: str = "0") -> str:
    """An arm of `gspo compare`."""
    mini_batches, lag = AGES[age]
    settings: dict[str, object] = {
        "learner.learning_rate": rate,
        "learner.mini_batches": mini_batches,
        "rollout.max_lag": lag,
    }
    if mini_batches > 1 or lag:  # otherwise every ratio is 1
        settings["learner.old_logp"] = "sampler"
    return "+".join([objective, *(f"{key}={value}" for key, value in settings.items())])


def compare(options: argparse.Namespace, name: str, arms: Sequence[str], seeds: str) -> None:
    """Train the arms, or continue to."""
    if options.report:
        return
    # The experts of a forward that is skipped cannot be recorded for all arms alike.
    common = ["--routing.record=false", *options.overrides]
    common += [] if options.jobs is None else [f"--jobs={options.jobs}"]
    command = [sys.executable, "-m", "gspo", "compare", options.recipe, f"--objectives={','.join(arms)}"]
    subprocess.run([*command, f"--seeds={seeds}", f"--out={options.out / name}", *common], check=True)


def accuracies(options: argparse.Namespace, name: str, label: str, seeds: str) -> list[float]:
    """Held-out accuracy at the end of each run of an arm that has one."""
    found: list[float] = []
    for seed in parse_seeds(seeds):
        rows = read_jsonl(run_path(options.out / name, label, seed) / "metrics.jsonl")
        found += [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None][-1:]
    return found


def shown(values: Sequence[float]) -> str:
    """Mean, and the range over seeds."""
    if not values:
        return "-"
    return f"{statistics.fmean(values):.1%} ({min(values):.1%} to {max(values):.1%}, {len(values)})"


if __name__ == "__main__":
    sys.exit(main())

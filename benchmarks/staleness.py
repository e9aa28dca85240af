"""Objectives on rollouts of older weights: held-out accuracy after training at ages of 0 to 64 optimizer updates.

    python benchmarks/staleness.py --out /tmp/staleness --updates 120
    python benchmarks/staleness.py --out /tmp/staleness --updates 120 --report   # tables and figure of what is there

In: a recipe. Out: two comparisons (`gspo compare`), tables and `OUT/age.png`. The first comparison trains every
objective at lag 0 with every learning rate, the same ones for all. The second one trains each at its own best rate on
other seeds, with ratios to the policy that sampled (`learner.old_logp = "sampler"`) and `rollout.max_lag` = age /
updates per step. Runs are evaluated before and after training only. Invariant: every objective has the same number of
trials, seeds and sampled tokens, and a comparison that was stopped continues.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from compared import change, ends, finished, late, shown, train
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from gspo.view.compare.arms import parse_seeds
from gspo.view.compare.curves import Run
from gspo.view.compare.figures import MARKERS, style

ROOT = Path(__file__).resolve().parents[1]
OBJECTIVES = ("grpo+kl=0", "gspo", "sapo", "vespo", "dppo_tv")
AGES = {"0": (4, 0), "1": (1, 1), "4": (4, 1), "16": (4, 4), "64": (4, 16)}
"""Age in updates -> (updates per step, rollout.max_lag). A step of one update samples a quarter of the prompts, so that
all runs train on the same number of tokens with the same number of updates of the same size. Age is that of the first
update of a step. The others are older by one update each, so the mean age of a token is 1.5, 1, 5.5, 17.5 and 65.5."""
UPDATE_PROMPTS = 8
LAST_UPDATES = 40
"""Updates at the end of a run over which its metrics are averaged."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "demo.toml"))
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES))
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 6e-4])
    parser.add_argument("--updates", type=int, default=120, help="optimizer steps of a run, up to completion lengths")
    parser.add_argument("--ages", nargs="+", choices=list(AGES), default=list(AGES))
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--tuning-seeds", default="10", help="seeds on which the learning rates are chosen")
    parser.add_argument("--jobs", type=int, help="concurrent runs")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("overrides", nargs="*", help="more settings, such as --eval.samples=4 (after --)")
    options = parser.parse_args()
    rated = {(name, rate): arm(name, rate) for name in options.objectives for rate in options.rates}
    compare(options, "rates", list(rated.values()), options.tuning_seeds)
    best = {}
    print(f"| objective | {' | '.join(f'{rate:g}' for rate in options.rates)} | chosen |")
    print(f"|---|{'---|' * (len(options.rates) + 1)}")
    for name in options.objectives:
        after = {r: ends(runs_of(options, "rates", rated[name, r], options.tuning_seeds)) for r in options.rates}
        best[name] = max(after, key=lambda rate: statistics.fmean(after[rate].values() or [0.0]))
        print(f"| `{name}` | {' | '.join(shown([*v.values()]) for v in after.values())} | {best[name]:g} |", flush=True)
    aged = {(name, age): arm(name, best[name], age) for name in options.objectives for age in options.ages}
    compare(options, "ages", list(aged.values()), options.seeds)
    runs = {key: runs_of(options, "ages", label, options.seeds) for key, label in aged.items()}
    found = {key: ends(of_arm) for key, of_arm in runs.items()}
    print_table(options, {key: shown([*values.values()]) for key, values in found.items()})
    print_table(options, {(name, age): change(found[name, "0"], found[name, age]) for name, age in found})
    for metric in ("clip/fraction_tokens", "ratio/ess"):
        print(f"\n{metric}, mean of the last {LAST_UPDATES} updates", end="")
        last = {key: late(of_arm, metric, LAST_UPDATES // AGES[key[1]][0]) for key, of_arm in runs.items()}
        print_table(options, {key: shown([*values.values()]) for key, values in last.items()})
    draw(options, {key: [*values.values()] for key, values in found.items()})
    return 0


def print_table(options: argparse.Namespace, cells: dict[tuple[str, str], str]) -> None:
    """A row per objective, a column per age."""
    print(f"\n\n| objective | {' | '.join(f'{age} updates' for age in options.ages)} |")
    print(f"|---|{'---|' * len(options.ages)}")
    for name in options.objectives:
        print(f"| `{name}` | {' | '.join(cells[name, age] for age in options.ages)} |")


def arm(objective: str, rate: float, age: str = "0") -> str:
    """An arm of `gspo compare`."""
    updates, lag = AGES[age]
    settings: dict[str, object] = {
        "learner.learning_rate": rate,
        "learner.mini_batches": updates,
        "rollout.prompts": updates * UPDATE_PROMPTS,
        "rollout.max_lag": lag,
        "learner.old_logp": "sampler",
    }
    return "+".join([objective, *(f"{key}={value}" for key, value in settings.items())])


def compare(options: argparse.Namespace, name: str, arms: Sequence[str], seeds: str) -> None:
    """Train the arms, or continue to."""
    if options.report:
        return
    # The token budget of a comparison is that of its recipe's steps. Here these are steps of one update, because a run
    # ends after twice as many steps at the latest: with larger steps, runs of one update per step would end too early.
    common = [f"--steps={options.updates}", f"--rollout.prompts={UPDATE_PROMPTS}", "--learner.mini_batches=1"]
    common += [f"--eval.every={2 * options.updates}", "--learner.schedule=constant"]
    # The experts of a forward that is skipped cannot be recorded for all arms alike.
    common += ["--routing.record=false", *options.overrides]
    train(options.out / name, options.recipe, arms, seeds, common, options.jobs)


def runs_of(options: argparse.Namespace, name: str, label: str, seeds: str) -> dict[int, Run]:
    return finished(options.out / name, label, parse_seeds(seeds))


def draw(options: argparse.Namespace, found: dict[tuple[str, str], list[float]]) -> None:
    """Accuracy by age: a point per seed, and the mean."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for number, name in enumerate(options.objectives):
        at = [i + 0.06 * (number - (len(options.objectives) - 1) / 2) for i in range(len(options.ages))]
        values = [found[name, age] for age in options.ages]
        means = [statistics.fmean(v) if v else float("nan") for v in values]
        marker = MARKERS[number % len(MARKERS)]
        axis.plot(at, means, label=name, marker=marker, **style(number))
        points = [(x, v) for x, of_age in zip(at, values, strict=True) for v in of_age]
        if points:
            axis.scatter(*zip(*points, strict=True), s=9, alpha=0.5, color=style(number)["color"])
    axis.set_xticks(range(len(options.ages)), options.ages)
    axis.set_xlabel("age of the rollouts in updates")
    axis.set_ylabel("held-out accuracy after training")
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    figure.savefig(options.out / "age.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())

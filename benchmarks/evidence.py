"""The small experiments of evidence.md: objectives, parts of DAPO, clip range and rate, group size, length, entropy.

    python benchmarks/evidence.py --out DIR --jobs 1                   # train, print the tables, draw the figures
    python benchmarks/evidence.py --out DIR --report --figures benchmarks/evidence
    python benchmarks/evidence.py --out DIR parts range                # some of the questions

In: the problem of evidence.toml. Out: one comparison (`gspo compare`) in DIR/arms, a table per question and a figure
per question. Invariants: all arms of a seed share the cold start, the problems and the number of sampled tokens; an arm
that several questions need is trained once; training that was stopped continues; the seed that chooses learning rates
reports nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compared import change, ends, finished, late, shown, text, train
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from gspo.data.task import build_task
from gspo.record.run_dir import read_jsonl, replace_text
from gspo.view.compare.arms import parse_seeds
from gspo.view.compare.curves import Run, band, curve
from gspo.view.compare.figures import MARKERS, style
from gspo.view.compare.intervals import over_seeds

RECIPE = Path(__file__).with_suffix(".toml")
PROBLEMS = 4000
MOST_WORKINGS = 3
"""A demonstration writes its working 0 to this many times, each equally often."""

GRPO = "grpo+kl=0"
TOKEN_MEAN = "dapo+clip_high=0.2+keep=all+shape=none"
DAPO = 'dapo+shape=["overlong_filter","soft_overlong"]'
GSPO = "gspo"
PARTS = {
    GRPO: "GRPO (no KL)",
    f"{GRPO}+shape=overlong_filter": "+ overlong filter",
    f"{GRPO}+clip_high=0.28": "+ higher clip",
    f"{GRPO}+shape=soft_overlong": "+ soft punishment",
    TOKEN_MEAN: "+ token mean",
    f"{GRPO}+keep=mixed": "+ dynamic sampling",
    DAPO: "DAPO, all parts",
}
"""The baseline, each part of DAPO alone, and all of them."""
TUNED = {GRPO: "GRPO (no KL)", GSPO: "GSPO 3e-3/4e-3", DAPO: "DAPO"}
"""Each gets its own learning rate."""
TUNING_SEED = 10
SAMPLING = "+keep=mixed+shape=soft_overlong"
"""DAPO's dynamic sampling and soft punishment, for GSPO at the rate of GSPO."""
RANGES = {
    "3e-4/4e-4": "+clip_low=3e-4+clip_high=4e-4",
    "3e-3/4e-3": "",
    "3e-2/4e-2": "+clip_low=3e-2+clip_high=4e-2",
    "auto:0.15": "+clip_low=auto:0.15+clip_high=auto:0.15",
}
RATES = {5e-5: "+learner.learning_rate=5e-5", 1.5e-4: "", 5e-4: "+learner.learning_rate=5e-4"}
"""The recipe's own range and rate have no option, so that the arm is the `gspo` of the other questions."""
OWN_RANGE = "3e-3/4e-3"
RANGE_RATES = (1.5e-4, 5e-4)
RANGE_CELLS = {(name, rate): GSPO + low + RATES[rate] for rate in RANGE_RATES for name, low in RANGES.items()}
GROUPS = {
    size: GSPO + (f"+rollout.prompts={128 // size}+rollout.group_size={size}" if size != 8 else "")
    for size in (2, 4, 8, 16, 32)
}
LENGTHS = {
    GRPO: "GRPO, 1/length per completion",
    TOKEN_MEAN: "GRPO, token mean",
    "dr_grpo+advantage_scale=std+max_length=72": "GRPO, constant",
    GSPO: "GSPO, 1/length per completion",
    "luspo+clip_low=3e-3+clip_high=4e-3": "GSPO without 1/length (LUSPO)",
}
ENTROPIES = {
    GRPO: "0.2/0.2, 1/length",
    f"{GRPO}+clip_high=0.28": "0.2/0.28, 1/length",
    TOKEN_MEAN: "0.2/0.2, token mean",
    "dapo+keep=all+shape=none": "0.2/0.28, token mean",
}

Runs = Mapping[int, Run]


@dataclass(frozen=True, kw_only=True)
class Results:
    """The runs that have ended."""

    arms: Path
    seeds: Sequence[int]
    _read: dict[str, Runs] = field(default_factory=dict)

    def runs(self, label: str) -> Runs:
        """Those of an arm, by seed."""
        if label not in self._read:
            self._read[label] = finished(self.arms, label, self.seeds)
        return self._read[label]

    def ends(self, label: str) -> dict[int, float]:
        """Held-out accuracy after training, by seed."""
        return ends(self.runs(label))

    def late(self, label: str, metric: str) -> list[float]:
        """A metric over the last quarter of the steps of each seed."""
        return list(late(self.runs(label), metric).values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"{', '.join(QUESTIONS)} (default: all)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path, help="folder of the figures (default: OUT)")
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument(
        "--steps", type=int, default=24, help="steps at the lengths of the cold start: the token budget"
    )
    parser.add_argument("--jobs", type=int, help="concurrent runs")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    if unknown := set(options.questions) - set(QUESTIONS):
        parser.error(f"no question {min(unknown)}; there are: {', '.join(QUESTIONS)}")
    results = Results(arms=options.out / "arms", seeds=parse_seeds(options.seeds))
    folder = options.figures or options.out
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.questions or QUESTIONS:
        arms_of, report = QUESTIONS[name]
        if not options.report:
            if not (arms := [*arms_of(results)]):
                parser.error(f"{name}: no learning rate has been chosen; run 'tuning' first")
            settings = [f"--data.path={written_problems(options.out)}", f"--steps={options.steps}"]
            seeds = str(TUNING_SEED) if name == "tuning" else options.seeds
            train(results.arms, str(RECIPE), arms, seeds, settings, options.jobs)
        print(f"\n## {name}\n")
        report(results).savefig(folder / f"{name}.png", dpi=110)
        sys.stdout.flush()
    return 0


def written_problems(out: Path) -> Path:
    """The data: additions whose demonstrations write the working a random number of times."""
    file = out.absolute() / "problems.jsonl"
    if not file.is_file():
        rng = random.Random(0)
        task = build_task("addition", {"digits": 3})
        lines = []
        for _ in range(PROBLEMS):
            problem = task.generate(rng)
            working, bar, answer = problem.demonstration.partition("|")
            solution = ";".join([working] * rng.randint(0, MOST_WORKINGS)) + bar + answer
            lines.append(json.dumps({"prompt": problem.prompt, "answer": answer, "solution": solution}) + "\n")
        out.mkdir(parents=True, exist_ok=True)
        replace_text(file, "".join(lines))
    return file


# ---- one report per question: prints a table and returns the figure


def tuning(results: Results) -> Figure:
    """Accuracy of the tuning seed by learning rate."""
    tuned = Results(arms=results.arms, seeds=[TUNING_SEED])
    header("objective", *(f"{short(rate)}" for rate in RATES))
    figure, axis = panels(1)
    for number, (label, name) in enumerate(TUNED.items()):
        values = [[*tuned.ends(label + rate).values()] for rate in RATES.values()]
        row(name, *(shown(v) for v in values))
        dots(axis, number, name, values, len(TUNED))
    axis.set_xticks(range(len(RATES)), [f"{short(rate)}" for rate in RATES])
    axis.set_xlabel(f"learning rate, seed {TUNING_SEED}")
    accuracy_axis(axis)
    legend(axis, 8)
    return figure


def chosen_rate(results: Results, label: str) -> str | None:
    """The rate with which an arm is most accurate on the tuning seed, the lower of two equal ones; None before that."""
    tuned = Results(arms=results.arms, seeds=[TUNING_SEED])
    accuracy = {rate: tuned.ends(label + rate).get(TUNING_SEED) for rate in RATES.values()}
    return None if None in accuracy.values() else max(accuracy, key=lambda rate: accuracy[rate] or 0.0)


def objectives_arms(results: Results) -> dict[str, str]:
    """Each objective at the rate that was chosen for it."""
    rates = {label: rate for label in TUNED if (rate := chosen_rate(results, label)) is not None}
    arms = {label + rate: TUNED[label] for label, rate in rates.items()}
    if GSPO in rates:
        arms[GSPO + SAMPLING + rates[GSPO]] = "GSPO + dynamic sampling + soft punishment"
    return arms


def parts(results: Results) -> Figure:
    return against_first(results, PARTS)


def objectives(results: Results) -> Figure:
    return against_first(results, objectives_arms(results))


def against_first(results: Results, arms: Mapping[str, str]) -> Figure:
    """Each arm against the first one, which is GRPO."""
    first = next(iter(arms), "")
    baseline = results.ends(first)
    header("arm", "before", "after", "against GRPO, paired", "uniform groups", "truncated", "steps", "clipped tokens")
    for label, name in arms.items():
        runs = results.runs(label)
        row(
            name,
            shown([run.values("eval/accuracy")[0] for run in runs.values()]),
            shown([*ends(runs).values()]),
            "" if label == first else change(baseline, ends(runs)),
            shown(results.late(label, "groups/uniform_fraction")),
            shown(results.late(label, "length/truncated_fraction")),
            plain([run.step for run in runs.values()], "{:.0f}"),
            shown(results.late(label, "clip/fraction_tokens")),
        )
    return differences(
        {name: (baseline, results.ends(label)) for label, name in arms.items() if label != first}, "GRPO"
    )


def differences(pairs: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]], baseline: str) -> Figure:
    """Accuracies that a baseline and an arm end with, by seed, as differences: their mean, and a point per seed."""
    figure, axis = panels(1, width=8, height=1.2 + 0.4 * (1 + len(pairs)))
    for at, (base, after) in enumerate(pairs.values()):
        points = [100 * (after[seed] - base[seed]) for seed in after if seed in base]
        if mean := over_seeds(points):
            reach = 0.0 if mean.high is None else mean.high - mean.value
            axis.errorbar(mean.value, at, xerr=reach, marker="o", capsize=3, color=style(0)["color"])
            axis.scatter(points, [at] * len(points), s=9, color="0.5")
    axis.axvline(0, color="0.3", linewidth=0.8)
    axis.set_yticks(range(len(pairs)), list(pairs))
    axis.set_ylim(len(pairs) - 0.5, -0.5)
    axis.set_xlabel(f"points against {baseline}, paired by seed, 95 % interval")
    return figure


def ranges(results: Results) -> Figure:
    cells = RANGE_CELLS
    grid(cells, lambda label: shown([*results.ends(label).values()]))
    print("\nLowest seed\n")
    grid(cells, lambda label: plain([min([*results.ends(label).values()], default=None)], "{:.1%}"))
    print("\nClipped tokens, last quarter\n")
    grid(cells, lambda label: shown(results.late(label, "clip/fraction_tokens")))
    print(f"\nPoints against {OWN_RANGE} at the same rate, paired\n")
    pairs = {
        (name, rate): (results.ends(cells[OWN_RANGE, rate]), results.ends(cells[name, rate]))
        for name, rate in cells
        if name != OWN_RANGE
    }
    grid(pairs, lambda pair: change(*pair))
    measured = {f"{name} at {short(rate)}": pair for (name, rate), pair in pairs.items() if pair[1]}
    return differences(measured, OWN_RANGE)


def groups(results: Results) -> Figure:
    base = results.ends(GROUPS[8])
    header(
        "completions per prompt", "prompts per step", "after", "against 8, paired", "uniform groups", "clipped tokens"
    )
    for size, label in GROUPS.items():
        row(
            str(size),
            str(128 // size),
            shown([*results.ends(label).values()]),
            "" if size == 8 else change(base, results.ends(label)),
            shown([statistics.fmean(run.values("groups/uniform_fraction")) for run in results.runs(label).values()]),
            shown(results.late(label, "clip/fraction_tokens")),
        )
    return differences(
        {f"groups of {size}": (base, results.ends(label)) for size, label in GROUPS.items() if size != 8}, "groups of 8"
    )


def lengths(results: Results) -> Figure:
    header("arm", "after", "against the first of its kind", "tokens", "of correct ones", "of wrong ones", "truncated")
    first = ""
    for label, name in LENGTHS.items():
        first = label if label in (GRPO, GSPO) else first
        measured = {seed: held_out_lengths(run) for seed, run in results.runs(label).items()}
        row(
            name,
            shown([*results.ends(label).values()]),
            "" if label == first else change(results.ends(first), results.ends(label)),
            *(
                plain([found[kind] for found in measured.values()], "{:.1f}")
                if label == first
                else f"{plain([found[kind] for found in measured.values()], '{:.1f}')}; "
                + paired(held_out_of(results, first, kind), held_out_of(results, label, kind))
                for kind in ("all", "correct", "wrong")
            ),
            shown(results.late(label, "length/truncated_fraction")),
        )
    figure, axes = panels(2, width=9)
    curves(axes[0], results, LENGTHS, "length/mean", "tokens per completion")
    curves(axes[1], results, LENGTHS, "length/truncated_fraction", "truncated completions")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1))
    legend(axes[0], 7)
    return figure


def held_out_of(results: Results, label: str, kind: str) -> dict[int, float | None]:
    return {seed: held_out_lengths(run)[kind] for seed, run in results.runs(label).items()}


def held_out_lengths(run: Run) -> dict[str, float | None]:
    """Mean tokens of the held-out completions after training: of all, of correct and of wrong ones."""
    rows = list(read_jsonl(run.path / "evaluations" / f"{run.step:06d}.jsonl"))
    of = {
        "all": [len(r["token_ids"]) for r in rows],
        "correct": [len(r["token_ids"]) for r in rows if r["correct"]],
        "wrong": [len(r["token_ids"]) for r in rows if r["correct"] is False],
    }
    return {kind: statistics.fmean(values) if values else None for kind, values in of.items()}


def entropies(results: Results) -> Figure:
    header(
        "arm", "after", "entropy in nats", "against the first, paired", "tokens", "against the first, paired", "clipped"
    )
    for label, name in ENTROPIES.items():
        cells = []
        for metric, form in (("entropy/mean", "{:.4f}"), ("length/mean", "{:.1f}")):
            base, own = (late(results.runs(arm), metric) for arm in (GRPO, label))
            cells += [plain([*own.values()], form), "" if label == GRPO else paired(base, own, form)]
        row(name, shown([*results.ends(label).values()]), *cells, shown(results.late(label, "clip/fraction_tokens")))
    figure, axes = panels(2, width=9)
    curves(axes[0], results, ENTROPIES, "entropy/mean", "entropy (nats per token)")
    curves(axes[1], results, ENTROPIES, "length/mean", "tokens per completion")
    axes[0].set_ylim(bottom=0)
    legend(axes[0], 8)
    return figure


# ---- tables


def header(*names: str) -> None:
    row(*names)
    print(f"|{'---|' * len(names)}")


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def grid(cells: Mapping[tuple[str, float], object], shows: Callable[..., str]) -> None:
    """A row per clip range, a column per learning rate."""
    header("clip range", *(f"{short(rate)}" for rate in RANGE_RATES))
    for name in dict.fromkeys(name for name, _ in cells):
        row(name, *(shows(cells[name, rate]) for rate in RANGE_RATES))


def short(rate: float) -> str:
    """A learning rate as the page writes it: 1.5e-4."""
    digits, exponent = f"{rate:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def plain(values: Sequence[float | None], form: str) -> str:
    return text(over_seeds(values, lowest=0), form)


def paired(base: Mapping[int, float | None], own: Mapping[int, float | None], form: str = "{:.1f}") -> str:
    """Paired difference of a quantity that is not a share."""
    pairs = [(base[seed], own[seed]) for seed in own if seed in base]
    return text(over_seeds([b - a for a, b in pairs if a is not None and b is not None]), form.replace(":", ":+"))


# ---- figures


def panels(number: int, *, width: float = 7, height: float = 3.4) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, number)
    for axis in [axes] if number == 1 else axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def dots(axis: Any, number: int, name: str, values: Sequence[Sequence[float]], lines: int) -> None:
    """A line of means, and a point per seed."""
    at = [i + 0.05 * (number - (lines - 1) / 2) for i in range(len(values))]
    means = [statistics.fmean(v) if v else float("nan") for v in values]
    points = [(x, v) for x, several in zip(at, values, strict=True) for v in several]
    if points:
        axis.plot(at, means, label=name, marker=MARKERS[number], **style(number))
        axis.scatter(*zip(*points, strict=True), s=10, alpha=0.6, color=style(number)["color"])


def accuracy_axis(axis: Any) -> None:
    axis.set_ylabel("held-out accuracy after training")
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.set_ylim(bottom=0)


def curves(axis: Any, results: Results, arms: Mapping[str, str], metric: str, label: str) -> None:
    """The mean of each arm over its seeds, by sampled tokens."""
    for number, (arm, name) in enumerate(arms.items()):
        mean = band([curve(run, metric, 5) for run in results.runs(arm).values()])
        if mean is not None:
            axis.plot(mean.x, mean.mean, label=name, **style(number))
    axis.set(xlabel="sampled tokens", ylabel=label)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def legend(axis: Any, size: int) -> None:
    # Without runs there is nothing to name.
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=size)


QUESTIONS: dict[str, tuple[Callable[[Results], Iterable[str]], Callable[[Results], Figure]]] = {
    "tuning": (lambda _: [label + rate for label in TUNED for rate in RATES.values()], tuning),
    "objectives": (objectives_arms, objectives),
    "parts": (lambda _: PARTS, parts),
    "range": (lambda _: RANGE_CELLS.values(), ranges),
    "groups": (lambda _: GROUPS.values(), groups),
    "length": (lambda _: LENGTHS, lengths),
    "entropy": (lambda _: ENTROPIES, entropies),
}


if __name__ == "__main__":
    sys.exit(main())

"""The report of a comparison: a self-contained HTML page, PNG figures, and the numbers as JSON.

In: a comparison directory. Out: `report.html`, `figures/*.png`, `table.json` in it. Invariant: all content comes from
the run directories and `compare.toml`; all text is escaped; the page loads nothing and runs no script.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config import differing, flatten
from gspo.record.run_dir import replace_text
from gspo.redact import known_secrets, redacted_values
from gspo.view.compare import figures, sentences
from gspo.view.compare.curves import Run, Series, read_run, window_of
from gspo.view.compare.logs import tail
from gspo.view.compare.record import Record, log_path, read, run_path
from gspo.view.compare.rows import SEED_TITLES, as_text, seed_rows, table_rows
from gspo.view.compare.spread import LengthBin, length_bins
from gspo.view.compare.table import ArmNumbers, arm_numbers
from gspo.view.compare.wording import NONE
from gspo.view.static_page import fill, save_png

PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """The report's path and the summary to print."""

    page: Path
    text: str
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ComparedRuns:
    """The runs of a comparison, truncated to a common number of tokens."""

    series: Sequence[Series]
    notes: Sequence[str]
    missing: Sequence[str]
    """Unfinished runs, each with the reason."""


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure on the page."""

    name: str
    title: str
    reading: Sequence[str]
    """Paragraphs on how to read it."""
    png: str
    """Base64; empty if there is no figure, and `reading` says why."""


def write_report(out: Path) -> ReportFiles:
    """Write the report of the existing runs."""
    record = read(out)
    assert record is not None
    runs = read_runs(out, record)
    arms = arm_numbers(runs.series)
    bins = [length_bins(s.runs) for s in runs.series]
    page_figures = write_figures(out, runs.series, arms, bins)
    data = redacted_values(as_data(record, runs, arms, bins), known_secrets())
    # allow_nan=False: Python would write NaN, which is not JSON and which other tools refuse.
    replace_text(out / "table.json", json.dumps(data, indent=2, allow_nan=False) + "\n")
    replace_text(out / "report.html", page(out, record, runs, arms, page_figures))
    notes = [*runs.notes, *(f"not finished: {line}" for line in runs.missing)]
    return ReportFiles(page=out / "report.html", text=as_text(arms, len(record.seeds)), notes=notes)


# ------------------------------------------------------------------------------------------------- reading


def read_runs(out: Path, record: Record) -> ComparedRuns:
    """Every run that has started, by arm, with notes on unfinished runs and token limits."""
    found = {(label, seed): read_run(run_path(out, label, seed)) for label in record.arms for seed in record.seeds}
    runs = [run for run in found.values() if run]
    missing = [why for (label, seed), run in found.items() if (why := _unfinished_reason(out, label, seed, run))]
    limit, notes = _token_limit(record, runs)
    series = []
    for label in record.arms:
        of_arm = [run for seed in record.seeds if (run := found[label, seed])]
        series.append(Series(label=label, runs=of_arm if limit is None else [run.until(limit) for run in of_arm]))
    return ComparedRuns(series=series, notes=[*notes, *filter(None, map(_idle_note, series))], missing=missing)


def _unfinished_reason(out: Path, label: str, seed: int, run: Run | None) -> str:
    """Why a run is not finished; empty if it is."""
    if run and run.finished:
        return ""
    name = f"{label}, seed {seed}"
    where = f"at step {run.step}" if run else "not started"
    if run and run.problem:
        return f"{name}: {where}; failed with {run.problem}"
    last = tail(log_path(out, run_path(out, label, seed)), 1)
    return f"{name}: {where}" + (f"; last log line: {last[0][:400]}" if last else "")


def _idle_note(series: Series) -> str:
    """A note on steps without a trainable sample; empty if there were none."""
    idle = sum(run.idle for run in series.runs)
    steps = sum(run.step for run in series.runs)
    if not idle:
        return ""
    return (
        f"{series.label} had no trainable completion in {idle} of {steps} steps (see events.jsonl of its runs for the "
        "reason), so its results say less about the objective."
    )


def _token_limit(record: Record, runs: Sequence[Run]) -> tuple[int | None, list[str]]:
    """The number of sampled tokens at which runs are compared (`None` if unlimited), and notes about it."""
    done = [run for run in runs if run.finished]
    if record.tokens:
        short = [f"{run.path.name} ({run.tokens:,})" for run in done if run.tokens < record.tokens]
        note = (
            f"These runs stopped at twice the planned steps before they had sampled {record.tokens:,} tokens: "
            f"{', '.join(short)}. Their final numbers are at fewer tokens."
        )
        # Every run stops by itself at the budget, so nothing needs to be truncated.
        return None, [note] if short else []
    reached = [run.tokens for run in done or runs]
    if len(set(reached)) < 2:
        return None, []
    note = (
        f"The runs had no common token budget; each took its steps. All curves and numbers end at {min(reached):,} "
        f"sampled tokens, which every {'finished ' if done else ''}run has reached (maximum: {max(reached):,})."
    )
    # At equal tokens: an arm that sampled more would otherwise look better for that alone.
    return min(reached), [note]


# ------------------------------------------------------------------------------------------------- figures


_WITHOUT_DATA = {
    "accuracy": "No run was evaluated (eval.every = 0).",
    "reward": "No run has taken a step yet.",
    "clipping": "No run has trained yet.",
    "flips": (
        "No run recorded an expert flip: the model is dense, routing.record is false, or there is one update per batch."
    ),
    "spread": (
        "There are too few completions with log-probs in rollouts/ (log.rollouts = false, learner.mini_batches = 1, or "
        "a very short run)."
    ),
    "health": "No run has trained yet.",
}
"""Why a figure is missing, by its name."""


def write_figures(
    out: Path, series: Sequence[Series], arms: Sequence[ArmNumbers], bins: Sequence[Sequence[LengthBin]]
) -> list[PageFigure]:
    """Write every figure to `figures/`. A figure without data is omitted, with the reason."""
    labels = [s.label for s in series]
    window = window_of(series)
    data: dict[str, Any] = next((run.settings.get("data", {}) for s in series for run in s.runs), {})
    problems = None if data.get("held_out_path") else data.get("held_out")
    plans: list[tuple[str, str, Any, Sequence[str]]] = [
        ("accuracy", "Held-out accuracy", figures.accuracy(series), sentences.accuracy(arms, problems)),
        ("reward", "Reward", figures.reward(series), sentences.reward(arms, window)),
        ("clipping", "Clipping", figures.clipping(series, arms), sentences.clipping(arms)),
        ("flips", "Expert flips", figures.flips(series), sentences.flips(arms)),
        (
            "spread",
            "Importance ratio variance and completion length",
            figures.spread(series, bins),
            sentences.spread(labels, bins),
        ),
        ("health", "Gradient norm and entropy", figures.health(series), sentences.health(arms)),
    ]
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    return [_page_figure(folder, *plan) for plan in plans]


def _page_figure(folder: Path, name: str, title: str, figure: Any, reading: Sequence[str]) -> PageFigure:
    file = folder / f"{name}.png"
    if figure is None:
        # The figure of an earlier report would contradict this one.
        file.unlink(missing_ok=True)
        return PageFigure(name=name, title=title, reading=[f"No figure. {_WITHOUT_DATA[name]}"], png="")
    return PageFigure(name=name, title=title, reading=[line for line in reading if line], png=save_png(figure, file))


# ------------------------------------------------------------------------------------------------- page


def as_data(
    record: Record, runs: ComparedRuns, arms: Sequence[ArmNumbers], bins: Sequence[Sequence[LengthBin]]
) -> dict[str, Any]:
    """The contents of `table.json`; field names as in `table.py` and `spread.py`."""
    return {
        "command": record.command,
        "tokens": record.tokens,
        "complete": not runs.missing,
        "missing": list(runs.missing),
        "notes": list(runs.notes),
        "arms": [
            {**dataclasses.asdict(arm), "ratio_variance": [dataclasses.asdict(b) for b in arm_bins]}
            for arm, arm_bins in zip(arms, bins, strict=True)
        ],
    }


def page(
    out: Path, record: Record, runs: ComparedRuns, arms: Sequence[ArmNumbers], page_figures: Sequence[PageFigure]
) -> str:
    """The HTML page."""
    recipe = out / "recipe.toml"
    return fill(
        PAGE,
        name=out.name,
        record=record,
        runs=runs,
        labels=[a.label for a in arms],
        colors=[figures.COLORS[i % len(figures.COLORS)] for i in range(len(arms))],
        rows=table_rows(arms, len(record.seeds)),
        single_seed=all(len(a.finished) < 2 for a in arms),
        seed_titles=SEED_TITLES,
        seed_rows=[row for a in arms for row in seed_rows(a)],
        figures=page_figures,
        differences=_differences(runs.series),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        machines=_machines(runs.series),
    )


def _differences(series: Sequence[Series]) -> list[tuple[str, list[str]]]:
    """Settings in which arms differ."""
    # These differ between runs of one arm, too.
    per_run = ("name", "run_dir", "seed", "model.path")
    per_arm = [flatten(s.runs[0].settings) if s.runs else {} for s in series]
    keys = [k for k in differing([s for s in per_arm if s]) if k not in per_run] if any(per_arm) else []
    return [(key, [str(s.get(key, NONE)) for s in per_arm]) for key in keys]


def _machines(series: Sequence[Series]) -> list[str]:
    """Versions and hardware of the runs; usually one line."""
    lines = []
    for run in (run for s in series for run in s.runs):
        file = run.path / "environment.json"
        if not file.is_file():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        packages = ", ".join(f"{k} {v}" for k, v in (found.get("packages") or {}).items() if v)
        line = (
            f"{found.get('device')}, {found.get('cores')} cores, {found.get('platform')}, "
            f"Python {found.get('python')}, {packages}, commit {found.get('commit')}"
        )
        lines += [line] if line not in lines else []
    return lines

"""The report of a comparison: one HTML page that needs nothing else, PNG figures, and the numbers as JSON.

In: a comparison directory. Out: `report.html`, `figures/*.png`, `table.json` in it. Invariant: everything shown comes from
the run directories and `compare.toml`; every text is escaped; the page loads nothing and runs no script.
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
    """What was written, and what a terminal should show of it."""

    page: Path
    text: str
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The runs of a comparison, cut to what can be compared."""

    series: Sequence[Series]
    notes: Sequence[str]
    missing: Sequence[str]
    """Runs that are not finished, and why."""


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure on the page."""

    name: str
    title: str
    reading: Sequence[str]
    """Paragraphs."""
    png: str
    """Base64; empty: there is none, and `reading` says why."""


def write_report(out: Path) -> ReportFiles:
    """Write everything from what is there."""
    record = read(out)
    assert record is not None
    gathered = gather(out, record)
    arms = arm_numbers(gathered.series)
    bins = [length_bins(s.runs) for s in gathered.series]
    drawn = draw(out, gathered.series, arms, bins)
    replace_text(
        out / "table.json",
        json.dumps(redacted_values(as_data(record, gathered, arms, bins), known_secrets()), indent=2, allow_nan=False)
        + "\n",
    )
    replace_text(out / "report.html", page(out, record, gathered, arms, drawn))
    notes = [*gathered.notes, *(f"not finished: {line}" for line in gathered.missing)]
    return ReportFiles(page=out / "report.html", text=as_text(arms, len(record.seeds)), notes=notes)


# ------------------------------------------------------------------------------------------------- reading


def gather(out: Path, record: Record) -> RolloutBatch:
    """Every run that has begun, by arm, and what is not as it should be."""
    found = {(label, seed): read_run(run_path(out, label, seed)) for label in record.arms for seed in record.seeds}
    runs = [run for run in found.values() if run]
    missing = [why for (label, seed), run in found.items() if (why := _why_not(out, label, seed, run))]
    limit, notes = _limit(record, runs)
    series = [
        Series(label=label, runs=[run if limit is None else run.until(limit) for seed in record.seeds if (run := found[label, seed])])
        for label in record.arms
    ]  # fmt: skip
    return RolloutBatch(series=series, notes=[*notes, *filter(None, map(_idle, series))], missing=missing)


def _why_not(out: Path, label: str, seed: int, run: Run | None) -> str:
    """Why a run is not finished; empty if it is."""
    if run and run.finished:
        return ""
    name, where = f"{label}, seed {seed}", f"at step {run.step}" if run else "has not begun"
    if run and run.problem:
        return f"{name}: {where}; it failed: {run.problem}"
    last = tail(log_path(out, run_path(out, label, seed)), 1)
    return f"{name}: {where}" + (f"; its log ends: {last[0][:400]}" if last else "")


def _idle(series: Series) -> str:
    """Says that an arm's runs have trained on nothing at times; empty: they have not."""
    idle, steps = sum(run.idle for run in series.runs), sum(run.step for run in series.runs)
    if not idle:
        return ""
    return (
        f"{series.label} trained on nothing in {idle} of {steps} steps, because no reply of them counted (events.jsonl of "
        "its runs says why): what it reached says that much less about the objective."
    )


def _limit(record: Record, runs: Sequence[Run]) -> tuple[int | None, list[str]]:
    """Up to how many sampled tokens runs are compared, and what there is to say about that."""
    done = [run for run in runs if run.finished]
    if record.tokens:
        short = [f"{run.path.name} ({run.tokens:,})" for run in done if run.tokens < record.tokens]
        told = f"Runs that took twice the planned steps before they had sampled {record.tokens:,} tokens and ended there: {', '.join(short)}. Their last numbers are at fewer tokens."
        return None, [told] if short else []
    reached = [run.tokens for run in done or runs]
    if len(set(reached)) < 2:
        return None, []
    return min(reached), [f"The runs had no common number of tokens to sample: each took its steps. All curves and numbers end at {min(reached):,} sampled tokens, which every {'finished ' if done else ''}run has reached (the most: {max(reached):,})."]  # fmt: skip


# ------------------------------------------------------------------------------------------------- figures


def draw(out: Path, series: Sequence[Series], arms: Sequence[ArmNumbers], bins: Sequence[Sequence[LengthBin]]) -> list[PageFigure]:  # fmt: skip
    """Draw every figure into `figures/`; those without data are left out, with the reason."""
    labels, window = [s.label for s in series], window_of(series)
    data: dict[str, Any] = next((run.settings.get("data", {}) for s in series for run in s.runs), {})
    problems = None if data.get("held_out_path") else data.get("held_out")
    plans: list[tuple[str, str, Any, Sequence[str], str]] = [
        ("accuracy", "Held-out accuracy", figures.accuracy(series), sentences.accuracy(arms, problems), "No run was evaluated (eval.every = 0)."),
        ("reward", "Reward", figures.reward(series), sentences.reward(arms, window), "No run has taken a step yet."),
        ("clipping", "Clipping", figures.clipping(series, arms), sentences.clipping(arms), "No run has learned yet."),
        ("flips", "Experts that flip", figures.flips(series), sentences.flips(arms), "No run has seen an expert flip: the model has no experts, routing.record is false, or there is one update per batch."),
        ("spread", "Ratio variance and reply length", figures.spread(series, bins), sentences.spread(labels, bins), "There are too few replies with log-probabilities in rollouts/ (log.rollouts = false, learner.mini_batches = 1, or a very short run)."),
        ("health", "Gradient norm and entropy", figures.health(series), sentences.health(arms), "No run has learned yet."),
    ]  # fmt: skip
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    return [_shown(folder, *plan) for plan in plans]


def _shown(folder: Path, name: str, title: str, figure: Any, reading: Sequence[str], why_not: str) -> PageFigure:
    file = folder / f"{name}.png"
    if figure is None:
        file.unlink(missing_ok=True)
        return PageFigure(name=name, title=title, reading=[f"Left out. {why_not}"], png="")
    return PageFigure(name=name, title=title, reading=[line for line in reading if line], png=save_png(figure, file))


# ------------------------------------------------------------------------------------------------- page


def as_data(record: Record, gathered: RolloutBatch, arms: Sequence[ArmNumbers], bins: Sequence[Sequence[LengthBin]]) -> dict[str, Any]:  # fmt: skip
    """The numbers for programs; names as in `table.py` and `spread.py`."""
    return {
        "command": record.command,
        "tokens": record.tokens,
        "complete": not gathered.missing,
        "missing": list(gathered.missing),
        "notes": list(gathered.notes),
        "arms": [{**dataclasses.asdict(arm), "ratio_variance": [dataclasses.asdict(b) for b in mine]} for arm, mine in zip(arms, bins, strict=True)],
    }  # fmt: skip


def page(
    out: Path, record: Record, gathered: RolloutBatch, arms: Sequence[ArmNumbers], drawn: Sequence[PageFigure]
) -> str:
    """The page as text."""
    recipe = out / "recipe.toml"
    return fill(
        PAGE,
        name=out.name,
        record=record,
        gathered=gathered,
        labels=[a.label for a in arms],
        colours=[figures.COLOURS[i % len(figures.COLOURS)] for i in range(len(arms))],
        rows=table_rows(arms, len(record.seeds)),
        single_seed=all(len(a.finished) < 2 for a in arms),
        seed_titles=SEED_TITLES,
        seed_rows=[row for a in arms for row in seed_rows(a)],
        figures=drawn,
        differences=_differences(gathered.series),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        machines=_machines(gathered.series),
    )


def _differences(series: Sequence[Series]) -> list[tuple[str, list[str]]]:
    """Settings in which arms differ."""
    own = ("name", "run_dir", "seed", "model.path")
    each = [flatten(s.runs[0].settings) if s.runs else {} for s in series]
    keys = [k for k in differing([e for e in each if e]) if k not in own] if any(each) else []
    return [(key, [str(e.get(key, NONE)) for e in each]) for key in keys]


def _machines(series: Sequence[Series]) -> list[str]:
    """Versions and machine of the runs; usually one line."""
    lines = []
    for run in (run for s in series for run in s.runs):
        file = run.path / "environment.json"
        if not file.is_file():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        packages = ", ".join(f"{k} {v}" for k, v in (found.get("packages") or {}).items() if v)
        line = f"{found.get('device')}, {found.get('cores')} cores, {found.get('platform')}, Python {found.get('python')}, {packages}, commit {found.get('commit')}"
        lines += [line] if line not in lines else []
    return lines

"""A replay as terminal text, JSON and a self-contained HTML page.

In: a `Replay`. Out: lines for a terminal; `replay.json`, `replay.html` and `figures/*.png` in a folder. Invariant: all
text on the page is escaped; the page loads nothing and runs no script.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gspo.record.run_dir import finite, replace_text
from gspo.redact import known_secrets, redacted_values
from gspo.view.compare.wording import NONE, aligned, plain, share
from gspo.view.replay import figures, sentences
from gspo.view.replay.coefficients import RatioSides
from gspo.view.replay.measure import Row, SweepResult
from gspo.view.replay.replay import Replay
from gspo.view.static_page import fill, save_png

WIDTH = 118
PAGE = Path(__file__).with_name("page.html")
TITLES = (
    "objective",
    "loss",
    "grad norm",
    "cos to run",
    "clipped tokens",
    "above / below",
    "clipped completions",
    "effective completions",
)
SWEEP_TITLES = (
    "value",
    "clipped tokens",
    "above / below",
    "clipped completions",
    "grad norm",
    "cos to run",
    "effective completions",
)


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure on the page."""

    title: str
    reading: str
    png: str
    """Base64."""
    table: Sequence[Sequence[str]] = ()


# ------------------------------------------------------------------------------------------------- text


def as_text(replay: Replay) -> str:
    """The replay for a terminal."""
    verdict, _ = sentences.agreement(replay)
    parts = [heading(replay), _wrap(verdict), "", aligned([TITLES, *map(table_row, replay.numbers.rows)])]
    for result in replay.numbers.sweeps:
        parts += ["", f"{result.setting}, {run_value(result)}:", aligned([SWEEP_TITLES, *sweep_rows(result)])]
    parts += ["", *(_wrap(text, "- ") for text in sentences.readings(replay))]
    parts += [_wrap(text, "- ") for text in sentences.notes(replay)]
    return "\n".join(parts)


def heading(replay: Replay) -> str:
    """The run, step and mini-batch."""
    n = replay.numbers
    which = "the last" if n.mini_batch == n.mini_batches else f"mini-batch {n.mini_batch}"
    start = f"checkpoint {replay.start}"
    if replay.start < replay.step - 1:
        start += f", then recomputing steps {replay.start + 1} to {replay.step - 1}"
    return (
        f"{replay.run}: step {replay.step} (from {start}), {which} of {n.mini_batches} mini-batches: "
        f"{len(n.completions)} completions, {n.tokens:,} tokens"
    )


def table_row(row: Row) -> list[str]:
    """A row of the main table; the run's own row has cosine 1."""
    star = "*" if row.note else ""
    return [
        row.label + star,
        plain(row.loss),
        plain(row.grad_norm),
        cosine(row.cosine),
        share(row.clipped_tokens.share),
        sides(row.clipped_tokens),
        share(row.clipped_completions.share),
        f"{row.effective_completions:.1f} of {row.completions}",
    ]


def sweep_rows(result: SweepResult) -> list[list[str]]:
    """The rows of a sweep's table."""
    return [
        [
            plain(p.value),
            share(p.clipped_tokens.share),
            sides(p.clipped_tokens),
            share(p.clipped_completions.share),
            plain(p.grad_norm),
            cosine(p.cosine),
            f"{p.effective_completions:.1f}",
        ]
        for p in result.points
    ]


def run_value(result: SweepResult) -> str:
    """The run's value of a swept setting."""
    return "disabled or unset in the run" if result.own is None else f"{plain(result.own)} in the run"


def cosine(value: float | None) -> str:
    """Three decimals; six near 1."""
    if value is None:
        return NONE
    # Otherwise 0.9996 would be printed as 1.000, which means the same gradient.
    return f"{value:.3f}" if abs(value) < 0.9995 or 1 - abs(value) < 1e-6 else f"{value:.6f}"


def sides(clipped: RatioSides) -> str:
    """Clipped shares with an importance ratio above and below 1."""
    return f"{share(clipped.above)} / {share(clipped.below)}" if clipped.share else NONE


def _wrap(text: str, first: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))


# ------------------------------------------------------------------------------------------------- files


def write(out: Path, replay: Replay) -> Path:
    """Write all files and return the path of the page."""
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    data = redacted_values(as_data(replay), known_secrets())
    # allow_nan=False: Python would write NaN, which is not JSON. `as_data` has replaced such values by null.
    replace_text(out / "replay.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
    replace_text(out / "replay.html", page(replay, write_figures(folder, replay)))
    return out / "replay.html"


def as_data(replay: Replay) -> dict[str, Any]:
    """The contents of `replay.json`; field names as in `measure.py` and `agreement.py`."""
    numbers = dataclasses.asdict(replay.numbers)
    data = {
        "run": str(replay.run),
        "step": replay.step,
        "checkpoint": replay.start,
        "exact": replay.exact,
        "agreements": [{**dataclasses.asdict(a), "exact": a.exact} for a in replay.agreements],
        "run_grad_norm": replay.run_grad_norm,
        "not_learned": replay.untrained,
        **numbers,
        "not_computed": [dataclasses.asdict(skipped) for skipped in replay.skipped],
        "reading": sentences.readings(replay),
        "notes": sentences.notes(replay),
    }
    valid: dict[str, Any] = finite(data)
    return valid


def write_figures(folder: Path, replay: Replay) -> list[PageFigure]:
    """Write every figure to the folder."""
    n = replay.numbers
    page_figures = [
        _page_figure(folder, "cosines", "Cosine similarity of the gradients", sentences.COSINES, figures.cosines(n)),
        _page_figure(folder, "weights", "Gradient weight of each completion", sentences.WEIGHTS, figures.weights(n)),
    ]
    for result in n.sweeps:
        title = f"Sweep of {result.setting}"
        figure = figures.sweep(result)
        page_figure = _page_figure(folder, f"sweep-{result.setting}", title, sentences.sweep(result), figure)
        page_figures.append(dataclasses.replace(page_figure, table=[SWEEP_TITLES, *sweep_rows(result)]))
    return page_figures


def _page_figure(folder: Path, name: str, title: str, reading: str, figure: Figure) -> PageFigure:
    return PageFigure(title=title, reading=reading, png=save_png(figure, folder / f"{name}.png"))


def page(replay: Replay, page_figures: Sequence[PageFigure]) -> str:
    """The HTML page."""
    verdict, warn = sentences.agreement(replay)
    return fill(
        PAGE,
        name=replay.run.resolve().name,
        step=replay.step,
        heading=heading(replay),
        agreement=verdict,
        warn=warn,
        titles=TITLES,
        rows=[table_row(row) for row in replay.numbers.rows],
        readings=sentences.readings(replay),
        notes=sentences.notes(replay),
        figures=page_figures,
    )

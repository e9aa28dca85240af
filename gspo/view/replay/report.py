"""A replay as text, JSON and one HTML page that needs nothing else.

In: a `Replay`. Out: lines for a terminal; `replay.json`, `replay.html` and `figures/*.png` in a folder. Invariant: every
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
TITLES = ("objective", "loss", "gradient norm", "cosine to run", "tokens clipped", "above / below", "replies clipped", "effective replies")  # fmt: skip
SWEEP_TITLES = ("value", "tokens clipped", "above / below", "replies clipped", "gradient norm", "cosine to run", "effective replies")  # fmt: skip


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
    """Everything for a terminal."""
    told, _ = sentences.agreement(replay)
    parts = [heading(replay), _wrapped(told), "", aligned([TITLES, *map(table_row, replay.numbers.rows)])]
    for swept in replay.numbers.sweeps:
        parts += ["", f"{swept.setting}, {had(swept)}:", aligned([SWEEP_TITLES, *map_points(swept)])]
    parts += ["", *(_wrapped(text, "- ") for text in sentences.readings(replay))]
    parts += [_wrapped(text, "- ") for text in sentences.notes(replay)]
    return "\n".join(parts)


def heading(replay: Replay) -> str:
    """What was looked at."""
    n = replay.numbers
    which = "the last" if n.mini_batch == n.mini_batches else f"mini-batch {n.mini_batch}"
    way = f"checkpoint {replay.start}" if replay.start == replay.step - 1 else f"checkpoint {replay.start}, then steps {replay.start + 1} to {replay.step - 1} learned again"  # fmt: skip
    return f"{replay.run}: step {replay.step} (from {way}), {which} of {n.mini_batches} mini-batches: {len(n.replies)} replies, {n.tokens:,} tokens"  # fmt: skip


def table_row(row: Row) -> list[str]:
    """A row of the main table; `cosine to run` of the run's own row is 1."""
    star = "*" if row.note else ""
    return [
        row.label + star,
        plain(row.loss),
        plain(row.grad_norm),
        cosine(row.cosine),
        share(row.clipped_tokens.share),
        sides(row.clipped_tokens),
        share(row.clipped_replies.share),
        f"{row.effective_replies:.1f} of {row.replies}",
    ]


def map_points(swept: SweepResult) -> list[list[str]]:
    """The rows of a sweep's table."""
    return [
        [plain(p.value), share(p.clipped_tokens.share), sides(p.clipped_tokens), share(p.clipped_replies.share), plain(p.grad_norm), cosine(p.cosine), f"{p.effective_replies:.1f}"]
        for p in swept.points
    ]  # fmt: skip


def had(swept: SweepResult) -> str:
    """What the run had of a swept setting."""
    return "off or unset in the run" if swept.own is None else f"{plain(swept.own)} in the run"


def cosine(value: float | None) -> str:
    """Three decimals; as many as it takes near 1."""
    if value is None:
        return NONE
    return f"{value:.3f}" if abs(value) < 0.9995 or 1 - abs(value) < 1e-6 else f"{value:.6f}"


def sides(clipped: RatioSides) -> str:
    """Shares whose ratio is above 1, and below."""
    return f"{share(clipped.above)} / {share(clipped.below)}" if clipped.share else NONE


def _wrapped(text: str, first: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))


# ------------------------------------------------------------------------------------------------- files


def write(out: Path, replay: Replay) -> Path:
    """Write the folder; the page's path."""
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(
        out / "replay.json",
        json.dumps(redacted_values(as_data(replay), known_secrets()), indent=1, allow_nan=False) + "\n",
    )
    replace_text(out / "replay.html", page(replay, draw(folder, replay)))
    return out / "replay.html"


def as_data(replay: Replay) -> dict[str, Any]:
    """Everything for programs; names as in `replay.py`, `numbers.py` and `agreement.py`."""
    numbers = dataclasses.asdict(replay.numbers)
    data = {
        "run": str(replay.run),
        "step": replay.step,
        "checkpoint": replay.start,
        "exact": replay.exact,
        "agreements": [{**dataclasses.asdict(a), "exact": a.exact} for a in replay.agreements],
        "run_grad_norm": replay.run_grad_norm,
        "not_learned": replay.not_learned,
        **numbers,
        "not_computed": [dataclasses.asdict(x) for x in replay.left_out],
        "reading": sentences.readings(replay),
        "notes": sentences.notes(replay),
    }
    found: dict[str, Any] = finite(data)
    return found


def draw(folder: Path, replay: Replay) -> list[PageFigure]:
    """Draw every figure into the folder."""
    n = replay.numbers
    how = "Each gradient against every other, closest to the run's first; 1: the same direction, 0: nothing in common, below 0: against each other."
    which = "How much of an objective's whole weight each reply has: the sum over its tokens of what multiplies the gradient of their log-probability. White: no say (clipped, or all replies to the prompt were worth the same); grey: the objective does not count the reply. Replies stand in the same order in every row."
    shown = [
        _shown(folder, "cosines", "Which objectives push the same way", how, figures.cosines(n)),
        _shown(folder, "weights", "Which replies they listen to", which, figures.weights(n)),
    ]  # fmt: skip
    for swept in n.sweeps:
        figure = figures.sweep(swept)
        made = _shown(folder, f"sweep-{swept.setting}", f"Sweep of {swept.setting}", sentences.sweep(swept), figure)
        shown.append(dataclasses.replace(made, table=[SWEEP_TITLES, *map_points(swept)]))
    return shown


def _shown(folder: Path, name: str, title: str, reading: str, figure: Figure) -> PageFigure:
    return PageFigure(title=title, reading=reading, png=save_png(figure, folder / f"{name}.png"))


def page(replay: Replay, drawn: Sequence[PageFigure]) -> str:
    """The page as text."""
    told, warn = sentences.agreement(replay)
    return fill(
        PAGE,
        name=replay.run.resolve().name,
        step=replay.step,
        heading=heading(replay),
        agreement=told,
        warn=warn,
        titles=TITLES,
        rows=[table_row(row) for row in replay.numbers.rows],
        readings=sentences.readings(replay),
        notes=sentences.notes(replay),
        figures=drawn,
    )

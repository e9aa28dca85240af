"""The figures of a replay. In: its numbers. Out: matplotlib figures, colours that differ for colour-blind eyes too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gspo.view.compare.figures import COLOURS
from gspo.view.replay.measure import ReplayNumbers, Row, SweepResult

MOST_WRITTEN = 30
"""Rows up to which a cell of the cosine matrix holds its number."""
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:g} %")


def cosines(numbers: ReplayNumbers) -> Figure:
    """Every gradient against every other."""
    names = [r.label for r in numbers.rows]
    matrix = np.array([[math.nan if c is None else c for c in row] for row in numbers.cosines])
    seen = matrix[np.isfinite(matrix)]
    lowest = min(0.9, math.floor(10 * float(seen.min())) / 10) if len(seen) else 0.0
    size = 2.2 + 0.42 * len(names)
    figure = Figure(figsize=(size + 0.9, size), layout="constrained")
    axis = figure.subplots()
    axis.set_facecolor("0.85")
    image = axis.imshow(matrix, cmap="cividis", vmin=lowest, vmax=1.0)
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    for tick in (axis.get_xticklabels()[0], axis.get_yticklabels()[0]):
        tick.set_fontweight("bold")
    if len(names) <= MOST_WRITTEN:
        _write_in(axis, matrix, (lowest + 1) / 2)
    figure.colorbar(image, ax=axis, label="cosine between gradients", shrink=0.8)
    return figure


def _write_in(axis: object, matrix: np.ndarray, middle: float) -> None:
    for (i, j), value in np.ndenumerate(matrix):
        text = "–" if not np.isfinite(value) else f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.0f}"  # fmt: skip
        colour = "black" if not np.isfinite(value) or value > middle else "white"
        axis.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)  # type: ignore[attr-defined]


def weights(numbers: ReplayNumbers) -> Figure:
    """Each reply's share of an objective's weight, from the reply the run pushes up most to the one it pushes down most."""
    order = sorted(range(len(numbers.replies)), key=lambda i: _order(numbers.rows[0], i))
    shares = np.array([_shares(row, order) for row in numbers.rows])
    finite = np.abs(shares[np.isfinite(shares)])
    bound = float(np.quantile(finite[finite > 0], 0.98)) if (finite > 0).any() else 1.0
    figure = Figure(figsize=(10, 1.6 + 0.28 * len(numbers.rows)), layout="constrained")
    axis = figure.subplots()
    axis.set_facecolor("0.85")
    image = axis.imshow(shares, cmap="PuOr_r", vmin=-bound, vmax=bound, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(numbers.rows)), [r.label for r in numbers.rows])
    axis.get_yticklabels()[0].set_fontweight("bold")
    axis.set_xticks([])
    axis.set_xlabel(f"the {len(order)} replies of the mini-batch, by their weight and advantage in the run")
    bar = figure.colorbar(image, ax=axis, extend="both", format=_PERCENT)
    bar.set_label("share of all weight\nmade less | more likely")
    return figure


def _order(own: Row, i: int) -> tuple[float, float]:
    """Replies that the run gives the same weight (0: clipped, or of a uniform group) stand by their advantage."""
    return -(own.weights[i] or 0.0), -(own.advantages[i] or 0.0)


def _shares(row: Row, order: Sequence[int]) -> list[float]:
    total = sum(abs(w) for w in row.weights if w is not None) or 1.0
    found = (row.weights[i] for i in order)
    return [math.nan if w is None else w / total for w in found]


def sweep(swept: SweepResult) -> Figure:
    """Clipped shares, gradient norm and cosine along one setting."""
    x = [p.value for p in swept.points]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    clipped, norm, cosine = figure.subplots(1, 3)
    look = {"marker": "o", "markersize": 4}
    clipped.plot(x, [p.clipped_replies.share for p in swept.points], color=COLOURS[0], label="replies", **look)
    clipped.plot(x, [p.clipped_tokens.share for p in swept.points], color=COLOURS[1], linestyle="--", label="tokens", **look)  # fmt: skip
    clipped.legend(frameon=False, fontsize=8)
    clipped.set(ylabel="share clipped", ylim=(-0.03, 1.03))
    clipped.yaxis.set_major_formatter(_PERCENT)
    norm.plot(x, [p.grad_norm for p in swept.points], color=COLOURS[2], **look)
    norm.set(ylabel="gradient norm")
    norm.set_ylim(0, 1.1 * max(p.grad_norm for p in swept.points) or 1.0)
    cosine.plot(x, [math.nan if p.cosine is None else p.cosine for p in swept.points], color=COLOURS[3], **look)
    cosine.set(ylabel="cosine with the run's gradient")
    cosine.ticklabel_format(axis="y", useOffset=False)
    for axis in (clipped, norm, cosine):
        axis.set(xscale="log", xlabel=swept.setting)
        axis.grid(alpha=0.3)
        if swept.own is not None and x[0] <= swept.own <= x[-1]:
            axis.axvline(swept.own, color="0.4", linewidth=1, linestyle=":")
            axis.annotate("run", (swept.own, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8, color="0.3")  # fmt: skip
    return figure

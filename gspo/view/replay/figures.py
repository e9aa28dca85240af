"""The figures of a replay.

In: its numbers. Out: matplotlib figures. Invariant: color maps are safe for color-blind readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gspo.view.compare.figures import COLORS
from gspo.view.replay.measure import ReplayNumbers, Row, SweepResult

MOST_LABELED_ROWS = 30
"""A larger cosine matrix has no numbers in its cells."""
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:g} %")


def cosines(numbers: ReplayNumbers) -> Figure:
    """Cosine similarity of every pair of gradients."""
    names = [r.label for r in numbers.rows]
    matrix = np.array([[math.nan if c is None else c for c in row] for row in numbers.cosines])
    known = matrix[np.isfinite(matrix)]
    # At most 0.9, so that tiny differences do not fill the whole range of colors.
    lowest = min(0.9, math.floor(10 * float(known.min())) / 10) if len(known) else 0.0
    size = 2.2 + 0.42 * len(names)
    figure = Figure(figsize=(size + 0.9, size), layout="constrained")
    axis = figure.subplots()
    # Shows through where a cell is NaN: a gradient of 0 has no cosine.
    axis.set_facecolor("0.85")
    image = axis.imshow(matrix, cmap="cividis", vmin=lowest, vmax=1.0)
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    for tick in (axis.get_xticklabels()[0], axis.get_yticklabels()[0]):
        tick.set_fontweight("bold")
    if len(names) <= MOST_LABELED_ROWS:
        _label_cells(axis, matrix, (lowest + 1) / 2)
    figure.colorbar(image, ax=axis, label="cosine between gradients", shrink=0.8)
    return figure


def _label_cells(axis: object, matrix: np.ndarray, middle: float) -> None:
    for (i, j), value in np.ndenumerate(matrix):
        # The upper half of cividis is bright, so a label there must be dark.
        color = "black" if not np.isfinite(value) or value > middle else "white"
        axis.text(j, i, _cell(value), ha="center", va="center", fontsize=8, color=color)  # type: ignore[attr-defined]


def _cell(value: float) -> str:
    if not np.isfinite(value):
        return "–"
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.0f}"


def weights(numbers: ReplayNumbers) -> Figure:
    """Each completion's share of an objective's gradient weight, sorted by its weight in the run."""
    order = sorted(range(len(numbers.completions)), key=lambda i: _order(numbers.rows[0], i))
    shares = np.array([_shares(row, order) for row in numbers.rows])
    finite = np.abs(shares[np.isfinite(shares)])
    # A quantile instead of the maximum: a few dominant completions would fade all others.
    bound = float(np.quantile(finite[finite > 0], 0.98)) if (finite > 0).any() else 1.0
    figure = Figure(figsize=(10, 1.6 + 0.28 * len(numbers.rows)), layout="constrained")
    axis = figure.subplots()
    # Shows through where a cell is NaN: the objective does not train on that completion.
    axis.set_facecolor("0.85")
    image = axis.imshow(shares, cmap="PuOr_r", vmin=-bound, vmax=bound, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(numbers.rows)), [r.label for r in numbers.rows])
    axis.get_yticklabels()[0].set_fontweight("bold")
    axis.set_xticks([])
    axis.set_xlabel(f"the {len(order)} completions of the mini-batch, by weight and advantage in the run")
    # The colors end at the quantile, so the bar has arrows for the values beyond it.
    bar = figure.colorbar(image, ax=axis, extend="both", format=_PERCENT)
    bar.set_label("share of the total weight\nless | more likely")
    return figure


def _order(own: Row, i: int) -> tuple[float, float]:
    """Sort by weight, then by advantage: clipped completions and those of uniform groups all have weight 0."""
    return -(own.weights[i] or 0.0), -(own.advantages[i] or 0.0)


def _shares(row: Row, order: Sequence[int]) -> list[float]:
    total = sum(abs(w) for w in row.weights if w is not None) or 1.0
    ordered = (row.weights[i] for i in order)
    return [math.nan if w is None else w / total for w in ordered]


def sweep(result: SweepResult) -> Figure:
    """Clip fractions, gradient norm and cosine over one setting."""
    x = [p.value for p in result.points]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    clipped, norm, cosine = figure.subplots(1, 3)
    look = {"marker": "o", "markersize": 4}
    tokens = [p.clipped_tokens.share for p in result.points]
    clipped.plot(x, [p.clipped_completions.share for p in result.points], color=COLORS[0], label="completions", **look)
    clipped.plot(x, tokens, color=COLORS[1], linestyle="--", label="tokens", **look)
    clipped.legend(frameon=False, fontsize=8)
    clipped.set(ylabel="clip fraction", ylim=(-0.03, 1.03))
    clipped.yaxis.set_major_formatter(_PERCENT)
    norm.plot(x, [p.grad_norm for p in result.points], color=COLORS[2], **look)
    norm.set(ylabel="gradient norm")
    norm.set_ylim(0, 1.1 * max(p.grad_norm for p in result.points) or 1.0)
    cosine.plot(x, [math.nan if p.cosine is None else p.cosine for p in result.points], color=COLORS[3], **look)
    cosine.set(ylabel="cosine to the run's gradient")
    # For values near 1, matplotlib would print the distance from an offset instead of the cosine.
    cosine.ticklabel_format(axis="y", useOffset=False)
    for axis in (clipped, norm, cosine):
        axis.set(xscale="log", xlabel=result.setting)
        axis.grid(alpha=0.3)
        if result.own is not None and x[0] <= result.own <= x[-1]:
            axis.axvline(result.own, color="0.4", linewidth=1, linestyle=":")
            label = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "0.3"}
            axis.annotate("run", (result.own, 1), xycoords=("data", "axes fraction"), **label)
    return figure

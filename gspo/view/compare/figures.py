"""The figures of a comparison.

In: `Series` of runs. Out: matplotlib figures, `None` if the data is missing. Invariant: an arm has the same color and
line style in every figure; colors are the Okabe-Ito palette, which is safe for color-blind readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter

from gspo.view.compare.curves import Band, Curve, Series, band, curve, window_of
from gspo.view.compare.intervals import Number
from gspo.view.compare.spread import LengthBin
from gspo.view.compare.table import ArmNumbers, set_accuracies

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v")
MOST_SEED_LINES = 5
MOST_BANDS = 6
"""With more arms than this, only means are plotted: ranges and single seeds would hide each other."""
MOST_DYNAMIC_RANGE = 1e4
"""A log axis reaches this factor below its maximum: one collapsed run would otherwise squeeze all others."""
FLIPS = {
    "routing/flip_fraction": "during the step's updates",
    "routing/flip_fraction_native": "without routing replay (hypothetical)",
    "routing/flip_fraction_sampler": "between sampler and learner",
}
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
_TWO_AND_FIVE = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
"""Labels 2 and 5 between powers of ten, because a log axis may span less than one decade."""


def style(number: int) -> dict[str, Any]:
    """Color and line style of the arm with this number."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": STYLES[number % len(STYLES)]}


# ------------------------------------------------------------------------------------------------- figures


def reward(series: Sequence[Series]) -> Figure | None:
    """Mean reward of the sampled completions."""
    return _curves_figure(series, [("reward/mean", "mean reward, smoothed")], window=window_of(series), log=False)


def accuracy(series: Sequence[Series]) -> Figure | None:
    """Held-out accuracy, sampled and greedy, and the accuracy on each evaluation set."""
    panels = [("eval/accuracy", "held-out accuracy, sampled"), ("eval/accuracy_greedy", "held-out accuracy, greedy")]
    panels += [
        (key, f"accuracy on {name}") for name, key in set_accuracies([r for s in series for r in s.runs]).items()
    ]
    shares = len(_measured(series, panels))
    if any(run.values("eval/reward") != run.values("eval/accuracy") for s in series for run in s.runs):
        panels.append(("eval/reward", "held-out reward"))
    figure = _curves_figure(series, panels, markers=True, log=False)
    for axis in figure.axes[:shares] if figure else ():
        # From 0, so that noise does not look like a trend.
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    return figure


def clipping(series: Sequence[Series], numbers: Sequence[ArmNumbers]) -> Figure | None:
    """Clip fractions: curves, and bars of their means."""
    keys = [
        ("clip/fraction_tokens", "clip fraction, tokens"),
        ("clip/fraction_sequences", "clip fraction, completions"),
    ]
    if not _measured(series, keys):
        return None
    figure, axes = _figure(series, 3)
    for axis, (key, label) in zip(axes, keys, strict=False):
        _plot_metric(axis, series, key, label, window=window_of(series))
    _bars(axes[2], numbers)
    return figure


def flips(series: Sequence[Series]) -> Figure | None:
    """Share of routed experts that changed."""
    panels = [(key, f"flipped experts (share)\n{what}") for key, what in FLIPS.items() if _ever_nonzero(series, key)]
    return _curves_figure(series, panels, window=window_of(series))


def spread(series: Sequence[Series], bins: Sequence[Sequence[LengthBin]]) -> Figure | None:
    """Variance of the log importance ratio over tokens and over completions, against completion length."""
    if not any(bins):
        return None
    figure, (tokens, completions) = _figure(series, 2, sharey=True)
    for number, arm_bins in enumerate(bins):
        length = [b.length for b in arm_bins]
        look = {**style(number), "marker": MARKERS[number % len(MARKERS)], "markersize": 4.5}
        tokens.plot(length, [_positive(b.token_variance) for b in arm_bins], **look)
        completions.plot(length, [_positive(b.completion_variance) for b in arm_bins], **look)
        # The variance of a mean of independent tokens is that of one token divided by their number.
        independent = [_positive(b.token_variance / b.length) for b in arm_bins]
        completions.plot(length, independent, color=look["color"], linestyle=":", linewidth=1, alpha=0.8)
    for axis, label in ((tokens, "over tokens: $\\log r_t$"), (completions, "over completions: mean of $\\log r_t$")):
        axis.set(xlabel="completion length (tokens)", xscale="log", yscale="log")
        axis.set_title(label, fontsize=10)
        _plain_ticks(axis)
    tokens.set_ylabel("variance of the log importance ratio")
    completions.plot([], [], color="0.4", linestyle=":", linewidth=1, label="token variance / length")
    completions.legend(frameon=False, fontsize=8)
    return figure


def health(series: Sequence[Series]) -> Figure | None:
    """Gradient norm and entropy."""
    panels = [("grad/norm", "gradient norm, before clipping"), ("entropy/mean", "entropy (nats per token)")]
    figure = _curves_figure(series, panels)
    if figure and _ever_nonzero(series, "grad/norm"):
        # A step without any gradient has a norm of 0, which a log axis cannot show.
        figure.axes[0].set_yscale("log", nonpositive="mask")
        figure.axes[0].yaxis.set_major_formatter(_PLAIN)
        figure.axes[0].yaxis.set_minor_formatter(_TWO_AND_FIVE)
    return figure


# ------------------------------------------------------------------------------------------------- panels


def _curves_figure(
    series: Sequence[Series],
    panels: Sequence[tuple[str, str]],
    *,
    window: int = 1,
    markers: bool = False,
    log: bool = True,
) -> Figure | None:
    panels = _measured(series, panels)
    if not panels:
        return None
    figure, axes = _figure(series, len(panels))
    for axis, (key, label) in zip(axes, panels, strict=True):
        _plot_metric(axis, series, key, label, window=window, markers=markers, log=log)
    return figure


def _measured(series: Sequence[Series], panels: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The panels whose metric was measured in at least one run."""
    return [(key, label) for key, label in panels if any(run.values(key) for s in series for run in s.runs)]


def _ever_nonzero(series: Sequence[Series], key: str) -> bool:
    """Whether a metric was nonzero in at least one step."""
    return any(value for s in series for run in s.runs for value in run.values(key))


def _figure(series: Sequence[Series], panels: int, **options: Any) -> tuple[Figure, Any]:
    """An empty figure with one legend above its panels."""
    # About 100 characters fit on a legend line; 8 is the width of a line sample.
    lines = -(-sum(len(figure_label(s.label)) + 8 for s in series) // 100)
    # Not pyplot, which keeps every figure in memory until it is closed.
    figure = Figure(figsize=(10, 3.6 + 0.2 * lines), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, **options)[0]
    handles = [Line2D([], [], **style(number), linewidth=2) for number in range(len(series))]
    columns = max(1, -(-len(series) // lines))
    labels = [figure_label(s.label) for s in series]
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot_metric(
    axis: Any,
    series: Sequence[Series],
    key: str,
    label: str,
    *,
    window: int,
    markers: bool = False,
    log: bool = True,
) -> None:
    """Plot a metric of every arm: mean and range over seeds, single seeds if there are few, only means for many arms.

    `log` allows a logarithmic axis, which is used if the values span orders of magnitude.
    """
    plotted: list[Curve] = []
    for number, s in enumerate(series):
        curves = [curve(run, key, window) for run in s.runs]
        plotted += curves
        seed_curves = curves if len(series) <= MOST_BANDS else ()
        _plot_arm(axis, band(curves), seed_curves, style(number), "o" if markers else None)
    axis.set(xlabel="sampled tokens", ylabel=label)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if log and spans_orders_of_magnitude(plotted):
        axis.set_yscale("log", nonpositive="mask")
        highest = max(c.y.max() for c in plotted if len(c.y))
        axis.set_ylim(bottom=max(axis.get_ylim()[0], highest / MOST_DYNAMIC_RANGE), top=2 * highest)


def _plot_arm(axis: Any, mean: Band | None, curves: Sequence[Curve], look: dict[str, Any], marker: str | None) -> None:
    color = look["color"]
    if len(curves) > 1:
        for c in curves if len(curves) <= MOST_SEED_LINES else ():
            axis.plot(c.x, c.y, color=color, linewidth=0.6, alpha=0.45)
        if mean is not None:
            axis.fill_between(mean.x, mean.low, mean.high, color=color, alpha=0.13, linewidth=0)
    if mean is not None:
        marker = marker if len(mean.x) <= 40 else None
        axis.plot(mean.x, mean.mean, **look, linewidth=1.9, marker=marker, markersize=3.5)


def _bars(axis: Any, numbers: Sequence[ArmNumbers]) -> None:
    """Mean clip fractions of tokens (left) and completions (right), on a log axis, with the range over seeds."""
    values: list[float] = []
    for number, arm in enumerate(numbers):
        for offset, name, alpha in ((-0.2, "clip_tokens", 1.0), (0.2, "clip_sequences", 0.4)):
            mean: Number | None = getattr(arm, name)
            if mean is None:
                continue
            x = number + offset
            per_seed = [v for run in arm.finished if (v := getattr(run, name)) is not None]
            values += [v for v in per_seed if v > 0]
            axis.bar(x, mean.value, 0.38, color=COLORS[number % len(COLORS)], alpha=alpha)
            if len(per_seed) > 1 and min(per_seed) > 0:
                axis.plot([x, x], [min(per_seed), max(per_seed)], color="0.15", linewidth=1)
            if len(numbers) <= MOST_BANDS:
                _annotate(axis, f"{mean.value:.2g}", x, max([mean.value, *per_seed]))
    _bar_labels(axis, [arm.label for arm in numbers])
    axis.set_ylabel("mean clip fraction\n(dark: tokens, light: completions)")
    axis.grid(axis="x", visible=False)
    axis.set_xlim(-0.6, len(numbers) - 0.4)
    if values:
        # A bar starts at 0, which a log axis does not have: masked instead of clipped, it would vanish.
        axis.set_yscale("log", nonpositive="clip")
        axis.set_ylim(min(values) / 3, max(values) * 3)


def _annotate(axis: Any, text: str, x: float, y: float) -> None:
    axis.annotate(text, (x, y), ha="center", va="bottom", fontsize=7, xytext=(0, 2), textcoords="offset points")


def _bar_labels(axis: Any, labels: Sequence[str]) -> None:
    """Arm names below the bars, rotated where there are too many to fit."""
    rotation: dict[str, Any] = {}
    if len(labels) > 2:
        rotation = {"rotation": 20 if len(labels) < 6 else 60, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(range(len(labels)), [figure_label(label, 14) for label in labels], fontsize=8, **rotation)


def spans_orders_of_magnitude(curves: Sequence[Curve]) -> bool:
    """Whether positive values span more than a factor of 30, which a linear axis cannot show."""
    positive = np.concatenate([np.empty(0), *(c.y[c.y > 0] for c in curves)])
    negative = any((c.y < 0).any() for c in curves)
    return bool(len(positive) and not negative and positive.max() > 30 * positive.min())


def figure_label(label: str, most: int = 40) -> str:
    """A label as figure text: truncated, with the dollar signs escaped that would start matplotlib's math mode."""
    text = label if len(label) <= most else label[: most - 1] + "…"
    return text.replace("$", r"\$")


def _positive(value: float) -> float:
    """The value, or NaN if a log axis cannot show it."""
    return value if value > 0 else float("nan")


def _plain_ticks(axis: Any) -> None:
    """Label lengths as plain numbers, also between powers of ten if the axis spans less than a decade."""
    axis.xaxis.set_major_formatter(_PLAIN)
    low, high = axis.get_xlim()
    if high < 10 * low:
        axis.xaxis.set_minor_formatter(_PLAIN)
        axis.tick_params(axis="x", which="minor", labelsize=8)

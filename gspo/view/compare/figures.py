"""The figures of a comparison.

In: `Series` of runs. Out: matplotlib figures, each None where its data is missing. Invariant: an arm has the same colour and
line style in every figure; colours are Okabe and Ito's, which differ for colour-blind eyes too.
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
from gspo.view.compare.table import ArmNumbers

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v")
MOST_SEED_LINES = 5
MOST_BANDS = 6
"""With more arms than this only means are drawn: ranges and single seeds would hide each other."""
MOST_DECADES = 1e4
"""How far below its highest value a logarithmic axis reaches: what collapsed to nothing would squeeze the rest."""
FLIPS = {
    "routing/flip_fraction": "by the updates of a step",
    "routing/flip_fraction_native": "would be, without replay",
    "routing/flip_fraction_sampler": "between sampler and learner",
}
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
_TWO_AND_FIVE = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
"""Between powers of ten, for a log axis that may span less than one."""


def style(number: int) -> dict[str, Any]:
    """Colour and line style of the arm with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}


# ------------------------------------------------------------------------------------------------- figures


def reward(series: Sequence[Series]) -> Figure | None:
    """Mean reward of the sampled replies."""
    return _curves_figure(series, [("reward/mean", "mean reward, smoothed")], window=window_of(series), log=False)


def accuracy(series: Sequence[Series]) -> Figure | None:
    """Held-out accuracy, sampled and greedy."""
    panels = [("eval/accuracy", "held-out accuracy, sampled"), ("eval/accuracy_greedy", "held-out accuracy, greedy")]
    figure = _curves_figure(series, panels, marked=True, log=False)
    for axis in figure.axes if figure else ():
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    return figure


def clipping(series: Sequence[Series], numbers: Sequence[ArmNumbers]) -> Figure | None:
    """Clip fractions: curves, and bars of their means."""
    keys = [("clip/fraction_tokens", "share of tokens clipped"), ("clip/fraction_sequences", "share of replies clipped")]  # fmt: skip
    if not _measured(series, keys):
        return None
    figure, axes = _figure(series, 3)
    for axis, (key, label) in zip(axes, keys, strict=False):
        _draw(axis, series, key, label, window=window_of(series))
    _bars(axes[2], numbers)
    return figure


def flips(series: Sequence[Series]) -> Figure | None:
    """Share of routed experts that changed."""
    panels = [(key, f"share of experts flipped\n{what}") for key, what in FLIPS.items() if _ever(series, key)]
    return _curves_figure(series, panels, window=window_of(series))


def spread(series: Sequence[Series], bins: Sequence[Sequence[LengthBin]]) -> Figure | None:
    """Variance of the log-ratio over tokens and over replies, against length."""
    if not any(bins):
        return None
    figure, (tokens, replies) = _figure(series, 2, sharey=True)
    for number, mine in enumerate(bins):
        length = [b.length for b in mine]
        look = {**style(number), "marker": MARKERS[number % len(MARKERS)], "markersize": 4.5}
        tokens.plot(length, [_positive(b.token_variance) for b in mine], **look)
        replies.plot(length, [_positive(b.reply_variance) for b in mine], **look)
        independent = [_positive(b.token_variance / b.length) for b in mine]
        replies.plot(length, independent, color=look["color"], linestyle=":", linewidth=1, alpha=0.8)
    for axis, label in ((tokens, "over tokens: $\\log r_t$"), (replies, "over replies: mean of $\\log r_t$")):
        axis.set(xlabel="reply length (tokens)", xscale="log", yscale="log")
        axis.set_title(label, fontsize=10)
        _plain_ticks(axis)
    tokens.set_ylabel("variance of the log-ratio")
    replies.plot([], [], color="0.4", linestyle=":", linewidth=1, label="variance over tokens / length")
    replies.legend(frameon=False, fontsize=8)
    return figure


def health(series: Sequence[Series]) -> Figure | None:
    """Gradient norm and entropy."""
    panels = [("grad/norm", "gradient norm, before clipping"), ("entropy/mean", "entropy (nats per token)")]
    figure = _curves_figure(series, panels)
    if figure and _ever(series, "grad/norm"):
        figure.axes[0].set_yscale("log", nonpositive="mask")
        figure.axes[0].yaxis.set_major_formatter(_PLAIN)
        figure.axes[0].yaxis.set_minor_formatter(_TWO_AND_FIVE)
    return figure


# ------------------------------------------------------------------------------------------------- panels


def _curves_figure(series: Sequence[Series], panels: Sequence[tuple[str, str]], *, window: int = 1, marked: bool = False, log: bool = True) -> Figure | None:  # fmt: skip
    panels = _measured(series, panels)
    if not panels:
        return None
    figure, axes = _figure(series, len(panels))
    for axis, (key, label) in zip(axes, panels, strict=True):
        _draw(axis, series, key, label, window=window, marked=marked, log=log)
    return figure


def _measured(series: Sequence[Series], panels: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The panels that have anything to show."""
    return [(key, label) for key, label in panels if any(run.values(key) for s in series for run in s.runs)]


def _ever(series: Sequence[Series], key: str) -> bool:
    """Whether a metric was ever anything but 0."""
    return any(value for s in series for run in s.runs for value in run.values(key))


def _figure(series: Sequence[Series], panels: int, **options: Any) -> tuple[Figure, Any]:
    """An empty figure with one legend above its panels."""
    lines = -(-sum(len(shown(s.label)) + 8 for s in series) // 100)
    figure = Figure(figsize=(10, 3.6 + 0.2 * lines), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, **options)[0]
    handles = [Line2D([], [], **style(number), linewidth=2) for number in range(len(series))]
    columns = max(1, -(-len(series) // lines))
    figure.legend(handles, [shown(s.label) for s in series], loc="outside upper center", ncols=columns, frameon=False, fontsize=9)  # fmt: skip
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw(axis: Any, series: Sequence[Series], key: str, label: str, *, window: int, marked: bool = False, log: bool = True) -> None:  # fmt: skip
    """A metric of every arm: the mean over seeds, the range between them, and single seeds if they are few; of many
    arms the means alone. `log`: on a logarithmic axis if its values span orders of magnitude."""
    drawn: list[Curve] = []
    for number, s in enumerate(series):
        curves = [curve(run, key, window) for run in s.runs]
        drawn += curves
        _arm(axis, band(curves), curves if len(series) <= MOST_BANDS else (), style(number), "o" if marked else None)
    axis.set(xlabel="sampled tokens", ylabel=label)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if log and wide(drawn):
        axis.set_yscale("log", nonpositive="mask")
        most = max(c.y.max() for c in drawn if len(c.y))
        axis.set_ylim(bottom=max(axis.get_ylim()[0], most / MOST_DECADES), top=2 * most)


def _arm(axis: Any, mean: Band | None, curves: Sequence[Curve], look: dict[str, Any], marker: str | None) -> None:
    colour = look["color"]
    if len(curves) > 1:
        for c in curves if len(curves) <= MOST_SEED_LINES else ():
            axis.plot(c.x, c.y, color=colour, linewidth=0.6, alpha=0.45)
        if mean is not None:
            axis.fill_between(mean.x, mean.low, mean.high, color=colour, alpha=0.13, linewidth=0)
    if mean is not None:
        axis.plot(mean.x, mean.mean, **look, linewidth=1.9, marker=marker if len(mean.x) <= 40 else None, markersize=3.5)  # fmt: skip


def _bars(axis: Any, numbers: Sequence[ArmNumbers]) -> None:
    """Mean clip fractions of tokens (left of a pair) and replies (right), on a log axis, with the range over seeds."""
    values: list[float] = []
    for number, arm in enumerate(numbers):
        for offset, name, fill in ((-0.2, "clip_tokens", 1.0), (0.2, "clip_sequences", 0.4)):
            mean: Number | None = getattr(arm, name)
            if mean is None:
                continue
            mine = [v for run in arm.finished if (v := getattr(run, name)) is not None]
            values += [v for v in mine if v > 0]
            axis.bar(number + offset, mean.value, 0.38, color=COLOURS[number % len(COLOURS)], alpha=fill)
            if len(mine) > 1 and min(mine) > 0:
                axis.plot([number + offset] * 2, [min(mine), max(mine)], color="0.15", linewidth=1)
            if len(numbers) <= MOST_BANDS:
                axis.annotate(f"{mean.value:.2g}", (number + offset, max([mean.value, *mine])), ha="center", va="bottom", fontsize=7, xytext=(0, 2), textcoords="offset points")  # fmt: skip
    turned = {"rotation": 20 if len(numbers) < 6 else 60, "ha": "right", "rotation_mode": "anchor"} if len(numbers) > 2 else {}  # fmt: skip
    axis.set_xticks(range(len(numbers)), [shown(a.label, 14) for a in numbers], fontsize=8, **turned)
    axis.set_ylabel("mean share clipped\n(dark: tokens, light: replies)")
    axis.grid(axis="x", visible=False)
    axis.set_xlim(-0.6, len(numbers) - 0.4)
    if values:
        axis.set_yscale("log", nonpositive="clip")
        axis.set_ylim(min(values) / 3, max(values) * 3)


def wide(curves: Sequence[Curve]) -> bool:
    """Whether values span orders of magnitude, so that a log axis is needed to see them."""
    positive = np.concatenate([np.empty(0), *(c.y[c.y > 0] for c in curves)])
    negative = any((c.y < 0).any() for c in curves)
    return bool(len(positive) and not negative and positive.max() > 30 * positive.min())


def shown(label: str, most: int = 40) -> str:
    """A label as text of a figure: short, and without the signs that begin mathematics."""
    text = label if len(label) <= most else label[: most - 1] + "…"
    return text.replace("$", r"\$")


def _positive(value: float) -> float:
    return value if value > 0 else float("nan")


def _plain_ticks(axis: Any) -> None:
    """Lengths as whole numbers, also between powers of ten."""
    axis.xaxis.set_major_formatter(_PLAIN)
    low, high = axis.get_xlim()
    if high < 10 * low:
        axis.xaxis.set_minor_formatter(_PLAIN)
        axis.tick_params(axis="x", which="minor", labelsize=8)

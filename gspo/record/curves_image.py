"""Plot the training curves of a run.

In: a run directory. Out: `curves.png` in it. Invariant: reads only `metrics.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo.record.run_dir import read_metrics

Curve = tuple[str, str, str]
"""Metric, label and color."""

PANELS: dict[str, list[Curve]] = {
    "Reward and accuracy": [
        ("reward/mean", "reward (training)", "C0"),
        ("eval/accuracy", "held-out, sampled", "C1"),
        ("eval/accuracy_greedy", "held-out, greedy", "C2"),
    ],
    "Clip fraction": [
        ("clip/fraction_tokens", "tokens", "C0"),
        ("clip/fraction_sequences", "completions", "C1"),
        ("groups/uniform_fraction", "uniform groups", "C7"),
    ],
    "Importance ratio": [
        ("ratio/token_log_std", "std of log-ratio, tokens", "C0"),
        ("ratio/sequence_log_std", "std of log-ratio, completions", "C1"),
    ],
    "Completion length and entropy": [("length/mean", "mean length (tokens)", "C0")],
}


def draw_curves(run: Path) -> Path:
    """Plot reward and held-out accuracy, clip fractions, the spread of the importance ratio, length and entropy."""
    import matplotlib  # Imported here, because it is slow to import and most commands draw nothing.

    matplotlib.use("Agg")  # Needs no display.
    import matplotlib.pyplot as plt

    rows = read_metrics(run)
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), constrained_layout=True)
    for axis, (title, curves) in zip((axes[0][0], axes[0][1], axes[1][0], axes[1][1]), PANELS.items(), strict=True):
        _panel(axis, rows, title, curves)
    _band(axes[0][0], rows, "C1")
    if any(r.get("ratio/sequence_log_std") for r in rows):
        axes[1][0].set_yscale("log")
    entropy_axis = axes[1][1].twinx()
    _panel(entropy_axis, rows, "", [("entropy/mean", "entropy (nats, right axis)", "C3")])
    for axis, location in ((axes[1][1], "upper left"), (entropy_axis, "upper right")):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc=location, frameon=False, fontsize=8)
        axis.margins(y=0.3)
    entropy_axis.grid(False)
    figure.suptitle(run.name)
    path = run / "curves.png"
    try:
        figure.savefig(path, dpi=110)
    except OSError:
        # A full disk leaves a truncated image, which no viewer can open.
        path.unlink(missing_ok=True)
        raise
    finally:
        plt.close(figure)
    return path


def _panel(axis: Any, rows: list[dict[str, Any]], title: str, curves: list[Curve]) -> None:
    for key, label, color in curves:
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        if points:
            few = len(points) < 40  # A curve with a single point is invisible without a marker.
            axis.plot(
                *zip(*points, strict=True),
                label=label,
                color=color,
                marker="o" if few else None,
                markersize=3,
                linewidth=1.4,
            )
    if title:
        axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.spines[["top"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)


def _band(axis: Any, rows: list[dict[str, Any]], color: str) -> None:
    points = [
        (r["step"], r["eval/accuracy_low"], r["eval/accuracy_high"])
        for r in rows
        if r.get("eval/accuracy_low") is not None
    ]
    if points:
        steps, low, high = zip(*points, strict=True)
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))

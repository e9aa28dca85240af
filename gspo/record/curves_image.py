"""The curves of a run as one PNG. In: a run directory. Out: `curves.png` in it. Reads nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo.record.run_dir import read_jsonl


def draw_curves(run: Path) -> Path:
    """Reward and held-out accuracy, clipping, ratio spread, length and entropy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_jsonl(run / "metrics.jsonl")
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), constrained_layout=True)
    _panel(axes[0][0], rows, "Is it learning?", [("reward/mean", "reward (training)", "C0"), ("eval/accuracy", "held-out, sampled", "C1"), ("eval/accuracy_greedy", "held-out, greedy", "C2")])  # fmt: skip
    _band(axes[0][0], rows, "C1")
    _panel(axes[0][1], rows, "How much is clipped?", [("clip/fraction_tokens", "tokens", "C0"), ("clip/fraction_sequences", "replies", "C1"), ("groups/uniform_fraction", "groups without a signal", "C7")])  # fmt: skip
    _panel(axes[1][0], rows, "How far does a step move the policy?", [("ratio/token_log_std", "spread of log-ratio, tokens", "C0"), ("ratio/sequence_log_std", "spread of log-ratio, replies", "C1")])  # fmt: skip
    if any(r.get("ratio/sequence_log_std") for r in rows):
        axes[1][0].set_yscale("log")
    _panel(axes[1][1], rows, "What do replies look like?", [("length/mean", "mean length (tokens)", "C0")])
    other = axes[1][1].twinx()
    _panel(other, rows, "", [("entropy/mean", "entropy (nats, right axis)", "C3")])
    for axis, place in ((axes[1][1], "upper left"), (other, "upper right")):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc=place, frameon=False, fontsize=8)
        axis.margins(y=0.3)
    other.grid(False)
    figure.suptitle(run.name)
    path = run / "curves.png"
    try:
        figure.savefig(path, dpi=110)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        plt.close(figure)
    return path


def _panel(axis: Any, rows: list[dict[str, Any]], title: str, curves: list[tuple[str, str, str]]) -> None:
    for key, label, colour in curves:
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        if points:
            few = len(points) < 40
            axis.plot(
                *zip(*points, strict=True),
                label=label,
                color=colour,
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


def _band(axis: Any, rows: list[dict[str, Any]], colour: str) -> None:
    points = [
        (r["step"], r["eval/accuracy_low"], r["eval/accuracy_high"])
        for r in rows
        if r.get("eval/accuracy_low") is not None
    ]
    if points:
        steps, low, high = zip(*points, strict=True)
        axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))

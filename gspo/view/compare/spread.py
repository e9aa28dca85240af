"""Variance of the log importance ratio over tokens and over completions, against completion length.

In: `rollouts/` of runs. Out: one `LengthBin` per range of lengths. Invariant: files are read line by line, at most
`MOST_FILES` of a run, evenly spaced; completions used by the first optimizer step of a batch are excluded, because
their log-ratios are exactly 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gspo.view.compare.curves import Floats, Run

MOST_FILES = 40
MOST_BYTES = 200 * 2**20
"""Limit per run. Long completions make large files, and then fewer files are enough."""
BINS = 8
FEWEST_COMPLETIONS = 16
"""Fewest completions in a bin; with fewer, the variance estimate is too noisy."""


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Completions of similar length. Variances are those of `log pi - log pi_old`."""

    length: float
    """Mean tokens per completion."""
    completions: int
    """Number of completions."""
    token_variance: float
    """Over the tokens of all completions."""
    completion_variance: float
    """Over completions, of the mean per completion, which is the log of a sequence ratio."""


def length_bins(runs: Sequence[Run]) -> list[LengthBin]:
    """Bin the runs' completions by length, with about the same number in each bin, from short to long."""
    sums_R3 = np.concatenate([np.empty((0, 3)), *(moments(run) for run in runs)])
    if len(sums_R3) < FEWEST_COMPLETIONS:
        return []
    count = min(BINS, len(sums_R3) // FEWEST_COMPLETIONS)
    length_R = sums_R3[:, 0]
    # unique: if many completions have the same length, several quantiles coincide.
    edges = np.unique(np.quantile(length_R, np.linspace(0, 1, count + 1)[1:-1]))
    bin_R = np.searchsorted(edges, length_R, side="right")
    groups = (sums_R3[bin_R == number] for number in range(len(edges) + 1))
    return [_bin(group) for group in groups if len(group) >= FEWEST_COMPLETIONS]


def _bin(sums_R3: Floats) -> LengthBin:
    length_R, sum_R, square_R = sums_R3.T
    # Log-ratios have a mean near 0, so the difference of squares below loses few digits.
    mean = sum_R.sum() / length_R.sum()
    return LengthBin(
        length=float(length_R.mean()),
        completions=len(length_R),
        # From sums, so that no token needs to be kept in memory.
        token_variance=float(square_R.sum() / length_R.sum() - mean**2),
        completion_variance=float((sum_R / length_R).var()),
    )


def moments(run: Run) -> Floats:
    """Length, sum and sum of squares of the log-ratios of each completion trained on after the first update."""
    rows = [row for file in _files(run) for row in _completions(file)]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def _files(run: Run) -> list[Path]:
    """Evenly spaced rollout files, up to the run's last step (a truncated run has more files than steps)."""
    files = sorted(f for f in (run.path / "rollouts").glob("*.jsonl") if f.stem.isdecimal() and int(f.stem) <= run.step)
    if not files:
        return []
    size = sum(f.stat().st_size for f in files) / len(files)
    count = max(1, min(len(files), MOST_FILES, int(MOST_BYTES // max(size, 1))))
    # The middle of each interval, so that neither the first nor the last steps dominate.
    return [files[int((i + 0.5) * len(files) / count)] for i in range(count)]


def _completions(file: Path) -> Iterator[tuple[float, float, float]]:
    with file.open("rb") as lines:
        for line in lines:
            # Before parsing, which is slow.
            if b'"trained": true' not in line or b'"computed": false' in line:
                continue
            log_ratio = _numbers(line, b"logp_new") - _numbers(line, b"logp_old")
            # Exact zeros mark the first update, whose policy is the old one.
            if log_ratio.any() and np.isfinite(log_ratio).all():
                yield len(log_ratio), float(log_ratio.sum()), float(log_ratio @ log_ratio)


def _numbers(line: bytes, field: bytes) -> Floats:
    """A field that is a list of numbers.

    Parsing only this field is much faster than parsing the line. The lists are the last fields, so the last match is
    the field even if a completion's text contains its name.
    """
    start = line.rindex(b'"' + field + b'": [') + len(field) + 4
    return np.array(json.loads(line[start : line.index(b"]", start) + 1]), dtype=np.float64)

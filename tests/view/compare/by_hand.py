"""Run directories with hand-written metrics, so that every number in a report can be computed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo import config as settings

STEPS = 4


def step_row(step: int, **values: Any) -> dict[str, Any]:
    """The metrics of a step; 100 tokens per step unless given in `values`."""
    row = {
        "step": step,
        "tokens/sampled": 100 * step,
        "reward/mean": 0.1 * step,
        "clip/fraction_tokens": 0.1,
        "clip/fraction_sequences": 0.2,
        "grad/norm": 1.0,
        "entropy/mean": 1.0 / step if step else None,
    }
    defaults = {key: value for key, value in row.items() if step or key in ("step", "tokens/sampled")}
    return defaults | {key.replace("__", "/"): value for key, value in values.items()}


def evaluation(value: float, *, low: float = 0.0, high: float = 1.0, greedy: float | None = None) -> dict[str, Any]:
    metrics = {"eval__accuracy": value, "eval__accuracy_low": low, "eval__accuracy_high": high}
    return metrics if greedy is None else metrics | {"eval__accuracy_greedy": greedy}


def rows_of(before: float, after: float, **values: Any) -> list[dict[str, Any]]:
    """Four steps with an evaluation before and after."""
    middle = [step_row(step, **values) for step in range(1, STEPS)]
    return [step_row(0, **evaluation(before)), *middle, step_row(STEPS, **values, **evaluation(after))]


def write_run(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    objective: str = "gspo",
    steps: int = STEPS,
    tokens: int = 0,
    last_event: Mapping[str, Any] | None = None,
    completions: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """A run directory as `gspo train` writes it, by default one that stopped cleanly."""
    tree = {
        "seed": seed,
        "steps": steps,
        "tokens": tokens,
        "model": {"path": "m"},
        "data": {"task": "addition"},
        "objective": {"name": objective},
    }
    timings = [{"step": row["step"], "time/step_s": 30.0} for row in rows if row["step"]]
    (path / "rollouts").mkdir(parents=True)
    (path / "config.toml").write_text(settings.to_toml(settings.from_tree(tree, where="test")))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timings))
    event = last_event or {"event": "stop", "step": rows[-1]["step"] if rows else 0, "signal": None}
    (path / "events.jsonl").write_text(json.dumps({"time": "now", "event": "start"}) + "\n" + json.dumps(event) + "\n")
    (path / "environment.json").write_text(json.dumps({"device": "cpu", "cores": 2, "packages": {"torch": "2.13.0"}}))
    for step, records in (completions or {}).items():
        (path / "rollouts" / f"{step:06d}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path

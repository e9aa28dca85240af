"""The metrics of an evaluation, and the timings of a step.

In: an `Evaluation`; a `Clock` and the usage of services. Out: flat dictionaries that are ready to be written;
`record/metric_definitions.py` defines every metric. Invariant: timings have their own dictionary, because
`metrics.jsonl` must not depend on the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.clock import Clock
from gspo.evaluation import Evaluation


def eval_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """The metrics of an evaluation on the held-out problems."""
    accuracy = evaluation.accuracy
    metrics = {
        "eval/unscored": evaluation.unscored,
        "eval/accuracy": accuracy.value,
        "eval/accuracy_low": accuracy.low,
        "eval/accuracy_high": accuracy.high,
        "eval/length_mean": evaluation.mean_length,
    }
    if evaluation.greedy is not None:
        metrics["eval/accuracy_greedy"] = evaluation.greedy.value
    return metrics


def step_timings(step: int, clock: Clock, usage: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Where the time of a step went, and what its rewards asked of models and endpoints."""
    timings: dict[str, Any] = {"step": step}
    timings |= {f"time/{name}_s": round(seconds, 6) for name, seconds in clock.seconds.items()}
    for function, sums in usage.items():
        counts = {name: int(count) for name, count in sums.items() if name != "seconds"}
        timings |= {f"service/{function}/{name}": count for name, count in counts.items()}
        if counts.get("requests"):
            timings[f"service/{function}/latency_s"] = round(sums["seconds"] / counts["requests"], 6)
    return timings

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


def eval_metrics(evaluation: Evaluation, name: str = "") -> dict[str, Any]:
    """The metrics of an evaluation on the held-out problems, or on the evaluation set of this name."""
    family = f"eval/{name}" if name else "eval"
    accuracy = evaluation.accuracy
    metrics = {
        f"{family}/unscored": evaluation.unscored,
        f"{family}/accuracy": accuracy.value,
        f"{family}/accuracy_low": accuracy.low,
        f"{family}/accuracy_high": accuracy.high,
        f"{family}/length_mean": evaluation.mean_length,
    }
    if evaluation.greedy is not None:
        metrics[f"{family}/accuracy_greedy"] = evaluation.greedy.value
    return metrics


def source_eval_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """The metrics of the held-out problems of each source in a mixture; empty without one."""
    metrics: dict[str, Any] = {}
    for name, part in evaluation.by_source().items():
        metrics |= eval_metrics(part, name)
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

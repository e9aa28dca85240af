"""The metrics of an evaluation, and the timings of a step.

In: an `Evaluation`; a `Clock` and the usage of services and of ranks. Out: flat dictionaries that are ready to be
written; `record/metric_definitions.py` defines every metric. Invariant: timings have their own dictionary, because
`metrics.jsonl` must not depend on the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.clock import Clock
from gspo.evaluation import Evaluation
from gspo.ranks.usage import RankUsage
from gspo.reduction import Family, Max, Mean, Reduced, Same, combined


def step_eval_metrics(evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The metrics of a step's evaluations: on the held-out problems (`""`) and on evaluation sets, by name."""
    metrics: dict[str, Any] = {}
    for name, evaluation in evaluations.items():
        metrics |= eval_metrics(evaluation, name)
        if not name:
            metrics |= source_eval_metrics(evaluation)
    return metrics


def eval_metrics(evaluation: Evaluation, name: str = "") -> dict[str, Any]:
    """The metrics of an evaluation on the held-out problems, or on the evaluation set of this name."""
    family = f"eval/{name}" if name else "eval"
    accuracy, reward = evaluation.accuracy, evaluation.reward
    metrics = {
        f"{family}/unscored": evaluation.unscored,
        f"{family}/accuracy": accuracy.value,
        f"{family}/accuracy_low": accuracy.low,
        f"{family}/accuracy_high": accuracy.high,
        f"{family}/reward": reward.value,
        f"{family}/reward_low": reward.low,
        f"{family}/reward_high": reward.high,
        f"{family}/length_mean": evaluation.mean_length,
    }
    if evaluation.greedy is not None:
        metrics |= {
            f"{family}/accuracy_greedy": evaluation.greedy.value,
            f"{family}/accuracy_greedy_low": evaluation.greedy.low,
            f"{family}/accuracy_greedy_high": evaluation.greedy.high,
        }
    return metrics


def source_eval_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """The metrics of the held-out problems of each source in a mixture; empty without one."""
    metrics: dict[str, Any] = {}
    for name, part in evaluation.by_source().items():
        metrics |= eval_metrics(part, name)
    return metrics


def rank_timings(ranks: Sequence[RankUsage]) -> dict[str, Any]:
    """Time and memory of each rank, and over all ranks. A single process has only its memory."""
    return combined([_usage(rank, usage, len(ranks)) for rank, usage in enumerate(ranks)])


def _usage(rank: int, usage: RankUsage, count: int) -> dict[str, Reduced]:
    memory_gb = round(usage.memory_bytes / 1e9, 6)
    peak: dict[str, Reduced] = {"memory/peak_gb": Max(memory_gb)}
    if count == 1:
        return peak
    numbers = {"rollout_s": round(usage.rollout_s, 6), "learn_s": round(usage.learn_s, 6), "memory_gb": memory_gb}
    return {
        **peak,
        "memory/mean_gb": Mean(memory_gb, 1),
        "ranks/rollout_max_s": Max(numbers["rollout_s"]),
        "ranks/rollout_mean_s": Mean(numbers["rollout_s"], 1),
        "ranks/learn_max_s": Max(numbers["learn_s"]),
        "ranks/learn_mean_s": Mean(numbers["learn_s"], 1),
        **{f"rank/NAME/{name}": Family({str(rank): Same(number)}) for name, number in numbers.items()},
    }


def step_timings(
    step: int, clock: Clock, usage: Mapping[str, Mapping[str, float]], lag: Mapping[str, float]
) -> dict[str, Any]:
    """Where the time of a step went, what its rewards asked of models and endpoints, and, with `rollout.max_lag`, how
    sampling ran next to it."""
    timings: dict[str, Any] = {"step": step}
    timings |= {f"time/{name}_s": round(seconds, 6) for name, seconds in clock.seconds.items()}
    timings |= {name: round(value, 6) for name, value in lag.items()}
    for function, sums in usage.items():
        counts = {name: int(count) for name, count in sums.items() if name != "seconds"}
        timings |= {f"service/{function}/{name}": count for name, count in counts.items()}
        if counts.get("requests"):
            timings[f"service/{function}/latency_s"] = round(sums["seconds"] / counts["requests"], 6)
    return timings

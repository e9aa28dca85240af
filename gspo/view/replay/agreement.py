"""Compare a recomputed step with the run's record of it.

In: the recomputed step and the recorded one. Out: an `Agreement`. Invariant: `exact` means that every log-prob equals
the recorded one to its 7 decimals and every metric of the step is reproduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo.learner.result import LearnResult
from gspo.objectives.objective import Objective
from gspo.record.ledger import BatchHistory
from gspo.record.metrics import step_metrics
from gspo.reduction import combined
from gspo.rollout.gather import CollectResult, RolloutState
from gspo.view.replay.records import StepRecord

LOGP_TOLERANCE = 1e-7
"""Log-probs are recorded with 7 decimals."""
METRIC_TOLERANCE = 1e-6
"""Relative. Metrics are float32 sums."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Difference between a recomputed step and the run's."""

    step: int
    tokens: int
    """Number of compared tokens."""
    logp_old: float
    """Largest difference of a token's old log-prob."""
    logp_new: float
    """Largest difference of a token's log-prob in the update that trained on it."""
    other_completions: int
    """Completions that only one of the two trained on, or computed."""
    metrics: int
    """Number of compared metrics; `0` if the run has not written the step's metrics."""
    worst_metric: str
    """The metric with the largest difference; empty if all agree."""
    worst_difference: float
    """Relative."""
    ledger: bool | None
    """Whether the ledger names the same prompts and the same version of the weights; `None` without one."""
    weights: bool | None
    """Whether the weights after the step are bitwise those of its checkpoint; `None` if there is none."""

    @property
    def exact(self) -> bool:
        """Whether everything agrees."""
        numbers = self.logp <= LOGP_TOLERANCE and self.worst_difference <= METRIC_TOLERANCE
        return numbers and not self.other_completions and self.ledger is not False and self.weights is not False

    @property
    def logp(self) -> float:
        """Largest difference of any log-prob; NaN if one is not finite."""
        return math.nan if math.isnan(self.logp_old + self.logp_new) else max(self.logp_old, self.logp_new)


def agreement(
    step: int,
    objective: Objective,
    recorded: StepRecord,
    learned: LearnResult | None,
    metrics: Mapping[str, Any] | None,
    history: BatchHistory | None,
    weights: bool | None,
) -> Agreement:
    """Compare a step with its record. `history` is its batch in the ledger. `weights` says whether they are those of
    the step's checkpoint."""
    old, new, tokens, other = _logp_differences(recorded, learned)
    # The metrics of a batch do not depend on its version and on its place in the data order, which are not known here.
    collected = CollectResult(rollouts=recorded.rollouts, version=0, after=RolloutState())
    recomputed = combined([step_metrics(objective, collected, learned)])
    routed = any(c.routes for g in recorded.rollouts.groups for c in g.completions)
    # These need the sampler's experts, which are not recorded.
    skipped = () if routed else ("routing/flip_fraction_sampler", "routing/sampler_bytes")
    # Padding depends on how a batch is split into micro-batches, which depends on the machine.
    # An earlier version did not write all metrics.
    keys = [k for k in recomputed if k in (metrics or {}) and k not in skipped and not k.startswith("padding/")]
    differences = {k: _relative(recomputed[k], (metrics or {}).get(k)) for k in keys}
    worst = max(differences, key=lambda k: differences[k], default="")
    return Agreement(
        step=step,
        tokens=tokens,
        logp_old=old,
        logp_new=new,
        other_completions=other,
        metrics=len(keys),
        worst_metric=worst if worst and differences[worst] else "",
        worst_difference=differences.get(worst, 0.0),
        ledger=None if history is None else _as_in_ledger(recorded, history),
        weights=weights,
    )


def _as_in_ledger(recorded: StepRecord, history: BatchHistory) -> bool:
    sampled = recorded.rollouts.sampled
    # A prompt whose completions were all dropped has no record (`rollout.over_lag`).
    prompts = {group.prompt.id for group in sampled} <= set(history.prompts or ())
    # A batch that a checkpoint has kept was issued by an earlier process, and a resume makes that line void.
    versions = {line["version"] for line in history.issued[-1:]}
    return prompts and (not versions or {c.version for g in sampled for c in g.completions} == versions)


def _logp_differences(recorded: StepRecord, learned: LearnResult | None) -> tuple[float, float, int, int]:
    """(largest old difference, largest new difference, compared tokens, completions that only one of the two has)."""
    records = dict(recorded.trained)
    if learned is None:
        return 0.0, 0.0, 0, len(records)
    old_N = learned.tokens.logp_old_N.tolist()
    new_N = learned.tokens.logp_N.tolist()
    computed_N = learned.computed_N.tolist()
    worst = [0.0, 0.0]
    start = tokens = other = 0
    for sample in learned.samples:
        end = start + sample.completion.sampled_count
        record = records.pop((sample.group, sample.sample), None)
        # A completion that neither of the two computed has no log-probs to compare.
        if record is None or len(record.logp_old) != sum(computed_N[start:end]):
            other += 1
        else:
            tokens += len(record.logp_old)
            for i, (logp_N, written) in enumerate(((old_N, record.logp_old), (new_N, record.logp_new))):
                worst[i] = _largest(worst[i], logp_N[start : start + len(written)], written)
        start = end
    return worst[0], worst[1], tokens, other + len(records)


def _largest(so_far: float, recomputed: Any, written: Any) -> float:
    """The largest difference. NaN is sticky, because `max` would drop it depending on the order of its arguments."""
    differences = [_difference(a, b) for a, b in zip(recomputed, written, strict=True)]
    return math.nan if math.isnan(so_far) or any(map(math.isnan, differences)) else max([so_far, *differences])


def _difference(recomputed: float, written: float | None) -> float:
    """A value that is not finite is recorded as null, so the two agree if neither is finite."""
    if written is None:
        return math.nan if math.isfinite(recomputed) else 0.0
    return abs(recomputed - written)


def _relative(recomputed: Any, written: Any) -> float:
    undefined = recomputed is None or (isinstance(recomputed, float) and not math.isfinite(recomputed))
    if written is None or undefined:
        # A value that only one of the two has is never within a tolerance.
        return 0.0 if undefined and written is None else math.inf
    # A sum of terms that cancel (a policy loss) is as exact as its terms, which are about 1.
    return abs(float(recomputed) - float(written)) / max(abs(float(written)), 1e-2)

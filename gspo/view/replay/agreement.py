"""Whether a step that was learned from again went as it went in the run.

In: what was learned now, and what the run wrote down then. Out: an `Agreement`. Invariant: `exact` means that every
log-probability is the run's to its 7 written decimals and that every metric of the step came out again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo.learner.result import LearnResult
from gspo.objectives.objective import Objective
from gspo.record.metrics import step_metrics
from gspo.rollout.gather import CollectResult
from gspo.view.replay.records import StepRecord

LOGP = 1e-7
"""Log-probabilities are written with 7 decimals."""
RELATIVE = 1e-6
"""Metrics are sums in float32."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far a step that was learned from again is from the run's."""

    step: int
    tokens: int
    """Tokens that were compared."""
    logp_old: float
    """Largest difference of a token's old log-probability."""
    logp_new: float
    """The same for the log-probability at the moment the token was used."""
    other_replies: int
    """Replies that only one of the two learned from."""
    metrics: int
    """Metrics that were compared; 0: the run has not written the step's yet."""
    worst_metric: str
    """The metric that is farthest off; empty: none is off."""
    worst_difference: float
    """Relative."""

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return self.logp <= LOGP and not self.other_replies and self.worst_difference <= RELATIVE

    @property
    def logp(self) -> float:
        """Largest difference of any log-probability; NaN if one is not finite."""
        return math.nan if math.isnan(self.logp_old + self.logp_new) else max(self.logp_old, self.logp_new)


def agreement(step: int, objective: Objective, recorded: StepRecord, learned: LearnResult | None, metrics: Mapping[str, Any] | None) -> Agreement:  # fmt: skip
    """Compare a step with its record."""
    old, new, tokens, other = _logp_differences(recorded, learned)
    found = step_metrics(objective, CollectResult(gathered=recorded.gathered, cursor=0), learned)
    routed = any(c.routes for g in recorded.gathered.groups for c in g.completions)
    skipped = () if routed else ("routing/flip_fraction_sampler",)  # the record has no experts to count it by
    # How a batch is cut up depends on the machine.
    keys = [k for k in found if metrics is not None and k not in skipped and not k.startswith("padding/")]
    differences = {k: _relative(found[k], (metrics or {}).get(k)) for k in keys}
    worst = max(differences, key=lambda k: differences[k], default="")
    return Agreement(
        step=step,
        tokens=tokens,
        logp_old=old,
        logp_new=new,
        other_replies=other,
        metrics=len(keys),
        worst_metric=worst if worst and differences[worst] else "",
        worst_difference=differences.get(worst, 0.0),
    )


def _logp_differences(recorded: StepRecord, learned: LearnResult | None) -> tuple[float, float, int, int]:
    """(old, new, tokens, replies only one of the two has)."""
    there = dict(recorded.learnt)
    if learned is None:
        return 0.0, 0.0, 0, len(there)
    old_N, new_N = learned.tokens.logp_old_N.tolist(), learned.tokens.logp_N.tolist()
    worst, start, tokens, other = [0.0, 0.0], 0, 0, 0
    for reply in learned.samples:
        end = start + len(reply.completion.token_ids)
        record = there.pop((reply.group, reply.sample), None)
        if record is None or len(record.logp_old) != end - start:
            other += 1
        else:
            tokens += end - start
            for i, (mine, theirs) in enumerate(((old_N, record.logp_old), (new_N, record.logp_new))):
                worst[i] = _largest(worst[i], mine[start:end], theirs)
        start = end
    return worst[0], worst[1], tokens, other + len(there)


def _largest(so_far: float, mine: Any, theirs: Any) -> float:
    """NaN wins: a number that is none is no agreement, unless both are none (written as null)."""
    gaps = [0.0 if b is None and not math.isfinite(a) else math.nan if b is None else abs(a - b) for a, b in zip(mine, theirs, strict=True)]  # fmt: skip
    return math.nan if math.isnan(so_far) or any(map(math.isnan, gaps)) else max(so_far, *gaps)


def _relative(found: Any, written: Any) -> float:
    nothing = found is None or (isinstance(found, float) and not math.isfinite(found))
    if written is None or nothing:
        return 0.0 if nothing and written is None else math.inf
    # A sum of terms that cancel (a policy loss) is as exact as its terms, which are about 1.
    return abs(float(found) - float(written)) / max(abs(float(written)), 1e-2)

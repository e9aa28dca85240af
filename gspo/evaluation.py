"""pass@k and avg@k on held-out problems, with intervals, by the same rollout and reward code as training.

In: prompts and an engine. Out: an `Evaluation`. Invariants: an unscored completion is neither right nor wrong, so it is
excluded and counted, and so is a problem without any scored completion. A run is never evaluated on problems that it
has trained on, nor on problems that ask the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.reward.reward import RewardPool
from gspo.rollout.engine import Engine
from gspo.types import Completion, Prompt, Sampling, Score


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Completions and scores of a set of problems."""

    prompts: Sequence[Prompt]
    completions: Sequence[Sequence[Completion]]
    scores: Sequence[Sequence[Score]]
    greedy: Estimate | None = None
    """Accuracy of one greedy completion per problem; None if it was not measured."""

    @property
    def verdicts(self) -> list[list[bool]]:
        """Correctness of the judged completions, for each problem that has any."""
        judged = [[s.correct for s in scores if s.correct is not None] for scores in self.scores]
        return [v for v in judged if v]

    @property
    def unscored(self) -> int:
        """Completions without a verdict: unscored, or the deciding reward abstained."""
        return sum(s.correct is None for scores in self.scores for s in scores)

    @property
    def mean_length(self) -> float:
        """Mean sampled tokens per completion."""
        lengths = [c.sampled_count for completions in self.completions for c in completions]
        return sum(lengths) / len(lengths) if lengths else math.nan

    def avg_at(self, k: int) -> Estimate:
        """Mean correctness of the first k judged completions of a problem, over problems that have k."""
        return interval([sum(v[:k]) / k for v in self.verdicts if len(v) >= k])

    def pass_at(self, k: int) -> Estimate:
        """Probability that at least one of k completions is correct: the unbiased estimator 1 - C(n-c, k) / C(n, k)."""
        counts = [(sum(v), len(v)) for v in self.verdicts if len(v) >= k]
        return interval([1 - math.comb(n - c, k) / math.comb(n, k) for c, n in counts])

    @property
    def accuracy(self) -> Estimate:
        """Mean correctness over all judged completions of a problem, then over problems."""
        return self.pass_at(1)


def evaluate(
    engine: Engine,
    rewards: RewardPool,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    greedy: bool = False,
    sampling: Sampling,
    seed: int,
    stream: str,
    version: int = 0,
) -> Evaluation:
    """Sample `samples` completions per prompt, and a greedy one if asked, in one call, and score them."""
    completions = engine.generate(
        prompts,
        samples=samples + greedy,
        sampling=dataclasses.replace(sampling, greedy_last=greedy),
        seed=seed,
        stream=stream,
        version=version,
    )
    scores = rewards.score(list(zip(prompts, completions, strict=True)))
    sampled = Evaluation(
        prompts=prompts, completions=[c[:samples] for c in completions], scores=[s[:samples] for s in scores]
    )
    if not greedy:
        return sampled
    greedy_only = Evaluation(
        prompts=prompts, completions=[c[samples:] for c in completions], scores=[s[samples:] for s in scores]
    )
    return dataclasses.replace(sampled, greedy=greedy_only.accuracy)


def interval(values: Sequence[float]) -> Estimate:
    """The 95 % Wilson score interval over problems."""
    n = len(values)
    if not n:
        return Estimate(value=math.nan, low=math.nan, high=math.nan)
    # A value in [0, 1] varies no more than a coin of the same mean, so the binomial interval is not too narrow.
    # Unlike a normal or bootstrap interval it keeps a width at 0 % and 100 %.
    p = sum(values) / n
    z = 1.959964  # the 97.5 % quantile of the normal distribution
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(value=p, low=max(0.0, min(p, center - half)), high=min(1.0, max(p, center + half)))

"""pass@k and avg@k on held-out problems, with intervals, by the same rollout and reward code as training.

In: prompts and an engine. Out: an `Evaluation`. Invariants: an unscored completion is neither right nor wrong, so it is
excluded and counted, and so is a problem without any scored completion. A run is never evaluated on problems that it
has trained on, nor on duplicates of them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.clock import Clock
from gspo.rollout.engine import Engine, GenerateOptions
from gspo.rollout.gather import Scorer, sample_groups
from gspo.student_t import t_point
from gspo.types import Group, Prompt, Sampling, Score


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True, kw_only=True)
class MeanEstimate:
    """A mean with its 95 % interval; `low` and `high` are `None` if there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scored completions of a set of problems."""

    groups: Sequence[Group]
    greedy_groups: Sequence[Group] | None = None
    """The same problems with one greedy completion each; None if greedy decoding was not measured."""

    @property
    def greedy(self) -> Estimate | None:
        """Accuracy of one greedy completion per problem; None if it was not measured."""
        return None if self.greedy_groups is None else Evaluation(groups=self.greedy_groups).accuracy

    def by_source(self) -> dict[str, Evaluation]:
        """The evaluation of each named source of the problems; empty if they have no names."""
        greedy = self.greedy_groups

        def of(name: str, groups: Sequence[Group]) -> list[Group]:
            return [group for group in groups if group.prompt.source == name]

        names = dict.fromkeys(group.prompt.source for group in self.groups if group.prompt.source)
        return {
            name: Evaluation(groups=of(name, self.groups), greedy_groups=None if greedy is None else of(name, greedy))
            for name in names
        }

    @property
    def verdicts(self) -> list[list[bool]]:
        """Correctness of the judged completions, for each problem that has any."""
        judged = [[s.correct for s in group.scores if s.correct is not None] for group in self.groups]
        return [v for v in judged if v]

    @property
    def reward(self) -> MeanEstimate:
        """Mean reward over the scored completions of a problem, then over problems.

        With partial credit it moves where accuracy stays at 0 %."""
        rewards = [[s.reward for s in group.scores if s.reward is not None] for group in self.groups]
        return mean_interval([statistics.fmean(r) for r in rewards if r])

    @property
    def unscored(self) -> int:
        """Completions without a verdict: unscored, or the deciding reward abstained."""
        return sum(s.correct is None for s in self.scores)

    @property
    def scores(self) -> list[Score]:
        """The scores of all completions, in order."""
        return [s for group in self.groups for s in group.scores]

    @property
    def mean_length(self) -> float:
        """Mean sampled tokens per completion."""
        lengths = [c.sampled_count for group in self.groups for c in group.completions]
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
    rewards: Scorer,
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
    groups = sample_groups(
        engine,
        rewards,
        prompts,
        GenerateOptions(
            samples=samples + 1 if greedy else samples,  # the greedy completion comes last
            sampling=dataclasses.replace(sampling, greedy_last=greedy),
            seed=seed,
            stream=stream,
            version=version,
        ),
        clock=Clock(),  # an evaluation is timed as a whole; its sampling is not part of a step's rollout time
    )
    if not greedy:
        return Evaluation(groups=groups)
    return Evaluation(
        groups=[_part(group, slice(samples)) for group in groups],
        greedy_groups=[_part(group, slice(samples, None)) for group in groups],
    )


def _part(group: Group, which: slice) -> Group:
    return dataclasses.replace(group, completions=group.completions[which], scores=group.scores[which])


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


def mean_interval(values: Sequence[float]) -> MeanEstimate:
    """The 95 % t-interval over problems."""
    if not values:
        return MeanEstimate(value=math.nan)
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    # Equal values say nothing about how far apart those of other problems would be, so there is no interval.
    if not spread:
        return MeanEstimate(value=mean)
    half = t_point(len(values) - 1) * spread / math.sqrt(len(values))
    return MeanEstimate(value=mean, low=mean - half, high=mean + half)

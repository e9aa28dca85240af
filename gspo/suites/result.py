"""The result of a benchmark: estimates with intervals, rates of failure, and a breakdown.

In: a suite, its problems and their scored completions. Out: numbers, as text and for JSON. Invariant: every estimate is
over problems, with a 95 % interval; a number that a protocol does not define is absent.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.evaluation import Estimate, Evaluation, interval
from gspo.suites.suite import SuiteProblem, SuiteSource
from gspo.types import Group, StopReason


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """A finished evaluation on a suite."""

    source: SuiteSource
    model: str
    problems: Sequence[SuiteProblem]
    evaluation: Evaluation
    """One group per problem, in the same order."""
    samples: int
    deviations: Mapping[str, Any]
    """Settings that differ from the protocol, with their values."""
    contaminated: Sequence[str]
    """Ids of problems that were excluded because the model was trained on them."""

    @property
    def numbers(self) -> dict[str, Estimate]:
        """avg@n, pass@k, and maj@n where answers can be compared."""
        found = {f"avg@{self.samples}": self.evaluation.accuracy}
        # With fewer completions than the protocol's, the largest k that they allow.
        ks = [k for k in self.source.suite.ks if 1 < k <= self.samples] or [self.samples] * (self.samples > 1)
        found |= {f"pass@{k}": self.evaluation.pass_at(k) for k in ks}
        if self.samples > 1 and self.source.suite.scorer.votes:
            found[f"maj@{self.samples}"] = interval(
                [float(v) for g in self.evaluation.groups for v in self._majority(g)]
            )
        return found

    def _majority(self, group: Group) -> list[bool]:
        """Whether the most frequent answer is correct; of equally frequent ones, the first. Empty without a verdict."""
        if all(score.correct is None for score in group.scores):
            return []
        answers = [self.source.suite.scorer.answer(c.text) for c in group.completions]
        voted = [(a, s.correct) for a, s in zip(answers, group.scores, strict=True) if a is not None]
        if not voted:
            return [False]
        winner = Counter(answer for answer, _ in voted).most_common(1)[0][0]
        return [next(bool(correct) for answer, correct in voted if answer == winner)]

    @property
    def truncated(self) -> float:
        """Share of completions that reached the token limit."""
        return self._share(c.stop is StopReason.LENGTH for g in self.evaluation.groups for c in g.completions)

    @property
    def unextracted(self) -> float:
        """Share of completions without an answer in the form that the protocol asks for."""
        answer = self.source.suite.scorer.answer
        return self._share(answer(c.text) is None for g in self.evaluation.groups for c in g.completions)

    def _share(self, found: Iterator[bool]) -> float:
        values = list(found)
        return sum(values) / len(values)

    def breakdown(self) -> dict[str, dict[str, tuple[int, Estimate]]]:
        """By column and value: the number of problems, and their avg@n."""
        tables: dict[str, dict[str, list[Group]]] = {}
        for problem, group in zip(self.problems, self.evaluation.groups, strict=True):
            for column, value in problem.breakdown.items():
                tables.setdefault(column, {}).setdefault(value, []).append(group)
        return {
            column: {
                value: (len(groups), Evaluation(groups=groups).accuracy) for value, groups in sorted(values.items())
            }
            for column, values in tables.items()
        }

    def lines(self) -> Iterator[str]:
        """The result as text."""
        suite = self.source.suite
        of = f" of {suite.count}" if suite.count and len(self.problems) != suite.count else ""
        each = f"{self.samples} completion{'s' * (self.samples != 1)} each"
        yield f"{self.model}: {suite.title}, {len(self.problems)}{of} problems, {each}"
        for name, estimate in self.numbers.items():
            yield f"  {name:<8} {estimate}"
        yield f"  {self.truncated:.1%} of the completions were truncated"
        yield f"  {self.unextracted:.1%} have no answer in the form that the protocol asks for"
        if self.evaluation.unscored:
            failure = next((f"; the first failure: {s.failure}" for s in self.evaluation.scores if s.failure), "")
            yield f"  {self.evaluation.unscored} completions have no verdict (unscored) and are excluded{failure}"
        for column, values in self.breakdown().items():
            yield f"  by {column}:"
            width = max(map(len, values))
            yield from (f"    {value:<{width}}  {estimate}  ({n})" for value, (n, estimate) in values.items())
        if count := len(self.contaminated):
            problems = "1 problem is" if count == 1 else f"{count} problems are"
            yield f"  {problems} excluded, because the training data contains them"
        if self.deviations:
            changed = ", ".join(f"{key} = {value}" for key, value in self.deviations.items())
            yield f"  Not the published protocol: {changed}. Do not compare it with published scores."

    def as_data(self) -> dict[str, Any]:
        """The result in JSON's types."""
        suite = self.source.suite
        return {
            "suite": self.source.name,
            "model": self.model,
            "problems": len(self.problems),
            "samples": self.samples,
            "numbers": {name: dataclasses.asdict(estimate) for name, estimate in self.numbers.items()},
            "truncated": self.truncated,
            "unextracted": self.unextracted,
            "unscored": self.evaluation.unscored,
            "mean_length": self.evaluation.mean_length,
            "breakdown": {
                column: {value: {"problems": n, **dataclasses.asdict(e)} for value, (n, e) in values.items()}
                for column, values in self.breakdown().items()
            },
            "contaminated": list(self.contaminated),
            "protocol": {
                "source": suite.source,
                "samples": suite.samples,
                "temperature": suite.temperature,
                "top_p": suite.top_p,
                "max_tokens": suite.max_tokens,
            },
            "deviations": dict(self.deviations),
        }

"""Which training problem is sampled next.

In: the number of problems of each source, their weights, the run's seed and, with `data.sampling = "difficulty"`, the
measured pass rates. Out: indices of problems. Invariants: the next prompts are a function of the seed, the number of
prompts taken so far and the pass rates, so nothing else has to be saved. Each source is visited in epochs: every
problem once, in an order of its own. After any number of prompts, the share of each source is exact up to a bounded
number of prompts.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gspo.config import DataConfig
from gspo.data.difficulty import Difficulty
from gspo.types import Prompt


class PromptOrder:
    """Endless seeded order over `count` prompts. Every epoch has its own permutation, so one integer is the whole
    state."""

    def __init__(self, count: int, seed: int | str) -> None:
        assert count > 0
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._permutation = [0]

    def take(self, cursor: int, n: int) -> list[int]:
        """Indices of the `n` prompts from position `cursor`; the next cursor is `cursor + n`."""
        assert cursor >= 0
        assert n >= 0
        taken: list[int] = []
        while len(taken) < n:
            epoch, start = divmod(cursor + len(taken), self.count)
            taken += self._order(epoch)[start : start + n - len(taken)]
        return taken

    def _order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:  # a cache of one epoch; the result does not depend on it
            self._permutation = list(range(self.count))
            # Seeded by text: Python hashes it with SHA-512, so that neighboring seeds and epochs are unrelated.
            random.Random(f"{self.seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation


class Mixture:
    """Interleaves sources in proportion to their weights: prompt k of a source is due at time (k + 1/2) / share, and
    prompts are taken in the order of these times.

    So after n prompts the number of those from any of S sources is within (S + 1) / 2 of n times its share."""

    def __init__(self, weights: Sequence[float]) -> None:
        # Exact fractions of the decimals that a recipe contains: no rounding error accumulates over a long run.
        exact = [Fraction(repr(weight)) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]

    def counts(self, n: int) -> list[int]:
        """How many of the first `n` prompts come from each source."""
        # At a time T, a source has taken its share of T prompts, rounded to the nearest integer. T is early enough that
        # this is not more than n in total, and late enough that few remain.
        early = max(0, n - len(self._shares))
        taken = [max(0, math.ceil(early * share - Fraction(1, 2))) for share in self._shares]
        for _ in range(n - sum(taken)):
            taken[self._next(taken)] += 1
        return taken

    def take(self, start: int, n: int) -> list[int]:
        """The sources of the `n` prompts after the first `start`."""
        taken = self.counts(start)
        sources = []
        for _ in range(n):
            sources.append(source := self._next(taken))
            taken[source] += 1
        return sources

    def _next(self, taken: Sequence[int]) -> int:
        return min(range(len(taken)), key=lambda s: ((2 * taken[s] + 1) / self._shares[s], s))


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Problems that were taken in order."""

    indices: Sequence[int]
    difficulty: Difficulty | None = None
    """The given state with the problems that were skipped on the way; None if sampling is uniform."""


class SamplingOrder:
    """The order over all training problems of a run, which are grouped by source."""

    def __init__(
        self, counts: Sequence[int], *, names: Sequence[str], weights: Sequence[float], seed: int, floor: float
    ) -> None:
        self._mixture = Mixture(weights)
        self._floor = floor
        self._starts = [sum(counts[:i]) for i in range(len(counts))]
        self._seeds = [f"{seed}/{name}" if name else str(seed) for name in names]
        self._orders = [PromptOrder(count, own) for count, own in zip(counts, self._seeds, strict=True)]

    @classmethod
    def of(cls, train: Sequence[Prompt], config: DataConfig, seed: int) -> SamplingOrder:
        """The order over the training problems of a run."""
        counts = Counter(prompt.source for prompt in train)
        names = list(config.sources)
        weights = [source.weight for source in config.mix.values()] or [1.0]
        floor = config.difficulty_floor
        return cls([counts[name] for name in names], names=names, weights=weights, seed=seed, floor=floor)

    def take(self, cursor: int, n: int, difficulty: Difficulty | None = None) -> Taken:
        """The `n` problems after the first `cursor`. With `difficulty`, problems without a training signal are skipped
        at random, and another problem of the same source takes their place."""
        position = self._mixture.counts(cursor)
        skipped = [0] * len(position) if difficulty is None else list(difficulty.skipped)
        indices = []
        for source in self._mixture.take(cursor, n):
            index = self._visit(source, position[source] + skipped[source])
            while difficulty is not None and self._skips(source, position[source] + skipped[source], index, difficulty):
                skipped[source] += 1
                index = self._visit(source, position[source] + skipped[source])
            indices.append(index)
            position[source] += 1
        after = difficulty and dataclasses.replace(difficulty, skipped=tuple(skipped))
        return Taken(indices=indices, difficulty=after)

    def _visit(self, source: int, visit: int) -> int:
        return self._starts[source] + self._orders[source].take(visit, 1)[0]

    def _skips(self, source: int, visit: int, index: int, difficulty: Difficulty) -> bool:
        return random.Random(f"{self._seeds[source]}/skip/{visit}").random() >= difficulty.chance(index, self._floor)

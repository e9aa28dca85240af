"""Sample and score groups of completions (`sample_groups`), and gather a batch of them to train on (`Gatherer`).

In: prompts, an engine and a scorer. Out: groups; for a training step, a `CollectResult`. Invariant: a group is
kept or discarded by its rewards before length shaping. When the budget runs out, the step trains on what was kept;
nothing that was discarded comes back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gspo.clock import Clock
from gspo.data.difficulty import Difficulty
from gspo.data.order import Taken
from gspo.rollout.engine import DecodeStats, Engine, GenerateOptions
from gspo.types import Completion, Group, Prompt, Score, Status


class Scorer(Protocol):
    """Scores completions. In a run it is the `RewardPool`, which this stage does not import because it comes later."""

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[Score]]:
        """One score per completion, in the order of the prompts and completions."""
        ...


def sample_groups(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    *,
    clock: Clock,
) -> list[Group]:
    """Sample completions of each prompt and score them. Training, evaluation and the doctor all sample here.

    The clock measures sampling as `rollout` and scoring as `reward`."""
    with clock.measure("rollout"):
        completions_P = engine.generate(prompts, options)
    with clock.measure("reward"):
        scores_P = scorer.score(list(zip(prompts, completions_P, strict=True)))
    scored = zip(prompts, completions_P, scores_P, strict=True)
    return [Group(prompt=p, completions=c, scores=s) for p, c, s in scored]


@dataclass(frozen=True, kw_only=True)
class RolloutState:
    """How far sampling has come. With the seed and the weights, it determines the next batch."""

    batch: int = 0
    """Batches collected so far. The next one has this number plus 1, and its random streams are keyed by it."""
    cursor: int = 0
    """Prompts taken so far. The data order is a function of it."""
    difficulty: Difficulty | None = None
    """The pass rates measured in these batches, on which the data order depends, too; None if sampling is uniform."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The groups of a batch."""

    groups: tuple[Group, ...]
    discarded: tuple[Group, ...]

    @property
    def sampled(self) -> tuple[Group, ...]:
        """All groups, discarded ones included."""
        return self.groups + self.discarded


@dataclass(frozen=True, kw_only=True)
class DroppedCompletion:
    """A completion that was dropped because it was too long for its turns (`rollout.over_lag = "drop"`)."""

    prompt_id: str
    sample: int
    tokens: int
    """Its sampled tokens, which no step trains on."""


@dataclass(frozen=True, kw_only=True)
class CollectResult:
    """A collected batch, which knows where it comes from: it may be trained on later than it was sampled."""

    rollouts: RolloutBatch
    version: int
    """Optimizer steps behind the weights when sampling started. A completion carries its own version too."""
    after: RolloutState
    """Where sampling stands after this batch, so a run that has trained on it continues with the next one."""
    weights: int | None = None
    """The training step after which the weights were taken; None if sampling and training take turns."""
    wanted: int | None = None
    """How many groups a full batch has; None if unknown."""
    decoded: DecodeStats | None = None
    """What decoding cost; None if the engine does not know."""
    decoded_tokens: int | None = None
    """The tokens that it sampled, if not those of this batch: a turn samples parts of several batches."""
    pass_rates: tuple[float, ...] = ()
    """Estimated pass rates of the sampled problems before this batch; empty if sampling is uniform."""
    skipped: int = 0
    """Visited problems that were not sampled, because of their pass rates."""
    dropped: tuple[DroppedCompletion, ...] = ()
    """Completions that were dropped. They are in no group, and a prompt without any other has none."""

    @property
    def batch(self) -> int:
        """The number of this batch, from 1."""
        return self.after.batch

    @property
    def missing(self) -> int:
        """How many groups the batch has less than a full one."""
        return max(0, (self.wanted or 0) - len(self.rollouts.groups))

    @property
    def tokens(self) -> int:
        """Sampled tokens of all completions, discarded and dropped ones included."""
        in_vain = sum(dropped.tokens for dropped in self.dropped)
        return in_vain + sum(c.sampled_count for group in self.rollouts.sampled for c in group.completions)

    @property
    def prompts(self) -> list[str]:
        """The prompts that were sampled; at the end those without a group, because all of their completions were
        dropped."""
        ids = [group.prompt.id for group in self.rollouts.sampled] + [dropped.prompt_id for dropped in self.dropped]
        return list(dict.fromkeys(ids))


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """Prompts to sample next."""

    cursor: int
    count: int
    difficulty: Difficulty | None = None


class Gatherer:
    """Iterates over requests for prompts until `want` groups are kept, with at most `budget` times `want` prompts.

    Without a budget (`"full"`) it gives up after `patience` prompts in a row without a group to keep, or once more than
    `max_unscored` of the completions are unscored: a broken reward never fills a batch."""

    def __init__(
        self,
        *,
        want: int,
        budget: int | Literal["full"],
        start: RolloutState,
        keep: Callable[[Group], bool],
        patience: int,
        max_unscored: float,
    ) -> None:
        self.batch = start.batch + 1
        """The number of the batch that is gathered."""
        self._start = start
        self._cursor = start.cursor
        self._difficulty = start.difficulty
        self._want = want
        self._limit = math.inf if budget == "full" else budget * want
        self._keep = keep
        self._patience = math.inf if budget != "full" else patience
        self._max_unscored = 1.0 if budget != "full" else max_unscored
        self._in_vain = 0
        """Groups in a row that were discarded."""
        self._kept: list[Group] = []
        self._discarded: list[Group] = []
        self._indices: list[int] = []
        self._sampled: list[Group] = []

    def __iter__(self) -> Iterator[PromptRequest]:
        requested = 0
        while len(self._kept) < self._want and requested < self._limit and not self._hopeless:
            count = int(min(self._want - len(self._kept), self._limit - requested))
            requested += count
            # The pass rates are those before the batch: its refills depend on nothing that it has measured itself.
            yield PromptRequest(cursor=self._cursor, count=count, difficulty=self._difficulty)
            self._cursor += count

    def add(self, groups: Sequence[Group], taken: Taken) -> None:
        """Keep or discard the groups of the last request, whose problems are `taken`."""
        for group in groups:
            kept = self._keep(group)
            (self._kept if kept else self._discarded).append(group)
            self._in_vain = 0 if kept else self._in_vain + 1
        self._indices += taken.indices
        self._sampled += groups
        self._difficulty = taken.difficulty

    @property
    def _hopeless(self) -> bool:
        """Whether further sampling would hardly fill the batch."""
        scores = [s for group in self._sampled for s in group.scores]
        unscored = sum(s.status is Status.UNSCORED for s in scores)
        return self._in_vain >= self._patience or unscored > self._max_unscored * len(scores)

    def result(self, version: int, before: DecodeStats | None, after: DecodeStats | None) -> CollectResult:
        """What was gathered from weights of this version; `before` and `after` are the engine's counters around it."""
        return CollectResult(
            rollouts=RolloutBatch(groups=tuple(self._kept), discarded=tuple(self._discarded)),
            version=version,
            after=RolloutState(batch=self.batch, cursor=self._cursor, difficulty=self._measured()),
            wanted=self._want,
            decoded=after - before if after and before else None,
            **self._selection(),
        )

    def _measured(self) -> Difficulty | None:
        """The pass rates after this batch. Discarded groups are measurements like any other."""
        return self._difficulty and self._difficulty.measured(self._indices, self._sampled)

    def _selection(self) -> dict[str, Any]:
        before, now = self._start.difficulty, self._difficulty
        if before is None or now is None:
            return {}
        rates = tuple(before.pass_rate(index) for index in self._indices)
        return {"pass_rates": rates, "skipped": sum(now.skipped) - sum(before.skipped)}


def with_unique_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Rename the repetitions of a prompt in one request (small data): each id is a random stream of its own."""
    seen: dict[str, int] = {}
    renamed = []
    for prompt in prompts:
        times = seen[prompt.id] = seen.get(prompt.id, 0) + 1
        renamed.append(prompt if times == 1 else dataclasses.replace(prompt, id=f"{prompt.id}#{times}"))
    return renamed

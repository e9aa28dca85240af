"""Scores of conversations: the rewards of the environment, and those of reward functions if there are any.

In: prompts with their conversations. Out: a `Score` each. Invariant: a conversation that failed because of the
environment or the machine is unscored. One that exceeded a limit keeps the rewards that it had, so a model cannot
choose to be unscored. Reward functions see the last message of the model alone: what a tool wrote is not its answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from gspo.reward.function import Source
from gspo.reward.jobs import Groups
from gspo.reward.reward import MOST_FAULTS, Fault, RewardPool
from gspo.reward.traits import Service
from gspo.types import Completion, Conversation, ConversationEnd, Prompt, Score, Status

PART = "environment"
"""The environment's part of a reward."""


class ConversationRewards:
    """Scores conversations. It has the interface of a `RewardPool`, and owns one if there are reward functions."""

    def __init__(self, environment: str, *, correct_above: float, pool: RewardPool | None) -> None:
        self._environment = environment
        self._correct_above = correct_above
        self._pool = pool
        self._faults: dict[str, Fault] = {}
        self._new_faults: list[Fault] = []

    @property
    def names(self) -> tuple[str, ...]:
        return (PART, *(self._pool.names if self._pool else ()))

    @property
    def about(self) -> dict[str, str]:
        return self._pool.about if self._pool else {}

    @property
    def services(self) -> dict[str, Service]:
        return self._pool.services if self._pool else {}

    def service_memory(self, name: str) -> int:
        return self._pool.service_memory(name) if self._pool else 0

    def functions_of(self, source: str) -> list[Source]:
        return self._pool.functions_of(source) if self._pool else []

    def new_faults(self) -> list[Fault]:
        faults = []
        while self._new_faults:  # another thread may be scoring
            faults.append(self._new_faults.pop(0))
        return [*faults, *(self._pool.new_faults() if self._pool else ())]

    def take_usage(self) -> dict[str, dict[str, float]]:
        return self._pool.take_usage() if self._pool else {}

    def pids(self) -> list[int]:
        return self._pool.pids() if self._pool else []

    def check_columns(self, prompts: Iterable[Prompt]) -> None:
        if self._pool:
            self._pool.check_columns(prompts)

    def close(self) -> None:
        if self._pool:
            self._pool.close()

    def score(self, groups: Groups, functions: Collection[str] | None = None) -> list[list[Score]]:
        """Score every conversation of every group."""
        others: Sequence[Sequence[Score | None]] = [[None] * len(completions) for _, completions in groups]
        if self._pool:
            others = self._pool.score([(p, list(map(_last_message, c))) for p, c in groups], functions)
        return [
            [self._score(prompt, c, other) for c, other in zip(completions, scores, strict=True)]
            for (prompt, completions), scores in zip(groups, others, strict=True)
        ]

    def _score(self, prompt: Prompt, completion: Completion, other: Score | None) -> Score:
        conversation = completion.conversation
        assert conversation is not None
        if conversation.failure is not None:
            self._remember(prompt, completion, conversation.failure)
            return Score(status=Status.UNSCORED, failure=conversation.failure)
        given = any(turn.reward is not None for turn in conversation.turns)
        own = conversation.reward if given else None
        if own is not None and not math.isfinite(own):
            return self._not_finite(prompt, completion)
        steps = _steps(completion, conversation)
        if other is None:
            # A limit ended it before the environment gave a reward.
            own = 0.0 if own is None and conversation.end is not ConversationEnd.DONE else own
            if own is None:
                failure = f"abstained: environment {self._environment} gave no reward"
                return Score(status=Status.UNSCORED, failure=failure, parts={PART: None})
            return Score(
                status=Status.SCORED,
                reward=own,
                correct=own > self._correct_above,
                parts={PART: own},
                step_rewards=steps,
            )
        parts: Mapping[str, float | None] = {PART: own, **other.parts}
        if other.reward is None or own is None:
            return replace(other, parts=parts)
        total = own + other.reward
        if not math.isfinite(total):
            return self._not_finite(prompt, completion)
        if steps:
            # What is judged at the end belongs to the last turn, be it rewarded or not. A 0 counts in the group's mean.
            end = completion.sampled_count - 1
            last, value = steps[-1]
            steps = (*(steps[:-1] if last == end else steps), (end, other.reward + (value if last == end else 0.0)))
        return replace(other, reward=total, correct=own > self._correct_above, parts=parts, step_rewards=steps)

    def _not_finite(self, prompt: Prompt, completion: Completion) -> Score:
        failure = f"invalid: environment {self._environment}: the sum of the rewards is not finite"
        self._remember(prompt, completion, failure)
        return Score(status=Status.UNSCORED, failure=failure)

    def _remember(self, prompt: Prompt, completion: Completion, failure: str) -> None:
        if failure not in self._faults and len(self._faults) < MOST_FAULTS:
            fault = Fault(
                function=self._environment,
                failure=failure,
                trace="",
                printed="",
                prompt=f"{prompt.id}\n{prompt.content}",
                completion=completion.text,
            )
            self._faults[failure] = fault
            self._new_faults.append(fault)


def _steps(completion: Completion, conversation: Conversation) -> tuple[tuple[int, float], ...]:
    """The rewards of its turns, if they are not all for the last one."""
    ends = list(accumulate(map(int, completion.sampled or (True,) * len(completion.token_ids))))
    given = [(ends[t.end - 1] - 1, t.reward) for t in conversation.turns if t.reward is not None and t.end]
    return tuple(given) if any(at < completion.sampled_count - 1 for at, _ in given) else ()


def _last_message(completion: Completion) -> Completion:
    """The completion with its last turn as its text."""
    conversation = completion.conversation
    assert conversation is not None
    return replace(completion, text=conversation.turns[-1].text if conversation.turns else "")

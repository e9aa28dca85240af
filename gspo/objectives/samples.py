"""Which groups and replies are learned from, and their shaped reward.

In: scored groups. Out: the replies that count. Invariant: an unscored reply, a cut reply under `overlong_filter`, an
empty reply, and one left alone in its group are out of every mean, std and denominator; nothing becomes a 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.objectives.advantage import batch_whitened
from gspo.objectives.objective import Objective
from gspo.objectives.penalty import soft_overlong
from gspo.types import Completion, Group, Prompt, Score, Status, StopReason, equal_rewards


@dataclass(frozen=True, kw_only=True)
class TrainSample:
    """A reply that is learned from."""

    group: int
    sample: int
    """Its place within the group."""
    prompt: Prompt
    completion: Completion
    score: Score
    reward: float
    """After shaping."""


def trainable(groups: Sequence[Group], objective: Objective, *, max_tokens: int) -> list[TrainSample]:
    """The replies to learn from, group by group."""
    kept: list[TrainSample] = []
    for number, group in enumerate(groups):
        members = [
            TrainSample(
                group=number,
                sample=i,
                prompt=group.prompt,
                completion=c,
                score=s,
                reward=shaped(s, c, objective, max_tokens=max_tokens),
            )
            for i, (c, s) in enumerate(zip(group.completions, group.scores, strict=True))
            if drop_reason(c, s, objective) is None
        ]
        if len(members) > 1 or objective.advantage is batch_whitened:
            kept += members
    return kept


def keeps_group(objective: Objective, group: Group) -> bool:
    """Whether an objective trains on a group. `keep = "mixed"` wants different rewards among the completions that count.

    The reward is the one before length shaping: a soft length penalty sets completions apart that are all wrong, and DAPO's
    condition is meant to drop those. With a reward of 0 and 1 it is the paper's 0 < #correct < G; with a dense reward a group
    can teach without a single completion above `reward.correct_above`."""
    if objective.keep == "all":
        return True
    counting = [s for c, s in zip(group.completions, group.scores, strict=True) if drop_reason(c, s, objective) is None]
    return not equal_rewards([s.reward for s in counting if s.reward is not None])


def drop_reason(completion: Completion, score: Score, objective: Objective) -> str | None:
    """Why a reply does not count, or None if it does."""
    if score.status is Status.UNSCORED:
        return "unscored"
    if objective.shape == "overlong_filter" and completion.stop is StopReason.LENGTH:
        return "overlong"
    return None if completion.token_ids else "empty"


def shaped(score: Score, completion: Completion, objective: Objective, *, max_tokens: int) -> float:
    """The reward with the length penalty, where the objective has one."""
    assert score.reward is not None
    if objective.shape != "soft_overlong":
        return score.reward
    return score.reward + soft_overlong(len(completion.token_ids), *overlong_range(objective, max_tokens=max_tokens))


def overlong_range(objective: Objective, *, max_tokens: int) -> tuple[int, int]:
    """The limit of the soft length penalty, and the ramp before it."""
    limit = objective.overlong_limit or max_tokens
    return limit, objective.overlong_cache or max(1, limit // 5)

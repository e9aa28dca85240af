"""Which groups and completions are trained on, and their shaped reward.

In: scored groups. Out: the completions to train on. Invariant: an unscored completion, a truncated one under
`overlong_filter`, an empty one, and a single one in its group are in no mean, std or denominator. None of them is
counted as a reward of 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gspo.errors import ConfigError
from gspo.objectives.objective import Objective
from gspo.types import Completion, Group, Prompt, Score, Status, StopReason, equal_rewards


@dataclass(frozen=True, kw_only=True)
class TrainSample:
    """A completion to train on."""

    group: int
    sample: int
    """Its index within the group."""
    prompt: Prompt
    completion: Completion
    score: Score
    reward: float
    """After shaping."""


def train_samples(groups: Sequence[Group], objective: Objective, *, max_tokens: int) -> list[TrainSample]:
    """The completions to train on, group by group."""
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
        # A single completion has nothing to be compared with in its group, but it does in the batch.
        if len(members) > 1 or objective.advantage.scope == "batch":
            kept += members
    return kept


def keeps_group(objective: Objective, group: Group) -> bool:
    """Whether an objective trains on a group. `keep = "mixed"` requires different rewards among its trainable
    completions.

    The reward is the one before length shaping. A soft length penalty makes the rewards of wrong completions differ,
    and DAPO's condition is meant to drop such groups. With rewards of 0 and 1 this is the paper's 0 < #correct < G.
    With a dense reward a group can have a signal without any completion above `reward.correct_above`. If reward
    functions are compared separately, one of them must differ."""
    if objective.keep == "all":
        return True
    trained = [s for c, s in zip(group.completions, group.scores, strict=True) if drop_reason(c, s, objective) is None]
    return not all(map(equal_rewards, _compared(objective, trained)))


def _compared(objective: Objective, scores: Sequence[Score]) -> Iterator[list[float]]:
    """The rewards that the advantages compare: the sums, or the values of each function that has a weight."""
    if objective.normalize == "sum":
        yield [s.reward for s in scores if s.reward is not None]
        return
    if not scores:  # nothing to transpose
        return
    by_function = list(zip(*(s.parts.values() for s in scores), strict=True))
    for values, weight in zip(by_function, objective.reward_weights or (1.0,) * len(by_function), strict=True):
        if weight:
            yield [v for v in values if v is not None]


def drop_reason(completion: Completion, score: Score, objective: Objective) -> str | None:
    """Why a completion is not trained on; `None` if it is."""
    if score.status is Status.UNSCORED:
        return "unscored"
    if "overlong_filter" in objective.shape and completion.stop is StopReason.LENGTH:
        return "overlong"
    return None if completion.sampled_count else "empty"


def shaped(score: Score, completion: Completion, objective: Objective, *, max_tokens: int) -> float:
    """The reward, with the length penalty if the objective has one."""
    assert score.reward is not None
    if "soft_overlong" not in objective.shape:
        return score.reward
    return score.reward + soft_overlong(completion.sampled_count, *overlong_range(objective, max_tokens=max_tokens))


def overlong_range(objective: Objective, *, max_tokens: int) -> tuple[int, int]:
    """The limit of the soft length penalty, and the length of the ramp before it."""
    # A fifth is DAPO's proportion: a ramp of 4,096 tokens before a limit of 20,480.
    limit = objective.overlong_limit or max_tokens
    return limit, objective.overlong_cache or max(1, limit // 5)


def soft_overlong(length: int, limit: int, cache: int) -> float:
    """DAPO's penalty added to the reward: 0 up to limit - cache, falling linearly to -1 at the limit, -1 beyond it."""
    if not 0 < cache <= limit:
        raise ConfigError(f"overlong_cache: must be between 1 and the limit of {limit} tokens, not {cache}")
    return max(-1.0, min(0.0, (limit - cache - length) / cache))

"""The objectives that a replay evaluates on the same batch.

In: the run's settings and `--objectives`. Out: `Candidate`s, the run's own first, and skipped objectives with the
reason. Invariant: no objective is skipped silently, and none is computed twice under two names.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo import config as settings
from gspo.build import with_reward_weights
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.objectives.custom import is_custom
from gspo.objectives.objective import Objective, ObjectiveWarning, settings_of
from gspo.objectives.table import TABLE
from gspo.objectives.table import objective as build
from gspo.types import Group
from gspo.view.compare.arms import Arm, parse_arms

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An objective and its label."""

    label: str
    objective: Objective
    note: str = ""
    """How it deviates from its label."""


@dataclass(frozen=True, kw_only=True)
class SkippedObjective:
    """An objective that is not computed, and the reason."""

    label: str
    reason: str


def own(objective: Objective) -> Candidate:
    """The run's objective, as used in the step."""
    return Candidate(label=f"{objective.name} (run)", objective=objective)


def candidates(config: Config, run: Objective, text: str) -> tuple[list[Candidate], list[SkippedObjective]]:
    """The run's own objective and the requested ones, `NAME[+KEY=VALUE...],...`; `all` is every row of the table."""
    table = [Arm(label=name, objective=name) for name in TABLE]
    found = [own(run)]
    skipped = []
    for arm in [a for given in parse_arms(text) for a in (table if given.label == ALL else [given])]:
        objective = _objective(config, arm)
        twin = next((c for c in found if _same(c.objective, objective)), None)
        if objective.advantage.scope == "external":
            reason = "its advantages come from a critic, which the run does not have"
            skipped.append(SkippedObjective(label=arm.label, reason=reason))
        elif twin is None:
            found.append(Candidate(label=arm.label, objective=objective))
        # A plain row of the table that equals another needs no explanation; one with changed settings does.
        elif arm not in table:
            skipped.append(SkippedObjective(label=arm.label, reason=f"it is the same as {twin.label}"))
    return found, skipped


def for_rewards(found: Sequence[Candidate], groups: Sequence[Group]) -> tuple[list[Candidate], list[SkippedObjective]]:
    """The candidates that are defined for the rewards of a step, and the others."""
    lowest = min((s.reward for g in groups for s in g.scores if s.reward is not None), default=0.0)
    undefined = [c for c in found if lowest < 0 and c.objective.advantage.nonnegative_rewards]
    reason = f"it needs rewards of 0 or more, and one of this step is {lowest:g}"
    return [c for c in found if c not in undefined], [SkippedObjective(label=c.label, reason=reason) for c in undefined]


def _objective(config: Config, arm: Arm) -> Objective:
    foreign = next((o for o in arm.options if not o.startswith("objective.")), None)
    if foreign:
        raise ConfigError(
            f"--objectives: {arm.label!r}: {foreign.partition('=')[0]} is not a setting of an objective; a replay uses "
            "the batch and its routing as recorded, leave it out"
        )
    if arm.objective not in TABLE and not is_custom(arm.objective):
        raise ConfigError(
            f"--objectives: no objective {arm.objective!r}; choose from {', '.join(TABLE)}, {ALL}, or your own as "
            "file.py:name"
        )
    values = dict(settings.override({}, arm.overrides, where="--objectives").objective.settings)
    if "max_length" in settings_of(build(arm.objective)):
        # As in a run, where the limit on completions sets it.
        values.setdefault("max_length", config.rollout.max_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)  # the table shows the effect of an unusual clip range
        return with_reward_weights(build(arm.objective, **values), config)


def _same(a: Objective, b: Objective) -> bool:
    # Without `given`, which records what was typed and not what is computed.
    return replace(a, given=frozenset()) == replace(b, given=frozenset())


def without_reference(found: Sequence[Candidate], why: str) -> list[Candidate]:
    """The candidates without their KL penalties, each with a note."""
    return [_without_kl(c, why) if c.objective.kl else c for c in found]


def _without_kl(candidate: Candidate, why: str) -> Candidate:
    objective = candidate.objective
    note = f"without its KL penalty ({objective.kl:g}): {why}"
    return replace(candidate, objective=replace(objective, kl=0.0), note=note)

"""Which objectives are put to the same batch.

In: the run's settings and `--objectives`. Out: `Candidate`s, the run's own first, and what cannot be computed, with the
reason. Invariant: nothing is left out silently, and no objective is computed twice under two names.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo import config as settings
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.objectives.objective import Objective, ObjectiveWarning, settings_of
from gspo.objectives.table import TABLE
from gspo.objectives.table import objective as build
from gspo.view.compare.arms import Arm, parse_arms

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An objective by the name it is shown with."""

    label: str
    objective: Objective
    note: str = ""
    """What is not as the label says."""


@dataclass(frozen=True, kw_only=True)
class SkippedObjective:
    """An objective that cannot be computed, and why."""

    label: str
    reason: str


def own(objective: Objective) -> Candidate:
    """The run's objective, as it was in force in the step."""
    return Candidate(label=f"{objective.name} (run)", objective=objective)


def candidates(config: Config, run: Objective, text: str) -> tuple[list[Candidate], list[SkippedObjective]]:
    """The run's own objective and those asked for: `NAME[+KEY=VALUE...],...`, where `all` is every row of the table."""
    every = [Arm(label=name, row=name) for name in TABLE]
    found, left_out = [own(run)], []
    for arm in [a for given in parse_arms(text) for a in (every if given.label == ALL else [given])]:
        objective = _objective(config, arm)
        twin = next((c for c in found if _same(c.objective, objective)), None)
        if objective.advantage.scope == "external":
            left_out.append(
                SkippedObjective(
                    label=arm.label, reason="its advantages come from outside (a critic), and the run has none"
                )
            )
        elif twin is None:
            found.append(Candidate(label=arm.label, objective=objective))
        elif arm not in every:
            left_out.append(SkippedObjective(label=arm.label, reason=f"it is the same as {twin.label}"))
    return found, left_out


def _objective(config: Config, arm: Arm) -> Objective:
    foreign = next((o for o in arm.options if not o.startswith("objective.")), None)
    if foreign:
        raise ConfigError(f"--objectives: {arm.label!r}: {foreign.partition('=')[0]} is no setting of an objective; a replay takes the batch and its routing as they were")  # fmt: skip
    if arm.row not in TABLE:
        raise ConfigError(f"--objectives: no objective {arm.row!r}; there are: {', '.join(TABLE)}, or {ALL}")
    given = settings.override({}, arm.overrides, where="--objectives").objective
    values = dict(given.settings)
    if "max_length" in settings_of(TABLE[arm.row]):
        values.setdefault("max_length", config.rollout.max_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)  # a range that does not fit is what the table will show
        return build(arm.row, **values)


def _same(a: Objective, b: Objective) -> bool:
    return replace(a, given=frozenset()) == replace(b, given=frozenset())


def without_reference(found: Sequence[Candidate], why: str) -> list[Candidate]:
    """The candidates with their KL penalties left out, and that said, where there is no reference model."""
    return [
        c if not c.objective.kl else replace(c, objective=replace(c.objective, kl=0.0), note=f"without its KL penalty ({c.objective.kl:g}): {why}")
        for c in found
    ]  # fmt: skip

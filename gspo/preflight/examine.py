"""The checks in their order, each kept from spoiling the others.

In: a recipe and overrides. Out: findings, handed on as they come. Invariant: whatever a check does, it ends in findings:
an error of the user's becomes a FAIL with its message, any other exception a FAIL that names the check, and checks that
need what could not be built are named as not done. When this returns, no process and no file of it is left.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from gspo import config as settings
from gspo.errors import GspoError
from gspo.objectives.objective import ObjectiveWarning
from gspo.preflight import disk, files, memory, model, pace, ratio, rewards, sampling, setup, tokens
from gspo.preflight.case import Case
from gspo.preflight.findings import Finding, fail, note, warning
from gspo.reward.function import RewardWarning, describe

Show = Callable[[Finding], None]

MISSING = {
    "tokenizer": "the tokenizer did not load",
    "skeleton": "the model's config could not be read",
    "problems": "the data could not be read",
    "rewards": "the rewards could not be loaded",
    "policy": "the model was not loaded",
    "engine": "the sampling engine was not built",
    "groups": "no replies were sampled",
    "objective": "the objective could not be built",
}
"""Why a part of the case is None, in words."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to look at."""

    name: str
    run: Callable[[Case], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    """Parts of the case that must have been built."""
    weights: bool = False
    """Whether it needs the model's weights, and is left out by `--quick`."""


CHECKS = (
    Check(name="settings", run=setup.check_settings),
    Check(name="objective", run=setup.check_objective),
    Check(name="tokenizer", run=tokens.check_tokenizer),
    Check(name="model files", run=model.check_files, needs=("tokenizer",)),
    Check(name="data", run=files.check_data),
    Check(name="prompt lengths", run=files.check_lengths, needs=("tokenizer", "problems")),
    Check(name="chat template", run=tokens.check_template, needs=("tokenizer",)),
    Check(name="end of a reply", run=tokens.check_ends, needs=("tokenizer", "skeleton")),
    Check(name="reward functions", run=rewards.check_functions, needs=("problems",)),
    Check(name="known answers", run=rewards.check_known, needs=("problems", "rewards")),
    Check(name="sandbox", run=rewards.check_sandbox),
    Check(name="model", run=model.check_model, needs=("tokenizer", "skeleton"), weights=True),
    Check(name="experts", run=model.check_experts, needs=("policy",), weights=True),
    Check(name="sampling", run=sampling.check_sampling, needs=("engine", "problems", "rewards"), weights=True),
    Check(name="ratio", run=ratio.check_ratio, needs=("groups", "policy"), weights=True),
    Check(name="temperature", run=ratio.check_temperature, needs=("groups", "policy"), weights=True),
    Check(name="reward on replies", run=rewards.check_replies, needs=("groups",), weights=True),
    Check(name="uniform groups", run=sampling.check_uniform, needs=("groups", "objective"), weights=True),
    Check(name="memory", run=memory.check_memory, needs=("skeleton",)),
    Check(name="disk", run=disk.check_disk, needs=("skeleton",)),
    Check(name="run directory", run=disk.check_directory),
    Check(name="time", run=pace.check_time, needs=("groups",), weights=True),
)


def examine(recipe: str, overrides: Sequence[str], *, quick: bool, prompts: int | None, show: Show) -> list[Finding]:
    """Look a recipe over; `show` gets each finding as it comes."""
    path = settings.find_recipe(recipe)
    try:
        config = settings.override(settings.read_toml(path), overrides, where=str(path))
    except GspoError as error:
        refused = _refused("settings", error)
        show(refused)
        return [refused]
    with ExitStack() as stack:
        return run_checks(Case(config=config, prompts=prompts, stack=stack), quick=quick, show=show)


def run_checks(case: Case, checks: Iterable[Check] = CHECKS, *, quick: bool = False, show: Show) -> list[Finding]:
    """All checks that can be run on a case, in their order."""
    findings: list[Finding] = []
    skipped: dict[str, list[str]] = {}

    def tell(finding: Finding) -> None:
        findings.append(finding)
        show(finding)

    for check in checks:
        missing = next((need for need in check.needs if getattr(case, need) is None), None)
        if quick and check.weights:
            skipped.setdefault("left out by --quick", []).append(check.name)
        elif missing:
            skipped.setdefault(MISSING[missing], []).append(check.name)
        else:
            for finding in run_check(check, case):
                tell(finding)
    for reason, names in skipped.items():
        tell(replace(note(f"{', '.join(names)}: {reason}."), check="not checked"))
    return findings


def run_check(check: Check, case: Case) -> Iterator[Finding]:
    """A check's findings, its warnings and errors among them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for finding in check.run(case):
                yield replace(finding, check=check.name)
        except GspoError as error:
            yield _refused(check.name, error)
        except Exception as error:  # whatever it is, the other checks go on
            yield replace(_broken(error), check=check.name)
    for text in dict.fromkeys(str(w.message) for w in caught if _ours(w.category)):
        yield replace(warning(text), check=check.name)


def _refused(check: str, error: GspoError) -> Finding:
    """An error that the run would stop with."""
    first, *rest = str(error).splitlines()
    return replace(fail(first, detail=rest), check=check)


def _broken(error: Exception) -> Finding:
    return fail(
        f"The check broke off: {describe(error)}.",
        "The run would meet the same in this place, if it is the model or the data; else it is a fault of the doctor.",
    )


def _ours(category: type[Warning]) -> bool:
    """Libraries warn of many things; these kinds are raised by the stages of a run."""
    return issubclass(category, ObjectiveWarning | RewardWarning) or category is RuntimeWarning

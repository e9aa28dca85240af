"""The checks in their order, isolated from each other.

In: a recipe and overrides. Out: findings, passed on as they come. Invariant: every check ends in findings. A user error
becomes a FAIL with its message, any other exception a FAIL that names the check, and a check whose components could not
be built is listed as not checked. No process and no file remains afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from gspo.build import with_dtype
from gspo.config import find_recipe, override, read_toml
from gspo.errors import GspoError
from gspo.objectives.objective import ObjectiveWarning
from gspo.preflight import (
    data,
    disk,
    environment,
    memory_check,
    model,
    ratio,
    rewards,
    sampling,
    settings,
    step_time,
    tokens,
)
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, note, warning
from gspo.reward.function import RewardWarning, describe
from gspo.suites.suite import SuiteSource

Show = Callable[[Finding], None]

MISSING = {
    "tokenizer": "the tokenizer did not load",
    "skeleton": "the model's config could not be read",
    "problems": "the data could not be read",
    "rewards": "the rewards could not be loaded",
    "policy": "the model was not loaded",
    "engine": "the sampling engine was not built",
    "groups": "no completions were sampled",
    "objective": "the objective could not be built",
}
"""Why a component of the context is `None`."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A named check of the context."""

    name: str
    run: Callable[[PreflightContext], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    """Components of the context that must have been built."""
    weights: bool = False
    """Whether it needs the model's weights; `--quick` skips it."""


# Cheap checks first, and each after those that build what it needs. `memory` comes after `ratio`, which measures
# activations.
CHECKS = (
    Check(name="settings", run=settings.check_settings),
    Check(name="objective", run=settings.check_objective),
    Check(name="tokenizer", run=tokens.check_tokenizer),
    Check(name="model files", run=model.check_files, needs=("tokenizer",)),
    Check(name="data", run=data.check_data),
    Check(name="contamination", run=data.check_contamination, needs=("problems",)),
    Check(name="environment", run=environment.check_environment, needs=("tokenizer", "problems")),
    Check(name="prompt lengths", run=data.check_lengths, needs=("tokenizer", "problems")),
    Check(name="chat template", run=tokens.check_template, needs=("tokenizer",)),
    Check(name="stop tokens", run=tokens.check_ends, needs=("tokenizer", "skeleton")),
    Check(name="reward functions", run=rewards.check_functions, needs=("problems",)),
    Check(name="reward services", run=rewards.check_services, needs=("problems", "rewards")),
    Check(name="known answers", run=rewards.check_known, needs=("problems", "rewards")),
    Check(name="sandbox", run=rewards.check_sandbox),
    Check(name="model", run=model.check_model, needs=("tokenizer", "skeleton"), weights=True),
    Check(name="experts", run=model.check_experts, needs=("policy",), weights=True),
    Check(name="sampling", run=sampling.check_sampling, needs=("engine", "problems", "rewards"), weights=True),
    Check(name="ratio", run=ratio.check_ratio, needs=("groups", "policy"), weights=True),
    Check(name="temperature", run=ratio.check_temperature, needs=("groups", "policy"), weights=True),
    Check(name="reward on completions", run=rewards.check_completions, needs=("groups",), weights=True),
    Check(name="uniform groups", run=sampling.check_uniform, needs=("groups", "objective"), weights=True),
    Check(name="memory", run=memory_check.check_memory, needs=("skeleton",)),
    Check(name="disk", run=disk.check_disk, needs=("skeleton",)),
    Check(name="run directory", run=disk.check_directory),
    Check(name="time", run=step_time.check_time, needs=("groups",), weights=True),
)


def examine(
    recipe: str,
    overrides: Sequence[str],
    *,
    quick: bool,
    prompts: int | None,
    suites: Sequence[SuiteSource] = (),
    show: Show,
) -> list[Finding]:
    """Run the pre-flight checks of a recipe; `show` receives each finding as it comes."""
    path = find_recipe(recipe)
    try:
        config = with_dtype(override(read_toml(path), overrides, where=str(path)))
    except GspoError as error:
        refused = _refused("settings", error)
        show(refused)
        return [refused]
    with ExitStack() as stack:
        return run_checks(
            PreflightContext(config=config, prompts=prompts, suites=suites, stack=stack), quick=quick, show=show
        )


def run_checks(
    context: PreflightContext, checks: Iterable[Check] = CHECKS, *, quick: bool = False, show: Show
) -> list[Finding]:
    """All checks that can be run on the context, in their order."""
    findings: list[Finding] = []
    skipped: dict[str, list[str]] = {}

    def report(finding: Finding) -> None:
        findings.append(finding)
        show(finding)

    for check in checks:
        missing = next((need for need in check.needs if getattr(context, need) is None), None)
        # First, so that --quick gives this reason and not a component that it did not build.
        if quick and check.weights:
            skipped.setdefault("skipped by --quick", []).append(check.name)
        elif missing:
            skipped.setdefault(MISSING[missing], []).append(check.name)
        else:
            for finding in run_check(check, context):
                report(finding)
    for reason, names in skipped.items():
        report(replace(note(f"{', '.join(names)}: {reason}."), check="not checked"))
    return findings


def run_check(check: Check, context: PreflightContext) -> Iterator[Finding]:
    """The findings of a check, including its warnings and errors."""
    # A warning of the run's own code is a finding; the user would otherwise see it only in the log of the run.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for finding in check.run(context):
                yield replace(finding, check=check.name)
        except GspoError as error:
            yield _refused(check.name, error)
        except Exception as error:  # any failure of one check must not stop the others
            yield replace(_broken(error), check=check.name)
    # Each text once: a warning of a step recurs in every chunk.
    for text in dict.fromkeys(str(w.message) for w in caught if _ours(w.category)):
        yield replace(warning(text), check=check.name)


def _refused(check: str, error: GspoError) -> Finding:
    """An error that would stop the run."""
    first, *rest = str(error).splitlines()
    return replace(fail(first, detail=rest), check=check)


def _broken(error: Exception) -> Finding:
    return fail(
        f"The check failed with an exception: {describe(error)}.",
        "If the cause is the model or the data, the run would fail in the same place; otherwise it is a bug in the "
        "doctor.",
    )


def _ours(category: type[Warning]) -> bool:
    """Whether a stage of the run raised the warning. Libraries warn about many other things."""
    return issubclass(category, ObjectiveWarning | RewardWarning) or category is RuntimeWarning

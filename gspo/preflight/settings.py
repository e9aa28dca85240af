"""Settings and objective: values that cannot work, have no effect, or are valid but probably not intended.

In: the context. Out: findings, and the objective of the run. Invariant: the settings are checked by the run's own code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from gspo.config import check
from gspo.objectives.objective import Objective
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, note, ok


def check_settings(context: PreflightContext) -> Iterator[Finding]:
    check(context.config)
    yield ok("Every setting is known, in range and has an effect.")
    for sink in context.config.log.sinks:
        if importlib.util.find_spec(sink) is None:
            yield fail(f"log.sinks: {sink} is not installed.", f"Run: pip install {sink}")


def check_objective(context: PreflightContext) -> Iterator[Finding]:
    from gspo.build import run_objective

    context.objective = objective = run_objective(context.config)
    steps = context.config.learner.mini_batches
    yield ok(
        f"{objective.name} ({objective.paper or 'custom'}){_range(objective)}; "
        f"{context.completions} completions per step in "
        f"{steps} optimizer step{'s' * (steps > 1)}.",
        optimizer_steps=steps,
    )
    if steps == 1 and objective.trust_region.clip_range is not None:
        yield note(
            "With one optimizer step per batch the ratio is always 1, so nothing is clipped and the clip range has no "
            "effect.",
            "Set learner.mini_batches above 1 to use each batch for several steps.",
        )
    if objective.kl and context.config.model.lora.rank:
        yield note(
            f"kl = {objective.kl:g} needs no copy of the model, only one more forward pass per completion, with the "
            "adapters disabled."
        )
    elif objective.kl:
        yield note(
            f"kl = {objective.kl:g} keeps a frozen copy of the model: its weights in memory, and one more forward pass "
            "per completion.",
            "Set objective.kl = 0 to disable it.",
        )


def _range(objective: Objective) -> str:
    clip_range = objective.trust_region.clip_range
    if clip_range is None:
        return ""
    low, high = clip_range
    return f", clip range {low:g}/{high:g} on the {'sequence' if objective.clips_sequences else 'token'} ratio"

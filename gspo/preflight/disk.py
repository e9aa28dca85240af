"""Disk space for checkpoints and completions, and a run directory that can be used.

In: the context. Out: findings. Invariant: the checks create and write nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from gspo.config import EvalConfig, EvalSetConfig
from gspo.learner.checkpoint import size_of
from gspo.preflight.context import PreflightContext
from gspo.preflight.findings import Finding, fail, ok, warning
from gspo.preflight.machine import human
from gspo.preflight.step_time import batches_per_step, evaluation_count
from gspo.record.retention import abandoned_steps, extra_checkpoints, most_checkpoints
from gspo.types import Prompt

TOKEN_BYTES = 64
"""Bytes per completion token in `rollouts/`: its id, three log-probs, flags. Measured on demo runs: 62."""
COMPLETION_BYTES = 600
"""Bytes per completion in `rollouts/`, without its tokens and texts."""
EVALUATED_TOKEN_BYTES, EVALUATED_COMPLETION_BYTES = 28, 250
"""The same in `evaluations/`, where a token has its id and one log-prob."""
TEXT_BYTES = 4
"""Bytes per token of text."""


def check_disk(context: PreflightContext) -> Iterator[Finding]:
    place = existing(context)
    free = shutil.disk_usage(place).free
    each, count = checkpoint_bytes(context), checkpoints(context)
    logged = rollout_bytes(context)
    steps, abandoned = context.config.steps, abandoned_steps(context.config)
    evaluated = evaluation_bytes(context)
    lost = (logged + evaluated / steps) * abandoned  # evaluations of abandoned steps are kept, too
    need = each * count + logged * steps + evaluated + lost
    masters = ", float32 masters" if _low_precision(context) else ""
    lag = context.config.rollout.max_lag
    older = f", up to {lag} of older weights for rollout.max_lag" if lag else ""
    disabled = "" if context.config.log.rollouts else " (log.rollouts = false)"
    detail = [
        f"{'checkpoints':<24} {human(each * count):>8}   {count} x {human(each)} (weights, moments{masters}{older}); "
        f"{_kept(context)}",
        f"{'rollouts':<24} {human(logged * steps):>8}   {steps} steps x {human(logged)}{disabled}",
    ]
    if evaluated:
        most = context.config.log.evaluations
        detail.append(f"{'evaluations':<24} {human(evaluated):>8}   at most {most} problems of each (log.evaluations)")
    if abandoned:
        detail.append(
            f"{'abandoned completions':<24} {human(lost):>8}   up to about {abandoned} steps that "
            f"alarms.max_rollbacks = {context.config.alarms.max_rollbacks} rollbacks keep"
        )
    sentence = f"The run writes about {human(need)}; {human(free)} are free at {place}."
    numbers = {"need": round(need), "free": free, "checkpoint": round(each), "checkpoints": count}
    if need > free:
        remedy = "Lower checkpoint.keep, raise checkpoint.every, set log.rollouts = false, or choose another --run-dir."
        yield fail(sentence, remedy, detail=detail, **numbers)
    elif need > 0.8 * free:
        remedy = "That is nearly all of it; free some space, or choose another --run-dir."
        yield warning(sentence, remedy, detail=detail, **numbers)
    else:
        yield ok(sentence, detail=detail, **numbers)


def checkpoint_bytes(context: PreflightContext) -> float:
    """One checkpoint: the model, two moments, and float32 masters for weights in lower precision. With a
    lag, also that many copies of older weights, which is the most that batches can still need."""
    return size_of(context.skeleton, context.config.learner.optimizer, context.config.rollout.max_lag)


def checkpoints(context: PreflightContext) -> int:
    """The largest number at a time: those kept, the one being written, and a reference model that the run creates."""
    config = context.config
    creates_reference = bool(config.model.build or config.cold_start.steps)
    return most_checkpoints(config) + (
        context.objective is not None and bool(context.objective.kl) and creates_reference
    )


def rollout_bytes(context: PreflightContext) -> float:
    """Bytes that a step writes to `rollouts/`."""
    if not context.config.log.rollouts:
        return 0.0
    # Discarded groups are written, too.
    # "full" has no bound that is useful here, so the estimate is what the sampled groups suggest.
    budget = context.config.rollout.refill_budget
    most = batches_per_step(context) if budget == "full" else budget
    refill = most if context.objective and context.objective.keep == "mixed" else 1
    text = TEXT_BYTES * (context.longest_prompt + context.completion_length)
    return context.completions * refill * (COMPLETION_BYTES + TOKEN_BYTES * context.completion_length + text)


def evaluation_bytes(context: PreflightContext) -> float:
    """Bytes that the evaluations of the run write to `evaluations/`."""
    config, problems = context.config, context.problems
    if problems is None:
        return 0.0
    parts: list[tuple[EvalConfig | EvalSetConfig, Sequence[Prompt]]] = [(config.eval, problems.held_out)]
    parts += [(one, problems.sets[name]) for name, one in config.eval.sets.items()]
    completions = sum(
        evaluation_count(config.steps, settings.every)
        * min(len(prompts), config.log.evaluations)
        * (settings.samples + settings.greedy)
        for settings, prompts in parts
    )
    text = TEXT_BYTES * (context.longest_prompt + context.completion_length)
    return completions * (EVALUATED_COMPLETION_BYTES + EVALUATED_TOKEN_BYTES * context.completion_length + text)


def _kept(context: PreflightContext) -> str:
    keep = context.config.checkpoint.keep
    if not keep:
        return "checkpoint.keep = 0 keeps all of them"
    extra = extra_checkpoints(context.config)
    more = f", {extra} for checkpoint.keep_best or alarms.rollback" if extra else ""
    return f"checkpoint.keep = {keep}{more}, and one being written"


def _low_precision(context: PreflightContext) -> bool:
    return any(p.element_size() < 4 for p in context.skeleton.parameters())


# ------------------------------------------------------------------------------------------------- the directory


def check_directory(context: PreflightContext) -> Iterator[Finding]:
    given = context.config.run_dir
    place = existing(context)
    # The same conditions as in `RunDir.create`, which would create the directory.
    if given and (Path(given) / "config.toml").exists():
        remedy = f"Continue it with 'gspo train --resume {given}', or choose another --run-dir."
        yield fail(f"{given} already holds a run.", remedy)
    elif given and Path(given).is_dir() and any(p.name != ".lock" for p in Path(given).iterdir()):
        remedy = "Choose another --run-dir, so that nothing in it is lost."
        yield fail(f"{given} is not empty and holds no run.", remedy)
    elif not os.access(place, os.W_OK | os.X_OK):
        yield fail(f"{place} cannot be written to.", "Choose another --run-dir.")
    else:
        yield ok(f"{given or f'runs/{context.config.name}-DATE-TIME'} can be created. The doctor has created nothing.")


def existing(context: PreflightContext) -> Path:
    """The nearest existing parent of the directory that the run would create."""
    path = Path(context.config.run_dir or "runs").absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())

"""Room for checkpoints and rollouts, and a directory that a run may use. Nothing is made or written here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gspo.learner.checkpoint import size_of
from gspo.preflight.case import Case
from gspo.preflight.findings import Finding, fail, ok, warning
from gspo.preflight.machine import human

TOKEN_BYTES = 64
"""Of a reply's token in `rollouts/`: its id, three log-probabilities, flags. Measured on demo runs: 62."""
REPLY_BYTES = 600
"""Of a reply beside its tokens and texts."""
TEXT_BYTES = 4
"""Of a token as text."""


def check_disk(case: Case) -> Iterator[Finding]:
    place = existing(case)
    free = shutil.disk_usage(place).free
    each, count = checkpoint_bytes(case), checkpoints(case)
    logged = rollout_bytes(case)
    steps = case.config.steps
    need = each * count + logged * steps
    detail = [
        f"{'checkpoints':<24} {human(each * count):>8}   {count} x {human(each)} (weights, moments{', masters' if _low(case) else ''}); {_kept(case)}",
        f"{'rollouts':<24} {human(logged * steps):>8}   {steps} steps x {human(logged)}{'' if case.config.log.rollouts else ' (log.rollouts = false)'}",
    ]
    sentence = f"The run writes about {human(need)}; {human(free)} are free at {place}."
    numbers = {"need": round(need), "free": free, "checkpoint": round(each), "checkpoints": count}
    if need > free:
        yield fail(sentence, "Lower checkpoint.keep, raise checkpoint.every, set log.rollouts = false, or give another --run-dir.", detail=detail, **numbers)  # fmt: skip
    elif need > 0.8 * free:
        yield warning(sentence, "That is nearly all of it; free some, or give another --run-dir.", detail=detail, **numbers)  # fmt: skip
    else:
        yield ok(sentence, detail=detail, **numbers)


def checkpoint_bytes(case: Case) -> float:
    """One checkpoint: the model, two float32 moments, and float32 masters where the weights are in less."""
    return size_of(case.skeleton)


def checkpoints(case: Case) -> int:
    """How many lie there at once: those kept, and one being written. A reference that the run makes counts as one."""
    config = case.config
    written = 2 + config.steps // config.checkpoint.every
    kept = written if not config.checkpoint.keep else min(written, config.checkpoint.keep + 1)
    made = bool(config.model.build or config.cold_start.steps)
    return kept + (case.objective is not None and bool(case.objective.kl) and made)


def rollout_bytes(case: Case) -> float:
    """What a step writes to `rollouts/`."""
    if not case.config.log.rollouts:
        return 0.0
    refill = case.config.rollout.refill_budget if case.objective and case.objective.keep == "mixed" else 1
    text = TEXT_BYTES * (case.longest_prompt + case.reply_length)
    return case.replies * refill * (REPLY_BYTES + TOKEN_BYTES * case.reply_length + text)


def _kept(case: Case) -> str:
    keep = case.config.checkpoint.keep
    return f"checkpoint.keep = {keep}, and one while it is written" if keep else "checkpoint.keep = 0 keeps all of them"


def _low(case: Case) -> bool:
    return any(p.element_size() < 4 for p in case.skeleton.parameters())


# ------------------------------------------------------------------------------------------------- the directory


def check_directory(case: Case) -> Iterator[Finding]:
    given, place = case.config.run_dir, existing(case)
    if given and (Path(given) / "config.toml").exists():
        yield fail(f"{given} already holds a run.", f"Continue it with 'gspo train --resume {given}', or choose another --run-dir.")  # fmt: skip
    elif given and Path(given).is_dir() and any(p.name != ".lock" for p in Path(given).iterdir()):
        yield fail(f"{given} is not empty and holds no run.", "Choose another --run-dir, so that nothing in it is lost.")  # fmt: skip
    elif not os.access(place, os.W_OK | os.X_OK):
        yield fail(f"{place} cannot be written to.", "Choose another --run-dir.")
    else:
        yield ok(f"{given or f'runs/{case.config.name}-DATE-TIME'} can be made. The doctor has made nothing.")


def existing(case: Case) -> Path:
    """The nearest directory that is there already, up from the one that the run would make."""
    path = Path(case.config.run_dir or "runs").absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())

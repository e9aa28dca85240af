"""Entry point of a replay, from the run directory to the page.

In: a `Request` from the command line. Out: an exit code, a table on the terminal, and a folder with `replay.json`,
`replay.html` and `figures/*.png`. Invariant: the run directory is only read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import trust
from gspo.build import run_objective
from gspo.context import LearnContext
from gspo.errors import ConfigError
from gspo.learner.batch import TrainBatch
from gspo.record.progress import life_signs
from gspo.view.replay.agreement import Agreement
from gspo.view.replay.candidates import ALL, Candidate, SkippedObjective, candidates, for_rewards, without_reference
from gspo.view.replay.measure import ReplayNumbers, measure
from gspo.view.replay.rebuild import NO_REFERENCE, load_reference, rebuild, reference_model
from gspo.view.replay.records import StepRecord
from gspo.view.replay.source import Source, open_run
from gspo.view.replay.sweep import Sweep, needs_reference, parse_sweep, swept


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `gspo replay`."""

    run: str
    step: int | None = None
    start: int | None = None
    """The checkpoint to start from; `None` for the newest one before the step."""
    objectives: str = ALL
    sweeps: Sequence[str] = ()
    mini_batch: int | None = None
    """Counted from 1; `None` for the last."""
    out: str | None = None
    device: str | None = None
    trust_run: bool = False
    """Run the run's own model code, even if it was not trusted before."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of a replay."""

    run: Path
    step: int
    start: int
    """The checkpoint it started from."""
    agreements: tuple[Agreement, ...]
    numbers: ReplayNumbers
    skipped: tuple[SkippedObjective, ...]
    run_grad_norm: float
    """The gradient norm that the optimizer reports when this mini-batch is recomputed."""
    max_grad_norm: float
    """The run clips gradients to this norm."""
    untrained: int
    """Completions of the step that the run did not train on; no row includes them."""

    @property
    def exact(self) -> bool:
        """Whether every recomputed step agrees with the run."""
        return all(a.exact for a in self.agreements)


def replay(request: Request) -> int:
    """Replay a step, print the result and write the report."""
    from gspo.view.replay.report import as_text

    with life_signs():
        result = compute(request)
    print(as_text(result))
    page = written(request, result)
    print(f"\nPage:     {page}\nNumbers:  {page.parent / 'replay.json'}")
    return 0


def written(request: Request, result: Replay) -> Path:
    """Write the report. Returns the page."""
    from gspo.view.replay.report import write

    out = Path(request.out or _default_out(result.run, result.step))
    try:
        return write(out, result)
    except OSError as error:
        raise ConfigError(f"-o: {out}: {error.strerror}; choose another folder") from None


def compute(request: Request) -> Replay:
    """Compute the numbers of a replay."""
    source = open_run(request.run)
    sweeps = [parse_sweep(text) for text in request.sweeps]
    # The file of a custom objective runs in `_check` already.
    trust.check(source.path, trust.objective_code(source.config), trust=request.trust_run)
    _check(source, request, sweeps)
    step, start = source.start_of(request.step, request.start)
    # A checkpoint may contain model code, which loading executes. Ask before anything is loaded.
    models = [source.checkpoints[start], *((m.path,) if (m := reference_model(source, request.device)) else ())]
    trust.check(source.path, trust.model_code(source.config.model, models), trust=request.trust_run)
    measurement = _Measurement(source, request, step, sweeps)
    rebuilt = rebuild(source, step, start, device=request.device, before_update=measurement, say=_say)
    assert measurement.numbers is not None
    sampled = sum(len(g.completions) for g in measurement.recorded.rollouts.sampled)
    return Replay(
        run=source.path,
        step=step,
        start=start,
        agreements=rebuilt.agreements,
        numbers=measurement.numbers,
        skipped=tuple(measurement.skipped),
        run_grad_norm=rebuilt.learned.updates[measurement.numbers.mini_batch - 1].grad_norm,
        max_grad_norm=source.config.learner.max_grad_norm,
        untrained=sampled - len(rebuilt.learned.samples),
    )


def _check(source: Source, request: Request, sweeps: Sequence[Sweep]) -> None:
    """Refuse invalid requests before anything is loaded."""
    objective = run_objective(source.config)
    candidates(source.config, objective, request.objectives)
    for number, sweep in enumerate(sweeps):
        if sweep.setting in [s.setting for s in sweeps[:number]]:
            raise ConfigError(f"--sweep: {sweep.setting} is given twice; give each setting once")
        if needs_reference(swept(objective, sweep)) and reference_model(source, request.device) is None:
            raise ConfigError(f"--sweep {sweep.setting}: {NO_REFERENCE}")
    out = Path(request.out or _default_out(source.path, 0)).resolve()
    run = source.path.resolve()
    # Resolved paths, so that a link or `..` does not lead into the run directory.
    if out == run or run in out.parents:
        raise ConfigError(f"-o: {out} is inside the run directory, which a replay only reads; choose another folder")
    existing = next(p for p in (out, *out.parents) if p.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(f"-o: {out}: cannot write to {existing}; choose another folder")


class _Measurement:
    """Measures the objectives at one optimizer step while the run's step is recomputed."""

    def __init__(self, source: Source, request: Request, step: int, sweeps: Sequence[Sweep]) -> None:
        self.source = source
        self.request = request
        self.step = step
        self.sweeps = sweeps
        self.numbers: ReplayNumbers | None = None
        self.skipped: list[SkippedObjective] = []

    def __call__(self, learner: LearnContext, recorded: StepRecord, batch: TrainBatch, index: int) -> None:
        last = len(batch.plan.updates)
        wanted = self.request.mini_batch or last
        # Known only now: a step with few completions has fewer updates than learner.mini_batches.
        if wanted > last:
            raise ConfigError(f"--mini-batch: step {self.step} has {last} mini-batches, not {wanted}")
        if index + 1 != wanted:
            return
        self.recorded = recorded
        found, self.skipped = candidates(self.source.config, learner.objective, self.request.objectives)
        found, undefined = for_rewards(found, recorded.rollouts.groups)
        self.skipped += undefined
        found, reference = self._with_reference(learner, found)
        self.numbers = measure(
            learner,
            recorded.rollouts.groups,
            batch,
            index,
            step=self.step,
            found=found,
            sweeps=self.sweeps,
            reference=reference,
        )

    def _with_reference(self, learner: LearnContext, found: list[Candidate]) -> tuple[list[Candidate], Any]:
        """The candidates and the reference model, which is loaded only if an objective has a KL penalty."""
        by_sweep = [o for sweep in self.sweeps for o in swept(found[0].objective, sweep)]
        if learner.reference is not None or not needs_reference([*(c.objective for c in found), *by_sweep]):
            return found, learner.reference
        reference, why = load_reference(self.source, self.request.device)
        if reference is None and needs_reference(by_sweep):
            raise ConfigError(f"--sweep kl: {why}")
        return found if reference is not None else without_reference(found, why), reference


def _default_out(run: Path, step: int) -> str:
    # Resolved, because the path `.` has no name.
    return f"runs/replay-{run.resolve().name}-{step:06d}"


def _say(text: str) -> None:
    # Progress goes to stderr, so that stdout holds only the result.
    print(text, file=sys.stderr)

"""A replay from the run directory to the page.

In: a `Request`, as the command line gives it. Out: an exit code, a table on the terminal, and a folder with `replay.json`,
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
from gspo.view.replay.agreement import Agreement
from gspo.view.replay.candidates import ALL, Candidate, SkippedObjective, candidates, without_reference
from gspo.view.replay.measure import ReplayNumbers, look
from gspo.view.replay.rebuild import NO_REFERENCE, load_reference, rebuild, reference_model
from gspo.view.replay.records import StepRecord
from gspo.view.replay.source import Source, open_run
from gspo.view.replay.sweep import Sweep, needs_reference, parse_sweep, swept


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    run: str
    step: int | None = None
    objectives: str = ALL
    sweeps: Sequence[str] = ()
    mini_batch: int | None = None
    """From 1; None: the last."""
    out: str | None = None
    device: str | None = None
    trust_run: bool = False
    """Also run model code that was not asked for here before."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found."""

    run: Path
    step: int
    start: int
    """The checkpoint it began from."""
    agreements: tuple[Agreement, ...]
    numbers: ReplayNumbers
    left_out: tuple[SkippedObjective, ...]
    run_grad_norm: float
    """The gradient norm that the run's optimiser found at this mini-batch, taken again."""
    max_grad_norm: float
    """Gradients are scaled down to this norm in the run."""
    not_learned: int
    """Replies that the step sampled and the run did not learn from; they are in no row."""

    @property
    def exact(self) -> bool:
        """Whether every step on the way went as it went in the run."""
        return all(a.exact for a in self.agreements)


def replay(request: Request) -> int:
    """Replay a step, show it and write it down."""
    from gspo.view.replay.report import as_text, write

    found = compute(request)
    print(as_text(found))
    out = Path(request.out or _default_out(found.run, found.step))
    try:
        page = write(out, found)
    except OSError as error:
        raise ConfigError(f"-o: {out}: {error.strerror}; choose another") from None
    print(f"\nPage:     {page}\nNumbers:  {out / 'replay.json'}")
    return 0


def compute(request: Request) -> Replay:
    """The numbers of a replay."""
    source, sweeps = open_run(request.run), [parse_sweep(text) for text in request.sweeps]
    _check(source, request, sweeps)
    step, start = source.start_of(request.step)
    models = [source.checkpoints[start], *((m.path,) if (m := reference_model(source, request.device)) else ())]
    trust.check(source.path, trust.model_code(source.config.model, models), trust=request.trust_run)
    watcher = _Watcher(source, request, step, sweeps)
    done = rebuild(source, step, start, device=request.device, look=watcher, say=_say)
    assert watcher.numbers is not None
    sampled = sum(len(g.completions) for g in watcher.recorded.gathered.sampled)
    return Replay(
        run=source.path,
        step=step,
        start=start,
        agreements=done.agreements,
        numbers=watcher.numbers,
        left_out=tuple(watcher.left_out),
        run_grad_norm=done.learned.updates[watcher.numbers.mini_batch - 1].grad_norm,
        max_grad_norm=source.config.learner.max_grad_norm,
        not_learned=sampled - len(done.learned.samples),
    )


def _check(source: Source, request: Request, sweeps: Sequence[Sweep]) -> None:
    """Refuse what cannot work before anything is loaded."""
    objective = run_objective(source.config)
    candidates(source.config, objective, request.objectives)
    for number, sweep in enumerate(sweeps):
        if sweep.setting in [s.setting for s in sweeps[:number]]:
            raise ConfigError(f"--sweep: {sweep.setting} is there twice; give each setting once")
        if needs_reference(swept(objective, sweep)) and reference_model(source, request.device) is None:
            raise ConfigError(f"--sweep {sweep.setting}: {NO_REFERENCE}")
    out, run = Path(request.out or _default_out(source.path, 0)).resolve(), source.path.resolve()
    if out == run or run in out.parents:
        raise ConfigError(f"-o: {out} is inside the run directory, which a replay only reads; choose another")
    there = next(p for p in (out, *out.parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ConfigError(f"-o: {out}: cannot write in {there}; choose another")


class _Watcher:
    """Looks at one optimiser step while the run's own are taken again."""

    def __init__(self, source: Source, request: Request, step: int, sweeps: Sequence[Sweep]) -> None:
        self.source, self.request, self.step, self.sweeps = source, request, step, sweeps
        self.numbers: ReplayNumbers | None = None
        self.left_out: list[SkippedObjective] = []

    def __call__(self, learner: LearnContext, recorded: StepRecord, batch: TrainBatch, index: int) -> None:
        last = len(batch.plan.updates)
        wanted = self.request.mini_batch or last
        if wanted > last:
            raise ConfigError(f"--mini-batch: step {self.step} has {last} mini-batches, not {wanted}")
        if index + 1 != wanted:
            return
        self.recorded = recorded
        found, self.left_out = candidates(self.source.config, learner.objective, self.request.objectives)
        found, reference = self._with_reference(learner, found)
        self.numbers = look(
            learner, recorded.gathered.groups, batch, index, step=self.step, found=found, sweeps=self.sweeps, reference=reference,
        )  # fmt: skip

    def _with_reference(self, learner: LearnContext, found: list[Candidate]) -> tuple[list[Candidate], Any]:
        by_sweep = [o for sweep in self.sweeps for o in swept(found[0].objective, sweep)]
        if learner.reference is not None or not needs_reference([*(c.objective for c in found), *by_sweep]):
            return found, learner.reference
        reference, why = load_reference(self.source, self.request.device)
        if reference is None and needs_reference(by_sweep):
            raise ConfigError(f"--sweep kl: {why}")
        return found if reference is not None else without_reference(found, why), reference


def _default_out(run: Path, step: int) -> str:
    return f"runs/replay-{run.resolve().name}-{step:06d}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)

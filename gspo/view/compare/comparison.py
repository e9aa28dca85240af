"""Entry point of a comparison, from the first cold start to the report.

In: a `Request` from the command line. Out: an exit code and a comparison directory (`record.py`).
Invariant: repeating a request skips finished runs, resumes partial ones and starts missing ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo import config as settings
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.record.run_dir import lock, replace_text
from gspo.signals import StopRequest
from gspo.view.compare import record
from gspo.view.compare.arms import parse_arms, parse_seeds
from gspo.view.compare.curves import read_run
from gspo.view.compare.launch import Failure, default_jobs, run_jobs
from gspo.view.compare.plan import (
    Job,
    arm_configs,
    arm_job,
    check_same_settings,
    measured_budget,
    needs_start,
    shared_config,
    start_job,
)
from gspo.view.compare.record import Record
from gspo.view.compare.report import ReportFiles, write_report


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `gspo compare`."""

    recipe: str
    objectives: str
    seeds: str
    tokens: int | None = None
    out: str | None = None
    jobs: int | None = None
    overrides: Sequence[str] = ()
    trust_run: bool = False
    """Forwarded to the runs that are resumed."""


def compare(request: Request) -> int:
    """Run what is missing and write the report."""
    arms = parse_arms(request.objectives)
    seeds = parse_seeds(request.seeds)
    recipe = settings.find_recipe(request.recipe)
    for option, number in (("--tokens", request.tokens), ("--jobs", request.jobs)):
        if number is not None and number < 1:
            raise ConfigError(f"{option}: must be at least 1, not {number}")
    shared = shared_config(recipe, request.overrides)
    configs = arm_configs(recipe, request.overrides, arms)
    out = Path(request.out or f"runs/compare-{shared.name}")
    with ExitStack() as stack:
        record.read(out)  # refuses a directory of something else before anything, the lock included, is written there
        stack.enter_context(_lock(out))
        # Read again: another comparison may have written the record before this one got the lock.
        saved = replace(
            record.read(out) or Record(recipe=request.recipe), recipe=request.recipe, overrides=[*request.overrides]
        )
        saved = saved.extend([arm.label for arm in arms], seeds)
        # The recorded budget makes a repeated command resume its runs instead of refusing them as different.
        tokens = request.tokens or shared.tokens or saved.tokens
        comparison = _Comparison(
            out=out,
            shared=shared,
            configs=configs,
            seeds=seeds,
            jobs=request.jobs or default_jobs(shared),
            trust_run=request.trust_run,
        )
        comparison.check(tokens)
        # Before any run, so that a comparison that is killed can be repeated with the same arms.
        record.write(out, replace(saved, tokens=tokens))
        replace_text(out / "recipe.toml", settings.to_toml(shared))
        stop = stack.enter_context(StopRequest(_say))
        failures = comparison.start(stop)
        if not stop and comparison.ready():
            saved = replace(saved, tokens=comparison.budget() if tokens is None else tokens)
            record.write(out, saved)
            failures += comparison.run(saved.tokens or 0, stop)
        if stop.signal is not None:
            print(f"\nStopped. Repeat the command to resume; 'gspo compare --report {out}' reports the runs so far.")
            # The exit code that shells give to a process that a signal ended.
            return 128 + stop.signal
        return _print_summary(write_report(out), failures)


def report(out: str) -> int:
    """Write the report of the existing runs."""
    if not (Path(out) / "compare.toml").is_file():
        raise ConfigError(f"{out}: no comparison found (no compare.toml); give the --out directory of 'gspo compare'")
    return _print_summary(write_report(Path(out)), [])


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The runs of one request."""

    out: Path
    shared: Config
    configs: Mapping[str, Config]
    seeds: Sequence[int]
    jobs: int
    trust_run: bool

    def check(self, tokens: int | None) -> None:
        """Refuse existing runs with other settings, before anything is written. Without a budget no arm has started."""
        for job in self._starts() + (self._arms(tokens, self.seeds) if tokens is not None else []):
            check_same_settings(job)

    def start(self, stop: StopRequest) -> list[Failure]:
        """Run the cold starts."""
        return run_jobs(self._starts(), concurrency=self.jobs, say=_say, stop=stop, trust_run=self.trust_run)

    def ready(self) -> Sequence[int]:
        """Seeds whose cold start is finished."""
        return [job.config.seed for job in self._starts() if job.finished] if needs_start(self.shared) else self.seeds

    def budget(self) -> int:
        """Token budget of every run, measured on the cold starts."""
        runs = [run for job in self._starts() if job.finished and (run := read_run(job.path))]
        tokens = measured_budget(self.shared, runs)
        if tokens:
            _say(
                f"each run samples {tokens:,} tokens: {self.shared.steps} steps at the completion length "
                "of the cold starts"
            )
        else:
            _say(
                f"no completion length was measured, so each run takes {self.shared.steps} steps and the report "
                "compares runs at the largest number of tokens that all have sampled"
            )
        return tokens

    def run(self, tokens: int, stop: StopRequest) -> list[Failure]:
        """Train every arm of every seed whose cold start is finished."""
        jobs = self._arms(tokens, self.ready())
        for job in jobs:
            check_same_settings(job)
        done = sum(job.finished for job in jobs)
        _say(f"{len(jobs)} runs, {done} of them finished, {self.jobs} at a time, in {self.out}")
        return run_jobs(jobs, concurrency=self.jobs, say=_say, stop=stop, trust_run=self.trust_run)

    def _starts(self) -> list[Job]:
        return [start_job(self.out, self.shared, seed) for seed in self.seeds] if needs_start(self.shared) else []

    def _arms(self, tokens: int, seeds: Sequence[int]) -> list[Job]:
        """All arms of a seed before the next seed, so that a partial report compares arms on the same seeds."""
        return [
            arm_job(self.out, label, config, seed, tokens) for seed in seeds for label, config in self.configs.items()
        ]


def _print_summary(written: ReportFiles, failures: Sequence[Failure]) -> int:
    print()
    print(written.text)
    for note in written.notes:
        print(f"Note: {note}")
    for failure in failures:
        print(f"FAILED  {failure}")
    print(f"Report:  {written.page}")
    return 1 if failures else 0


def _lock(out: Path) -> Any:
    """Create the comparison directory if needed and lock it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot create this directory: {error.strerror}; choose another --out") from None
    return lock(out, busy="another comparison is using this directory", option="--out")


def _say(text: str) -> None:
    print(text, flush=True)

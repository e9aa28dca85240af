"""`gspo.doctor`, `gspo.compare` and `gspo.replay`: the commands of these names, from Python.

In: the arguments of `gspo.train`, or a run. Out: findings, a comparison, a replay. Invariant: they do what the commands
do, with a recipe that is written from the arguments.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gspo import config as settings_of
from gspo.api.run import Run
from gspo.api.training import Arguments, prepare
from gspo.commands.command import quiet_libraries
from gspo.config import to_toml
from gspo.errors import ConfigError
from gspo.reward import in_process

if TYPE_CHECKING:
    from gspo.preflight.findings import Finding
    from gspo.view.replay.replay import Replay


class Findings(tuple["Finding", ...]):
    """The findings of `gspo.doctor`, in their order."""

    __slots__ = ()

    @property
    def fails(self) -> bool:
        """Whether the run would fail."""
        return any(finding.level.value == "FAIL" for finding in self)

    def __repr__(self) -> str:
        # The report is already printed, and a notebook shows the last value of a cell.
        counts = Counter(finding.level.value for finding in self)
        return f"<Findings: {', '.join(f'{count} {level}' for level, count in counts.items())}>"

    def __str__(self) -> str:
        return "\n".join(f"{finding.level.value:<8} {finding.check}: {finding.what}" for finding in self)


def doctor(
    model: Any = None,
    dataset: Any = None,
    rewards: Any = None,
    *,
    objective: Any = None,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    quick: bool = False,
    prompts: int | None = None,
    show: bool = True,
    **settings: Any,
) -> Findings:
    """Pre-flight checks of a run, with the arguments of `gspo.train`.

    `quick` checks files and settings only, without loading weights. `prompts` is how many groups of completions are
    sampled. `show` prints the findings as they come."""
    quiet_libraries()
    from gspo.preflight.examine import examine
    from gspo.preflight.report import shown

    where = "gspo.doctor"
    arguments = Arguments(
        model=model,
        dataset=dataset,
        rewards=rewards,
        objective=objective,
        eval_dataset=eval_dataset,
        tokenizer=tokenizer,
        recipe=recipe,
        settings=settings,
    )
    with TemporaryDirectory(prefix="gspo-") as name:
        folder = Path(name)
        prepared = prepare(arguments, lambda config: folder, where=where)
        prepared.inputs.write(folder)
        file = folder / "recipe.toml"
        file.write_text(to_toml(prepared.config), encoding="utf-8")
        with in_process.given(prepared.rewards.own):
            if show:
                title = "gspo.doctor" if recipe is None else f"gspo.doctor {os.fspath(recipe)}"
                found = shown(str(file), (), quick=quick, prompts=prompts, title=title, folder=name)
            else:
                found = examine(str(file), (), quick=quick, prompts=prompts, show=lambda finding: None)
        return Findings(finding.without_folder(name) for finding in found)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `gspo.compare`."""

    path: Path
    """The directory of the comparison."""
    complete: bool
    """Whether every run has finished."""

    @property
    def report(self) -> Path:
        """The report with its figures."""
        return self.path / "report.html"

    @property
    def table(self) -> dict[str, Any]:
        """The numbers of the report (docs/compare.md)."""
        found: dict[str, Any] = json.loads((self.path / "table.json").read_text(encoding="utf-8"))
        return found

    @property
    def runs(self) -> Mapping[str, Run]:
        """The runs by the names of their directories, NAME-seed-SEED."""
        return {path.parent.name: Run(path.parent) for path in sorted(self.path.glob("runs/*/config.toml"))}


def compare(
    objectives: str | Sequence[str],
    model: Any = None,
    dataset: Any = None,
    rewards: Any = None,
    *,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    tokens: int | None = None,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    trust_run: bool = False,
    **settings: Any,
) -> Comparison:
    """Train several objectives on the same problems, with equal numbers of sampled tokens, and write a report.

    `objectives` are arms as in `gspo compare`: `["grpo", "gspo", "gspo+clip_high=1e-3"]`. Every run is a process of its
    own, so reward functions must be importable. `out` is the directory of the comparison (default:
    `runs/compare-NAME`); repeating the call resumes it. The other arguments are those of `gspo.train`."""
    from gspo.view.compare.comparison import Request
    from gspo.view.compare.comparison import compare as run_comparison

    where = "gspo.compare"
    if "objective" in settings:
        raise ConfigError(f"{where}: objective: name the arms in objectives; settings of an arm are NAME+KEY=VALUE")
    arguments = Arguments(
        model=model,
        dataset=dataset,
        rewards=rewards,
        eval_dataset=eval_dataset,
        tokenizer=tokenizer,
        recipe=recipe,
        settings=settings,
    )
    directories: list[Path] = []

    def folder(config: settings_of.Config) -> Path:
        directories.append(Path(out or f"runs/compare-{config.name}"))
        return Path(f"{directories[0]}-inputs")

    prepared = prepare(arguments, folder, where=where)
    if prepared.rewards.own:
        names = ", ".join(prepared.rewards.own)
        raise ConfigError(
            f"{where}: rewards: every run is a process of its own, and only this process has {names}; put it into a "
            f'file and import it, or pass "file.py:{next(iter(prepared.rewards.own))}"'
        )
    target, given = directories[0], Path(f"{directories[0]}-inputs")
    # Next to the comparison, whose directory holds nothing but what it has written itself.
    replace(prepared.inputs, files={**prepared.inputs.files, "recipe.toml": to_toml(prepared.config)}).write(given)
    code = run_comparison(
        Request(
            recipe=str(given / "recipe.toml"),
            objectives=objectives if isinstance(objectives, str) else ",".join(objectives),
            seeds=",".join(map(str, seeds)),
            tokens=tokens,
            out=str(target),
            jobs=jobs,
            trust_run=trust_run,
        )
    )
    return Comparison(path=target, complete=code == 0)


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The result of `gspo.replay`."""

    numbers: Replay
    """What every objective would have done."""
    page: Path
    """The report; `replay.json` is next to it."""
    text: str
    """The table that `gspo replay` prints."""

    def __repr__(self) -> str:
        return self.text


def replay(
    run: str | os.PathLike[str] | Run,
    step: int | None = None,
    *,
    start: int | None = None,
    objectives: str | Sequence[str] = "all",
    sweep: str | Sequence[str] = (),
    mini_batch: int | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    trust_run: bool = False,
) -> ReplayResult:
    """What every objective would have done on a recorded step of a run, by default the last one that can be replayed.

    The arguments are those of `gspo replay`: `objectives=["grpo", "gspo+clip_high=1e-3"]`,
    `sweep="clip_high=1e-4..1e-1"`. `start` is `--from`, the checkpoint from which all steps are repeated."""
    quiet_libraries()
    from gspo.view.replay.replay import Request, compute, written
    from gspo.view.replay.report import as_text

    request = Request(
        run=str(run.path) if isinstance(run, Run) else os.fspath(run),
        step=step,
        start=start,
        objectives=objectives if isinstance(objectives, str) else ",".join(objectives),
        sweeps=[sweep] if isinstance(sweep, str) else list(sweep),
        mini_batch=mini_batch,
        out=None if out is None else os.fspath(out),
        device=device,
        trust_run=trust_run,
    )
    result = compute(request)
    return ReplayResult(numbers=result, page=written(request, result), text=as_text(result))

"""Log to TensorBoard, Weights & Biases, trackio or MLflow, in addition to the run directory.

In: the metrics and completions of a step, and the report of the finished run. Out: nothing that training depends on.
Invariant: a sink that cannot start is an error before anything expensive runs. A sink that fails later is disabled with
a message, and the run continues. A resumed run continues in the same run of the tracker, whose id is in
`trackers.json`. API keys are read by the packages themselves; nothing here sees or writes one.
"""

from __future__ import annotations

import importlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo.config import LogConfig
from gspo.errors import ConfigError
from gspo.record.run_dir import replace_text
from gspo.redact import known_secrets, redacted, redacted_values
from gspo.types import Group

FILE = "trackers.json"
"""The file of a run directory with the ids of its runs in trackers."""
COLUMNS = ("step", "prompt", "completion", "answer", "reward", "correct", "stop", "tokens")
"""Of the table of completions."""
Row = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a sink is told about the run."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    log: LogConfig

    @property
    def title(self) -> str:
        """The name of the run in a tracker."""
        return f"{self.name}-{self.path.name}"

    def id_of(self, tracker: str) -> str | None:
        """The id that a tracker knows this run by; None if it has not been logged there."""
        file = self.path / FILE
        if not file.is_file():
            return None
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get(tracker)
        except (ValueError, AttributeError):
            raise ConfigError(f"{file}: is damaged; remove it, and the run continues in new runs of trackers") from None
        return found if isinstance(found, str) else None

    def remember(self, tracker: str, identity: str) -> None:
        """Keep the id, so that a resumed run continues in the same run of the tracker."""
        file = self.path / FILE
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        replace_text(file, json.dumps(known | {tracker: identity}, indent=2) + "\n")

    @property
    def flat_settings(self) -> dict[str, str | int | float | bool]:
        """The settings as single values, without those that are empty."""
        return dict(_flat(self.settings, ""))


class Sink(Protocol):
    """A destination for metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        ...

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        """Log some completions of a step: rows of `COLUMNS`."""
        ...

    def report(self, file: Path) -> None:
        """Keep the report of the run."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class TensorBoardSink:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        module = _import("torch.utils.tensorboard", "tensorboard")
        summary = _import("torch.utils.tensorboard.summary", "tensorboard")
        folder = run.path / "tensorboard"
        resumed = folder.is_dir()
        self._writer = module.SummaryWriter(str(folder))
        if not resumed:
            # Not `add_hparams`, which writes a run of its own next to the curves.
            for part in summary.hparams(run.flat_settings, {"reward/mean": 0, "eval/accuracy": 0, "eval/reward": 0}):
                self._writer.file_writer.add_summary(part)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        # A killed run would otherwise lose the last minutes.
        self._writer.flush()

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        lines = [" | ".join(map(_cell, row)) for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
        self._writer.add_text("completions", "\n".join(f"| {line} |" for line in lines), step)

    def report(self, file: Path) -> None:
        """TensorBoard has no files."""

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        self._module = _import("wandb", "wandb")
        identity = run.id_of("wandb") or secrets.token_hex(4)
        self._module.init(
            project=run.log.project,
            entity=run.log.entity or None,
            group=run.log.group or None,
            tags=list(run.log.tags),
            name=run.title,
            id=identity,
            resume="allow",
            config=dict(run.settings),
            dir=str(run.path),
        )
        run.remember("wandb", identity)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        table = self._module.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._module.log({"completions": table}, step=step)

    def report(self, file: Path) -> None:
        artifact = self._module.Artifact("report", type="report")
        artifact.add_file(str(file))
        self._module.log_artifact(artifact)

    def close(self) -> None:
        self._module.finish()


class TrackioSink(WandbSink):
    """trackio, which keeps its own local database and has the interface of Weights & Biases for logging."""

    def __init__(self, run: TrackedRun) -> None:
        self._module = _import("trackio", "trackio")
        # A run of trackio is known by its name.
        name = run.id_of("trackio") or f"{run.title}-{secrets.token_hex(2)}"
        self._module.init(
            project=run.log.project,
            name=name,
            group=run.log.group or None,
            resume="allow",
            config=dict(run.settings) | ({"tags": list(run.log.tags)} if run.log.tags else {}),
        )
        run.remember("trackio", name)


class MlflowSink:
    """MLflow. Where it keeps its runs is a setting of MLflow (`MLFLOW_TRACKING_URI`)."""

    def __init__(self, run: TrackedRun) -> None:
        self._module = _import("mlflow", "mlflow")
        identity = run.id_of("mlflow")
        self._module.set_experiment(run.log.project)
        tags = dict.fromkeys(run.log.tags, "true") | ({"group": run.log.group} if run.log.group else {})
        started = self._module.start_run(run_id=identity, run_name=run.title, tags=tags)
        if identity is None:
            # Parameters cannot be changed, and a resumed run may have other settings.
            self._module.log_params({key: str(value)[:500] for key, value in run.flat_settings.items()})
            run.remember("mlflow", started.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # MLflow allows letters, digits and "_-. /" in names.
        self._module.log_metrics({re.sub(r"[^\w\-. /]", "_", k): v for k, v in values.items()}, step=step)

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        data = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        self._module.log_dict(data, f"completions/{step:06d}.json")

    def report(self, file: Path) -> None:
        self._module.log_artifact(str(file))

    def close(self) -> None:
        self._module.end_run()


SINKS: dict[str, Callable[[TrackedRun], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
}


class Sinks:
    """All sinks of a run."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        name: str,
        run: Path,
        settings: Mapping[str, Any],
        complain: Callable[[str], None],
        log: LogConfig | None = None,
    ) -> None:
        tracked = TrackedRun(
            name=name, path=run, settings=redacted_values(settings, known_secrets()), log=log or LogConfig()
        )
        self._open: dict[str, Sink] = {sink: SINKS[sink](tracked) for sink in names}
        self._rows = tracked.log.completions
        self._complain = complain

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numeric values to every sink."""
        # A metric that could not be measured is None, which no sink accepts.
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and k != "step"}
        self._each(lambda sink: sink.log(step, numbers))

    def completions(self, step: int, groups: Sequence[Group]) -> None:
        """Send some completions of a step to every sink (`log.completions`)."""
        if self._rows and self._open and groups:
            rows = completion_rows(step, groups, self._rows)
            self._each(lambda sink: sink.completions(step, rows))

    def report(self, file: Path) -> None:
        """Send the report of the run to every sink."""
        self._each(lambda sink: sink.report(file))

    def __bool__(self) -> bool:
        """Whether there are sinks."""
        return bool(self._open)

    def close(self) -> None:
        """Close every sink."""
        self._each(lambda sink: sink.close())
        self._open.clear()

    def _each(self, action: Callable[[Sink], None]) -> None:
        # A copy of the names, because a sink that fails is removed while this runs.
        for name in list(self._open):
            try:
                action(self._open[name])
            # A third-party logger may raise anything (a lost connection, an expired login). No step may fail for it.
            except Exception as error:
                del self._open[name]
                self._complain(f"log sink {name} failed and is disabled for this run: {error}")


def completion_rows(step: int, groups: Sequence[Group], count: int) -> list[list[Any]]:
    """At most `count` completions as rows of `COLUMNS`, from as many different groups as possible."""
    known = known_secrets()
    chosen = groups[:: max(1, len(groups) // count)]
    pairs = [(group, i) for i in range(max(len(g.completions) for g in chosen)) for group in chosen]
    rows = []
    for group, i in [(g, i) for g, i in pairs if i < len(g.completions)][:count]:
        completion, score = group.completions[i], group.scores[i]
        texts = (group.prompt.text, completion.text, str(group.prompt.columns.get("answer", "")))
        shown = [redacted(text, known) for text in texts]
        length = len(completion.token_ids)
        rows.append([step, *shown, score.reward, score.correct, str(completion.stop), length])
    return rows


def _flat(value: Any, prefix: str) -> list[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        return [one for key, item in value.items() for one in _flat(item, f"{prefix}.{key}" if prefix else str(key))]
    if value is None or value == "" or value == () or value == []:
        return []
    return [(prefix, value if isinstance(value, str | int | float | bool) else str(value))]


def _cell(value: Any) -> str:
    """A value as a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"log.sinks: {package} is not installed; run: pip install {package}") from None

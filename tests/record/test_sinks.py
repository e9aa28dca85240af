"""Trackers, with stand-ins that have the interfaces of their packages."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gspo import config as settings
from gspo.config import Config, LogConfig
from gspo.errors import ConfigError
from gspo.record.progress import PlainDisplay
from gspo.record.sinks import Sinks
from gspo.trainer import resume, train

KEY = "hf_" + "abcdEFGH1234" * 3


class Tracker(ModuleType):
    """What was sent to a tracker."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.started: list[dict[str, Any]] = []
        self.logged: dict[int, dict[str, Any]] = {}
        self.files: list[str] = []
        self.finished = 0

    def finish(self) -> None:
        self.finished += 1

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        self.logged.setdefault(step, {}).update(values)

    @staticmethod
    def Table(*, columns: list[str], data: list[list[Any]]) -> SimpleNamespace:
        assert all(len(row) == len(columns) for row in data)
        return SimpleNamespace(columns=columns, data=data)

    @staticmethod
    def Artifact(name: str, type: str) -> Any:
        added: list[str] = []
        return SimpleNamespace(name=name, type=type, files=added, add_file=added.append)

    def log_artifact(self, artifact: Any) -> None:
        self.files += [Path(file).read_text(encoding="utf-8") for file in artifact.files]


class Wandb(Tracker):
    def init(
        self,
        *,
        project: str,
        entity: str | None,
        group: str | None,
        tags: list[str],
        name: str,
        id: str,
        resume: str,
        config: dict[str, Any],
        dir: str,
    ) -> None:
        self.started.append(locals())


class Trackio(Tracker):
    def init(self, *, project: str, name: str, group: str | None, resume: str, config: dict[str, Any]) -> None:
        self.started.append(locals())


class Mlflow(Tracker):
    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, *, run_id: str | None, run_name: str, tags: dict[str, str]) -> Any:
        self.started.append(locals())
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "run7"))

    def log_params(self, params: dict[str, str]) -> None:
        assert not hasattr(self, "params"), "parameters cannot be changed"
        self.params = params

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self.log(metrics, step)

    def log_dict(self, dictionary: dict[str, Any], artifact_file: str) -> None:
        self.files.append(json.dumps({artifact_file: dictionary}))

    def log_artifact(self, local_path: str) -> None:
        self.files.append(Path(local_path).read_text(encoding="utf-8"))

    def end_run(self) -> None:
        self.finish()


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {"wandb": Wandb("wandb"), "trackio": Trackio("trackio"), "mlflow": Mlflow("mlflow")}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_a_run_is_tracked_and_resumed_as_the_same_run(
    trackers: dict[str, Any], tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    wanted = ["log.project=sums", "log.group=g", "log.tags=a,b", "log.completions=3", "log.report=true"]
    config = tiny("steps=1", "log.sinks=wandb,trackio,mlflow", *wanted, "log.entity=team")
    run = train(config, PlainDisplay()).run
    resume(run, PlainDisplay(), steps=2)

    wandb, trackio, mlflow = trackers["wandb"], trackers["trackio"], trackers["mlflow"]
    first, again = wandb.started
    assert (first["project"], first["entity"], first["group"], first["tags"]) == ("sums", "team", "g", ["a", "b"])
    assert first["resume"] == again["resume"] == "allow"
    assert first["id"] == again["id"]
    assert first["config"]["objective"]["name"] == "gspo"
    names = [one["name"] for one in trackio.started]
    assert names[0] == names[1]
    assert [one["run_id"] for one in mlflow.started] == [None, "run7"]
    assert mlflow.experiment == "sums"
    assert mlflow.started[0]["tags"] == {"a": "true", "b": "true", "group": "g"}
    assert mlflow.params["learner.mini_batches"] == "2"
    ids = json.loads((run / "trackers.json").read_text())
    assert ids == {"wandb": first["id"], "trackio": names[0], "mlflow": "run7"}

    for tracker in (wandb, trackio):
        table = tracker.logged[2]["completions"]
        assert len(table.data) == 3
        prompts = [row[table.columns.index("prompt")] for row in table.data]
        assert len(set(prompts)) == 3, "completions of different prompts"
    assert "completions/000002.json" in "".join(mlflow.files)
    for tracker in trackers.values():
        assert sorted(tracker.logged) == [1, 2]
        assert isinstance(tracker.logged[2]["reward/mean"], float)
        assert sum("<!DOCTYPE html>" in file for file in tracker.files) == 2
        assert tracker.finished == 2
    sent = repr([(t.started, t.logged, t.files) for t in trackers.values()])
    assert KEY not in sent + "".join(p.read_text(errors="replace") for p in run.rglob("*.json*"))


def test_tensorboard_shows_settings_and_completions(tiny: Callable[..., Config]) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tiny("steps=1", "log.sinks=tensorboard", "log.completions=2"), PlainDisplay()).run
    events = loader.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert "reward/mean" in tags["scalars"]
    assert any("completions" in name for name in tags["tensors"])
    metadata = events.SummaryMetadata("_hparams_/session_start_info")
    assert b"learner.mini_batches" in metadata.plugin_data.content


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_missing_package_is_named_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"log.sinks: {name} is not installed; run: pip install {name}"):
        Sinks([name], name="x", run=tmp_path, settings={}, complain=print)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["log.group=g"], "log.group: has no effect without log.sinks"),
        (["log.sinks=trackio", "log.entity=e"], "log.entity: has no effect with log.sinks = .'trackio'.; add wandb"),
        (["log.sinks=tensorboard", "log.report=true"], "log.report: has no effect .* add mlflow or trackio or wandb"),
    ],
)
def test_a_setting_that_no_sink_takes_is_an_error(
    overrides: list[str], message: str, tiny: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.check(tiny(*overrides))


def test_a_damaged_file_of_ids_is_an_error_with_a_remedy(trackers: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text("{")
    with pytest.raises(ConfigError, match=r"trackers.json: is damaged; remove it"):
        Sinks(
            ["wandb"],
            name="x",
            run=tmp_path,
            settings={},
            complain=print,
            log=dataclasses.replace(LogConfig(), sinks=("wandb",)),
        )

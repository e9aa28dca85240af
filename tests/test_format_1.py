"""A run directory of format 1, as the version before `run.json` wrote it, in everything that opens a run.

`format_1/run` was written by that version: two steps, with both checkpoints. Its settings, metrics, events and records
have the old names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from shown_runs import write_lines

from gspo import aliases
from gspo.build import run_objective
from gspo.cli import main
from gspo.config import from_tree, read_toml, to_toml
from gspo.objectives.describe import resolved
from gspo.record import run_format
from gspo.record.curves_image import draw_curves
from gspo.record.run_dir import read_events, read_jsonl, read_metrics
from gspo.trainer import resume
from gspo.view.compare.curves import read_run
from gspo.view.completions import Completions
from gspo.view.dashboard import handlers
from gspo.view.dashboard.watchlist import Watchlist
from gspo.view.report import write_report
from gspo.view.run_reader import RunReader
from gspo.view.terminal import watch_text

GIVEN = Path(__file__).parent / "format_1" / "run"
RENAMED = (
    "length/penalized_fraction",
    "sampler/idle_fraction",
    "sampler/running_mean",
    "reward/part/completion_format",
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GIVEN, tmp_path / "old"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old run, continued for two more steps."""
    run = Path(shutil.copytree(GIVEN, tmp_path_factory.mktemp("resumed") / "run"))
    resume(run, Silent(), steps=4)
    return run


class Silent:
    """Shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def translated(run: Path) -> Path:
    """Rewrite a run of format 1 as if today's version had written it."""
    config = from_tree(read_toml(run / "config.toml"), where="old")
    (run / "config.toml").write_text(to_toml(config))
    (run / "run.json").write_text(run_format.to_json(resolved(run_objective(config))))
    write_lines(run / "metrics.jsonl", read_metrics(run))
    write_lines(run / "events.jsonl", read_events(run))
    for file in (run / "rollouts").iterdir():
        write_lines(file, [aliases.record(row) for row in read_jsonl(file)])
    for folder in (run / "checkpoints").iterdir():
        state = json.loads((folder / "trainer.json").read_text())
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        state["offsets"]["metrics.jsonl"] = sum(map(len, lines[: 1 + state["step"]]))
        state["settings"] = aliases.settings(state["settings"])
        store(folder, state)
    return run


def store(checkpoint: Path, state: dict[str, Any]) -> None:
    """Replace the `trainer.json` of a checkpoint, whose manifest must match."""
    data = json.dumps(state).encode()
    (checkpoint / "trainer.json").write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["trainer.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_the_directory_has_old_names_and_no_format() -> None:
    assert not (GIVEN / "run.json").exists()
    assert "replies = 4" in (GIVEN / "config.toml").read_text()
    assert "length/punished_fraction" in (GIVEN / "metrics.jsonl").read_text()
    assert {"cold start", "new end"} <= {event["event"] for event in read_jsonl(GIVEN / "events.jsonl")}


def test_it_resumes_bitwise_like_the_same_run_in_today_s_format(resumed: Path, tmp_path: Path) -> None:
    today = translated(Path(shutil.copytree(GIVEN, tmp_path / "run")))
    resume(today, Silent(), steps=4)
    assert read_metrics(resumed) == read_jsonl(today / "metrics.jsonl")
    for step in (3, 4):
        name = f"rollouts/{step:06d}.jsonl"
        assert (resumed / name).read_bytes() == (today / name).read_bytes()
    for name in ("model.safetensors", "trainer.tensors"):
        parts = [(run / "checkpoints/000004" / name).read_bytes() for run in (resumed, today)]
        assert parts[0] == parts[1]


def test_a_resume_upgrades_the_directory_and_writes_only_new_names(resumed: Path) -> None:
    assert run_format.read(resumed).format == run_format.FORMAT
    assert "group_size = 4" in (resumed / "config.toml").read_text()
    rows = read_jsonl(resumed / "metrics.jsonl")
    before = (GIVEN / "metrics.jsonl").read_bytes()
    assert (resumed / "metrics.jsonl").read_bytes().startswith(before), "what was written stays as it is"
    for row in rows[len(before.splitlines()) :]:
        assert row == aliases.metrics(row)
    for file in ("rollouts/000003.jsonl", "rollouts/000004.jsonl"):
        assert all(record == aliases.record(record) for record in read_jsonl(resumed / file))
    state = json.loads((resumed / "checkpoints/000004/trainer.json").read_text())
    assert state["settings"] == aliases.settings(state["settings"])
    events = read_jsonl(resumed / "events.jsonl")
    assert [e for e in events if e["event"] == "steps_changed"] == [
        e for e in events if e["event"] != "new end" and e.get("before") == 2
    ]
    assert "changed" not in next(e for e in reversed(events) if e["event"] == "resume"), "a new name is no new value"


def test_every_reader_shows_one_curve_under_the_new_name(resumed: Path) -> None:
    reader = RunReader(resumed)
    reader.refresh()
    for key in RENAMED:
        assert np.flatnonzero(~np.isnan(reader.metrics.values(key))).tolist() == [1, 2, 3, 4], key
    assert not set(aliases.METRICS) & set(reader.metrics.columns)
    assert set(RENAMED) <= set(reader.row_of(1))
    compared = read_run(resumed)
    assert compared is not None
    assert all(len(compared.values(key)) == 4 for key in RENAMED)
    assert draw_curves(resumed).stat().st_size > 1000


def test_it_opens_in_watch_and_report(old: Path, tmp_path: Path, capsys: Any) -> None:
    (watched,) = Watchlist([old]).runs.values()
    shown = handlers.overview(watched, {})
    assert {"length/penalized_fraction", "sampler/idle_fraction"} <= set(shown["curves"])
    assert {e["event"] for e in shown["events"]} >= {"cold_start", "steps_changed"}
    assert watched.run.settings["rollout"]["group_size"] == 4
    completion = handlers.completion(watched, 2, 0, 0)
    assert (completion["range_of"], completion["completions"]) == ("sequence", 4)
    assert "completion_format" in completion["parts"]
    page = write_report([old], tmp_path / "report.html").read_text()
    assert "length/penalized_fraction" in page
    assert "length/punished_fraction" not in page
    with (tmp_path / "out").open("w") as out:
        assert watch_text([old], Console(file=out)) == 0
    assert "length/penalized_fraction" in (tmp_path / "out").read_text()


def test_records_of_dropped_completions_are_read(old: Path) -> None:
    file = old / "rollouts/000002.jsonl"
    records = read_jsonl(file)
    for record in records[:4]:
        record |= {"trained": False, "left_out": "not mixed", "failure": "untried: the batch ended: too late"}
    write_lines(file, records)
    completions = Completions(old)
    assert [group["discarded"] for group in completions.groups(2)] == [True, False, False, False]
    found = completions.find(2, only="dropped")["completions"]
    assert [c["drop_reason"] for c in found] == ["uniform"] * 4
    whole = completions.completion(2, 0, 0)
    assert whole is not None
    assert whole["failure"] == "not_run: the batch ended: too late"


def test_it_opens_in_replay_and_eval(old: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "replay"
    assert main(["replay", str(old), "--step", "2", "-o", str(out)]) == 0
    assert json.loads((out / "replay.json").read_text())["rows"][0]["completions"] > 0
    written = tmp_path / "completions.jsonl"
    capsys.readouterr()
    assert main(["eval", str(old), f"--completions={written}"]) == 0
    assert len(written.read_text().splitlines()) == 4
    assert "now called" not in capsys.readouterr().err, "nobody edits the settings of a run"


def test_the_old_option_of_eval_works_and_is_reported(old: Path, tmp_path: Path, capsys: Any) -> None:
    file = f"{tmp_path}/completions.jsonl"
    assert main(["eval", str(old), f"--replies={file}"]) == 0
    assert len(Path(file).read_text().splitlines()) == 4
    assert capsys.readouterr().err == "warning: --replies is now called --completions; the old name still works\n"
    assert main(["eval", str(old), f"--replies={file}", f"--completions={file}"]) == 1
    assert "--replies is the old name of --completions, and both are given" in capsys.readouterr().err


def test_a_pending_step_of_an_old_checkpoint_is_written_with_new_names(old: Path) -> None:
    """A step whose evaluation was interrupted is stored in the checkpoint with its metrics."""
    lines = (old / "metrics.jsonl").read_text().splitlines(keepends=True)
    (old / "metrics.jsonl").write_text("".join(lines[:2]))
    folder = old / "checkpoints/000002"
    state = json.loads((folder / "trainer.json").read_text())
    state["pending"] = {k: v for k, v in json.loads(lines[2]).items() if not k.startswith("eval/")}
    state["offsets"]["metrics.jsonl"] = sum(map(len, lines[:2]))
    store(folder, state)
    resume(old, Silent(), steps=2)
    last = read_jsonl(old / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert last == aliases.metrics(last)
    assert last["length/penalized_fraction"] == json.loads(lines[2])["length/punished_fraction"]

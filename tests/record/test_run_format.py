"""`run.json`: what a run writes into it, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shown_runs import CONFIG

import gspo
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.objectives.describe import resolved
from gspo.record import run_format
from gspo.record.run_dir import RunDir
from gspo.record.run_format import ObjectiveFacts
from gspo.trainer import train
from gspo.view.dashboard import handlers
from gspo.view.dashboard.watchlist import Watchlist
from gspo.view.replay.source import open_run
from gspo.view.run_reader import RunReader

GOOD = json.loads(run_format.to_json(resolved(gspo.objective("gspo"))))

FORMAT_1_OBJECTIVES = (
    "gspo",
    "gspo_token",
    "luspo",
    "gmpo",
    "vespo",
    "grpo",
    "dr_grpo",
    "dapo",
    "reinforce_pp",
    "sapo",
    "maspo",
    "cispo",
    "minirl",
    "clip_cov",
    "kl_cov",
    "gpg",
    "rloo",
)
"""The objectives that a run of format 1 can have. Later ones need not be known by name."""


def written(folder: Path, text: str) -> Path:
    (folder / "config.toml").write_text(CONFIG)
    (folder / "run.json").write_text(text)
    return folder


def test_a_run_records_its_format_and_what_its_objective_does(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=1", "eval.every=0", "objective.name=dapo", "rollout.refill_budget=1", "objective.kl=0.1")
    train(config, display)
    record = json.loads((Path(config.run_dir) / "run.json").read_text())
    assert (record["format"], record["gspo"]) == (run_format.FORMAT, gspo.__version__)
    objective = record["objective"]
    assert (objective["name"], objective["clips"], objective["clip_high"]) == ("dapo", "tokens", 0.28)
    assert (objective["keep"], objective["shape"], objective["kl"]) == ("mixed", "soft_overlong", 0.1)


@pytest.mark.parametrize("name", FORMAT_1_OBJECTIVES)
def test_a_directory_without_the_file_has_the_same_facts_by_name(name: str, tmp_path: Path) -> None:
    written(tmp_path, run_format.to_json(resolved(gspo.objective(name))))
    assert_same_facts(run_format.read(tmp_path).objective, run_format.format_1_facts({"objective": {"name": name}}))


def assert_same_facts(recorded: ObjectiveFacts | None, by_name: ObjectiveFacts) -> None:
    """Equal, except that by name only the settings are known that a diagnosis may advise, and no ratio."""
    assert recorded is not None
    assert replace(recorded, settings=by_name.settings, ratio="") == by_name
    assert set(by_name.settings) <= set(recorded.settings)


def test_settings_of_a_directory_without_the_file_count(tmp_path: Path) -> None:
    changed = {"shape": "overlong_filter", "kl": 0.1, "kl_in": "reward"}
    written(tmp_path, run_format.to_json(resolved(gspo.objective("dapo", **changed))))
    by_name = run_format.format_1_facts({"objective": {"name": "dapo", **changed}})
    assert_same_facts(run_format.read(tmp_path).objective, by_name)


@pytest.mark.parametrize("settings", [{}, {"objective": 3}, {"objective": {"name": 3, "shape": ["x"]}}])
def test_settings_of_another_type_give_the_default(settings: dict[str, Any]) -> None:
    assert run_format.format_1_facts(settings) == run_format.format_1_facts({"objective": {"name": "gspo"}})


def test_a_later_format_says_to_update(tmp_path: Path) -> None:
    written(tmp_path, json.dumps(GOOD | {"format": 3, "objective": "unknown"}))
    for opened in (RunDir.open, open_run, lambda path: RunReader(path).refresh()):
        with pytest.raises(ConfigError, match=r"run\.json: .*format 3, .*formats up to 2; update gspo"):
            opened(tmp_path)
    assert not (tmp_path / ".lock").exists(), "a directory of a later version is not touched"


def without(key: str) -> str:
    return json.dumps(GOOD | {"objective": {k: v for k, v in GOOD["objective"].items() if k != key}})


MALFORMED = {
    "empty": "",
    "not JSON": "format = 2",
    "deep": "[" * 20000,
    "many digits": '{"format": ' + "9" * 5000 + "}",
    "a large number": '{"format": ' + "9" * 4000 + "}",
    "a bool": '{"format": true}',
    "a float": '{"format": 2.0}',
    "text": '{"format": "2"}',
    "zero": '{"format": 0}',
    "a list": "[2]",
    "no objective": json.dumps({"format": 2, "gspo": "0.1.0"}),
    "objective of another type": json.dumps(GOOD | {"objective": ["gspo"]}),
    "no clips": without("clips"),
    "clips of another type": json.dumps(GOOD | {"objective": GOOD["objective"] | {"clips": 1}}),
    "a number for a flag": json.dumps(GOOD | {"objective": GOOD["objective"] | {"clips_log_ratio": 1}}),
    "long text": json.dumps(GOOD | {"objective": GOOD["objective"] | {"shape": "x" * 200}}),
    "a large file": json.dumps(GOOD) + " " * run_format.LARGEST_FILE,
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    written(tmp_path, text)
    with pytest.raises(ConfigError, match=r"run\.json: .*(restore it from a copy|a plain file)") as error:
        run_format.read(tmp_path)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_anything_but_a_plain_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG)
    if kind == "link":
        (tmp_path / "elsewhere").write_text(json.dumps(GOOD))
        (run / "run.json").symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(run / "run.json")
    else:
        (run / "run.json").mkdir()
    with pytest.raises(ConfigError, match=r"run\.json"):
        RunDir.open(run)


def test_a_hard_link_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    written(run, json.dumps(GOOD))
    os.link(run / "run.json", tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"run\.json: is a symlink, has a hard link elsewhere"):
        RunDir.open(run)


def test_one_unreadable_run_does_not_hide_the_others(tmp_path: Path) -> None:
    for name, text in {"good": json.dumps(GOOD), "new": json.dumps(GOOD | {"format": 9})}.items():
        (tmp_path / name).mkdir()
        written(tmp_path / name, text)
    shown = {run["name"]: run for run in handlers.runs(Watchlist([tmp_path]))["runs"]}
    assert shown["good"]["state"] == "ended"
    assert shown["new"]["state"] == "unreadable"
    assert "update gspo" in shown["new"]["why"]

"""Old names of settings, metrics and events: every one leads to a name that is in use, and old recipes still work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gspo import aliases, config
from gspo.cli import main
from gspo.config import help_texts, load, recipe_dir
from gspo.errors import ConfigError
from gspo.record.alarms import NAMES as ALARMS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "gspo").rglob("*.py")))
EMITTED = set(re.findall(r"""\.event\(\s*"([^"]+)\"""", SOURCES))
TABLES = {name: getattr(aliases, name) for name in dir(aliases) if name.isupper() and name != "VALUES"}
OLD = """\
[model]
build = "tiny_dense"
[data]
task = "addition"
[rollout]
engine = "scripted"
engine_options = {replies = {"1+2" = ["3"]}, default = "4"}
replies = 6
[reward]
functions = ["task_answer", "reply_format"]
options.reply_format = {pattern = ".*"}
[alarms]
stop = ["engine apart", "repetition"]
"""
NEW = (
    OLD.replace("replies", "completions", 1)
    .replace("replies", "group_size")
    .replace("reply_format", "completion_format")
    .replace("engine apart", "engine mismatch")
)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_new_name_is_also_an_old_one(table: dict[str, str]) -> None:
    assert not set(table) & set(table.values())


def test_new_settings_exist_and_old_ones_do_not() -> None:
    keys = {key for key, *_ in help_texts()}
    tables = {key for key, kind, *_ in help_texts() if kind == "table"}
    for old, new in aliases.SETTINGS.items():
        assert old.rpartition(".")[0] == new.rpartition(".")[0], "only the last part of a key changes"
        assert old not in keys
        assert new in keys or new.rpartition(".")[0] in tables


def test_new_metrics_are_documented_and_old_ones_are_not() -> None:
    keys = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/metrics.md").read_text(encoding="utf-8"), re.M)
    known = re.compile("|".join(re.sub("[A-Z]+", ".+", key) for key in keys))
    for old, new in aliases.METRICS.items():
        assert known.fullmatch(new + "x" * new.endswith("/")), new
        if not old.startswith(("reward/", "samples/unscored/")):  # keys with a part that is any name
            assert not known.fullmatch(old), old


def test_new_events_are_written_and_old_ones_are_not() -> None:
    assert set(aliases.EVENTS.values()) <= EMITTED
    assert not set(aliases.EVENTS) & EMITTED


def test_new_names_of_rewards_alarms_and_recipes_exist() -> None:
    for new in aliases.REWARDS.values():
        assert (ROOT / f"gspo/reward/rewards/{new}.py").is_file()
    assert set(aliases.ALARMS.values()) <= set(ALARMS)
    for old, new in aliases.RECIPES.items():
        for name in (old, f"recipes/{old}.toml"):
            with pytest.warns(FutureWarning, match=f"recipe: {old} is now called {new}"):
                assert load(name) == load(recipe_dir() / f"{new}.toml")


def recipe(folder: Path, text: str) -> Path:
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


def test_an_old_recipe_works_and_each_old_name_is_reported_once(tmp_path: Path) -> None:
    new = load(recipe(tmp_path, NEW))
    with pytest.warns(FutureWarning) as found:
        assert load(recipe(tmp_path, OLD)) == new
    said = sorted(str(warning.message).removeprefix(f"{tmp_path}/recipe.toml: ") for warning in found)
    assert said == [
        "engine apart is now called engine mismatch; the old name still works",
        "reply_format is now called completion_format; the old name still works",
        "reward.options.reply_format is now called reward.options.completion_format; the old name still works",
        "rollout.engine_options.replies is now called rollout.engine_options.completions; the old name still works",
        "rollout.replies is now called rollout.group_size; the old name still works",
    ]
    written = config.to_toml(new)
    assert config.from_tree(config.read_toml(recipe(tmp_path, written)), where="written") == new
    assert not re.search("repl(y|ies)", written)


@pytest.mark.filterwarnings("error")
def test_a_new_recipe_is_not_reported(tmp_path: Path) -> None:
    assert load(recipe(tmp_path, NEW)).rollout.group_size == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--rollout.replies=3", "--rollout.group_size=3"),
        ("--reward.functions=task_answer,reply_format", "--reward.functions=task_answer,completion_format"),
        ("--reward.options.reply_format.pattern=a+", "--reward.options.completion_format.pattern=a+"),
        ("--alarms.stop=engine apart", "--alarms.stop=engine mismatch"),
    ],
)
def test_an_old_override_works_and_is_reported(old: str, new: str, tmp_path: Path) -> None:
    file = recipe(tmp_path, NEW)
    with pytest.warns(FutureWarning, match="command line: .* is now called .*"):
        assert load(file, [old]) == load(file, [new])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_override_wins_over_the_recipe_whatever_the_names(tmp_path: Path) -> None:
    for text in (OLD, NEW):
        for key in ("replies", "group_size"):
            assert load(recipe(tmp_path, text), [f"--rollout.{key}=3"]).rollout.group_size == 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_both_names_of_a_setting_are_an_error(tmp_path: Path) -> None:
    both = "rollout.replies is the old name of rollout.group_size, and both are given; keep rollout.group_size"
    with pytest.raises(ConfigError, match=f"recipe.toml: {both}"):
        load(recipe(tmp_path, OLD.replace("replies = 6", "replies = 6\ngroup_size = 6")))
    with pytest.raises(ConfigError, match=f"command line: {both}"):
        load(recipe(tmp_path, NEW), ["--rollout.replies=3", "--rollout.group_size=3"])


def test_the_command_prints_the_note_on_one_line(tmp_path: Path, capsys: Any) -> None:
    file = recipe(tmp_path, NEW)
    assert main(["train", str(file), "--rollout.replies=0", f"--run-dir={tmp_path}/run"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "warning: command line: rollout.replies is now called rollout.group_size; the old name still works"
    assert second == "gspo: rollout.group_size: must be at least 1, not 0"


def test_unknown_and_deep_tables_are_left_as_they_are() -> None:
    deep: dict[str, Any] = {}
    tree = {"data": {"task_options": deep}, "rollout": 3, "reward": {"functions": 4, "options": [1]}}
    for _ in range(5000):
        deep["a"] = {}
        deep = deep["a"]
    current, renamed = aliases.tables(tree, where="here")
    assert current["data"] is tree["data"] or current["data"]["task_options"] is tree["data"]["task_options"]
    assert (current["rollout"], current["reward"], renamed) == (3, {"functions": 4, "options": [1]}, {})

"""`gspo doctor` from the command line: the report, the exit code, JSON, and no files or processes left behind."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import children_of

from gspo import cli
from gspo.config import Config, to_toml
from gspo.preflight import data, examine
from gspo.preflight.examine import CHECKS
from gspo.preflight.findings import Level


@pytest.fixture
def recipe(tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., str]:
    """A recipe on disk; returns its path."""

    def write(*overrides: str) -> str:
        path = tmp_path / "recipe.toml"
        data = ("data.held_out=100", "data.task_size=100", "data.task_options.max_items=4")
        path.write_text(to_toml(tiny(*data, *overrides)))
        return str(path)

    return write


def test_a_good_recipe(recipe: Callable[..., str], capsys: Any, tmp_path: Path) -> None:
    path = recipe("model.build=tiny_moe", "rollout.max_tokens=40")
    processes_before = children_of(os.getpid())
    files_before = sorted(tmp_path.rglob("*"))
    code = cli.main(["doctor", path, "--rollout.temperature=0.9"])
    text = capsys.readouterr().out
    assert code == 0, text
    for check in CHECKS:
        assert f"\n{check.name}\n" in text, "every check reports something"
    assert "every ratio is exactly 1" in " ".join(text.split()), "wherever the line is wrapped"
    assert "At temperature 0.9" in text
    assert "Nothing would fail" in text.splitlines()[-1]
    assert "not checked" not in text
    assert sorted(tmp_path.rglob("*")) == files_before, "the doctor writes nothing"
    assert children_of(os.getpid()) == processes_before, "the doctor leaves no process"


def test_a_bad_recipe(recipe: Callable[..., str], capsys: Any, monkeypatch: Any) -> None:
    def broken(context: Any) -> Any:
        yield from ()
        raise ZeroDivisionError("inside")

    checks = [dataclasses.replace(c, run=broken) if c.name == "ratio" else c for c in CHECKS]
    monkeypatch.setattr(examine.run_checks, "__defaults__", (checks,))
    code = cli.main(["doctor", recipe(), "--json", "--prompts=2"])
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert code == 1
    assert report["fails"] is True
    assert "Traceback" not in out.out + out.err
    (crash,) = [f for f in report["findings"] if f["check"] == "ratio"]
    assert crash["level"] == "FAIL"
    assert "ZeroDivisionError: inside" in crash["what"]
    assert {f["check"] for f in report["findings"]} >= {"temperature", "uniform groups", "memory", "time"}
    assert report["counts"]["FAIL"] == 1
    assert all(f["level"] in list(Level) for f in report["findings"])
    (sampled,) = [f for f in report["findings"] if f["check"] == "sampling"]
    assert sampled["numbers"]["groups"] == 2


def test_a_model_that_does_not_load(recipe: Callable[..., str], capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    code = cli.main(["doctor", recipe("model.build=", f"model.path={tmp_path}/model"), "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert code == 1
    (tokenizer,) = [f for f in found if f["check"] == "tokenizer"]
    assert (tokenizer["level"], "has no config.json" in tokenizer["what"]) == ("FAIL", True)
    ok = {f["check"] for f in found if f["level"] == "ok"}
    assert {"settings", "objective", "data", "reward functions", "run directory"} <= ok
    assert any(f["check"] == "not checked" and "ratio" in f["what"] for f in found)


def test_a_threshold_that_is_not_a_number_is_one_failure_and_no_exception(
    recipe: Callable[..., str], capsys: Any
) -> None:
    assert cli.main(["doctor", recipe(), "--quick", "--reward.correct_above=nan"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "reward.correct_above: must be a finite number, not nan" in text
    assert "exception" not in text


def test_quick_loads_no_weights(recipe: Callable[..., str], capsys: Any, monkeypatch: Any) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("gspo.build.load_policy", refuse)
    path = recipe()
    assert cli.main(["doctor", path, "--quick", "--steps", "7"]) == 0
    text = capsys.readouterr().out
    assert "skipped by --quick" in " ".join(text.split())
    assert "7 steps of" in text
    for check in ("stop tokens", "memory", "disk", "known answers"):
        assert f"\n{check}\n" in text
    assert cli.main(["doctor", path]) == 1
    assert "weights were loaded" in " ".join(capsys.readouterr().out.split())


def test_a_recipe_that_cannot_be_read(recipe: Callable[..., str], capsys: Any) -> None:
    assert cli.main(["doctor", recipe(), "--quick", "--lerner.x=1"]) == 1
    assert "unknown setting lerner" in capsys.readouterr().out
    assert cli.main(["doctor", "nowhere.toml"]) == 1
    assert "no such recipe" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", recipe(), "--prompts=0"])


def test_a_narrow_terminal_and_colors(recipe: Callable[..., str], monkeypatch: Any) -> None:
    import io

    from gspo.preflight.findings import warning
    from gspo.preflight.report import _Page

    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size((60, 24)))
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    page = _Page(out)
    page.show(warning("A long sentence " * 10, "Do this " * 10, detail=["a table  with columns"]))
    assert "\033[33m" in out.getvalue()
    assert "a table  with columns" in out.getvalue()
    assert all(len(line) <= 60 + len("\033[33m\033[0m") for line in out.getvalue().splitlines())


def test_long_texts_are_shortened() -> None:
    assert data.excerpt("a\nb") == "a⏎b"
    assert len(data.excerpt("x" * 1000)) < 420

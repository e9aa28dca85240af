"""`gspo init`: recipes from options and from answers to questions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo import config as settings
from gspo.build import run_objective
from gspo.cli import main

GSM8K = {"question": "How many are 2 and 3?", "answer": "2 + 3 = 5\n#### 5"}
MBPP = {"task_id": 1, "text": "Write a function add.", "code": "x", "test_list": ["assert add(1, 2) == 3"]}
PLAIN = {"problem": "What is 2 + 3?", "target": "5"}


def data(folder: Path, row: Any, count: int = 10) -> str:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))
    return str(path)


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "marker", "reward"),
    [
        (GSM8K, "question", "answer", "####", "math_answer"),
        (MBPP, "text", "", "", "code_tests"),
        (PLAIN, "problem", "target", "", "math_answer"),
    ],
)
def test_a_recipe_for_a_data_file_reads_its_fields(
    row: Any, prompt: str, answer: str, marker: str, reward: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path), "--data", data(tmp_path, row), "--model", "some/model", "--yes"]) == 0
    config = settings.load(path)
    settings.check(config)
    assert (config.name, config.model.path) == ("mine", "some/model")
    found = config.data
    assert (found.prompt_field, found.answer_field, found.answer_after) == (prompt, answer, marker)
    assert found.held_out == 2
    assert config.reward.functions == (reward,)
    assert config.reward.options == ({"math_answer": {"marker": "####"}} if marker else {})


def test_every_setting_has_a_comment_and_commented_settings_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path), "--data", data(tmp_path, GSM8K), "--lora", "16", "--yes"]) == 0
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 120
    assigned = [i for i, line in enumerate(lines) if " = " in line and line.lstrip("# ").split(" = ")[0].isidentifier()]
    for i in assigned[1:]:
        assert lines[i - 1].startswith("# "), lines[i]
    on = "\n".join(line.removeprefix("# ") if i in assigned else line for i, line in enumerate(lines))
    path.write_text(on.replace("lora.rank = 16", "").replace('engine = "vllm"', 'engine = "local"'))
    config = settings.load(path)
    assert config.checkpoint.keep_best
    assert config.model.gradient_checkpointing


@pytest.mark.parametrize("objective", ["dapo", "gmpo", "reinforce_pp"])
def test_a_task_has_its_own_verifier(objective: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path), "--data", "addition", "--objective", objective, "--steps", "7", "--yes"]) == 0
    config = settings.load(path)
    assert (config.data.task, config.reward.functions, config.steps) == ("addition", (), 7)
    assert run_objective(config).name == objective


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--data: give it"),
        (("--data", "nothing.jsonl"), "no such file"),
        (("--data", "additio"), "addition"),
        (("--data", "addition", "--reward", "math_answer"), "verifier of its own"),
        (("--data", "org/problems", "--reward", "mathanswer"), "not a reward"),
        (("--data", "addition", "--objective", "gsp"), "gspo"),
    ],
)
def test_what_cannot_work_is_refused(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path), "--yes", *options]) == 1
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_rows_without_a_usual_field_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "a.toml"), "--data", data(tmp_path, {"q": "x", "answer": "1"}), "--yes"]) == 1
    assert "its fields are q, answer" in capsys.readouterr().err


def test_a_file_is_replaced_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("precious")
    assert main(["init", str(path), "--data", "addition", "--yes"]) == 1
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "precious"
    assert main(["init", str(path), "--data", "addition", "--yes", "--force"]) == 0
    assert "addition" in path.read_text()


def test_questions_are_repeated_until_the_answer_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers() -> Iterator[str]:
        yield from ("some/model", "", "nowhere.jsonl", data(tmp_path, GSM8K), "nonsense", "", "", "x", "16", "300", "")

    given = answers()
    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or next(given))
    path = tmp_path / "mine.toml"
    assert main(["init", str(path)]) == 0
    config = settings.load(path)
    assert config.model.lora.rank == 16
    assert (config.rollout.max_tokens, config.steps, config.reward.functions) == (300, 200, ("math_answer",))
    assert [text.partition(" ")[0] for text in asked].count("Problems") == 3
    assert "Reward [math_answer]: " in asked
    assert "no such file" in capsys.readouterr().out

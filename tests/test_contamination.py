"""The problems that a checkpoint was trained on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gspo.config import Config, from_flat
from gspo.contamination import trained_on
from gspo.data.problems import demonstrations, load_problems
from gspo.errors import DataError

TASK = {"data.task": "addition", "data.task_size": 30, "data.held_out": 5}


class Tokenizer:
    """A minimal tokenizer for loading problems."""

    chat_template = None
    eos_token_id = None

    def __call__(self, texts: Any, **_: Any) -> dict[str, Any]:
        return {"input_ids": [[1] for _ in texts]}


def save(folder: Path, **settings: Any) -> tuple[str, Config]:
    folder.mkdir()
    flat = {key.replace("__", "."): value for key, value in settings.items()}
    (folder / "trainer.json").write_text(json.dumps({"step": 1, "settings": flat}))
    return str(folder), from_flat(flat, where="test")


def test_problems_include_the_cold_start_of_the_run_it_started_from(tmp_path: Path) -> None:
    task = {key.replace(".", "__"): value for key, value in TASK.items()}
    start, first = save(tmp_path / "a", seed=1, cold_start__steps=3, cold_start__batch=4, **task)
    later, second = save(tmp_path / "b", seed=2, model__path=start, **task)
    later_problems, first_problems = (load_problems(c.data, Tokenizer(), c.seed) for c in (second, first))
    demonstrated = islice(demonstrations(first.data, 1, exclude={p.key for p in first_problems.held_out}), 12)
    expected = {p.key for p in (*later_problems.train, *first_problems.train, *demonstrated)}
    assert expected <= trained_on(later, Tokenizer())
    assert not {p.key for p in first_problems.held_out} & trained_on(start, Tokenizer())


def test_a_model_without_a_run_has_no_training_problems(tmp_path: Path) -> None:
    assert trained_on(str(tmp_path), Tokenizer()) == trained_on("hub/name", Tokenizer()) == frozenset()
    (tmp_path / "trainer.json").write_text("[]")
    assert trained_on(str(tmp_path), Tokenizer()) == frozenset()


def test_a_missing_training_file_is_an_error(tmp_path: Path) -> None:
    path, _ = save(tmp_path / "a", data__path=str(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        trained_on(path, Tokenizer())

"""What is recorded of the row of a completion: bounded in size, without secrets."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from gspo.record.columns import LONGEST, MOST, answer_and_columns
from gspo.types import Prompt


def recorded(**columns: Any) -> dict[str, Any]:
    return answer_and_columns(Prompt(id="train/1", content="6*7?", text="", token_ids=(1,), columns=columns))


def test_the_answer_and_the_other_columns_keep_their_types() -> None:
    row = {"answer": 42, "level": 3, "tests": [{"in": "1", "out": [2.5, None, True]}], "question": "6*7?"}
    assert recorded(**row) == {"answer": 42, "columns": {"level": 3, "tests": row["tests"]}}
    assert recorded() == {}
    assert recorded(answer=None) == {"answer": None}


@pytest.mark.parametrize(
    "value", ["x" * 10**6, ["x" * 100] * 10**5, {str(i): [[[i]]] for i in range(10**5)}, ["x" * 10**6], [0.5] * 10**6]
)
def test_a_long_value_is_cut(value: Any) -> None:
    found = recorded(answer=value, tests=value)
    for text in (found["answer"], found["columns"]["tests"]):
        assert len(text) == LONGEST + 2
        assert text.endswith(" …")
        assert json.dumps(value, ensure_ascii=False).strip('"').startswith(text[:-2])


def test_there_are_at_most_so_many_columns() -> None:
    found = recorded(answer="7", **{f"column{i}": i for i in range(10 * MOST)})
    assert len(found["columns"]) == MOST
    assert found["answer"] == "7"


@pytest.mark.parametrize("value", ["\ud800", [10**400], {"\ud800": float("nan")}, 10**400, 2**70, float("inf")])
def test_every_value_can_be_read_again(value: Any) -> None:
    assert orjson.loads(json.dumps(recorded(answer=value, **{"\ud800": value})))["columns"]


def test_secrets_are_hidden_also_where_a_value_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "correct horse battery")
    key = "hf_" + "a1B2" * 8
    long = "x " * (LONGEST // 2 - 5) + key
    row = {
        "answer": f"{key} correct horse battery",
        "nested": [{"url": [key]}],
        "long": long,
        "answer_key": "B",
        key: 1,
    }
    found = recorded(**row)
    assert "[hidden]" in found["answer"]
    assert found["columns"]["answer_key"] == "B"
    text = json.dumps(found)
    assert "horse" not in text
    assert "hf_a" not in text
    assert "hf_" not in recorded(long=long + "x" * 10**4)["columns"]["long"]

"""Whether the doctor finds problems of a benchmark in the training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo.config import Config, from_tree
from gspo.suites.suite import SuiteSource

QUESTIONS = [f"A farmer counts {n} sheep and {n + 7} goats. How many animals does the farmer have?" for n in range(6)]


def recipe(folder: Path, questions: list[str]) -> Config:
    rows = [json.dumps({"question": q, "answer": "1"}) for q in questions]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    data = {"path": str(folder / "train.jsonl"), "prompt_field": "question", "held_out": 0}
    return from_tree({"data": data, "reward": {"functions": ["exact_answer"]}, "eval": {"every": 0}}, where="test")


def suite(folder: Path, questions: list[str]) -> SuiteSource:
    rows = [json.dumps({"question": q, "answer": "x\n#### 1"}) for q in questions]
    (folder / "test.jsonl").write_text("\n".join(rows) + "\n")
    return SuiteSource.parse(f"gsm8k={folder / 'test.jsonl'}")


def test_benchmark_problems_in_the_training_data_are_a_warning(examined: Any, tmp_path: Path) -> None:
    other = "Which of these two numbers is larger, the first one or the second one, and by how much exactly?"
    config = recipe(tmp_path, [f"Think first.\n{QUESTIONS[2]}\nThen answer.", "What is 3 + 4?"])
    found = examined(config, "data", "contamination", suites=[suite(tmp_path, [other, QUESTIONS[2]])])
    (finding,) = [f for f in found.findings if f.check == "contamination"]
    assert (finding.level, finding.numbers["contaminated"], finding.numbers["problems"]) == ("warning", 1, 2)
    assert finding.detail[0].startswith("gsm8k/1: A farmer counts 2 sheep")


def test_other_problems_are_no_contamination(examined: Any, tmp_path: Path) -> None:
    """Neither a common phrase nor a problem of a few words that is part of another one."""
    config = recipe(
        tmp_path, ["How many animals does the farmer have? Count 5 cows.", "What is 3 + 4 in binary digits?"]
    )
    found = examined(config, "data", "contamination", suites=[suite(tmp_path, [QUESTIONS[0], "What is 3 + 4?"])])
    (finding,) = [f for f in found.findings if f.check == "contamination"]
    assert (finding.level, finding.numbers["contaminated"]) == ("ok", 0)

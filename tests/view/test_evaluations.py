"""Completions of evaluations: their problems, and what changed between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shown_runs import completion, evaluated, make_run, write_lines

from gspo.view.evaluations import PROBLEM_FILTERS, Evaluations, Outcome
from gspo.view.report import write_report


def problem(prompt: str, *rewards: float, **changed: Any) -> list[dict[str, Any]]:
    return [completion(prompt, i, f"{prompt} {i}", reward=r, correct=r == 1, **changed) for i, r in enumerate(rewards)]


def test_problems_say_what_changed_since_the_evaluation_before(tmp_path: Path) -> None:
    evaluations = Evaluations(make_run(tmp_path / "made"))
    assert evaluations.steps() == [0, 10]
    first, last = evaluations.problems(0), evaluations.problems(10)
    assert first["before_step"] is None
    assert {p["change"] for p in first["problems"]} == {""}
    assert (last["before_step"], last["total"], last["better"], last["worse"]) == (0, 3, 1, 1)
    assert [p["change"] for p in last["problems"]] == ["same", "better", "worse"]
    # The greedy completion does not count, as in the metrics.
    assert [(p["correct"], p["judged"]) for p in last["problems"]] == [(1, 1), (1, 1), (0, 1)]
    kinds = [p["kinds"] for p in last["problems"]]
    assert kinds == [["right"], ["right", "better"], ["wrong", "worse"]]
    assert all(p["answer"] == "forty-two" for p in last["problems"])


def test_partial_credit_counts_if_as_many_completions_are_correct() -> None:
    def outcome(*rewards: float) -> Outcome:
        return Outcome.of(problem("p", *rewards))

    assert outcome(0.5, 0.1).change_from(outcome(0.4, 0.1)) == "better"
    assert outcome(1.0, 0.0).change_from(outcome(0.9, 0.9)) == "better", "a correct completion is worth more"
    assert outcome(0.2, 0.2).change_from(outcome(0.2, 0.2)) == "same"
    assert outcome(0.0).change_from(outcome(1.0)) == "worse"
    unscored = Outcome.of([completion("p", 0, "x", reward=None, correct=None)])
    assert outcome(1.0).change_from(unscored) == ""


def test_a_set_is_compared_with_its_own_last_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    for step, reward in ((0, 0.0), (20, 1.0)):
        write_lines(
            run / "evaluations" / f"{step:06d}.jsonl",
            [*evaluated(step), *problem("held_out/0", reward, set="other")],
        )
    evaluations = Evaluations(run)
    assert evaluations.sets(10) == [""]
    assert evaluations.sets(20) == ["", "other"]
    other = evaluations.problems(20, "other")
    assert (other["total"], other["before_step"], other["better"]) == (1, 0, 1)
    assert evaluations.problems(20)["before_step"] == 10
    found = evaluations.completion(20, 3, 0)
    assert found is not None
    assert [(c["step"], c["group"], c["number"], c["reward"]) for c in found["before"]] == [(0, 3, 0, 0.0)]


def test_a_search_finds_texts_and_prompts(tmp_path: Path) -> None:
    evaluations = Evaluations(make_run(tmp_path / "made"))
    assert [p["prompt_id"] for p in evaluations.problems(10, text="HELD_OUT/1 AT")["problems"]] == ["held_out/1"]
    assert evaluations.problems(10, text="what is")["found"] == 3
    assert evaluations.problems(10, text="nowhere")["problems"] == []


@pytest.mark.parametrize(
    "line", ["{}", "[]", '{"set": 5, "prompt_id": 3, "answer": {"a": [1]}, "correct": "yes"}', "{"]
)
def test_records_of_others_are_data(line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    (run / "evaluations/000010.jsonl").write_text(line + "\n")
    evaluations = Evaluations(run)
    found = evaluations.problems(10)
    assert {change for p in found["problems"] for change in p["kinds"]} <= set(PROBLEM_FILTERS)
    assert evaluations.completion(10, 7, 0) is None


def test_a_report_has_the_last_evaluation(tmp_path: Path) -> None:
    text = write_report([make_run(tmp_path / "made")], tmp_path / "report.html").read_text()
    assert "held_out/1 at 10" in text
    assert "forty-two" in text
    assert "<script>window.hacked" not in text

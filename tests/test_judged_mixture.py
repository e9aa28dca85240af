"""The recipe that mixes two tasks, asks a judge, and rolls back: with a scripted judge, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from endpoints import Action, Endpoint, Request, chat

import gspo.loop
from gspo.config import Config, load
from gspo.preflight.context import PreflightContext
from gspo.preflight.examine import CHECKS, run_checks
from gspo.record.metrics import step_metrics
from gspo.record.run_dir import read_events, read_jsonl
from gspo.reduction import Same
from gspo.trainer import train

QUICK = (
    "cold_start.steps=20",
    "cold_start.check_every=20",
    "rollout.prompts=6",
    "rollout.group_size=4",
    "data.held_out=8",
    "steps=6",
    "eval.every=3",
    "checkpoint.every=1",
    # After so short a cold start hardly anything is solved, so rewards are often uniform.
    'alarms.rollback=["repetition", "skipped updates"]',
)


def sorted_right(request: Request) -> Action:
    """A judge that looks: the digits of the list in the question, in ascending order."""
    numbers = re.findall(r"\d+", request.question.split("The same list", 1)[0])
    right = request.completion.split() == sorted(numbers, key=int)
    return chat(f"I compared the two lists.\nVerdict: {'yes' if right else 'no'}")


def recipe(tmp_path: Path, url: str, *overrides: str) -> Config:
    path = Path(__file__).parent.parent / "recipes" / "judged-mixture.toml"
    return load(path, [f"run_dir={tmp_path / 'run'}", f"reward.options.llm_judge.url={url}", *QUICK, *overrides])


def test_both_sources_are_scored_by_their_own_rewards(tmp_path: Path, display: Any) -> None:
    with Endpoint(sorted_right) as judge:
        config = recipe(tmp_path, judge.url)
        train(config, display)
    assert judge.posts
    assert all("A list of numbers" in request.question for request in judge.posts)
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    for source in ("addition", "sorting"):
        assert 0 <= last[f"source/{source}/reward_mean"] <= 1
    assert last["samples/unscored"] == 0
    assert (tmp_path / "run" / "best.json").is_file()


def test_the_doctor_counts_only_the_completions_that_the_judge_scores(tmp_path: Path) -> None:
    with Endpoint(sorted_right) as judge:
        context = PreflightContext(config=recipe(tmp_path, judge.url))
        names = ("tokenizer", "data", "reward functions", "reward services")
        with context.stack:
            found = run_checks(context, [c for c in CHECKS if c.name in names], quick=True, show=lambda finding: None)
    (finding,) = [f for f in found if f.check == "reward services"]
    # One of three prompts is a sorting problem, and 16 requests are sent at a time.
    assert "scores 8 of the 24 completions of a step" in finding.what
    assert finding.numbers["step_s"] == finding.numbers["seconds"]


def test_an_alarm_rolls_the_run_back(tmp_path: Path, display: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that say that the completions of two batches repeat a token stand in for a policy that collapses."""

    def collapsing(objective: Any, collected: Any, *rest: Any) -> dict[str, Any]:
        return step_metrics(objective, collected, *rest) | {
            "length/repetitive_fraction": Same(float(collected.batch in (4, 5)))
        }

    monkeypatch.setattr(gspo.loop, "step_metrics", collapsing)
    with Endpoint(sorted_right) as judge:
        train(recipe(tmp_path, judge.url, "alarms.steps=2"), display)
    events = read_events(tmp_path / "run")
    (rollback,) = [event for event in events if event["event"] == "rollback"]
    assert rollback["name"] == "repetition"
    assert (tmp_path / "run" / "abandoned" / "001").is_dir()
    rates = [row["learning_rate"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in row]
    assert len(rates) == 6

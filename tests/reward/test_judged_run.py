"""Whole runs with a judge behind an endpoint: they train, resume exactly without asking again, and leak no key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from endpoints import Action, Endpoint, Request, chat

from gspo import trust
from gspo.config import Config
from gspo.errors import ConfigError, RewardError, TrustError
from gspo.preflight.context import PreflightContext
from gspo.preflight.examine import CHECKS, run_checks
from gspo.preflight.findings import Level
from gspo.record.run_dir import read_jsonl
from gspo.trainer import resume, train

KEY = "k3y-that-must-not-leak-0123456789"


def shorter(request: Request) -> Action:
    assert request.headers["authorization"] == f"Bearer {KEY}"
    return chat(f"Short is good.\nScore: {max(0, 10 - len(request.completion))}")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("TEST_JUDGE_API_KEY", KEY)
    with Endpoint(shorter) as endpoint:
        yield endpoint


@pytest.fixture
def judged(server: Endpoint, tiny: Callable[..., Config]) -> Callable[..., Config]:
    """A tiny run whose only reward is the judge."""

    def make(*overrides: str) -> Config:
        options = ("url=" + server.url, "model=judge", "key_env=TEST_JUDGE_API_KEY", "concurrency=8", "retries=0")
        return tiny(
            "reward.functions=llm_judge",
            *(f"reward.options.llm_judge.{option}" for option in options),
            "reward.timeout_s=60",
            *overrides,
        )

    return make


def files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def test_a_run_trains_and_a_resume_asks_nothing_again(server: Endpoint, judged: Any, display: Any) -> None:
    config = judged("steps=2")
    run = Path(config.run_dir)
    train(config, display)
    metrics = (run / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["samples/unscored"] == 0 and 0 <= row["reward/mean"] <= 1 for row in rows[1:])
    asked = len(server.posts)
    timings = read_jsonl(run / "timings.jsonl")
    counts = [(t["service/llm_judge/requests"], t["service/llm_judge/cached"]) for t in timings]
    assert sum(requests for requests, _ in counts) == asked
    assert all(t["service/llm_judge/latency_s"] > 0 for t in timings)

    shutil.rmtree(run / "checkpoints" / "000002")  # as if it had been killed before it saved step 2
    server.script = lambda request: chat("Score: 0")
    resume(run, display)
    assert len(server.posts) == asked
    assert (run / "metrics.jsonl").read_text() == metrics
    assert read_jsonl(run / "timings.jsonl")[-1]["service/llm_judge/cached"] == sum(counts[1])

    assert [file for file in files(run) if KEY.encode() in file.read_bytes()] == []
    assert (run / "reward_cache" / "llm_judge.jsonl").is_file()


def test_an_endpoint_that_fails_stops_the_run_with_a_checkpoint(server: Endpoint, judged: Any, display: Any) -> None:
    config = judged("steps=3", "eval.every=0")
    run = Path(config.run_dir)

    def fail_later(request: Request) -> Action:
        error = Action({"error": f"no credit for {KEY}"}, status=402)
        return error if (run / "checkpoints" / "000001").exists() else shorter(request)

    server.script = fail_later
    with pytest.raises(RewardError, match="could not be scored"):
        train(config, display)
    assert (run / "checkpoints" / "000001").is_dir()
    (report,) = (run / "reward_errors").iterdir()
    assert "status 402" in report.read_text()
    assert [file for file in files(run) if KEY.encode() in file.read_bytes()] == []
    server.script = shorter
    with Endpoint(shorter) as moved:
        moved_to = [f"reward.options.llm_judge.url={moved.url}"]
        with pytest.raises(TrustError, match="sends prompts and completions"):
            resume(run, display, overrides=moved_to)
        with pytest.raises(ConfigError, match=r"reward\.options\.llm_judge\.model cannot be given"):
            resume(run, display, overrides=["reward.options.llm_judge.model=other"], trust_run=True)
        assert resume(run, display, overrides=moved_to, trust_run=True).step == 3
        assert moved.posts


def test_an_endpoint_that_is_gone_is_an_error_before_the_model_is_loaded(
    server: Endpoint, judged: Any, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.build.policy_for", lambda *args, **options: pytest.fail("the model was loaded"))
    server.close()
    with pytest.raises(RewardError, match=r"reward\.options\.llm_judge\.url"):
        train(judged(), display)


def test_a_run_directory_from_someone_else_sends_no_key_without_approval(
    server: Endpoint, judged: Any, tmp_path: Path
) -> None:
    code = trust.reward_code(judged())
    assert [c.what for c in code] == [
        f"reward.options.llm_judge.url sends prompts and completions to {server.url}, with the secret in "
        "$TEST_JUDGE_API_KEY"
    ]
    with pytest.raises(TrustError, match="TEST_JUDGE_API_KEY"):
        trust.check(tmp_path / "foreign", code, trust=False)


@pytest.mark.parametrize("works", [True, False])
def test_the_doctor_asks_once_and_not_about_the_data(server: Endpoint, judged: Any, works: bool) -> None:
    def reply(request: Request) -> Action:
        return chat("Good.\nScore: 8") if works else Action({"error": "gone"}, status=404)

    server.script = reply
    context = PreflightContext(config=judged())
    names = ("tokenizer", "data", "reward functions", "reward services", "known answers")
    with context.stack:
        found = run_checks(context, [c for c in CHECKS if c.name in names], quick=True, show=lambda finding: None)
    (finding,) = [f for f in found if f.check == "reward services"]
    assert len(server.posts) == 1
    assert server.posts[0].completion == "2 + 2 = 4"
    assert "What is 2 + 2?" in server.posts[0].question
    if works:
        assert finding.level is Level.OK
        assert "gave 0.8 to a made-up completion" in finding.what
        assert finding.numbers["step_s"] == pytest.approx(2 * finding.numbers["seconds"])
    else:
        assert finding.level is Level.FAIL
        assert "status 404" in finding.what

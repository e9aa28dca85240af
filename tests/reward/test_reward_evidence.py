"""A failing reward function is reported once per location, with line, traceback, output and completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import main
from gspo.config import Config
from gspo.errors import RewardError
from gspo.record.run_dir import read_jsonl
from gspo.trainer import train

CODE = """
import json, os, time
def inner(text):
    print("about to read", text)
    return json.loads("{")
def score(prompts, completions, **columns):
    return [inner(c) if c != "good" else 1.0 for c in completions]
"""


def test_fault_names_the_users_line_and_has_traceback_output_and_completion(
    make_pool: Any, group: Any, reward_file: Callable[..., str]
) -> None:
    pool = make_pool(reward_file(CODE))
    scores = pool.score([group(["good", "first", "second"], content="Why?")])[0]
    assert scores[1].failure.startswith("raised: score: JSONDecodeError: ")
    assert scores[1].failure.endswith("(mine.py:5)")
    (fault,) = pool.new_faults()
    assert fault.failure == scores[1].failure
    assert 'mine.py", line 5, in inner' in fault.trace
    assert "decoder.py" in fault.trace
    assert "gspo/reward" not in fault.trace
    assert "about to read first" in fault.printed
    assert (fault.prompt, fault.completion) == ("train/0\nWhy?", "first")
    assert all(part in str(fault) for part in (fault.failure, fault.trace.rstrip(), "about to read", "Why?", "first"))


def test_each_failing_location_is_reported_once(make_pool: Any, group: Any, reward_file: Callable[..., str]) -> None:
    pool = make_pool(
        reward_file("""
            def score(completions, **_):
                values = []
                for c in completions:
                    if c.startswith("key"):
                        raise KeyError(c)
                    values.append(float("nan") if c.startswith("nan") else 1 / (c != "zero"))
                return values
        """)
    )
    reported = []
    for step in range(3):
        texts = [f"key{step}", f"nan{step}", "zero", "good", f"key{step} again"]
        pool.score([group(texts, id=f"train/{n}") for n in range(2)])
        reported += [fault.failure for fault in pool.new_faults()]
    assert sorted(failure.split(": ")[2].split()[0] for failure in reported) == [
        "KeyError",
        "ZeroDivisionError",
        "returned",
    ]


@pytest.mark.parametrize(("harm", "kind"), [("os._exit(3)", "died"), ("time.sleep(3600)", "timeout")])
def test_output_before_a_death_or_a_hang_is_kept(
    make_pool: Any, group: Any, reward_file: Callable[..., str], harm: str, kind: str
) -> None:
    code = f"import os, time\ndef score(completions, **_):\n    print('last words', flush=True)\n    {harm}\n"
    pool = make_pool(reward_file(code), timeout_s=1.0)
    (score,) = pool.score([group(["a"])])[0]
    (fault,) = pool.new_faults()
    assert fault.failure == score.failure
    assert fault.failure.startswith(kind)
    assert "last words" in fault.printed


# ------------------------------------------------------------------------------------------------- in a run


class RecordingDisplay:
    """Records the messages of a run."""

    def __init__(self, display: Any) -> None:
        self.display = display
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.display, name)


def failing(tiny: Callable[..., Config], folder: Path, body: str, *overrides: str) -> Config:
    (folder / "mine.py").write_text(f"def score(prompts, completions, **columns):\n    print('hello')\n    {body}\n")
    return replace(tiny(*overrides), reward=replace(tiny().reward, functions=(f"{folder}/mine.py:score",)))


def test_run_stopped_by_a_reward_keeps_the_traceback_and_the_completions(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    config = failing(tiny, tmp_path, f"raise ValueError('ouch hf_{'x1' * 17}')", "steps=3", "eval.every=0")
    recording = RecordingDisplay(display)
    with pytest.raises(RewardError, match=r"ouch .*\(mine\.py:3\).*reward_errors/01\.txt"):
        train(config, recording)
    run = Path(config.run_dir)
    (file,) = (run / "reward_errors").iterdir()
    text = file.read_text()
    records = read_jsonl(run / "rollouts" / "000001.jsonl")
    assert 'mine.py", line 3, in score' in text
    assert "---- printed\nhello" in text
    assert records[0]["text"] in text
    assert "ouch [hidden]" in text
    assert "x1x1" not in text  # neither in the message nor in the source line that raised
    assert len(records) == 16
    assert all(record["failure"].startswith("raised: score: ValueError: ouch") for record in records)
    assert sum("reward_errors/01.txt" in message for message in recording.messages) == 1
    assert [e["step"] for e in read_jsonl(run / "events.jsonl") if e["event"] == "reward_failed"] == [1]


def test_fault_files_contain_no_secrets(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "a-value-of-no-shape")
    body = "print('hf_' + 'A' * 20); raise ValueError('Bearer 0123456789abcdef0 a-value-of-no-shape')"
    config = failing(tiny, tmp_path, body, "steps=3", "eval.every=0")
    with pytest.raises(RewardError):
        train(config, display)
    run = Path(config.run_dir)
    written = "".join(
        p.read_text() for p in (run / "reward_errors/01.txt", run / "rollouts/000001.jsonl", run / "events.jsonl")
    )
    assert "ValueError" in written
    for secret in ("hf_AAAA", "0123456789abcdef0", "a-value-of-no-shape"):
        assert secret not in written


def test_fault_in_every_step_is_reported_once(tiny: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    body = "return [ValueError('a few') if len(c) % 4 == 0 else len(c) % 3 for c in completions]"
    config = failing(tiny, tmp_path, body, "steps=3", "reward.max_unscored_fraction=1")
    recording = RecordingDisplay(display)
    train(config, recording)
    assert len(list((Path(config.run_dir) / "reward_errors").iterdir())) == 1
    assert sum("a few" in message and "reward_errors/01.txt" in message for message in recording.messages) == 1


def test_first_evaluation_without_any_score_stops_the_run_before_the_first_step(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    config = failing(tiny, tmp_path, "raise ValueError('ouch')", "reward.max_unscored_fraction=1")
    with pytest.raises(RewardError, match=r"the first evaluation: none of \d+ completions.*ouch.*reward_errors"):
        train(config, display)
    assert not (Path(config.run_dir) / "metrics.jsonl").exists()
    assert len(list((Path(config.run_dir) / "reward_errors").iterdir())) == 1


@pytest.mark.parametrize("every", [0, 2])
def test_command_in_the_error_resumes_the_run_once_the_reward_is_fixed(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    config = failing(tiny, tmp_path, "raise ValueError('ouch')", "steps=1", f"eval.every={every}")
    with pytest.raises(RewardError) as stopped:
        train(config, display)
    failing(tiny, tmp_path, "return [float(len(c)) for c in completions]")
    command = str(stopped.value).partition("then: gspo ")[2].split()
    assert main(command) == 0, capsys.readouterr().err

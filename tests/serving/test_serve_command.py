"""`gspo serve --openai` as a process."""

from __future__ import annotations

import http.client
import json
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import main
from gspo.config import Config
from gspo.trainer import train


@pytest.mark.slow
def test_a_run_is_served_until_it_is_told_to_stop(tiny: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    config = tiny("steps=1", "eval.every=0")
    train(config, display)
    command = [sys.executable, "-m", "gspo.cli", "serve", "run", "--openai", "--served-name=mine"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert "run/checkpoints/000001 at http://127.0.0.1:" in lines[0]
        (file,) = tmp_path.glob("gspo-serve-*.token")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        port = int(file.stem.removeprefix("gspo-serve-"))
        body = json.dumps({"model": "mine", "messages": [{"role": "user", "content": "1"}]})
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Authorization": f"Bearer {file.read_text().strip()}"}
        connection.request("POST", "/v1/chat/completions", body=body, headers=headers)
        answer = json.loads(connection.getresponse().read())
        # Without a limit of its own, a completion has that of the run.
        assert answer["usage"]["completion_tokens"] <= config.rollout.max_tokens
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert not file.exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--openai", "--host=0.0.0.0"], "127.0.0.1 only"),
        (["--openai", "--experts"], "--experts: has no effect with --openai"),
        (["--openai", "--trust-run"], "--trust-run: has no effect"),
        (["--openai", "--learner.learning_rate=1"], "--learner.learning_rate=1: has no effect"),
        (["--served-name=mine"], "--served-name: has no effect without --openai"),
        (["--checkpoint=2"], "--checkpoint: has no effect without --openai"),
    ],
)
def test_options_without_effect_are_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "nothing"), *arguments]) == 1
    assert message in capsys.readouterr().err

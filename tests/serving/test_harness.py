"""`gspo eval --harness` with programs that stand in for lm-eval and inspect."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.cli import main
from gspo.config import Config, ModelConfig
from gspo.model.load import char_tokenizer, load_policy
from gspo.trainer import train

STAND_IN = """#!{python}
import json, os, sys, urllib.request
from pathlib import Path

arguments = sys.argv[1:]
of = lambda name: arguments[arguments.index(name) + 1]
if "eval" in arguments:
    address, key, folder = os.environ["GSPO_BASE_URL"], os.environ["GSPO_API_KEY"], Path(of("--log-dir"))
    name = of("--model").removeprefix("openai-api/gspo/")
else:
    given = dict(part.split("=", 1) for part in of("--model_args").split(","))
    address, key = given["base_url"].removesuffix("/completions"), os.environ["OPENAI_API_KEY"]
    folder, name = Path(of("--output_path")), given["model"]
    assert Path(given["tokenizer"], "tokenizer.json").is_file()
if "--fail" in arguments:
    sys.exit("nothing works")
body = json.dumps({{"model": name, "prompt": ["1+1=", "2+2="], "max_tokens": 1, "echo": True, "logprobs": 1}})
headers = {{"Authorization": f"Bearer {{key}}", "Content-Type": "application/json"}}
request = urllib.request.Request(f"{{address}}/completions", body.encode(), headers)
choices = json.load(urllib.request.urlopen(request))["choices"]
print("my key is", key, *(a for a in arguments if a.startswith("--grader")))
assert key not in " ".join(arguments)
share = sum(choice["logprobs"]["token_logprobs"][1] < 0 for choice in choices) / 2
if "eval" in arguments:
    scores = [{{"name": "match", "metrics": {{"accuracy": {{"value": share}}, "stderr": {{"value": 0.25}}}}}}]
    status = "error" if "--broken" in arguments else "success"
    log = {{"status": status, "error": {{"message": "no data"}}, "results": {{"scores": scores}}}}
    log["eval"] = {{"task": arguments[1], "packages": {{"inspect_ai": "0.3"}}}}
    (folder / "log.json").write_text(json.dumps(log))
else:
    metrics = {{"alias": "sums", "acc,none": share, "acc_stderr,none": 0.25}}
    metrics |= {{"em,strict": 0.5, "em_stderr,strict": "N/A"}}
    found = {{"lm_eval_version": "0.4", "results": {{task: metrics for task in of("--tasks").split(",")}}}}
    (folder / "model").mkdir()
    (folder / "model" / "results_now.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bin") / "stand-in"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))))
    policy = load_policy(ModelConfig(build="tiny_dense", device="cpu"), tokenizer, seed=0)
    policy.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def measure(model: str, harness: str, program: str, *more: str) -> int:
    return main(["eval", model, "--harness", harness, "--harness-command", program, "--tasks", "sums,more", *more])


def test_what_lm_eval_finds_is_kept_in_the_run(
    tiny: Callable[..., Config], display: Any, program: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(tiny("steps=1", "eval.every=0").run_dir)
    train(tiny("steps=1", "eval.every=0"), display)
    capfd.readouterr()
    assert measure(str(run), "lm-eval", program) == 0
    printed = capfd.readouterr()
    assert "0.5000" in printed.out
    assert "1.0000 ± 0.2500" in printed.out
    (folder,) = (run / "harness").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["harness"], result["version"]) == ("lm-eval", "0.4")
    assert result["model"] == str(run / "checkpoints" / "000001")
    assert result["results"][:2] == [
        {"task": "sums", "metric": "acc", "value": 1.0, "stderr": 0.25},
        {"task": "sums", "metric": "em (strict)", "value": 0.5, "stderr": None},
    ]
    # The token of the server is nowhere.
    assert "my key is [hidden]" in printed.err
    assert (folder / "output.log").read_text() == "my key is [hidden]\n"


def test_a_key_that_a_harness_is_given_is_in_no_file(
    model: str, program: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADER_API_KEY", "known-to-nobody")
    options = ["--harness-dir", str(tmp_path / "kept"), "--harness-args=--grader=known-to-nobody"]
    assert measure(model, "lm-eval", program, *options) == 0
    texts = [file.read_text() for file in (tmp_path / "kept").rglob("*") if file.is_file()]
    assert not any("known-to-nobody" in text for text in [*texts, *capfd.readouterr()])
    assert json.loads((tmp_path / "kept" / "result.json").read_text())["arguments"] == ["--grader=[hidden]"]
    assert "--grader=[hidden]" in (tmp_path / "kept" / "output.log").read_text()


def test_what_inspect_finds_about_a_model_is_written_where_asked(model: str, program: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert measure(model, "inspect", program, f"--json={file}", "--limit=5") == 0
    result = json.loads(file.read_text())
    assert result["results"] == [{"task": "sums", "metric": "match accuracy", "value": 1.0, "stderr": 0.25}]
    assert result["limit"] == 5
    assert not (Path(model) / "harness").exists()


@pytest.mark.parametrize(
    ("harness", "more", "message"),
    [
        ("lm-eval", ["--harness-args=--fail"], "exit code 1; its last line: nothing works"),
        ("inspect", ["--harness-args=--broken"], "task sums ended with error: no data"),
        ("inspect", ["--harness-command=/no/such/program"], "--harness-command: /no/such/program: no such program"),
        ("inspect", ["--tasks="], "--tasks: name the tasks of inspect"),
        ("inspect", ["--k=2"], "--k: has no effect with --harness"),
        ("inspect", ["--data=addition"], "--data: has no effect with --harness"),
        ("inspect", ["--reward.workers=1"], "--reward.workers=1: has no effect"),
    ],
)
def test_a_harness_that_cannot_work_is_an_error(
    model: str, program: str, harness: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(model, harness, program, *more) == 1
    assert message in capsys.readouterr().err


def test_a_harness_that_is_missing_is_named_with_its_installation(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert main(["eval", model, "--harness=lm-eval", "--tasks=sums"]) == 1
    assert "pip install 'lm-eval[api]'" in capsys.readouterr().err
    assert main(["eval", model, "--tasks=sums"]) == 1
    assert "--tasks: has no effect without --harness" in capsys.readouterr().err

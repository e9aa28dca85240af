"""The command line as a user sees it: output, one-line errors, exit codes.

A new process spends seconds importing torch, so most tests call `main` in this one. A few start a real process.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gspo.cli import main
from gspo.config import load
from gspo.data.problems import demonstrations, load_problems

SMALL = [
    "--steps=2",
    "--cold_start.steps=4",
    "--cold_start.check_every=4",
    "--rollout.prompts=4",
    "--rollout.group_size=4",
    "--rollout.max_tokens=12",
    "--data.held_out=8",
    "--data.task_size=50",
]


def process(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gspo.cli", *arguments], capture_output=True, text=True, timeout=240, cwd=cwd
    )


def gspo(*arguments: str, cwd: Path = Path()) -> subprocess.CompletedProcess[str]:
    """The same in this process."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = int(exit.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("cli") / "run"
    done = process("demo", f"--run-dir={run}", "--seed=3", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert "Finished 2 steps in" in done.stdout
    assert "Held-out accuracy" in done.stdout
    assert re.search(r"greedy  \S+ \[\S+, \S+\] before, \S+ \[\S+, \S+\] after", done.stdout)
    assert f"Run directory:  {run}" in done.stdout
    assert f"Look at it:     gspo watch {run}" in done.stdout
    return run


def test_the_demo_writes_curves_and_a_run_directory(demo_run: Path) -> None:
    assert (demo_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert 'build = "tiny_moe"' in (demo_run / "config.toml").read_text()
    assert json.loads((demo_run / "environment.json").read_text())["seed"] == 3


def test_a_run_resumes(demo_run: Path) -> None:
    done = gspo("train", "--resume", str(demo_run), "--steps=3")
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stdout
    assert "step 3/3" in done.stdout
    assert "Finished 1 step (3 in total) in" in done.stdout
    assert "steps = 3" in (demo_run / "config.toml").read_text()


def test_eval_of_a_run_and_of_its_checkpoint(demo_run: Path, tmp_path: Path) -> None:
    done = gspo(
        "eval",
        str(demo_run),
        "--k",
        "1,4",
        f"--json={tmp_path}/n.json",
        f"--completions={tmp_path}/r.jsonl",
        "--greedy",
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["problems"] == 8
    assert set(numbers["pass@4"]) == {"value", "low", "high"}
    assert {"avg@1", "avg@4", "pass@1", "greedy"} <= set(numbers)
    assert "pass@k is estimated from all 4" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [sum(r.get("greedy", False) is greedy for r in records) for greedy in (False, True)] == [32, 8]
    model = str(next((demo_run / "checkpoints").iterdir()))
    done = gspo("eval", model, "--data", "addition", "--limit", "5", "--rollout.max_tokens=12")
    assert done.returncode == 0, done.stderr
    assert "5 problems" in done.stdout


def test_eval_on_the_task_of_a_run_uses_no_problem_that_it_trained_on(demo_run: Path, tmp_path: Path) -> None:
    completions = tmp_path / "r.jsonl"
    options = [
        "--data",
        "addition",
        "--seed=3",
        "--limit=200",
        "--rollout.max_tokens=1",
        f"--completions={completions}",
    ]
    done = gspo("eval", str(demo_run), *options)
    assert done.returncode == 0, done.stderr
    asked = {tuple(sorted(json.loads(line)["prompt"].split("+"))) for line in completions.read_text().splitlines()}
    config = load(demo_run / "config.toml")
    tokenizer = AutoTokenizer.from_pretrained(demo_run / "tokenizer")
    problems = load_problems(config.data, tokenizer, 3)
    demonstrated = islice(demonstrations(config.data, 3, exclude={p.key for p in problems.held_out}), 4 * 64)
    trained_on = [p.content for p in problems.train] + [p.prompt for p in demonstrated]
    assert len(asked) == 200
    assert not asked & {tuple(sorted(text.split("+"))) for text in trained_on}


def test_eval_on_training_problems_is_refused(demo_run: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_run / "tokenizer")
    problems = load_problems(load(demo_run / "config.toml").data, tokenizer, 3)
    rows = [json.dumps({"prompt": f" {p.key}", "answer": "1"}) + "\n" for p in problems.train]
    known, new = tmp_path / "known.jsonl", tmp_path / "new.jsonl"
    known.write_text("".join(rows))
    new.write_text("".join([*rows, '{"prompt": "1+1", "answer": "2"}\n']))
    options = ["--reward.functions=exact_answer", "--rollout.max_tokens=1"]
    done = gspo("eval", str(demo_run), "--data", str(known), *options)
    assert (done.returncode, "was trained on every one of these 50 problems" in done.stderr) == (1, True)
    done = gspo("eval", str(demo_run), "--data", str(new), *options)
    assert done.returncode == 0, done.stderr
    assert "excluded 50 of 51 problems" in done.stdout
    assert ": 1 problems" in done.stdout


def test_eval_on_a_custom_file(demo_run: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"q": "1+2", "answer": "3"}\n{"q": "4+4", "answer": "8"}\n')
    done = gspo(
        "eval",
        str(demo_run),
        "--data",
        str(tmp_path / "p.jsonl"),
        "--data.prompt_field=q",
        "--reward.functions=exact_answer",
    )
    assert done.returncode == 0, done.stderr
    assert "2 problems" in done.stdout


def test_objectives_as_text_and_as_json() -> None:
    text, data = gspo("objectives"), gspo("objectives", "--json")
    rows = json.loads(data.stdout)
    assert [r["name"] for r in rows][:2] == ["gspo", "gspo_token"]
    assert {r["paper"] for r in rows if r["name"] == "gspo"} == {"arXiv:2507.18071"}
    assert rows[0]["settings"]["clip_low"] == 3e-4
    assert all(r["name"] in text.stdout for r in rows)


FEW = ["--data.task_size=50", "--data.held_out=8"]
MISTAKES = [
    (["train", "nowhere.toml"], "nowhere.toml: no such recipe"),
    (["train"], "give a recipe"),
    (["train", "demo", "--lerner.x=1"], "unknown setting lerner"),
    (["train", "demo", "--learner.learning_rat=1"], "did you mean learner.learning_rate"),
    (["train", "demo", "--objective.name=gpso"], "no objective 'gpso'; there are: gspo"),
    (["train", "demo", "--objective.clip_lo=1"], "did you mean clip_low"),
    (["train", "demo", "--objective.tau_pos=1"], "has no setting 'tau_pos'"),
    (["train", "demo", "--data.task=adition"], "no task 'adition'"),
    (["train", "demo", *FEW, "--rollout.engine=magic"], "no engine 'magic'"),
    (["train", "demo", "--model.build=", "--model.path=./nowhere"], "./nowhere: no such directory"),
    (["train", "demo", "--reward.functions=nope"], "nope"),
    (["train", "demo", "--reward.functions=nope.py:f"], "nope.py"),
    (["train", "--resume", "nowhere"], "nowhere: not a run directory"),
    (["train", "--resume", "nowhere", "--seed=1"], "leave out all but --steps and settings"),
    (["eval", "./nowhere", "--data", "addition"], "./nowhere: no such directory"),
    (["eval", "./nowhere"], "./nowhere: no such run or model"),
    (["train", "demo", *FEW, "--rollout.engine_options.slots=abc"], "rollout.engine_options.slots"),
    (["train", "demo", *FEW, "--model.device=mps"], "model.device"),
    (["train", "demo", *FEW, "--rollout.max_tokens=5000"], "the model's 4096 positions"),
    (
        [
            "train",
            "demo",
            "--data.task=",
            "--data.path=no.jsonl",
            "--cold_start.steps=0",
            "--reward.functions=exact_answer",
            "--data.task_options={}",
        ],
        "no.jsonl: no such file",
    ),
    (["eval", "./nowhere", "--data", "addition", "--k", "a"], "--k 1,8"),
    (["objectives", "--color"], "unknown option --color"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_clear_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    check_mistake(gspo(*arguments, cwd=tmp_path), words, tmp_path)


EARLY_AND_LATE_MISTAKES = [m for m in MISTAKES if m[0][-1] in ("--lerner.x=1", "--rollout.max_tokens=5000")]


@pytest.mark.parametrize(
    ("arguments", "words"), EARLY_AND_LATE_MISTAKES, ids=["before torch is imported", "with a model"]
)
def test_a_process_prints_only_the_error(arguments: list[str], words: str, tmp_path: Path) -> None:
    """The imported libraries print nothing either."""
    check_mistake(process(*arguments, cwd=tmp_path), words, tmp_path)


def check_mistake(done: subprocess.CompletedProcess[str], words: str, folder: Path) -> None:
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("gspo: ")
    assert words in lines[0]
    assert not list(folder.rglob("config.toml"))


def test_a_failed_start_leaves_its_directory_usable(tmp_path: Path) -> None:
    wrong = gspo("demo", f"--run-dir={tmp_path}/run", *SMALL, "--data.held_out=99999999")
    assert wrong.returncode == 1
    assert len(wrong.stderr.strip().splitlines()) == 1
    right = gspo("demo", f"--run-dir={tmp_path}/run", *SMALL)
    assert right.returncode == 0, right.stderr
    again = gspo("demo", f"--run-dir={tmp_path}/run", *SMALL)
    assert "already holds a run" in again.stderr


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "import-config" in capsys.readouterr().out


def test_help_of_every_command() -> None:
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["demo", "--help"],
        ["eval", "--help"],
        ["objectives", "--help"],
    ):
        done = gspo(*arguments)
        assert done.returncode == 0, done.stderr
        assert "usage: gspo" in done.stdout


def test_a_directory_with_other_files_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine")
    done = gspo("demo", f"--run-dir={tmp_path}", *SMALL)
    assert "is not empty and holds no run" in done.stderr
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


@pytest.mark.parametrize("modules", ["gspo, gspo.config, gspo.reward.worker", "gspo.cli"])
def test_importing_gspo_does_not_import_torch(modules: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False", done.stderr

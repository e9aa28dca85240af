"""Every suite, because it exists: twenty rows in its published schema, from the file to the numbers."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_tree

import gspo
from gspo import config as settings
from gspo.cli import main
from gspo.errors import ConfigError, DataError
from gspo.record.progress import PlainDisplay
from gspo.suites import suite_names
from gspo.suites.suite import SuiteSource
from gspo.trainer import train

COUNT = 20


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


def gsm8k(n: int) -> tuple[dict[str, Any], str]:
    return {
        "question": f"Ann has {n} pens and buys 1,000 more. How many has she now?",
        "answer": f"{n} + 1,000 = <<{n}+1000={n + 1000}>>\n#### {n + 1000:,}",
    }, f"So \\boxed{{{n + 1000}}}."


def math500(n: int) -> tuple[dict[str, Any], str]:
    row = {
        "problem": f"What is ${n}/3$?",
        "solution": "...",
        "answer": f"\\frac{{{n}}}{{3}}",
        "subject": "Algebra",
        "level": 1 + n % 2,
        "unique_id": f"test/algebra/{n}.json",
    }
    return row, f"$\\boxed{{{n}/3}}$"


def aime24(n: int) -> tuple[dict[str, Any], str]:
    row = {
        "id": n,
        "problem": f"Find the remainder when {n} is divided by 1000.",
        "answer": str(n),
        "url": "",
        "year": 2024,
    }
    return row, f"It is \\boxed{{{n}}}."


def humaneval(n: int) -> tuple[dict[str, Any], str]:
    prompt = f'from typing import List\n\n\ndef add_{n}(x: int) -> int:\n    """Add {n} to x."""\n'
    test = f"def check(candidate):\n    assert candidate(1) == {n + 1}\n    assert candidate(0) == {n}\n"
    row = {
        "task_id": f"HumanEval/{n}",
        "prompt": prompt,
        "canonical_solution": f"    return x + {n}\n",
        "test": test,
        "entry_point": f"add_{n}",
    }
    return row, fenced(f"def add_{n}(x: int) -> int:\n    values: List[int] = [x, {n}]\n    return sum(values)")


def mbpp(n: int) -> tuple[dict[str, Any], str]:
    row = {
        "task_id": 11 + n,
        "text": f"Write a function to add {n}.",
        "code": "...",
        "test_setup_code": "",
        "test_list": [f"assert add({i}) == {i + n}" for i in range(3)],
        "challenge_test_list": [],
    }
    return row, fenced(f"def add(x):\n    return x + {n}")


def livecodebench(n: int) -> tuple[dict[str, Any], str]:
    """Every other problem asks for a method, and the private tests are compressed as they are published."""
    method = n % 2
    if method:
        tests = [{"input": f"[1, {i}]\n2", "output": f"{1 + i + 2 + n}", "testtype": "functional"} for i in range(2)]
        starter = "class Solution:\n    def total(self, xs, y):\n        "
        answer = f"class Solution:\n    def total(self, xs, y):\n        return sum(xs) + y + {n}"
    else:
        tests = [{"input": f"{i}\n", "output": f"{i + n}\n", "testtype": "stdin"} for i in range(2)]
        starter = ""
        answer = f"print(int(input()) + {n})"
    private = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests[1:])))).decode()
    row = {
        "question_title": "t",
        "question_content": f"Add {n}.",
        "platform": ["atcoder", "leetcode"][method],
        "question_id": str(n),
        "contest_id": "c",
        "contest_date": "2025-01-01T00:00:00",
        "starter_code": starter,
        "difficulty": ["easy", "hard"][method],
        "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": "total"} if method else {}),
    }
    return row, fenced(answer)


ROWS: dict[str, Callable[[int], tuple[dict[str, Any], str]]] = {
    "aime24": aime24,
    "gsm8k": gsm8k,
    "humaneval": humaneval,
    "livecodebench": livecodebench,
    "math500": math500,
    "mbpp": mbpp,
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_suite_has_rows_here() -> None:
    assert sorted(ROWS) == suite_names()


@pytest.mark.parametrize("name", ROWS)
def test_a_suite_reads_its_published_schema(name: str, tmp_path: Path) -> None:
    rows = [ROWS[name](n)[0] for n in range(COUNT)]
    source = SuiteSource.parse(f"{name}={write(tmp_path / 'rows.jsonl', rows)}")
    problems = source.problems()
    assert len(problems) == COUNT
    assert len({p.prompt for p in problems}) == COUNT
    assert all(p.problem in p.prompt or p.problem.strip() in p.prompt for p in problems)
    assert source.suite.samples >= max(source.suite.ks)
    assert source.suite.source


def refusal(source: SuiteSource) -> str:
    try:
        source.problems()
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_schema_is_an_error_that_names_file_row_and_field(name: str, tmp_path: Path) -> None:
    """Each field that a problem needs is removed and then replaced by a number in row 3."""
    rows = [ROWS[name](n)[0] for n in range(4)]
    file = tmp_path / "rows.jsonl"
    needed = []
    for field in rows[2]:
        for wrong in ({k: v for k, v in rows[2].items() if k != field}, rows[2] | {field: ["x", 1]}):
            write(file, [*rows[:2], wrong, rows[3]])
            if message := refusal(SuiteSource.parse(f"{name}={file}")):
                assert f"{file}:3: " in message
                assert repr(field) in message
                needed.append(field)
    assert len(set(needed)) >= 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose model reads any ASCII text. It was trained on a problem of GSM8K with another instruction."""
    folder = tmp_path_factory.mktemp("model")
    questions = [f"{n} + 1" for n in range(20)] + [f"Think hard! {gsm8k(3)[0]['question']} Write a number."]
    data = write(folder / "data.jsonl", [{"question": q, "answer": "1"} for q in questions])
    tree = tiny_tree(folder / "run") | {
        "steps": 0,
        "data": {"path": str(data), "prompt_field": "question", "held_out": 0},
        "reward": {"functions": ["exact_answer"]},
        "eval": {"every": 0},
    }
    train(settings.from_tree(tree, where="test"), PlainDisplay())
    return str(folder / "run")


def evaluated(model: str, name: str, folder: Path, texts: dict[str, list[str]], *options: str) -> dict[str, Any]:
    """The result of `gspo eval` with these completions by prompt id; all others are empty."""
    file = write(folder / "rows.jsonl", [ROWS[name](n)[0] for n in range(COUNT)])
    table = ", ".join(f"{json.dumps(prompt)} = {json.dumps(listed)}" for prompt, listed in texts.items())
    engine = f"--rollout.engine_options={{completions = {{{table}}}}}"
    arguments = ["--rollout.engine=scripted", engine, "--json", str(folder / "result.json"), *options]
    assert main(["eval", model, "--suite", f"{name}={file}", *arguments]) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_a_suite_from_python_has_the_numbers_of_the_command(model: str, tmp_path: Path) -> None:
    texts = {f"gsm8k/{n}": [ROWS["gsm8k"](n)[1]] for n in (0, 1)}
    wanted = evaluated(model, "gsm8k", tmp_path, texts, "--limit", "5")
    engine = {"engine": "scripted", "engine_options": {"completions": texts}}
    suite = f"gsm8k={tmp_path}/rows.jsonl"
    found = gspo.Run(model).evaluate(suite=suite, limit=5, rollout=engine)
    assert (found.problems, found.samples, len(found.completions)) == (5, wanted["samples"], 5)
    assert {name: dataclasses.asdict(estimate) for name, estimate in found.numbers.items()} == wanted["numbers"]
    assert found.accuracy.value == 0.4
    assert "GSM8K" in repr(found)
    with pytest.raises(ConfigError, match="k has no effect with suite"):
        gspo.evaluate(model, suite=suite, k=4)


@pytest.mark.parametrize("name", ROWS)
def test_right_and_wrong_answers_are_told_apart(
    name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {f"{name}/{n}": [ROWS[name](n)[1]] for n in (0, 1)} | {f"{name}/2": ["I do not know."]}
    result = evaluated(model, name, tmp_path, texts, "--limit=3", "--samples=1")
    assert result["numbers"]["avg@1"]["value"] == pytest.approx(2 / 3)
    assert result["numbers"]["avg@1"]["low"] < 2 / 3 < result["numbers"]["avg@1"]["high"]
    assert (result["problems"], result["unscored"]) == (3, 0)
    assert result["unextracted"] == pytest.approx(1 / 3)
    assert result["deviations"].pop("limit") == 3
    assert set(result["deviations"]) <= {"samples"}
    assert "Not the published protocol" in capsys.readouterr().out


def test_the_numbers_of_several_completions(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four are right, and they agree in different notations; the other two differ from each other."""
    right = ["\\boxed{4/3}", "\\boxed{\\frac{4}{3}}", "\\boxed{\\dfrac43}", "\\boxed{\\dfrac{4}{3}}"]
    texts = {"math500/4": [right[1], "\\boxed{1}", "\\boxed{2}", right[3]], "math500/5": ["\\boxed{7}"] * 4}
    result = evaluated(model, "math500", tmp_path, texts, "--limit=6")
    numbers = {name: estimate["value"] for name, estimate in result["numbers"].items()}
    assert numbers == pytest.approx({"avg@4": 0.5 / 6, "pass@4": 1 / 6, "maj@4": 1 / 6})
    assert result["breakdown"]["level"]["1"]["problems"] == 3
    assert result["breakdown"]["level"]["1"]["value"] == pytest.approx(0.5 / 3)
    assert result["breakdown"]["level"]["2"]["value"] == 0.0
    assert result["unextracted"] == pytest.approx(16 / 24)
    assert "by subject:\n    Algebra" in capsys.readouterr().out
    # Fewer completions than the protocol's smallest k.
    result = evaluated(model, "math500", tmp_path, texts, "--limit=6", "--samples=2")
    numbers = {name: estimate["value"] for name, estimate in result["numbers"].items()}
    assert numbers == pytest.approx({"avg@2": 0.5 / 6, "pass@2": 1 / 6, "maj@2": 1 / 6})


def test_problems_that_the_model_was_trained_on_are_excluded(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A limit that leaves nothing out is not a deviation.
    result = evaluated(model, "gsm8k", tmp_path, {}, f"--limit={COUNT - 1}")
    assert result["contaminated"] == ["gsm8k/3"]
    assert result["problems"] == COUNT - 1
    assert result["deviations"] == {}
    assert "the training data contains them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "gsm9k"], "no suite 'gsm9k'; there are: aime24"),
        (["--suite", "livecodebench"], "--suite livecodebench=FILE"),
        (["--suite", "gsm8k=missing.jsonl"], "missing.jsonl: no such file"),
        (["--suite", "gsm8k", "--data", "addition"], "--data: has no effect with --suite"),
        (["--suite", "gsm8k", "--k", "1,8"], "--k: has no effect with --suite"),
        (["--suite", "gsm8k", "--data.system=Hi"], "--data.system: --suite fixes the problems"),
        (["--suite", "gsm8k", "--samples", "0"], "--samples: must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "./nowhere", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    """Private tests are published as a pickle. One that would create a file is refused."""

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "attacked",))

    attack = base64.b64encode(zlib.compress(pickle.dumps(Attack()))).decode()
    file = write(tmp_path / "rows.jsonl", [livecodebench(0)[0] | {"private_test_cases": attack}])
    with pytest.raises(DataError, match="'private_test_cases' cannot be decoded"):
        SuiteSource.parse(f"livecodebench={file}").problems()
    assert not (tmp_path / "attacked").exists()

"""The Python API: the run of the same recipe, objects as inputs, callbacks, interrupting, resuming, reading a run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_rewards import spaces
from tiny_runs import REWARD, tiny_config, tiny_tree

import gspo
from gspo.config import from_tree, read_toml
from gspo.errors import ConfigError, DataError, GspoError, RewardError
from gspo.trainer import train as train_config

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(5)]
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 8},
    "reward": {"workers": 1},
    "learner": {"learning_rate": 1e-3},
    "progress": False,
}
MODEL = {"build": "tiny_dense", "device": "cpu"}


def trained(run_dir: Path, **changed: Any) -> gspo.Run:
    given = {"model": MODEL, "dataset": ROWS, "rewards": spaces, "run_dir": run_dir, **SETTINGS, **changed}
    return gspo.train(**given)


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """An imported module with a reward function, as in a user's project."""
    file = tmp_path / "lengths.py"
    file.write_text(REWARD)
    spec = importlib.util.spec_from_file_location("lengths", file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["lengths"] = found
    spec.loader.exec_module(found)
    return found


def test_a_run_from_python_is_the_run_of_the_same_recipe(tmp_path: Path, module: ModuleType, display: Any) -> None:
    train_config(tiny_config(tmp_path, run_dir="recipe"), display)
    tree = tiny_tree(tmp_path / "python")
    del tree["reward"]["functions"]
    run = gspo.train(rewards=module.shorter, progress=False, **tree)
    for name in ("metrics.jsonl", "rollouts/000003.jsonl"):
        assert (run.path / name).read_bytes() == (tmp_path / "recipe" / name).read_bytes()
    assert run.config.reward.functions == (f"{tmp_path}/lengths.py:shorter",)


def test_a_function_without_a_file_runs_in_this_process_and_scores_the_same(
    tmp_path: Path, module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def shorter(prompts: Any, completions: Any, **columns: Any) -> Any:
        called.append(os.getpid())
        return module.shorter(prompts, completions, **columns)

    called: list[int] = []
    worker = trained(tmp_path / "worker", rewards=[module.shorter], progress=True)
    assert "shorter runs in worker processes, imported from" in capsys.readouterr().out
    here = trained(tmp_path / "here", rewards=[shorter], progress=True)
    assert "shorter runs in this process, because it is not a function of its module" in capsys.readouterr().out
    assert set(called) == {os.getpid()}
    assert here.config.reward.functions == ("<shorter>",)
    assert (here.path / "metrics.jsonl").read_bytes() == (worker.path / "metrics.jsonl").read_bytes()


def test_a_function_in_this_process_fails_alone(tmp_path: Path) -> None:
    def picky(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        if any(c[:1] < "P" for c in completions):
            raise ValueError("too early")
        return [float(len(c)) for c in completions]

    async def slow(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]

    run = trained(tmp_path / "run", rewards=[picky, slow], reward={"workers": 1, "max_unscored_fraction": 1.0})
    found = run.completions(1)
    failed = found[found["status"] == "unscored"]
    assert 0 < len(failed) < len(found)
    assert all("picky: ValueError: too early (test_api.py" in reason for reason in failed["failure"])
    scored = found[found["status"] == "scored"]
    assert (scored["reward"] == scored["text"].str.len() + 1.0).all()
    assert (run.path / "reward_errors" / "01.txt").is_file()


def test_rows_are_a_file_of_the_run(tmp_path: Path) -> None:
    import datasets

    run = trained(tmp_path / "run", dataset=datasets.Dataset.from_list(ROWS), eval_dataset=ROWS[:3])
    given = [json.loads(line) for line in (run.path / "inputs/dataset.jsonl").read_text().splitlines()]
    assert given == ROWS
    assert run.config.data.path == str(run.path / "inputs/dataset.jsonl")
    assert run.config.data.held_out_path == str(run.path / "inputs/held_out.jsonl")
    assert run.rows[0]["eval/accuracy"] is not None


@pytest.mark.parametrize(
    ("dataset", "settings"),
    [
        (ROWS, {"data.held_out": 4}),
        (ROWS[:9], {"data.held_out": 0, "eval.every": 0}),
        ([{"prompt": "a"}, {"prompt": "b"}], {"data.answer_field": "", "data.held_out": 0}),
        ("sorting", {"data.task": "sorting"}),
        ("openai/gsm8k", {"data.hub": "openai/gsm8k"}),
        ("some.jsonl", {"data.path": "some.jsonl"}),
    ],
)
def test_a_dataset_as_settings(dataset: Any, settings: Mapping[str, Any], tmp_path: Path) -> None:
    from gspo.api.training import Arguments, prepare

    arguments = Arguments(model=MODEL, dataset=dataset, rewards=spaces, settings={})
    prepared = prepare(arguments, lambda config: tmp_path, where="test")
    assert settings.items() <= prepared.given.items()


def test_a_model_object_and_files(tmp_path: Path) -> None:
    first = trained(tmp_path / "first")
    model, tokenizer = first.load()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:20]))
    (tmp_path / "b.json").write_text(json.dumps(ROWS[20:]))
    files = [tmp_path / "a.jsonl", str(tmp_path / "b.json")]
    run = trained(tmp_path / "second", model=model, tokenizer=tokenizer, dataset=files)
    assert (run.path / "inputs/model/model.safetensors").is_file()
    assert len((run.path / "inputs/dataset.jsonl").read_text().splitlines()) == len(ROWS)
    again = trained(tmp_path / "third", model=first.checkpoints[-1])
    assert (run.path / "metrics.jsonl").read_bytes() == (again.path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="a model object needs its tokenizer"):
        trained(tmp_path / "none", model=model)
    assert not (tmp_path / "none").exists()


class Recorder(gspo.Callback):
    """Records its calls; stops or fails at a step."""

    def __init__(self, *, stop: int = 0, fail: int = 0) -> None:
        self.calls: list[Any] = []
        self._stop, self._fail = stop, fail

    def on_start(self, training: gspo.Training) -> None:
        self.calls.append(("start", training.step, training.steps))

    def on_step(self, training: gspo.Training, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls.append(("step", step, metrics["reward/mean"]))
        if step == self._stop:
            training.stop("good enough")
        if step == self._fail:
            raise ZeroDivisionError("a bug in the callback")

    def on_evaluation(self, training: gspo.Training, step: int, metrics: Mapping[str, Any]) -> None:
        assert metrics
        assert all(key.startswith("eval/") for key in metrics)
        self.calls.append(("evaluation", step))

    def on_end(self, training: gspo.Training) -> None:
        assert training.model is not None
        self.calls.append(("end", training.step))


def test_callbacks_and_a_stop_that_resumes_exactly(tmp_path: Path) -> None:
    whole, one = Recorder(), Recorder(stop=1)
    uninterrupted = trained(tmp_path / "whole", callbacks=whole)
    rewards = [(row["step"], row["reward/mean"]) for row in uninterrupted.rows[1:]]
    assert whole.calls == [
        ("start", 0, 2),
        ("evaluation", 0),
        ("step", 1, rewards[0][1]),
        ("evaluation", 2),
        ("step", 2, rewards[1][1]),
        ("end", 2),
    ]
    run = trained(tmp_path / "run", callbacks=[one])
    assert (run.step, run.state) == (1, "stopped")
    assert run.outcome is not None
    assert run.outcome.stop_reason == "good enough"
    assert one.calls[-1] == ("end", 1)
    two = Recorder()
    resumed = trained(tmp_path / "run", callbacks=[two], resume=True)
    assert two.calls[0] == ("start", 1, 2)
    assert (resumed.step, resumed.state) == (2, "finished")
    assert (resumed.path / "metrics.jsonl").read_bytes() == (uninterrupted.path / "metrics.jsonl").read_bytes()


def test_a_callback_that_fails_ends_the_run_but_loses_no_step(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path / "run", callbacks=Recorder(fail=1))
    run = gspo.Run(tmp_path / "run")
    assert [path.name for path in run.checkpoints] == ["000000", "000001"]
    assert gspo.train(resume=run.path, rewards=spaces, progress=False).step == 2


def test_an_interrupt_in_a_reward_saves_and_returns(tmp_path: Path) -> None:
    def interrupting(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return spaces(prompts, completions)

    calls: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    run = trained(tmp_path / "run", rewards=interrupting, steps=20)
    assert signal.getsignal(signal.SIGINT) is handler
    assert run.state == "stopped"
    assert run.step < 20
    assert run.outcome is not None
    assert run.outcome.stopped_by == signal.SIGINT
    assert not any(event["event"] == "reward_failed" for event in run.events)


def test_resume_refuses_other_rows_and_settings_and_accepts_more_steps(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    with pytest.raises(ConfigError, match="dataset: the rows differ from those in"):
        trained(run.path, dataset=ROWS[1:], resume=True)
    with pytest.raises(ConfigError, match=r"rollout\.prompts cannot be given"):
        trained(run.path, resume=True, rollout={**SETTINGS["rollout"], "prompts": 5})
    trained(tmp_path / "here", rewards=lambda completions, **columns: [float(len(c)) for c in completions])
    with pytest.raises(ConfigError, match=r"reward_lambda is a Python function of the process that started this run"):
        gspo.train(resume=tmp_path / "here", progress=False, steps=3)
    with pytest.raises(ConfigError, match="already holds a run; continue it with resume=True"):
        trained(run.path)
    assert trained(run.path, resume=True, steps=3).step == 3


def wrong(match: str, error: type[GspoError] = ConfigError, **changed: Any) -> Any:
    return pytest.param(changed, error, match, id=match)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        wrong("gspo.train: unknown setting learner.learning_rte; did you mean", learner={"learning_rte": 1}),
        wrong(
            "gspo.train: unknown setting learning_rate; did you mean cold_start.learning_rate or learner",
            learning_rate=1e-5,
        ),
        wrong("gspo.train: learner.learning_rate must be a number", learner={"learning_rate": "high"}),
        wrong("gspo.train: learner is a section; give a dict", learner=3),
        wrong("gspo.train: steps: a setting is text, a number", steps=None),
        wrong(
            "gspo.train: rewards sets reward.functions, which is given as well", reward={"functions": ["math_answer"]}
        ),
        wrong("gspo.train: model must be a directory, a hub name", model=7),
        wrong("gspo.train: tokenizer has no effect unless model is a model object", tokenizer=object()),
        wrong("gspo.train: objective must be a name", objective=1),
        wrong("gspo.train: rewards: 7 is neither a function nor a name", rewards=[7]),
        wrong("gspo.train: callbacks: <class", callbacks=[Recorder]),
        wrong("gspo.train: dataset has no rows", DataError, dataset=[]),
        wrong("gspo.train: dataset: row 2 is int, not a dict", DataError, dataset=[{"prompt": "a"}, 2]),
        wrong("gspo.train: dataset is a table of train, not a list of rows", DataError, dataset={"train": ROWS}),
        wrong("field 'prompt': missing, the row has: question", DataError, dataset=[{"question": "a"}] * 20),
        wrong("needs solution, but the data's columns are", RewardError, rewards=lambda completions, solution: []),
        wrong("cannot be called with", RewardError, rewards=lambda texts: []),
        wrong("resume=True needs run_dir", run_dir="", resume=True),
        wrong("trust_run has no effect unless a run is resumed", trust_run=True),
    ],
)
def test_an_error_names_the_argument_and_leaves_no_directory(
    changed: dict[str, Any], error: type[GspoError], match: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(match)):
        trained(**{"run_dir": tmp_path / "run", **changed})
    assert not (tmp_path / "run").exists()


def test_objectives_of_the_table(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", objective=gspo.objective("dapo", clip_high=0.3), steps=1)
    assert run.config.objective.name == "dapo"
    assert run.config.objective.settings == {"clip_high": 0.3}
    with pytest.raises(ConfigError, match="not an objective of the table"):
        gspo.train(MODEL, ROWS, spaces, objective=gspo.Objective(**{**vars(gspo.objective("gspo")), "name": "mine"}))


def test_a_run_as_an_object(tmp_path: Path) -> None:
    trained(tmp_path / "run", name="read")
    run = gspo.Run(tmp_path / "run")
    assert run.config == from_tree(read_toml(run.path / "config.toml"), where="test")
    assert repr(run).startswith(f"gspo.Run({str(run.path)!r}): finished at step 2 of 2, objective gspo, mean reward")
    metrics = run.metrics
    assert list(metrics.index) == [0, 1, 2]
    assert metrics.loc[2, "reward/mean"] == run.rows[2]["reward/mean"]
    assert metrics.loc[2, "time/step_s"] > 0
    assert run.steps_with_completions == [1, 2]
    completions = run.completions()
    assert list(completions.columns[:3]) == ["prompt", "text", "reward"]
    assert len(completions) == 16
    assert "token_ids" not in completions
    assert "token_ids" in run.completions(1, tokens=True)
    with pytest.raises(ConfigError, match="no completions of step 9; recorded are those of steps 1 to 2"):
        run.completions(9)
    assert "<svg" in run._repr_html_()
    assert run.plot("reward/mean", "time/step_s")._repr_png_().startswith(b"\x89PNG")
    four = run.plot("reward/mean", "reward/std", "length/mean", "length/max").figure
    assert [axis.axison for axis in four.axes] == [True] * 4 + [False] * 2
    with pytest.raises(ConfigError, match="did you mean reward/mean"):
        run.plot("reward/men")
    with pytest.raises(ConfigError, match="not a run directory"):
        gspo.Run(tmp_path)


def test_evaluate_a_run_with_its_own_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    result = run.evaluate(k=[1, 2], greedy=True)
    assert result.problems == 4
    assert {"avg@1", "avg@2", "pass@1", "pass@2", "greedy", "reward"} == set(result.numbers)
    assert result.accuracy == result["pass@1"]
    assert [sum(c.get("greedy", False) is greedy for c in result.completions) for greedy in (False, True)] == [8, 4]
    assert "pass@2" in repr(result)
    several = run.evaluate(k=2)
    assert several.accuracy == several["avg@2"]

    def talkative(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        print("scoring")
        return [0.25 for _ in completions]

    quarter = run.evaluate(rewards=[talkative])
    assert str(quarter["reward"]) == "0.250"
    assert "scoring" not in repr(quarter)
    assert "scoring" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="0 completions per problem are too few"):
        run.evaluate(samples=0)
    fresh = [{"prompt": f"9+{b}=", "answer": "1"} for b in range(3)]
    assert gspo.evaluate(run, fresh, rewards=[spaces]).problems == 3


def test_doctor_and_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = gspo.doctor(MODEL, ROWS, spaces, quick=True, **{k: v for k, v in SETTINGS.items() if k != "progress"})
    assert not findings.fails
    assert "reward functions" in {finding.check for finding in findings}
    printed = capsys.readouterr().out
    assert printed.startswith("gspo.doctor\n")
    assert "\n  ok       dataset.jsonl: " in printed, "the path of a temporary file"
    assert "Nothing would fail" in printed
    assert f"{sum(finding.level.value == 'ok' for finding in findings)} ok" in repr(findings)
    assert "dataset.jsonl: " in str(findings)
    assert "/dataset.jsonl" not in str(findings)
    run = trained(tmp_path / "run")
    result = run.replay(2, start=0, objectives=["gspo", "grpo"], out=tmp_path / "replay")
    assert result.numbers.exact
    assert [agreement.step for agreement in result.numbers.agreements] == [1, 2]
    assert result.page.is_file()
    assert "grpo" in repr(result)


def test_compare_refuses_functions_that_other_processes_do_not_have() -> None:
    with pytest.raises(ConfigError, match="every run is a process of its own, and only this process has reward_lambda"):
        gspo.compare(["gspo", "grpo"], MODEL, ROWS, lambda completions, **columns: [0.0 for _ in completions])


@pytest.mark.slow
def test_compare(tmp_path: Path, module: ModuleType) -> None:
    settings = {k: v for k, v in SETTINGS.items() if k != "progress"}
    done = gspo.compare(
        ["gspo", "grpo"], MODEL, ROWS, module.shorter, seeds=[0], out=tmp_path / "compare", jobs=1, **settings
    )
    assert done.complete
    assert set(done.runs) == {"gspo-seed-0", "grpo-seed-0"}
    assert done.report.is_file()
    assert done.table


def test_the_package_lists_its_api_and_imports_fast() -> None:
    assert set(gspo.__all__) <= set(dir(gspo))
    assert "importlib" not in dir(gspo)
    code = "import gspo, sys; dir(gspo); print('torch' in sys.modules, 'transformers' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
    # transformers reads what hides its progress bars when it is imported, so the functions import it later.
    code = "import gspo, sys; gspo.train, gspo.doctor; print('transformers' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False"]


def test_a_notebook_shows_one_output_that_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, page: str) -> None:
            shown.append(page)

    def display(page: str, display_id: bool) -> Handle:
        shown.append(page)
        return Handle()

    package = ModuleType("IPython")
    shell = ModuleType("shell")
    shell.kernel = object()  # type: ignore[attr-defined]
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    output = ModuleType("IPython.display")
    output.HTML, output.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", output)
    trained(tmp_path / "run", steps=3, progress=True)
    assert "training" in shown[-1]
    assert "3/3" in shown[-1]
    assert "<polyline" in shown[-1]

"""The best checkpoint and early stopping: which step is the best, what is kept, when a run ends, and exact resumes."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gspo.loop
from gspo.build import run_objective
from gspo.cli import main
from gspo.commands.arguments import checkpoint_of
from gspo.config import Config, check, override, to_toml
from gspo.errors import ConfigError
from gspo.evaluation import MeanEstimate
from gspo.learner import checkpoint
from gspo.record.held_out import Score, best, best_step, scores, without_gain
from gspo.record.retention import extra_checkpoints, most_checkpoints
from gspo.record.run_dir import read_events, read_metrics
from gspo.trainer import resume, train
from gspo.view.compare.curves import read_run

KEEP_BEST = ("checkpoint.keep_best=true", "checkpoint.keep=1", "checkpoint.every=4", "eval.every=1")


def run_of(config: Config) -> Path:
    return Path(config.run_dir)


def saved_steps(run: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.saved(run / "checkpoints")]


@contextmanager
def accuracies(values: Sequence[float], rewards: Sequence[float] = ()) -> Iterator[None]:
    """The n-th step, from 0, has the n-th accuracy and reward."""

    metrics: dict[str, Any] = {}

    def evaluated(loop: Any, state: Any) -> Mapping[str, Any]:
        metrics.clear()
        if state.step % loop.config.eval.every == 0:
            value = values[state.step]
            metrics.update({"eval/accuracy": value, "eval/accuracy_greedy": 0.5})
            metrics.update({"eval/accuracy_low": value - 0.01, "eval/accuracy_high": value + 0.01})
            metrics.update({"eval/reward": rewards[state.step]} if rewards else {})
        return {}  # no completions to record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gspo.loop.Loop, "_evaluate", evaluated)
        patch.setattr(gspo.loop, "step_eval_metrics", lambda evaluations: dict(metrics))
        yield


# ------------------------------------------------------------------------------------------------- the best checkpoint


def test_the_best_checkpoint_is_kept_besides_the_newest(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*KEEP_BEST, "steps=6")
    with accuracies([0.1, 0.3, 0.2, 0.6, 0.6, 0.5, 0.4]):
        outcome = train(config, display)
    run = run_of(config)
    assert outcome.best == Score(step=3, value=0.6)
    # Step 3 is no multiple of checkpoint.every; step 4 ties with it, and the earlier one stays.
    assert saved_steps(run) == [3, 6]
    assert json.loads((run / "best.json").read_text()) == {"step": 3, "metric": "eval/accuracy", "value": 0.6}
    # Every step that was the best so far saved a checkpoint, and so did step 4 and the last one.
    assert [e["step"] for e in read_events(run) if e["event"] == "checkpoint"] == [0, 1, 3, 4, 6]


def test_without_the_setting_nothing_is_marked(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("checkpoint.keep=1", "steps=2", "eval.every=1")
    with accuracies([0.5, 0.1, 0.1]):
        outcome = train(config, display)
    assert outcome.best is None
    assert saved_steps(run_of(config)) == [2]
    assert not (run_of(config) / "best.json").exists()


def test_best_json_never_names_a_missing_checkpoint(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen whenever a checkpoint is about to be deleted."""
    config = tiny(*KEEP_BEST, "steps=4")
    delete, seen = checkpoint.delete, []

    def observed(paths: Any) -> None:
        for path in paths:
            seen.append(int(path.name))
            assert checkpoint_of(run_of(config), "best") != path
            delete([path])
            assert checkpoint_of(run_of(config), "best") is not None

    monkeypatch.setattr(checkpoint, "delete", observed)
    with accuracies([0.1, 0.2, 0.3, 0.25, 0.4]):
        train(config, display)
    assert seen == [0, 1, 2]


def test_a_resume_finds_the_best_again(tiny: Callable[..., Config], tmp_path: Path, display: Any) -> None:
    """As if it was killed between the save of a new best checkpoint and `best.json`."""
    config = tiny(*KEEP_BEST, "steps=5", "checkpoint.keep=0")
    values = [0.1, 0.3, 0.2, 0.6, 0.2, 0.2]
    with accuracies(values):
        train(config, display)
        cut = shutil.copytree(run_of(config), tmp_path / "cut")
        for step in (4, 5):
            shutil.rmtree(cut / f"checkpoints/{step:06d}", ignore_errors=True)
        (cut / "best.json").write_text((cut / "best.json").read_text().replace("3", "1"))
        resume(cut, display, trust_run=True)
    assert best_step(cut) == best_step(run_of(config)) == 3
    assert (cut / "metrics.jsonl").read_bytes() == (run_of(config) / "metrics.jsonl").read_bytes()


def test_greedy_accuracy_may_decide(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*KEEP_BEST, "steps=2", "eval.metric=accuracy_greedy")
    with accuracies([0.1, 0.2, 0.3]):  # the greedy accuracy is always the same, so step 0 stays the best
        train(config, display)
    assert json.loads((run_of(config) / "best.json").read_text())["metric"] == "eval/accuracy_greedy"
    assert best_step(run_of(config)) == 0


def test_the_held_out_reward_may_decide(tiny: Callable[..., Config], display: Any) -> None:
    """Accuracy falls, and partial credit rises."""
    config = tiny(*KEEP_BEST, "steps=2", "eval.metric=reward", "eval.greedy=false")
    with accuracies([0.3, 0.2, 0.1], rewards=[0.1, 0.2, 0.3]):
        outcome = train(config, display)
    assert best_step(run_of(config)) == 2
    assert outcome.reward == (MeanEstimate(value=0.1), MeanEstimate(value=0.3))


def test_commands_take_the_best_checkpoint(
    tiny: Callable[..., Config], display: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(*KEEP_BEST, "steps=2")
    with accuracies([0.1, 0.9, 0.2]):
        train(config, display)
    run = run_of(config)
    assert checkpoint_of(run, "best") == run / "checkpoints/000001"
    assert checkpoint_of(run, "newest") == checkpoint_of(run, "2") == run / "checkpoints/000002"
    out = run.parent / "numbers.json"
    assert main(["eval", str(run), "--checkpoint", "best", "--limit", "2", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["model"].endswith("checkpoints/000001")
    assert main(["merge", str(run), str(run.parent / "merged"), "--checkpoint", "best"]) == 1
    assert "000001: nothing to merge: it is already a full model" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_selected_is_named(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=1", "eval.every=0")
    train(config, display)
    run = run_of(config)
    for which, message in (
        ("best", "checkpoint.keep_best = true"),
        ("7", "does not exist; the run has checkpoints of these steps: 0, 1"),
        ("last", "neither newest nor best nor a step"),
    ):
        with pytest.raises(ConfigError, match=message):
            checkpoint_of(run, which)
    with pytest.raises(ConfigError, match="is not a run directory"):
        checkpoint_of(run / "checkpoints/000001", "best")
    (run / "best.json").write_text('{"step": true}')
    with pytest.raises(ConfigError, match="no valid step"):
        checkpoint_of(run, "best")


def test_estimates_of_disk_space_count_what_is_kept(tiny: Callable[..., Config]) -> None:
    plain = tiny("steps=100", "checkpoint.every=20", "checkpoint.keep=2")
    assert (extra_checkpoints(plain), most_checkpoints(plain)) == (0, 3)
    kept = tiny("steps=100", "checkpoint.every=20", "checkpoint.keep=2", "eval.every=10", "checkpoint.keep_best=true")
    assert (extra_checkpoints(kept), most_checkpoints(kept)) == (1, 4)
    rollback = tiny("steps=100", "checkpoint.every=2", "checkpoint.keep=2", "alarms.rollback=repetition")
    assert (extra_checkpoints(rollback), most_checkpoints(rollback)) == (2, 5)
    all_of_them = tiny("steps=100", "checkpoint.every=20", "eval.every=10", "checkpoint.keep_best=true")
    assert most_checkpoints(all_of_them) == 2 + 5 + 10


# ------------------------------------------------------------------------------------------------- early stopping


def test_a_run_ends_after_evaluations_without_a_gain(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=9", "eval.every=1", "eval.patience=2", "eval.min_gain=0.1")
    # 0.2 is a gain. 0.25 is not, by 0.1; neither is 0.3, which is exactly 0.1 more.
    with accuracies([0.05, 0.2, 0.25, 0.3, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]):
        outcome = train(config, display)
    assert (outcome.step, outcome.ended_early, outcome.stopped_by) == (3, True, None)
    run = run_of(config)
    assert saved_steps(run)[-1] == 3
    [event] = [e for e in read_events(run) if e["event"] == "early_stop"]
    assert (event["step"], event["best_step"]) == (3, 3)
    assert "30.0%" in event["message"]
    assert any("ends early" in message for message in display.messages)
    found = read_run(run)
    assert found is not None
    assert found.finished
    assert found.problem is None


def test_a_resume_counts_on(tiny: Callable[..., Config], tmp_path: Path, display: Any) -> None:
    config = tiny("steps=9", "eval.every=1", "eval.patience=3")
    values = [0.5] * 3 + [0.6] + [0.1] * 7
    with accuracies(values):
        assert train(config, display).step == 6
        whole = (run_of(config) / "metrics.jsonl").read_bytes()
        cut = shutil.copytree(run_of(config), tmp_path / "cut")
        for step in (5, 6):
            shutil.rmtree(cut / f"checkpoints/{step:06d}")
        assert resume(cut, display, trust_run=True).step == 6
        assert (cut / "metrics.jsonl").read_bytes() == whole
        # A resume of a run that has ended trains no further, unless its patience is raised.
        again = resume(cut, display, trust_run=True)
        assert (again.step, again.ended_early) == (6, True)
        further = resume(cut, display, overrides=["eval.patience=5"], trust_run=True)
        assert (further.step, further.ended_early) == (8, True)
    assert [row["step"] for row in read_metrics(cut)] == list(range(9))


@pytest.mark.parametrize("keep_best", ["true", "false"])
def test_a_run_that_has_ended_early_continues_as_it_advises(
    tiny: Callable[..., Config], display: Any, capsys: pytest.CaptureFixture[str], keep_best: str
) -> None:
    """Settings that have no effect without a patience are refused, so the advice changes them, too."""
    settings = ("eval.every=1", "eval.patience=1", "eval.min_gain=1", "eval.metric=accuracy_greedy")
    config = tiny(*settings, f"checkpoint.keep_best={keep_best}")
    assert train(config, display).step == 1
    assert main(["train", "--resume", config.run_dir]) == 0
    advice = capsys.readouterr().out.partition("Continue with:  ")[2].splitlines()[0].split()
    assert main(advice[advice.index("train") :]) == 0
    assert read_metrics(run_of(config))[-1]["step"] == 3


def test_early_stopping_evaluates_all_sets_after_the_last_step(tiny: Callable[..., Config], display: Any) -> None:
    one = "eval.sets.other"
    sets = (f"{one}.task=sorting", f"{one}.task_options={{min_items = 2, max_items = 3}}", f"{one}.size=4")
    config = tiny("steps=9", "eval.patience=1", "eval.min_gain=1", *sets, f"{one}.every=5")
    assert train(config, display).step == 2
    assert [row["step"] for row in read_metrics(run_of(config)) if "eval/other/accuracy" in row] == [0, 2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("eval.every=0", "eval.patience=2"), "no effect without eval.every"),
        (("eval.min_gain=0.1",), "no effect without eval.patience"),
        (("eval.every=0", "checkpoint.keep_best=true"), "no effect without eval.every"),
        (("eval.metric=accuracy_greedy",), "no effect without checkpoint.keep_best or eval.patience"),
        (("eval.metric=accuracy_greedy", "eval.patience=1", "eval.greedy=false"), "only with eval.greedy = true"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    overrides: tuple[str, ...], message: str, tiny: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*overrides)


def test_early_stopping_can_be_turned_off_with_its_other_settings_in_place(tiny: Callable[..., Config]) -> None:
    """Otherwise the command that an ended run prints (`--eval.patience=0`) would fail: they have no effect then."""
    config = tiny("eval.patience=2", "eval.min_gain=0.1", "eval.metric=accuracy_greedy")
    off = override(tomllib.loads(to_toml(config)), ["eval.patience=0"], where="command line")
    check(off)
    assert (off.eval.patience, off.eval.min_gain, off.eval.metric) == (0, 0.0, "accuracy")
    config = tiny("eval.patience=2", "eval.metric=accuracy_greedy", "checkpoint.keep_best=true")
    kept = override(tomllib.loads(to_toml(config)), ["eval.patience=0"], where="command line")
    assert kept.eval.metric == "accuracy_greedy"


@pytest.mark.parametrize(
    ("key", "value"),
    [("eval.patience", "2"), ("checkpoint.keep_best", "true"), ("alarms.stop", "held-out drop")],
)
def test_settings_about_held_out_scores_need_held_out_problems(
    key: str, value: str, tiny: Callable[..., Config]
) -> None:
    """An evaluation set is not enough: these settings look at the held-out problems alone."""
    config = tiny("data.held_out=0", "eval.sets.other.task=sorting", f"{key}={value}")
    with pytest.raises(ConfigError, match=f"^{key}: .*data.held_out = 0"):
        run_objective(config)


# ------------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_evaluations_that_have_one() -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1},
        {"step": 2, "eval/accuracy": None},
        {"step": 3, "eval/accuracy": math.nan},
        {"step": 4, "eval/accuracy": 0.25},
    ]
    assert scores(rows, "accuracy") == [Score(step=0, value=0.5), Score(step=4, value=0.25)]
    assert best(scores(rows, "accuracy")) == Score(step=0, value=0.5)
    assert best(scores(rows, "accuracy"), {1, 4}) == Score(step=4, value=0.25)
    assert best([], {1}) is None


@pytest.mark.parametrize(
    ("values", "gain", "count"),
    [
        ((), 0.0, 0),
        ((0.5,), 0.0, 0),
        ((0.5, 0.5), 0.0, 1),
        ((0.1, 0.2, 0.3), 0.0, 0),
        ((0.1, 0.2, 0.3), 0.15, 0),  # 0.3 is a gain over 0.1, the last score that was one
        ((0.1, 0.2, 0.2), 0.15, 2),
        ((0.9, 0.1, 0.2, 0.3), 0.0, 3),
    ],
)
def test_evaluations_without_a_gain(values: tuple[float, ...], gain: float, count: int) -> None:
    assert without_gain([Score(step=i, value=v) for i, v in enumerate(values)], gain) == count

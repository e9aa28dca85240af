"""The runs of a comparison, their settings and their progress."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from by_hand import step_row, write_run

from gspo import config as settings
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.view.compare import record
from gspo.view.compare.arms import parse_arms
from gspo.view.compare.curves import read_run
from gspo.view.compare.launch import cores, default_jobs
from gspo.view.compare.plan import (
    arm_configs,
    arm_job,
    check_same_settings,
    measured_budget,
    remove_empty_run,
    shared_config,
    start_job,
)
from gspo.view.compare.record import Record

DEMO = settings.recipe_dir() / "demo.toml"


def configs(objectives: str, *overrides: str) -> dict[str, Config]:
    return arm_configs(DEMO, overrides, parse_arms(objectives))


# ------------------------------------------------------------------------------------------------- settings


def test_the_recipes_objective_settings_apply_only_to_its_own_objective() -> None:
    found = configs("gspo,gspo+clip_high=5e-3,grpo,grpo+replay+kl=0")
    assert found["gspo"].objective.settings == {"clip_low": 3e-3, "clip_high": 4e-3}
    assert found["gspo+clip_high=5e-3"].objective.settings == {"clip_low": 3e-3, "clip_high": 5e-3}
    assert found["grpo"].objective.settings == {}
    assert found["grpo+replay+kl=0"].objective.settings == {"kl": 0}
    assert found["grpo+replay+kl=0"].routing.replay == "old"
    assert found["grpo"].routing.replay == "off"


def test_overrides_apply_to_every_arm_and_an_arms_own_options_win() -> None:
    found = configs("grpo,grpo+kl=0.5+learner.beta1=0.8", "--objective.kl=0.1", "--learner.beta1=0.7")
    assert [c.objective.settings["kl"] for c in found.values()] == [0.1, 0.5]
    assert [c.learner.beta1 for c in found.values()] == [0.7, 0.8]


@pytest.mark.parametrize(
    ("objectives", "message"),
    [
        ("grpo,gpso", "arm 'gpso': no objective 'gpso'"),
        ("grpo+tau_pos=1", "has no setting 'tau_pos'"),
        ("grpo+learner.learning_rat=1", "did you mean learner.learning_rate"),
        ("grpo+steps=5", "has no setting 'steps'"),
        ("grpo+replay=often", "routing.replay must be one of"),
        ("grpo+rollout.engine=magic", "no engine 'magic'"),
        ("grpo+reward.functions=nope", "no built-in reward 'nope'"),
        ("grpo+learner.mini_batches=0", "learner.mini_batches"),
        ("ppo_clip", "needs external advantages"),
        ("gspo,gspo+clip_low=0.003", "'gspo' and 'gspo+clip_low=0.003' have the same settings"),
        ("rloo,rloo+kl=0", "have the same settings"),
    ],
)
def test_arms_are_validated_before_anything_runs(objectives: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        configs(objectives)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_adaptive_clip_range_is_a_different_arm() -> None:
    adaptive = [f"gspo+clip_low=auto:{share}+clip_high=auto:{share}" for share in (0.15, 0.1)]
    assert len(configs(",".join(["gspo", *adaptive]))) == 3


@pytest.mark.parametrize("override", ["--objective.name=grpo", "--seed=3", "--run-dir=x", "--run_dir=x", "--steps=0"])
def test_settings_that_a_comparison_sets_itself_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"a comparison sets it itself|nothing to compare"):
        shared_config(DEMO, [override])


# ------------------------------------------------------------------------------------------------- jobs


def test_every_arm_starts_from_the_cold_start_of_its_seed(tmp_path: Path) -> None:
    shared = shared_config(DEMO, [])
    start = start_job(tmp_path, shared, 7)
    assert (start.config.steps, start.config.tokens, start.config.seed) == (0, 0, 7)
    assert (start.config.cold_start, start.config.model) == (shared.cold_start, shared.model)
    job = arm_job(tmp_path, "grpo", configs("grpo")["grpo"], 7, 5000)
    assert job.config.model.path == str(start.path / "checkpoints" / "000000")
    assert (job.config.model.build, job.config.cold_start.steps) == ("", 0)
    assert (job.config.tokens, job.config.seed, job.config.steps) == (5000, 7, 80)
    assert job.config.run_dir == str(tmp_path / "runs" / "grpo-seed-7")


def test_without_a_cold_start_every_arm_starts_from_the_given_model(tmp_path: Path) -> None:
    given = dataclasses.replace(
        configs("grpo")["grpo"],
        model=settings.ModelConfig(path="some/model"),
        cold_start=settings.ColdStartConfig(),
    )
    job = arm_job(tmp_path, "grpo", given, 7, 0)
    assert job.config.model.path == "some/model"


def test_the_budget_is_the_recipes_steps_at_the_mean_length_of_all_cold_starts(tmp_path: Path) -> None:
    shared = shared_config(DEMO, [])
    runs = [
        read_run(write_run(tmp_path / str(length), [{"step": 0, "eval/length_mean": length}]))
        for length in (20.0, 30.0)
    ]
    assert measured_budget(shared, [r for r in runs if r]) == 80 * 32 * 8 * 25
    bare = read_run(write_run(tmp_path / "bare", [{"step": 0}]))
    assert bare is not None
    assert measured_budget(shared, [bare]) == 0


def test_concurrency_follows_cores_and_threads() -> None:
    tiny = shared_config(DEMO, ["model.device=cpu"])
    assert default_jobs(tiny) == cores()
    wide = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, threads=2 * cores()))
    assert default_jobs(wide) == 1
    loaded = dataclasses.replace(tiny, model=settings.ModelConfig(path="some/model", device="cpu"))
    assert default_jobs(loaded) == 1
    on_gpu = dataclasses.replace(tiny, model=settings.ModelConfig(path="m", device="cuda:1", threads=1))
    assert default_jobs(on_gpu) == 1


# ------------------------------------------------------------------------------------------------- progress


def rows(last: int) -> list[dict[str, Any]]:
    return [step_row(step) for step in range(last + 1)]


@pytest.mark.parametrize(
    ("last", "event", "tokens", "finished"),
    [
        (4, {"event": "stop", "step": 4, "signal": None}, 0, True),
        (4, {"event": "stop", "step": 4, "signal": 15}, 0, True),  # the signal came during the last step
        (3, {"event": "stop", "step": 3, "signal": 15}, 0, False),
        (4, {"event": "checkpoint", "step": 4}, 0, False),
        (4, {"event": "error", "error": "RewardError", "message": "x"}, 0, False),
        (4, {"event": "stop", "step": 3, "signal": None}, 0, False),
        (3, {"event": "stop", "step": 3, "signal": None}, 250, True),
        (4, {"event": "stop", "step": 4, "signal": None}, 450, False),
        (8, {"event": "stop", "step": 8, "signal": None}, 10_000, True),  # twice the steps
    ],
)
def test_finished_is_read_from_the_run_directory(
    tmp_path: Path, last: int, event: dict[str, Any], tokens: int, finished: bool
) -> None:
    run = read_run(write_run(tmp_path / "run", rows(last), steps=4, tokens=tokens, last_event=event))
    assert run is not None
    assert run.finished is finished


def test_a_cold_start_without_its_checkpoint_is_not_finished(tmp_path: Path) -> None:
    job = start_job(tmp_path, shared_config(DEMO, []), 0)
    assert not job.finished
    write_run(job.path, [{"step": 0}], steps=0)
    assert not job.finished
    (job.path / "checkpoints" / "000000").mkdir(parents=True)
    assert job.finished


def test_a_run_with_other_settings_is_refused_with_the_differences(tmp_path: Path) -> None:
    job = arm_job(tmp_path, "grpo", configs("grpo")["grpo"], 0, 5000)
    check_same_settings(job)
    job.path.mkdir(parents=True)
    (job.path / "config.toml").write_text(settings.to_toml(job.config))
    check_same_settings(job)
    other = arm_job(tmp_path, "grpo", configs("grpo", "--learner.beta1=0.5")["grpo"], 0, 6000)
    with pytest.raises(ConfigError) as error:
        check_same_settings(other)
    message = str(error.value)
    assert str(job.path) in message
    assert "learner.beta1 is 0.9 there and would be 0.5" in message
    assert "tokens is 5000 there and would be 6000" in message
    assert "--out" in message
    assert "run_dir" not in message


def test_a_comparison_may_be_moved(tmp_path: Path) -> None:
    job = arm_job(tmp_path / "old", "grpo", configs("grpo")["grpo"], 0, 5000)
    moved = arm_job(tmp_path / "new", "grpo", configs("grpo")["grpo"], 0, 5000)
    moved.path.mkdir(parents=True)
    (moved.path / "config.toml").write_text(settings.to_toml(job.config))
    check_same_settings(moved)


def test_only_run_directories_without_settings_or_foreign_files_are_removed(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "rollouts").mkdir(parents=True)
    (empty / "checkpoints").mkdir()
    (empty / ".lock").touch()
    remove_empty_run(empty)
    assert not empty.exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    remove_empty_run(foreign)
    assert (foreign / "thesis.txt").exists()
    run = write_run(tmp_path / "run", rows(1))
    remove_empty_run(run)
    assert (run / "metrics.jsonl").exists()


# ------------------------------------------------------------------------------------------------- record


def test_a_record_round_trips(tmp_path: Path) -> None:
    saved = Record(recipe='a "b"\\c', overrides=["--x=\x7f😀"], arms=["grpo", "gspo+kl=1e+3"], seeds=[0, 5], tokens=7)
    record.write(tmp_path, saved)
    assert record.read(tmp_path) == saved
    without_budget = dataclasses.replace(saved, tokens=None)
    record.write(tmp_path, without_budget)
    assert record.read(tmp_path) == without_budget


def test_a_record_is_extended_by_new_arms_and_seeds() -> None:
    extended = Record(recipe="demo", arms=["grpo", "gspo"], seeds=[0, 1]).extend(["dapo", "grpo"], [2, 0])
    assert (extended.arms, extended.seeds) == (["grpo", "gspo", "dapo"], [0, 1, 2])


@pytest.mark.parametrize("text", ["x = 1", "recipe = 3", 'recipe = "a"\narms = "b"\nseeds = [0]\noverrides = []'])
def test_an_invalid_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "compare.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"compare\.toml"):
        record.read(tmp_path)


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    assert record.read(tmp_path / "new") is None
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="not a comparison"):
        record.read(tmp_path)

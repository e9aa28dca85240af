"""Configs of TRL and verl as recipes: the tables, the conversion, the readers, the command and the errors."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo import config
from gspo.cli import main
from gspo.equivalents import trl, verl
from gspo.equivalents.equivalent import Equivalent, Kind
from gspo.equivalents.explain import explain
from gspo.errors import ConfigError
from gspo.objectives.table import objective
from gspo.reward.rewards import completion_format

RECORDED = json.loads((Path(__file__).parent / "trl_1_16.json").read_text(encoding="utf-8"))
"""The fields of TRL 1.16's GRPOConfig, ModelConfig and ScriptArguments, with the text of their defaults."""
FIELDS = {name: default for fields in RECORDED.values() for name, default in fields.items()}
OLDER = {"max_prompt_length", "warmup_ratio", "torch_dtype", "logging_dir"}
ARGUMENTS = {
    "reward_funcs", "tools", "environment_factory", "rollout_func", "reward_processing_classes", "optimizers", "env"
}  # fmt: skip
VERL = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "train.parquet",
    "data.train_batch_size": 64,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-0.6B",
    "actor_rollout_ref.rollout.n": 8,
    "reward.custom_reward_function.path": "reward.py",
    "trainer.total_training_steps": 10,
}


# ------------------------------------------------------------------------------------------------- tables


def test_every_setting_of_trl_has_a_line_with_its_default() -> None:
    assert set(FIELDS) | OLDER | ARGUMENTS == set(trl.TABLE)
    wrong = {
        name: (default, trl.TABLE[name].default)
        for name, default in FIELDS.items()
        if trl.TABLE[name].kind is not Kind.UNNEEDED and default != repr(trl.TABLE[name].default)
    }
    assert not wrong


@pytest.mark.parametrize("one", [*trl.TABLE.values(), *verl.TABLE.values()], ids=lambda one: one.name)
def test_a_line_names_settings_that_exist(one: Equivalent) -> None:
    for key in one.keys:
        section, _, name = key.partition(".")
        if section == "objective" and name != "name":
            accepted = [row for row in gspo.objective_names() if name in _settings(row)]
            assert accepted, key
        elif not key.startswith("rollout.engine_options."):
            assert config.type_of(key) is not None, key


def _settings(row: str) -> list[str]:
    from gspo.objectives.objective import settings_of

    return list(settings_of(objective(row)))


@pytest.mark.parametrize("losses", [trl.LOSSES, verl.LOSSES], ids=["trl", "verl"])
def test_losses_are_objectives(losses: dict[tuple[str, ...], str]) -> None:
    assert set(losses.values()) <= set(gspo.objective_names())


# ------------------------------------------------------------------------------------------------- TRL


def test_batches_are_counted_in_prompts() -> None:
    done = trl.convert(
        {"num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
         "steps_per_generation": 8, "max_steps": 100, "save_steps": 20},
        processes=2,
    )  # fmt: skip
    # 8 completions x 2 processes x 8 micro-batches, and an optimizer step for every second one.
    assert done.settings["rollout.prompts"] == 32
    assert done.settings["learner.mini_batches"] == 4
    assert (done.settings["steps"], done.settings["checkpoint.every"]) == (25, 5)


def test_epochs_need_the_number_of_rows() -> None:
    given = {"per_device_train_batch_size": 16, "num_train_epochs": 2}
    assert trl.convert(given, rows=101).settings["steps"] == 100
    assert "steps" not in trl.convert(given).settings
    assert any("--rows" in text for text in trl.convert(given).todo)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, {"name": "dapo", "keep": "all", "shape": [], "clip_low": 0.2, "clip_high": 0.2}),
        ({"loss_type": "grpo"}, {"name": "grpo", "kl": 0.0}),
        ({"loss_type": "grpo", "beta": 0.04}, {"name": "grpo", "kl": 0.04, "kl_estimator": "k3_ratio"}),
        ({"loss_type": "grpo", "scale_rewards": False}, {"name": "grpo", "advantage_scale": "none"}),
        ({"loss_type": "dr_grpo", "max_completion_length": 99}, {"advantage_scale": "std", "max_length": 99}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"name": "gspo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"name": "cispo", "weight_cap": 5.0}),
        ({"loss_type": "sapo"}, {"name": "sapo", "tau_neg": 1.05}),
        ({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 2.0}, {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0}),
        ({"mask_truncated_completions": True}, {"shape": ["overlong_filter"]}),
    ],
)
def test_objectives(given: dict[str, Any], settings: dict[str, Any]) -> None:
    done = trl.convert(given)
    found = {k.removeprefix("objective."): v for k, v in done.settings.items() if k.startswith("objective.")}
    assert found | settings == found
    assert not done.lost
    objective(found.pop("name"), **found)


@pytest.mark.parametrize(
    "options", [{"min_lr_rate": 0.2}, {"min_lr": 2e-6}, '{"min_lr_rate": 0.2}'], ids=["rate", "lowest", "json"]
)
def test_a_cosine_with_a_lowest_learning_rate(options: Any) -> None:
    given = {"learning_rate": 1e-5, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": options}
    done = trl.convert(given)
    assert not done.lost
    assert done.settings["learner.schedule"] == "cosine"
    assert done.settings["learner.final_fraction"] == pytest.approx(0.2)


def test_other_options_of_a_schedule_are_listed() -> None:
    given = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2, "num_cycles": 2}}
    assert list(trl.convert(given).lost) == ["lr_scheduler_kwargs"]


def test_rewards_of_trl() -> None:
    names = ["accuracy_reward", "think_format_reward", "my.rewards.length", "get_soft_overlong_punishment"]
    done = trl.convert({"reward_funcs": names})
    assert done.settings["reward.functions"] == ["math_answer", "completion_format", *names[2:]]
    assert done.settings["data.answer_field"] == "solution"
    pattern = done.settings["reward.options.completion_format.pattern"]
    texts = ["<think>a\nb</think> 5", "5", "<think>a<think>b</think>5"]
    assert completion_format.score([""] * 3, texts, pattern=pattern) == [1.0, 0.0, 0.0]
    assert [text.split(": ")[1] for text in done.todo if text.startswith("reward")] == names[2:]


@pytest.mark.parametrize(
    "given",
    [
        {"num_iterations": 2},
        {"repetition_penalty": 1.1},
        {"scale_rewards": "batch"},
        {"loss_type": "luspo"},
        {"top_entropy_quantile": 0.2},
        {"sync_ref_model": True},
        {"optim": "paged_adamw_8bit"},
        {"lr_scheduler_type": "polynomial"},
        {"generation_kwargs": {"typical_p": 0.9}},
    ],
)
def test_what_has_no_equivalent_is_listed(given: dict[str, Any]) -> None:
    assert list(trl.convert(given).lost) == list(given)


def test_every_given_setting_is_accounted_for() -> None:
    given = {name: "x" for name in trl.TABLE if trl.TABLE[name].kind in (Kind.MISSING, Kind.UNNEEDED)}
    done = trl.convert({**given, "unheard_of": 1})
    assert {*done.lost, *done.unneeded} == {*given, "unheard_of"}


# ------------------------------------------------------------------------------------------------- verl


def test_overrides_of_verl() -> None:
    done = verl.convert(VERL)
    assert done.settings["rollout.prompts"] == 64
    assert done.settings["learner.mini_batches"] == 4
    assert done.settings["objective.name"] == "dapo"
    assert done.settings["objective.dual_clip"] == 3.0
    assert done.settings["reward.functions"] == ["reward.py:compute_score"]
    assert not done.lost


def test_dynamic_sampling_and_kl_of_verl() -> None:
    changes = {
        "algorithm.filter_groups.enable": True,
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": 128,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 5,
    }
    settings = verl.convert(VERL | changes).settings
    assert settings["objective.name"] == "gspo"
    assert (settings["objective.keep"], settings["rollout.refill_budget"]) == ("mixed", "full")
    assert (settings["objective.shape"], settings["objective.overlong_cache"]) == (["soft_overlong"], 128)
    assert (settings["objective.kl"], settings["objective.kl_estimator"]) == (0.001, "k3")
    # verl's schedule counts batches.
    assert settings["learner.warmup_updates"] == 20


def test_a_critic_is_no_objective() -> None:
    assert "algorithm.adv_estimator" in verl.convert({}).lost


# ------------------------------------------------------------------------------------------------- files

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward as accuracy

BATCH = 4 * 4
def correct(completions, answer, **kwargs):
    return [1.0] * len(completions)
args = GRPOConfig("out", per_device_train_batch_size=BATCH, num_generations=8, learning_rate=1e-5, seed=seed())
dataset = load_dataset("openai/gsm8k", "main", split="train").map(str)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B", reward_funcs=[correct, accuracy, lambda **kwargs: []], args=args, train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
"""
SHELL = """
set -x
MODEL=Qwen/Qwen3-8B
export N=16
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path="$MODEL" \\
    +actor_rollout_ref.rollout.n=${N} \\
    data.train_files=$HOME/data/train.parquet \\
    actor_rollout_ref.actor.optim.lr=1e-6 $@
"""


def imported(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    assert main(["import-config", *arguments]) == 0
    text = capsys.readouterr().out
    return tomllib.loads(text), text


def test_a_yaml_config_becomes_a_recipe_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "grpo.yaml", tmp_path / "recipe.toml"
    file.write_text(
        "model_name_or_path: m\ndataset_name: d\nlearning_rate: 1e-5\nmax_steps: 10\nnum_generations: 4\n"
        "reward_funcs: math_answer\nnum_iterations: 2\n"
    )
    assert main(["import-config", str(file), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "num_iterations = 2" in printed
    assert printed.endswith(f"Next:\n  gspo doctor {out}\n  gspo train {out}\n")
    loaded = config.load(out)
    assert (loaded.learner.learning_rate, loaded.rollout.group_size, loaded.steps) == (1e-5, 4, 10)
    # A default of TRL that differs from ours.
    assert loaded.learner.schedule == "linear"
    assert main(["import-config", str(file), "--out", str(out)]) == 1


def test_a_json_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"max_completion_length": 77, "optim": "adamw_torch"}))
    assert imported(capsys, str(file))[0]["rollout"]["max_tokens"] == 77


def test_a_script_is_read_without_running_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    recipe, text = imported(capsys, str(file), "--rows", "100")
    assert (recipe["run_dir"], recipe["steps"]) == ("out", 150)
    assert recipe["model"] == {"path": "Qwen/Qwen3-0.6B", "lora": {"rank": 16, "alpha": 32}}
    assert (recipe["rollout"]["prompts"], recipe["learner"]["learning_rate"]) == (2, 1e-5)
    assert recipe["data"]["hub"] == "openai/gsm8k"
    assert recipe["reward"]["functions"] == [f"{file}:correct", "math_answer"]
    assert all(hint in text for hint in ("seed = seed()", "lambda", "data.path"))


def test_a_shell_script_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SHELL)
    recipe, text = imported(capsys, str(file))
    assert (recipe["model"]["path"], recipe["rollout"]["group_size"]) == ("Qwen/Qwen3-8B", 16)
    assert recipe["data"]["path"] == "~/data/train.parquet"
    assert sum(line.startswith("# - reward.functions") for line in text.splitlines()) == 1


def test_overrides_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, _ = imported(capsys, *(f"{key}={value}" for key, value in VERL.items()))
    assert (recipe["rollout"]["prompts"], recipe["objective"]["name"]) == (64, "dapo")


def test_overrides_of_hydra_that_add_and_remove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref:\n  rollout: {n: 8, temperature: 0.5}\ntrainer: {total_training_steps: 7}\n")
    added = ("+actor_rollout_ref.rollout.n=4", "++trainer.total_training_steps=9")
    recipe, text = imported(capsys, str(file), *added, "~actor_rollout_ref.rollout.temperature", "~trainer.logger=x")
    assert (recipe["rollout"]["group_size"], recipe["steps"]) == (4, 9)
    assert recipe["rollout"].get("temperature", 1.0) == 1.0
    assert "~actor_rollout_ref.rollout.temperature: removes a setting of verl" in text


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-config", "missing.yaml"]) == 1
    assert capsys.readouterr().err == "gspo: missing.yaml: No such file or directory\n"


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("num_generations", "rollout.group_size"),
        ("learner.per_device_train_batch_size", "rollout.prompts"),
        ("num_iterations", "no equivalent"),
        ("logging_steps", "not needed"),
        ("data.train_files", "data.path"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("rollout.tensor_model_parallel_size", "no equivalent"),
        ("objective.epsilon", "objective.clip_low"),
    ],
)
def test_an_unknown_setting_gets_its_equivalent(key: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", f"--{key}=1"]) == 1
    error = capsys.readouterr().err
    assert key.rpartition(".")[2] in error
    assert wanted in error


def test_a_recipe_and_python_get_the_equivalent(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[actor_rollout_ref.actor]\nclip_ratio_low = 0.1\n")
    with pytest.raises(ConfigError, match=r"objective\.clip_low"):
        config.load(file)
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens"):
        gspo.train(max_completion_length=8)


def test_a_name_of_nobody_is_not_explained() -> None:
    assert explain("learner.flux") == ""

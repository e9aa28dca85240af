"""Recipes: parsing, validation and error messages."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo import config as settings
from gspo.config import Config
from gspo.errors import ConfigError

GOOD = '[model]\nbuild = "tiny_dense"\n[data]\ntask = "sorting"\n'


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    (tmp_path / "r.toml").write_text(text)
    return settings.load(tmp_path / "r.toml", overrides)


def test_a_recipe_and_its_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        GOOD,
        "--steps=7",
        "--rollout.top-k=5",
        "learner.learning_rate=2",
        "--log.sinks=tensorboard,wandb",
        "--data.task_options={min_items = 2}",
        "--objective.clip_low=1e-3",
        "--objective.kl_estimator=k3+",
        "--name=007",
    )
    assert (config.steps, config.rollout.top_k, config.learner.learning_rate) == (7, 5, 2.0)
    assert config.log.sinks == ("tensorboard", "wandb")
    assert config.data.task_options == {"min_items": 2}
    assert config.objective.settings == {"clip_low": 1e-3, "kl_estimator": "k3+"}
    assert config.name == "007"


@pytest.mark.parametrize("text", ["1,2", "[1, 2]", "1.0, 2.0"])
def test_lists_of_numbers_can_be_written_with_commas(text: str, tmp_path: Path) -> None:
    recipe = GOOD + '[reward]\nfunctions = ["exact_answer", "task_answer"]\n'
    assert load(tmp_path, recipe, f"--reward.weights={text}").reward.weights == (1.0, 2.0)


def test_another_objective_does_not_inherit_the_settings_of_the_recipes_objective(tmp_path: Path) -> None:
    recipe = GOOD + '[objective]\nname = "gspo"\nclip_low = 3e-3\n'
    assert load(tmp_path, recipe, "--objective.name=grpo", "--objective.kl=0").objective.settings == {"kl": 0}
    assert load(tmp_path, recipe, "--objective.clip_high=1e-3").objective.settings == {
        "clip_low": 3e-3,
        "clip_high": 1e-3,
    }


ERRORS: list[tuple[str, tuple[str, ...], str]] = [
    ("lerner = 3\n" + GOOD, (), "r.toml: unknown setting lerner; did you mean learner"),
    (
        GOOD + "[learner]\nlearningrate = 1\n",
        (),
        "unknown setting learner.learningrate; did you mean learner.learning_rate",
    ),
    (GOOD, ("--temperature=2",), "command line: unknown setting temperature; did you mean rollout.temperature"),
    (GOOD, ("--rollout.zzz=2",), "unknown setting rollout.zzz; known here: engine"),
    (
        GOOD,
        ("--learner.expert_parallel=2",),
        "unknown setting learner.expert_parallel; not available, because gradients were wrong in one layout",
    ),
    (GOOD, ("--model.tensor_parallel_size=2",), "unknown setting model.tensor_parallel_size; not implemented; several"),
    (GOOD, ("--ranks.cpu_offload=true",), "not available; learner.optimizer_offload works in a single process"),
    (GOOD, ("--rollout.prompts=many",), "rollout.prompts must be a whole number, not 'many'"),
    (GOOD, ("--rollout.prompts=2.5",), "rollout.prompts must be a whole number"),
    (GOOD, ("--rollout.prompts=true",), "rollout.prompts must be a whole number"),
    (GOOD, ("--rollout.prompts=0",), "rollout.prompts: must be at least 1"),
    (GOOD, ("--rollout.temperature=0",), "rollout.temperature: must be above 0"),
    (GOOD, ("--rollout.temperature=nan",), "rollout.temperature: must be a finite number"),
    (GOOD, ("--learner.beta1=1.0",), "learner.beta1: must be between"),
    (GOOD, ("--name=a/b",), "name: use 1 to 64 letters"),
    (GOOD, ("--seed=99999999999999999999999",), "seed: must be between"),
    (GOOD, ("--model.threads=999999",), "model.threads: must be between 0 and 1024"),
    (GOOD, ("--reward.correct_above=inf",), "reward.correct_above: must be a finite number"),
    (GOOD, ("--rollout.top_p=1.5",), "rollout.top_p: must be between 0 and 1"),
    (GOOD, ("--learner.schedule=step",), "learner.schedule must be one of 'constant', 'linear', 'cosine'"),
    (
        GOOD,
        ("--learner.mini_batches=257",),
        "learner.mini_batches: 257 optimizer steps cannot share the 256 completions",
    ),
    (GOOD, ("--learner=3",), "learner is a section"),
    (GOOD, ("--steps",), "is not an override; write --section.key=value"),
    (GOOD, ("--steps.x=1",), "steps"),
    (GOOD, ("--log.sinks=disk",), "log.sinks must be one of 'tensorboard', 'wandb', 'trackio', 'mlflow', not 'disk'"),
    (GOOD, ("--data.path=x.jsonl",), "exactly one of data.path, data.hub, data.task"),
    (GOOD, ("--model.path=x",), "either model.path"),
    (GOOD, ("--reward.functions=a.py:b", "--reward.weights=1,2"), "2 weights for 1 functions"),
    (GOOD, ("--reward.options={nope = {a = 1}}",), "reward.options.nope"),
    (GOOD, ("--data.prompt_field=question",), "data.prompt_field: has no effect with data.task"),
    (GOOD, ("--learner.final_fraction=0.5",), "learner.final_fraction: has no effect"),
    ('[model]\nbuild = "tiny_dense"\n[data]\npath = "x.jsonl"\n', (), "reward.functions: name at least one"),
    ("steps = = 3", (), "r.toml: not valid TOML"),
    (GOOD, ('--rollout.stop=["a", ""]',), "rollout.stop: contains an empty string"),
    (GOOD, ('--rollout.stop=["\ufffd"]',), "contains U+FFFD"),
    (GOOD, ("--rollout.min_tokens=9", "--rollout.max_tokens=8"), "rollout.min_tokens: 9 is more than"),
    (GOOD, ("--rollout.thinking_budget=8", "--rollout.max_tokens=8"), "rollout.thinking_budget: 8 leaves no token"),
    (GOOD, ("--rollout.thinking_end=x",), "rollout.thinking_end: has no effect without rollout.thinking_budget"),
    (GOOD, ("--rollout.thinking_budget=8", "--rollout.thinking_end= "), "rollout.thinking_end: is empty"),
    (GOOD, ("--rollout.thinking_budget=8", "--rollout.stop=nk>"), "'nk>' is part of rollout.thinking_end"),
]


@pytest.mark.parametrize(("text", "overrides", "words"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_a_mistake_is_one_line_that_names_the_key(
    text: str, overrides: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such recipe.*demo"):
        settings.load("nowhere.toml")
    assert settings.load("demo").name == "demo"


def test_every_setting_has_a_help_text() -> None:
    texts = list(settings.help_texts())
    assert len(texts) > 60
    assert all(help_text.endswith((".", ")", "?")) for _, _, _, help_text in texts)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    texts,
    st.integers(0, 10**6),
    st.floats(1e-9, 1e9),
    st.booleans(),
    st.dictionaries(texts, texts | st.integers() | st.lists(texts)),
)
def test_a_written_config_is_read_back_unchanged(
    name: str, steps: int, rate: float, flag: bool, table: dict[str, Any]
) -> None:
    tree = {
        "name": name,
        "steps": steps,
        "learner": {"learning_rate": rate},
        "eval": {"greedy": flag},
        "data": {"task_options": table},
        "objective": {"name": "gspo", "clip_low": rate},
    }
    config = settings.from_tree(tree, where="test")
    assert settings.from_tree(tomllib.loads(settings.to_toml(config)), where="again") == config


def test_anchoring_makes_paths_absolute_and_keeps_other_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    tree = {
        "model": {"path": "models/mine"},
        "data": {"path": "p.jsonl"},
        "reward": {"functions": ["r.py:f", "exact_answer"], "options": {"exact_answer": {"marker": "a/b"}}},
        "rollout": {"engine_options": {"dir": "models/mine", "url": "http://x/y", "slots": 4}},
    }
    config = settings.anchored(settings.from_tree(tree, where="test"))
    assert config.model.path == f"{tmp_path}/models/mine"
    assert config.data.path == f"{tmp_path}/p.jsonl"
    assert config.reward.functions == (f"{tmp_path}/r.py:f", "exact_answer")
    assert config.reward.options == {"exact_answer": {"marker": "a/b"}}
    assert config.rollout.engine_options == {"dir": f"{tmp_path}/models/mine", "url": "http://x/y", "slots": 4}
    assert settings.anchored(config) == config
    hub = settings.from_tree({"model": {"path": "org/name"}}, where="test")
    assert settings.anchored(hub) == hub

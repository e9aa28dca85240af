"""Runs on several sources with several evaluation sets: problems, rewards, metrics, resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sampling_stand_in import stand_in

from gspo import config as settings
from gspo.cli import main
from gspo.config import Config
from gspo.data.problems import identities, load_problems
from gspo.errors import ConfigError, DataError
from gspo.learner.checkpoint import newest, read_state
from gspo.record.run_dir import read_jsonl, read_metrics
from gspo.reward.source_rewards import locate, source_rewards
from gspo.trainer import resume, train

REWARD = """\
def shorter(prompts, completions, **columns):
    return [len(c) % 3 + 0.5 * c.count(' ') for c in completions]

def always(prompts, completions, **columns):
    return [1.0 for c in completions]
"""


REFILLED = ("objective.keep=mixed", "rollout.refill_budget=2")


@pytest.fixture
def mixed(tmp_path: Path) -> Callable[..., Config]:
    """A run of a second on two sources, one of them a file, with two evaluation sets."""
    (tmp_path / "lengths.py").write_text(REWARD)
    rows = [{"prompt": f"{i} + {i}", "answer": str(2 * i)} for i in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))

    def make(*overrides: str, run_dir: str = "run") -> Config:
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / run_dir),
            "steps": 4,
            "model": {"build": "tiny_dense", "device": "cpu"},
            "data": {
                "held_out": 4,
                "mix": {
                    "lists": {
                        "task": "sorting",
                        "task_options": {"min_items": 2, "max_items": 3},
                        "task_size": 6,
                        "weight": 3,
                    },
                    "sums": {"path": str(tmp_path / "sums.jsonl"), "reward": [f"{tmp_path}/lengths.py:always"]},
                },
            },
            "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 10},
            "reward": {"functions": [f"{tmp_path}/lengths.py:shorter"], "workers": 1},
            "learner": {"learning_rate": 1e-3, "mini_batches": 2},
            "eval": {
                "every": 2,
                "sets": {
                    "few": {"path": str(tmp_path / "few.jsonl"), "every": 4, "samples": 2, "greedy": False},
                    "pairs": {"task": "sorting", "task_options": {"min_items": 2, "max_items": 2}, "size": 5},
                },
            },
            "checkpoint": {"every": 1, "keep": 0},
        }
        config = settings.override(tree, overrides, where="test")
        settings.check(config)
        return config

    return make


class Characters:
    """A tokenizer with one token per character."""

    chat_template = None
    eos_token_id = None

    def __call__(self, texts: Any, **_: Any) -> dict[str, Any]:
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def problems_of(config: Config) -> Any:
    return load_problems(config.data, Characters(), config.seed, config.eval.sets)


# ---------------------------------------------------------------------------- settings


def test_sources_take_the_defaults_of_data_and_eval(mixed: Callable[..., Config]) -> None:
    config = mixed("data.instruction=Sort.", "data.mix.sums.instruction=Add.", "data.prompt_field=prompt")
    assert config.data.mix["lists"].instruction == "Sort."
    assert config.data.mix["sums"].instruction == "Add."
    assert {source.held_out for source in config.data.mix.values()} == {4}
    assert [(one.every, one.instruction) for one in config.eval.sets.values()] == [(4, "Sort."), (2, "Sort.")]
    assert settings.from_flat(settings.flat(config), where="test") == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.mix.sums.weight=0", "data.mix.sums.weight: must be above 0"),
        ("data.mix.sums.task=sorting", "data.mix.sums: set exactly one of"),
        ("data.mix.sums.weigt=1", "did you mean data.mix.sums.weight?"),
        ("data.mix.lists.prompt_field=q", "data.mix.lists.prompt_field: has no effect with data.mix.lists.task"),
        ("data.task=sorting", "data.task: has no effect with data.mix"),
        ("data.mix.sums.reward_weights=1,2", "data.mix.sums.reward_weights: 2 weights for 1 functions"),
        ("eval.sets.lists.task=sorting", "eval.sets.lists: a source in data.mix has this name"),
        ("eval.sets.few.samples=0", "eval.sets.few.samples: must be at least 1"),
        ("data.difficulty_floor=0.2", 'data.difficulty_floor: has no effect with data.sampling = "uniform"'),
    ],
)
def test_a_mistake_in_a_source_or_set_names_its_key(override: str, words: str, mixed: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        mixed(override)


def test_a_bad_row_names_the_source(mixed: Callable[..., Config], tmp_path: Path) -> None:
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"question": "1 + 1", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"1 bad row[\s\S]*set data\.mix\.sums\.prompt_field"):
        problems_of(mixed())


# ---------------------------------------------------------------------------- problems and rewards


def test_no_training_problem_is_evaluated_in_any_source_or_set(mixed: Callable[..., Config], tmp_path: Path) -> None:
    lists = tmp_path / "lists.jsonl"
    given = problems_of(mixed())
    # A file with the texts of the generated problems, held-out ones and those of a set included.
    texts = [p.content for p in (*given.train, *given.evaluated) if p.source in ("lists", "pairs")]
    lists.write_text("".join(json.dumps({"prompt": text.upper(), "answer": "1"}) + "\n" for text in texts))
    problems = problems_of(mixed(f"data.mix.copies.path={lists}", "data.mix.copies.held_out=2"))
    evaluated = set().union(*map(identities, problems.evaluated))
    assert {p.source for p in problems.train} == {"lists", "sums", "copies"}
    assert all(evaluated.isdisjoint(identities(p)) for p in problems.train)
    # Without the check, the file would train on the copies of 4 held-out problems and of 5 problems of a set.
    assert problems.overlapping >= given.overlapping + 4
    assert len({p.id for p in problems.everything}) == len(problems.everything)


def test_a_set_removes_its_duplicates_from_a_single_source(mixed: Callable[..., Config], tmp_path: Path) -> None:
    tree = {"data": {"path": str(tmp_path / "sums.jsonl"), "held_out": 2}}
    alone = settings.from_tree(tree, where="test")
    sets = mixed().eval.sets
    before = load_problems(alone.data, Characters(), 0)
    after = load_problems(alone.data, Characters(), 0, {"few": sets["few"]})
    few = {p.key for p in after.sets["few"]}
    assert [p for p in before.train if p.key not in few] == after.train
    assert before.held_out == after.held_out
    assert len(few) == 3


def test_an_exhausted_source_is_an_error(mixed: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.mix\.sums: every training problem"):
        problems_of(mixed(f"eval.sets.few.path={tmp_path}/sums.jsonl"))


def test_each_source_has_its_own_functions(mixed: Callable[..., Config]) -> None:
    config = mixed("reward.functions=[]", "eval.sets.few.reward=exact_answer")
    sources, rules = locate(source_rewards(config), config.reward.options)
    names = {name: [sources[f].name for f in rule.functions] for name, rule in rules.items()}
    assert names == {
        "lists": ["lists.task_answer"],
        "sums": ["always"],
        "few": ["exact_answer"],
        "pairs": ["pairs.task_answer"],
    }


# ---------------------------------------------------------------------------- runs


def run_of(config: Config) -> Path:
    return Path(config.run_dir)


def test_a_run_reports_sources_and_sets(mixed: Callable[..., Config], display: Any) -> None:
    config = mixed("rollout.prompts=8")
    train(config, display)
    rows = read_metrics(run_of(config))
    assert "lists: 4, 75% of the prompts" in "".join(display.messages)
    for row in rows[1:]:
        assert row["source/lists/prompt_fraction"] == 0.75
        assert row["source/sums/reward_mean"] == 1.0  # scored by its own function
        assert row["source/lists/reward_mean"] != 1.0
        records = read_jsonl(run_of(config) / f"rollouts/{row['step']:06d}.jsonl")
        lists = [r["reward"] for r in records if r["source"] == "lists"]
        assert row["source/lists/reward_mean"] == pytest.approx(sum(lists) / len(lists))
    evaluated = {name: [row["step"] for row in rows if f"eval/{name}/accuracy" in row] for name in ("few", "pairs")}
    assert evaluated == {"few": [0, 4], "pairs": [0, 2, 4]}
    last = rows[-1]
    assert "eval/few/accuracy_greedy" not in last
    # Both sources hold out 4 problems, so the accuracy of all is their mean.
    assert last["eval/accuracy"] == pytest.approx((last["eval/lists/accuracy"] + last["eval/sums/accuracy"]) / 2)
    assert last["eval/sums/accuracy"] == 1.0


@pytest.mark.parametrize(
    "overrides",
    [(), REFILLED, (*REFILLED, "rollout.max_lag=2")],
    ids=["all groups", "refilled groups", "sampled ahead"],
)
def test_difficulty_is_measured_and_a_resume_is_byte_identical(
    overrides: tuple[str, ...], mixed: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    overrides = (*overrides, "data.sampling=difficulty", "steps=6")
    whole, cut = mixed(*overrides, run_dir="whole"), mixed(*overrides, run_dir="cut")
    train(whole, display)
    shutil.copytree(run_of(whole), run_of(cut))
    for step in (4, 5, 6):
        os.rename(run_of(cut) / f"checkpoints/{step:06d}", run_of(cut) / f".gone-{step}")
    resume(run_of(cut), display, trust_run=True)
    assert (run_of(cut) / "metrics.jsonl").read_bytes() == (run_of(whole) / "metrics.jsonl").read_bytes()
    name = "checkpoints/000006/difficulty.tensors"
    assert (run_of(cut) / name).read_bytes() == (run_of(whole) / name).read_bytes()
    assert any(row["difficulty/skipped_fraction"] > 0 for row in read_metrics(run_of(whole))[1:])

    state = read_state(newest(run_of(whole) / "checkpoints")[0]).rollout.difficulty
    assert state is not None
    ids = [p.id for p in problems_of(whole).train]
    expected = recomputed(run_of(whole), ids)
    assert len(expected) > len(ids) / 2
    assert {id_: state.pass_rate(i) for i, id_ in enumerate(ids) if id_ in expected} == pytest.approx(expected)


def recomputed(run: Path, ids: list[str]) -> dict[str, float]:
    """Pass rates from the recorded completions: each group weighs half as much as the next one of its problem. Without
    the problems that a batch sampled again in a refill, whose groups have the same id."""
    found: dict[str, list[list[bool]]] = {id_: [] for id_ in ids}
    refilled = set()
    for file in sorted((run / "rollouts").iterdir()):
        groups: dict[str, list[bool]] = {}
        for record in read_jsonl(file):
            groups.setdefault(record["prompt_id"], []).append(record["correct"])
        refilled |= {id_.partition("#")[0] for id_, group in groups.items() if len(group) > 4}
        # A problem that was sampled twice in a request has a number after its id.
        for id_ in sorted(groups, key=lambda i: int(i.partition("#")[2] or 1)):
            found[id_.partition("#")[0]].append(groups[id_])
    rates = {}
    for id_, groups_ in found.items():
        weights = [0.5 ** (len(groups_) - 1 - i) for i in range(len(groups_))]
        correct = sum(w * sum(g) for w, g in zip(weights, groups_, strict=True))
        judged = sum(w * len(g) for w, g in zip(weights, groups_, strict=True))
        rates[id_] = (correct + 0.5) / (judged + 1)
    return {id_: rate for id_, rate in rates.items() if id_ not in refilled}


def test_a_checkpoint_without_its_pass_rates_is_damaged(mixed: Callable[..., Config], display: Any) -> None:
    config = mixed("data.sampling=difficulty", "steps=2")
    train(config, display)
    last = run_of(config) / "checkpoints/000002"
    (last / "difficulty.tensors").unlink()
    manifest = json.loads((last / "manifest.json").read_text())
    del manifest["difficulty.tensors"]
    (last / "manifest.json").write_text(json.dumps(manifest))
    path, complaints = newest(run_of(config) / "checkpoints")
    assert path.name == "000001"
    assert "difficulty.tensors: missing" in complaints[0]


def test_a_run_saved_before_these_settings_existed_resumes(mixed: Callable[..., Config], display: Any) -> None:
    config = mixed("steps=1")
    train(config, display)
    last = run_of(config) / "checkpoints/000001"
    state = json.loads((last / "trainer.json").read_text())
    del state["settings"]["data.sampling"], state["settings"]["data.difficulty_floor"]
    (last / "trainer.json").write_text(json.dumps(state))
    shutil.rmtree(run_of(config) / "checkpoints/000000")
    from gspo.learner.checkpoint import _digest

    manifest = json.loads((last / "manifest.json").read_text())
    file = last / "trainer.json"
    manifest["trainer.json"] = {"size": file.stat().st_size, "sha256": _digest(file)}
    (last / "manifest.json").write_text(json.dumps(manifest))
    assert resume(run_of(config), display, steps=2, trust_run=True).step == 2


def test_eval_of_one_set(mixed: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    config = mixed("steps=0", "eval.sets.pairs.samples=2", "eval.sets.pairs.greedy=false")
    train(config, display)
    out = tmp_path / "pairs.json"
    # Nothing is excluded, although the task generates the same problems for training.
    assert main(["eval", config.run_dir, "--set", "pairs", "--samples", "2", "--json", str(out), "--trust-run"]) == 0
    numbers = json.loads(out.read_text())
    assert numbers["problems"] == 5
    # The same problems, random streams and weights as the evaluation before the first step.
    row = read_metrics(run_of(config))[0]
    assert numbers["pass@1"]["value"] == row["eval/pairs/accuracy"]
    assert main(["eval", config.run_dir, "--set", "none", "--trust-run"]) != 0


def test_eval_of_other_problems_needs_no_options_of_the_sources(
    mixed: Callable[..., Config], display: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("data.mix.sums.reward=exact_answer", 'reward.options.exact_answer={marker = "="}')
    config = mixed("steps=0", "eval.every=0", "eval.sets={}", *options)
    train(config, display)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1 + 8", "answer": "9"}\n')
    command = ["eval", config.run_dir, "--data", str(other), "--reward.functions=last_number", "--trust-run"]
    assert main(command) == 0
    assert "1 problems" in capsys.readouterr().out
    # A mistake on the command line is still one.
    assert main([*command, "--reward.options.math_answer={}"]) == 1
    assert "reward.options.math_answer: not among" in capsys.readouterr().err


def test_the_doctor_checks_every_source_and_set(
    mixed: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        settings.to_toml(
            mixed("reward.functions=[]", "data.mix.sums.reward=math_answer", "eval.sets.few.reward=math_answer")
        )
    )
    main(["doctor", str(recipe)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "lists: task sorting: 4 training problems, 4 held out" in printed
    assert "Evaluation set few" in printed
    assert "math_answer scores the data's own answers of sums as correct" in printed
    assert "lists.task_answer scores the data's own answers of lists as correct" in printed

"""Whole runs: exact resume, faults that must not stop or falsify a run, and the files of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo import config as settings
from gspo.build import with_dtype
from gspo.cli import main
from gspo.config import Config
from gspo.errors import CheckpointError, ConfigError, NumericalError, RewardError
from gspo.learner import checkpoint
from gspo.record.run_dir import read_events, read_jsonl
from gspo.trainer import resume, train


def run_of(config: Config) -> Path:
    return Path(config.run_dir)


def same_checkpoint(a: Path, b: Path) -> bool:
    files = ["model.safetensors", "trainer.tensors"]
    pairs = [(load_file(a / f), load_file(b / f)) for f in files]
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)


CONTROLS = ("rollout.stop=7,s 1", "rollout.min_tokens=3", "rollout.thinking_budget=5", "rollout.thinking_end=o")
VARIANTS = {
    "gspo": (),
    "KL to a stored reference": ("objective.name=grpo",),
    "dynamic sampling": ("objective.keep=mixed", "rollout.group_size=2", "rollout.refill_budget=2"),
    "mixture of experts": ("model.build=tiny_moe",),
    "bfloat16 with float32 master weights": ("model.dtype=bfloat16",),
    "float16 with loss scaling": ("model.dtype=float16",),
    "data smaller than a batch": ("data.task_size=3", "learner.schedule=cosine", "learner.warmup_updates=3"),
    "cold start": ("cold_start.steps=4", "cold_start.check_every=2", "cold_start.stop_accuracy=0.9"),
    "selected tokens": ("objective.name=clip_cov", "objective.select_fraction=0.1", "objective.cov_low=0"),
    "gradient checkpointing": ("model.gradient_checkpointing=true",),
    "sampling controls": CONTROLS,
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_resumed_run_is_byte_identical_to_the_uninterrupted_run(
    overrides: tuple[str, ...], tiny: Callable[..., Config], display: Any
) -> None:
    whole, cut = tiny(*overrides, "steps=4", run_dir="whole"), tiny(*overrides, "steps=4", run_dir="cut")
    train(whole, display)
    shutil.copytree(run_of(whole), run_of(cut))
    for step in (3, 4):  # remove the end, as if the run was killed during step 3
        os.rename(run_of(cut) / f"checkpoints/{step:06d}", run_of(cut) / f".gone-{step}")
    outcome = resume(run_of(cut), display, trust_run=True)
    assert outcome.step == 4
    assert "resumed" in "".join(display.messages)
    assert (run_of(cut) / "metrics.jsonl").read_bytes() == (run_of(whole) / "metrics.jsonl").read_bytes()
    for step in range(1, 5):
        name = f"rollouts/{step:06d}.jsonl"
        assert (run_of(cut) / name).read_bytes() == (run_of(whole) / name).read_bytes()
    for name in ("000000.jsonl", "000004.jsonl"):
        assert (run_of(cut) / "evaluations" / name).read_bytes() == (run_of(whole) / "evaluations" / name).read_bytes()
    assert same_checkpoint(run_of(cut) / "checkpoints/000004", run_of(whole) / "checkpoints/000004")
    assert [r["step"] for r in read_jsonl(run_of(cut) / "timings.jsonl")] == [1, 2, 3, 4]


def test_completions_of_evaluations_are_recorded(tiny: Callable[..., Config], display: Any) -> None:
    few = ("task=sorting", "size=2", "every=4", "greedy=false")
    config = tiny(*(f"eval.sets.few.{setting}" for setting in few), "steps=4", "eval.samples=2", "log.evaluations=3")
    train(config, display)
    folder = run_of(config) / "evaluations"
    assert sorted(file.name for file in folder.iterdir()) == ["000000.jsonl", "000002.jsonl", "000004.jsonl"]
    first, middle, last = (read_jsonl(file) for file in sorted(folder.iterdir()))
    held_out = [r for r in first if "set" not in r]
    # Of the 8 problems, the same 3 each time: two sampled completions and a greedy one of each.
    ids = [(r["prompt_id"], r["sample"], r.get("greedy", False)) for r in held_out]
    problems = list(dict.fromkeys(prompt for prompt, _, _ in ids))
    assert len(problems) == 3
    assert ids == [(prompt, i, i == 2) for prompt in problems for i in range(3)]
    assert [(r["prompt_id"], r["sample"]) for r in middle] == [(prompt, i) for prompt, i, _ in ids]
    assert [r.get("set") for r in last] == [None] * 9 + ["few"] * 4
    assert all(r["answer"] and "trained" not in r for r in first + middle + last)
    rewards = {r["prompt_id"]: r["reward"] for r in held_out}
    assert None not in rewards.values()


def test_completions_of_evaluations_can_be_disabled(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=1", "log.evaluations=0")
    train(config, display)
    assert not (run_of(config) / "evaluations").exists()


def test_metrics_and_records_say_how_completions_ended(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*CONTROLS, "steps=1", "rollout.group_size=16")
    train(config, display)
    (metrics,) = (row for row in read_jsonl(run_of(config) / "metrics.jsonl") if row["step"] == 1)
    records = read_jsonl(run_of(config) / "rollouts/000001.jsonl")
    shares = {
        "length/stop_string_fraction": [r["stop"] == "stop" for r in records],
        "length/thinking_cut_fraction": [r.get("thinking_cut", False) for r in records],
        "length/truncated_fraction": [r["stop"] == "length" for r in records],
    }
    for name, flags in shares.items():
        assert 0 < metrics[name] < 1, name
        assert metrics[name] == pytest.approx(sum(flags) / len(flags))
    assert metrics["mismatch/abs_max"] < 1e-4, "the learner computes the log-probs of what was sampled"
    for record in records:
        assert record.get("sampled", [1]).count(0) == record.get("thinking_cut", False)
        assert len(record["token_ids"]) > 3
    assert "7" in {r["text"][-1] for r in records if r["stop"] == "stop"}


def test_a_refused_resume_changes_no_settings(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("steps=1", "eval.every=0")
    train(config, display)
    files = [run_of(config) / name for name in ("config.toml", "environment.json")]
    before = [file.read_text() for file in files]
    monkeypatch.setattr("gspo.checkpoints.resume_checks.fingerprint", lambda problems: "others")
    with pytest.raises(ConfigError, match="the problems are not those"):
        resume(run_of(config), display, steps=4, overrides=["learner.learning_rate=1e-5"])
    assert [file.read_text() for file in files] == before
    kinds = [e["event"] for e in read_jsonl(run_of(config) / "events.jsonl")]
    assert "steps_changed" not in kinds


def test_a_stop_signal_saves_and_the_run_resumes_exactly(tiny: Callable[..., Config], display: Any) -> None:
    whole, cut = tiny("steps=4", run_dir="whole"), tiny("steps=4", "checkpoint.every=100", run_dir="cut")
    train(whole, display)

    class StopAfterTwo(type(display)):  # type: ignore[misc]
        def step(self, step: int, *rest: Any) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(cut, StopAfterTwo())
    assert (stopped.step, stopped.stopped_by) == (2, signal.SIGTERM)
    resume(run_of(cut), display)
    assert (run_of(cut) / "metrics.jsonl").read_bytes() == (run_of(whole) / "metrics.jsonl").read_bytes()


def test_the_same_seed_gives_the_same_run_and_another_does_not(tiny: Callable[..., Config], display: Any) -> None:
    a, b, c = tiny(run_dir="a"), tiny(run_dir="b"), tiny("seed=1", run_dir="c")
    for config in (a, b, c):
        train(config, display)
    read = lambda config: (run_of(config) / "metrics.jsonl").read_bytes()  # noqa: E731
    assert read(a) == read(b) != read(c)


def test_length_metrics_match_the_completions(tiny: Callable[..., Config], display: Any) -> None:
    """Recomputed from the records of all completions."""
    config = tiny(
        "objective.shape=soft_overlong", "objective.overlong_cache=8", "rollout.engine_options.slots=6", "steps=2"
    )
    train(config, display)
    for row in read_jsonl(run_of(config) / "metrics.jsonl")[1:]:
        records = read_jsonl(run_of(config) / f"rollouts/{row['step']:06d}.jsonl")
        lengths = sorted(len(r["token_ids"]) for r in records)
        assert row["length/median"] == statistics.median(lengths)
        assert lengths[0] <= row["length/p10"] <= row["length/median"] <= row["length/p90"] <= row["length/max"]
        penalties = [max(0, length - 2) / 8 for length in lengths]  # the limit is 10 tokens, the penalty starts 8 below
        assert row["reward/length_penalty"] == pytest.approx(statistics.mean(penalties))
        assert row["length/penalized_fraction"] == statistics.mean(p > 0 for p in penalties)
        assert all(
            r["reward"] - r["shaped_reward"] == pytest.approx(max(0, len(r["token_ids"]) - 2) / 8) for r in records
        )
        assert row["sampler/decode_steps"] * row["sampler/running_mean"] == pytest.approx(sum(lengths))
        assert max(lengths) <= row["sampler/decode_steps"]
        assert row["sampler/running_mean"] <= 6
        assert row["sampler/idle_fraction"] == 0, "a CPU computes no idle slots"
        assert row["padding/learner"] == 0, "sequences are packed"
        assert 0 < row["padding/saved"] < 1


def test_metrics_are_complete_and_exclude_timings(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny()
    train(config, display)
    rows = read_jsonl(run_of(config) / "metrics.jsonl")
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    required = [
        "reward/mean",
        "reward/std",
        "groups/uniform_fraction",
        "groups/discarded",
        "samples/unscored",
        "loss/policy",
        "grad/norm",
        "clip/fraction_tokens",
        "clip/fraction_sequences",
        "ratio/token_log_std",
        "ratio/sequence_log_std",
        "ratio/max",
        "kl/old_new",
        "mismatch/k3",
        "entropy/mean",
        "length/mean",
        "length/truncated_fraction",
        "tokens/generated",
        "tokens/trained",
    ]
    for row in rows[1:]:
        assert all(row[name] is not None for name in required)
        assert not any(name.startswith("time/") for name in row)
    for row in (rows[0], rows[2], rows[3]):
        assert row["eval/accuracy"] is not None
        assert row["eval/accuracy_greedy_low"] <= row["eval/accuracy_greedy"] <= row["eval/accuracy_greedy_high"]
    times = read_jsonl(run_of(config) / "timings.jsonl")
    assert all(
        t[name] >= 0 for t in times for name in ("time/rollout_s", "time/reward_s", "time/learn_s", "time/step_s")
    )
    records = read_jsonl(run_of(config) / "rollouts/000001.jsonl")
    assert len(records) == 16
    for r in records:
        assert len(r["token_ids"]) == len(r["logp_sampler"]) == len(r["logp_old"]) == len(r["logp_new"])
    kinds = [e["event"] for e in read_jsonl(run_of(config) / "events.jsonl")]
    assert kinds[0] == "start"
    assert kinds[-1] == "stop"
    again = settings.from_tree(__import__("tomllib").loads((run_of(config) / "config.toml").read_text()), where="x")
    # Complete: what `auto` was on this machine is written, so that the run resumes in it on any other.
    assert config.model.dtype == "auto"
    assert again == with_dtype(config)
    assert again.model.dtype == "float32"


def test_checkpoints_load_in_plain_transformers(tiny: Callable[..., Config], display: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = tiny("model.build=tiny_moe")
    train(config, display)
    path = run_of(config) / "checkpoints/000003"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer("sort 3 1")["input_ids"]
    assert model(torch.tensor([ids])).logits.shape[-1] == len(tokenizer)
    assert not list(path.parent.glob(".tmp-*"))
    assert not [f for f in path.iterdir() if f.suffix in (".pt", ".bin", ".pkl")]


def test_master_weights_include_the_cold_start(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(
        "model.dtype=bfloat16", "cold_start.steps=4", "cold_start.check_every=4", "steps=1", "learner.learning_rate=0"
    )
    train(config, display)
    checkpoints = [run_of(config) / f"checkpoints/{step:06d}/model.safetensors" for step in (0, 1)]
    before, after = map(load_file, checkpoints)
    assert all(
        torch.equal(before[k], after[k]) for k in before
    )  # an update with learning rate 0 must not undo the cold start


def test_a_cold_start_shorter_than_its_check_interval_is_evaluated(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    (tmp_path / "ones.py").write_text(
        "def ones(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    ones = f"reward.functions={tmp_path}/ones.py:ones"
    config = tiny("cold_start.steps=3", "cold_start.check_every=10", "steps=1", "eval.every=0", ones)
    train(config, display)
    (event,) = [e for e in read_jsonl(run_of(config) / "events.jsonl") if e["event"] == "cold_start"]
    assert (event["steps"], event["accuracy"]) == (3, 1.0)
    assert any("3 supervised steps, reached" in m for m in display.messages)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.overlong_cache=11"], r"objective\.overlong_cache: .* 11 tokens .* limit of 10 .*10 or less"),
        (
            ["objective.overlong_limit=12", "objective.overlong_cache=2"],
            r"objective\.overlong_limit: .* never applies; lower",
        ),
        (["objective.overlong_limit=100"], r"objective\.overlong_limit: .* above 80 tokens .*max_tokens = 10"),
    ],
)
def test_an_ineffective_length_penalty_is_refused_before_the_run_starts(
    overrides: list[str], message: str, tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny("objective.shape=soft_overlong", "cold_start.steps=2", *overrides)
    with pytest.raises(ConfigError, match=message):
        train(config, display)
    assert not run_of(config).exists()


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove", "manifest"])
def test_a_damaged_checkpoint_is_named_and_skipped(damage: str, tiny: Callable[..., Config], display: Any) -> None:
    config = tiny()
    train(config, display)
    golden = (run_of(config) / "metrics.jsonl").read_bytes()
    file = run_of(config) / "checkpoints/000003/model.safetensors"
    if damage == "remove":
        file.unlink()
    elif damage == "manifest":
        file = file.with_name("manifest.json")
        file.write_text("{}}")
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes({"truncate": bytes(data[:-1]), "flip": bytes(data), "empty": b""}[damage])
    display.messages.clear()
    resume(run_of(config), display)
    assert any("000003" in m and "damaged" in m for m in display.messages)
    assert any("at step 2" in m for m in display.messages)
    assert (run_of(config) / "metrics.jsonl").read_bytes() == golden
    for path in (run_of(config) / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint.*000003"):
        resume(run_of(config), display)


def test_a_log_shorter_than_its_checkpoint_resumes_from_an_earlier_one(
    tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny()
    train(config, display)
    log = run_of(config) / "metrics.jsonl"
    golden = log.read_bytes()
    log.write_bytes(golden[:-5])
    resume(run_of(config), display)
    assert log.read_bytes() == golden
    log.unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl has 0 bytes"):
        resume(run_of(config), display)


def test_a_resume_on_changed_problems_is_refused(tiny: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{i}", "answer": "x"}) for i in range(20)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    tree = {"task": "", "path": str(tmp_path / "d.jsonl"), "held_out": 4}
    config = replace(tiny(), data=replace(settings.DataConfig(), **tree))
    train(config, display)
    (tmp_path / "d.jsonl").write_text("\n".join([*rows, rows[0].replace("0", "77")]))
    with pytest.raises(ConfigError, match="not those the run began with"):
        resume(run_of(config), display)


def test_the_learning_rate_warms_up_and_decays_to_its_final_fraction() -> None:
    from gspo.config import LearnerConfig
    from gspo.learner.optimizer import learning_rate

    for schedule in ("linear", "cosine"):
        config = LearnerConfig(learning_rate=2.0, warmup_updates=2, schedule=schedule, final_fraction=0.1)  # type: ignore[arg-type]
        rates = [learning_rate(config, update, 10) for update in range(10)]
        assert rates[0] == 1.0
        assert rates[1] == rates[2] == 2.0
        assert rates[-1] == pytest.approx(0.2)
        assert rates[2:] == sorted(rates[2:], reverse=True)


def test_old_checkpoints_are_deleted_and_the_newest_kept(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("checkpoint.keep=2", "steps=5")
    train(config, display)
    assert sorted(p.name for p in (run_of(config) / "checkpoints").iterdir()) == ["000004", "000005"]
    (run_of(config) / "checkpoints/000004-best").mkdir()
    resume(run_of(config), display, steps=7)
    assert sorted(p.name for p in (run_of(config) / "checkpoints").iterdir()) == ["000004-best", "000006", "000007"]


def test_a_run_can_be_extended(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=2")
    train(config, display)
    outcome = resume(run_of(config), display, steps=3)
    assert outcome.step == 3
    assert read_jsonl(run_of(config) / "metrics.jsonl")[-1]["step"] == 3
    with pytest.raises(ConfigError, match="already done 3 steps"):
        resume(run_of(config), display, steps=2)
    with pytest.raises(ConfigError):
        resume(run_of(config), display, steps=-5)
    assert resume(run_of(config), display).step == 3  # finished, and unchanged by the refused attempts


def test_a_resume_accepts_and_records_a_lower_learning_rate(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny("steps=2", "eval.every=0")
    train(config, display)
    run = run_of(config)
    resume(run, display, steps=3, overrides=["--learner.learning_rate=1e-5", "--learner.max_grad_norm=0.5"])
    rates = [row["learning_rate"] for row in read_jsonl(run / "metrics.jsonl")[1:]]
    assert rates == [1e-3, 1e-3, 1e-5]
    event = next(e for e in read_jsonl(run / "events.jsonl") if e["event"] == "resume")
    assert event["changed"] == {"learner.learning_rate": [1e-3, 1e-5], "learner.max_grad_norm": [1.0, 0.5]}
    assert "learning_rate = 1e-05" in (run / "config.toml").read_text()
    assert resume(run, display, steps=4).step == 4
    assert read_jsonl(run / "metrics.jsonl")[-1]["learning_rate"] == 1e-5


@pytest.mark.parametrize(
    "override", ["learner.mini_batches=4", "objective.kl=0.1", "seed=3", "rollout.group_size=2", "run_dir=elsewhere"]
)
def test_a_resume_refuses_settings_that_define_the_run(
    override: str, tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny("steps=1", "eval.every=0")
    train(config, display)
    before = (run_of(config) / "config.toml").read_text()
    with pytest.raises(ConfigError, match=rf"{override.partition('=')[0]} cannot be given"):
        resume(run_of(config), display, steps=2, overrides=[override])
    assert (run_of(config) / "config.toml").read_text() == before


def poison(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """Make the loss of some micro-batches NaN."""
    from gspo import step as module

    real = module.loss_of
    count = [0]

    def broken(*arguments: Any) -> Any:
        loss = real(*arguments)
        count[0] += 1
        return replace(loss, total=loss.total * float("nan")) if count[0] in calls else loss

    monkeypatch.setattr(module, "loss_of", broken)


def test_a_non_finite_update_is_skipped_and_reported(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    poison(monkeypatch, {3})
    train(config, display)
    rows = read_jsonl(run_of(config) / "metrics.jsonl")
    assert [r["grad/skipped"] for r in rows[1:]] == [0, 1, 0]
    assert json.loads((run_of(config) / "checkpoints/000003/trainer.json").read_text())["updates"] == 5
    assert any(e["event"] == "update_skipped" and e["step"] == 2 for e in read_jsonl(run_of(config) / "events.jsonl"))
    weights = load_file(run_of(config) / "checkpoints/000003/model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())


def test_a_skipped_update_changes_neither_weights_nor_moments(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("steps=2", "learner.max_skipped=9")
    poison(monkeypatch, {3, 4})
    train(config, display)
    path = run_of(config) / "checkpoints"
    assert same_checkpoint(path / "000001", path / "000002")


def test_repeated_non_finite_updates_stop_the_run(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(3, 99)))
    with pytest.raises(NumericalError, match=r"3 updates in a row.*--resume"):
        train(tiny("steps=9", "learner.max_skipped=3"), display)


def test_a_broken_reward_stops_the_run_with_a_checkpoint(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    flag = tmp_path / "broken"
    (tmp_path / "broken.py").write_text(
        "import os\n"
        "def score(prompts, completions, **columns):\n"
        f"    if os.path.exists({str(flag)!r}):\n"
        "        raise ValueError('ouch')\n"
        "    return [len(c) % 3 for c in completions]\n"
    )
    config = replace(
        tiny("steps=5", "eval.every=0"), reward=replace(tiny().reward, functions=(f"{tmp_path}/broken.py:score",))
    )

    class BreakAfterTwo(type(display)):  # type: ignore[misc]
        def step(self, step: int, *rest: Any) -> None:
            if step == 2:
                flag.write_text("")

    with pytest.raises(RewardError, match=r"step 3: 16 of 16 completions could not be scored.*ouch.*--resume"):
        train(config, BreakAfterTwo())
    flag.unlink()
    resume(run_of(config), display)
    assert read_jsonl(run_of(config) / "metrics.jsonl")[-1]["step"] == 5


def test_some_unscored_completions_do_not_stop_a_run(tiny: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "def score(prompts, completions, **columns):\n"
        "    return [float('nan') if len(c) % 4 == 0 else len(c) % 3 for c in completions]\n"
    )
    config = replace(tiny(), reward=replace(tiny().reward, functions=(f"{tmp_path}/picky.py:score",)))
    train(config, display)
    rows = read_jsonl(run_of(config) / "metrics.jsonl")
    records = [r for s in (1, 2, 3) for r in read_jsonl(run_of(config) / f"rollouts/{s:06d}.jsonl")]
    unscored = [r for r in records if r["status"] == "unscored"]
    assert unscored
    assert sum(r["samples/unscored"] for r in rows[1:]) == len(unscored)
    assert all(r["reward"] is None and not r["trained"] and "invalid" in r["failure"] for r in unscored)
    scored = [r["reward"] for r in read_jsonl(run_of(config) / "rollouts/000001.jsonl") if r["reward"] is not None]
    assert rows[1]["reward/mean"] == pytest.approx(sum(scored) / len(scored))


def test_dynamic_sampling_replaces_uniform_groups_within_its_budget(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    (tmp_path / "rare.py").write_text(
        "def rare(prompts, completions, **columns):\n    return [float(c.count(' ') > 1) for c in completions]\n"
    )
    config = tiny("objective.keep=mixed", f"reward.functions={tmp_path}/rare.py:rare", "rollout.refill_budget=3")
    train(config, display)
    rows = read_jsonl(run_of(config) / "metrics.jsonl")[1:]
    assert any(row["groups/discarded"] for row in rows)
    for row in rows:
        records = read_jsonl(run_of(config) / f"rollouts/{row['step']:06d}.jsonl")
        trained = {r["prompt_id"] for r in records if r["trained"]}
        assert row["groups/sampled"] - row["groups/discarded"] == len(trained) <= 4
        assert row["groups/sampled"] <= 12
        assert len(trained) == 4 or row["groups/sampled"] == 12
        for prompt in trained:
            assert {r["reward"] for r in records if r["prompt_id"] == prompt} == {0.0, 1.0}


def test_dynamic_sampling_keeps_mixed_groups_without_a_correct_completion(
    tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny("objective.name=dapo", "reward.correct_above=1000")
    train(config, display)
    rows = read_jsonl(run_of(config) / "metrics.jsonl")[1:]
    assert [row["reward/correct_fraction"] for row in rows] == [0, 0, 0]
    assert all(row["samples/trained"] == 16 for row in rows)


def test_dynamic_sampling_ignores_excluded_completions(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    """With overlong_filter, truncated completions are not trained on, so they do not make a group mixed."""
    (tmp_path / "long.py").write_text(
        "def long(prompts, completions, **columns):\n    return [float(len(c) > 9) for c in completions]\n"
    )
    config = tiny(
        "objective.keep=mixed",
        "objective.shape=overlong_filter",
        "rollout.max_tokens=24",
        "rollout.group_size=6",
        f"reward.functions={tmp_path}/long.py:long",
    )
    train(config, display)
    records = [r for step in (1, 2, 3) for r in read_jsonl(run_of(config) / f"rollouts/{step:06d}.jsonl")]
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for r in records:
        groups.setdefault((r["version"], r["prompt_id"]), []).append(r)
    trained = [[r for r in g if r["trained"]] for g in groups.values()]
    assert any(trained)
    assert all({r["correct"] for r in g} == {True, False} for g in trained if g)
    mixed_by_truncated = [
        g for g in groups.values() if len({r["correct"] for r in g}) == 2 and not any(r["trained"] for r in g)
    ]
    assert any(r["drop_reason"] == "uniform" for g in mixed_by_truncated for r in g)


def test_steps_without_a_group_to_train_on_are_reported_and_skipped(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    """DAPO's length penalty makes equal rewards differ, but such groups are still not trained on."""
    (tmp_path / "same.py").write_text(
        "def same(prompts, completions, **columns):\n    return [0.1] * len(completions)\n"
    )
    config = tiny("objective.name=dapo", f"reward.functions={tmp_path}/same.py:same", "steps=3", "alarms.steps=2")
    outcome = train(config, display)
    assert any("no group to train on" in m and "all have the same reward" in m for m in display.messages)
    assert any("ALARM at step 2, no trainable samples" in m for m in display.messages)
    assert read_jsonl(run_of(config) / "metrics.jsonl")[-1]["tokens/trained"] == 0
    assert (outcome.idle, outcome.step, outcome.start_step) == (3, 3, 0)


def test_fewer_completions_than_mini_batches_is_reported_once(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    (tmp_path / "half.py").write_text(
        "def half(prompts, completions, **columns):\n"
        "    return [float(i % 4) if i % 4 < 2 else None for i in range(len(completions))]\n"
    )
    half = f"reward.functions={tmp_path}/half.py:half"
    config = tiny(half, "learner.mini_batches=12", "steps=2", "reward.max_unscored_fraction=1")
    train(config, display)
    # 8 of 16 completions: half as many optimizer steps, each on as many completions as in a full batch, rounded down.
    text = "only 8 of 16 completions could be trained on, so the step had 6 optimizer steps instead of 12"
    messages = [m for m in display.messages if f"{text} (learner.mini_batches)" in m]
    found = [e for e in read_jsonl(run_of(config) / "events.jsonl") if e["event"] == "fewer_updates"]
    assert [(e["step"], e["updates"], e["completions"]) for e in found] == [(1, 6, 8), (2, 6, 8)]
    assert len(messages) == 1


def test_a_run_limited_by_tokens_never_shows_a_step_beyond_its_last(tiny: Callable[..., Config], display: Any) -> None:
    class RecordingDisplay(type(display)):  # type: ignore[misc]
        def step(self, step: int, steps: int, *rest: Any) -> None:
            self.steps.append((step, steps))

    recorder = RecordingDisplay()
    outcome = train(tiny("steps=2", "tokens=420", "eval.every=0"), recorder)
    assert outcome.step > 2  # a step samples at most 160 tokens
    assert all(step < steps for step, steps in recorder.steps[:-1])
    assert recorder.steps[-1] == (outcome.step, outcome.step) == (outcome.step, outcome.steps)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_multi_process_launch_is_refused(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = tiny("steps=1")
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="one of 2 processes, and each would do the same"):
        train(config, display)
    assert not run_of(config).exists()
    assert main(["eval", "model", "--data", "addition"]) == 1


def test_a_run_with_relative_paths_resumes_from_another_directory(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    for name, rows in (("train", range(20)), ("test", range(30, 34))):
        lines = [json.dumps({"prompt": f"sort {i}", "answer": str(i)}) + "\n" for i in rows]
        (home / f"{name}.jsonl").write_text("".join(lines))
    (home / "mine.py").write_text(
        "def mine(prompts, completions, *, most=1.0, **columns):\n"
        "    return [min(most, len(c) % 3) for c in completions]\n"
    )
    task = tiny("steps=2")
    tree = settings.flat(task) | {"data.path": "train.jsonl", "data.held_out_path": "test.jsonl", "data.held_out": 4}
    tree |= {"reward.functions": ["mine.py:mine"], "data.task": ""}
    tree = {k: v for k, v in tree.items() if not k.startswith(("data.task_", "data.split"))}
    config = settings.from_flat(tree, where="test")
    options = {"mine.py:mine": {"most": 2.0}}
    config = replace(config, reward=replace(config.reward, options=options), steps=1)
    train(config, display)
    monkeypatch.chdir(elsewhere)
    assert resume(run_of(config), display, steps=2).step == 2
    saved = settings.load(run_of(config) / "config.toml")
    assert saved.data.path == str(home / "train.jsonl")
    assert saved.reward.options == {f"{home}/mine.py:mine": {"most": 2.0}}


def test_the_message_without_a_group_to_train_on_gives_the_reasons(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    """With a limit of one token, all completions but a lone EOS are truncated."""
    config = tiny(
        "objective.shape=overlong_filter",
        "rollout.max_tokens=1",
        "steps=2",
        "reward.max_unscored_fraction=1",
        "eval.every=0",
    )
    (tmp_path / "picky.py").write_text(
        "def score(prompts, completions, **columns):\n"
        "    return [None] + [float(i) for i in range(len(completions) - 1)]\n"
    )
    config = replace(config, reward=replace(config.reward, functions=(f"{tmp_path}/picky.py:score",)))
    train(config, display)
    found = [e for e in read_jsonl(run_of(config) / "events.jsonl") if e["event"] == "no_trainable_samples"]
    for event in found:
        records = read_jsonl(run_of(config) / f"rollouts/{event['step']:06d}.jsonl")
        assert event["reasons"] == Counter(r["drop_reason"] for r in records)
        assert {"overlong", "unscored"} <= event["reasons"].keys()
    messages = [m for m in display.messages if "no group to train on" in m]
    assert len(messages) == len(found) == 2
    assert all(
        "were truncated at rollout.max_tokens" in m and "could not be scored" in m and "same reward" not in m
        for m in messages
    )


def test_a_second_trainer_and_an_occupied_directory_are_refused(tiny: Callable[..., Config], display: Any) -> None:
    from gspo.record.run_dir import RunDir

    config = tiny()
    train(config, display)
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
        train(config, display)
    held, _ = RunDir.open(run_of(config))
    with pytest.raises(ConfigError, match="another trainer"):
        resume(run_of(config), display)
    held.close()


def test_invalid_settings_of_a_run_are_refused(tiny: Callable[..., Config], display: Any) -> None:
    for overrides, words in [
        (("objective.name=ppo_clip",), "external advantages"),
        (("rollout.group_size=1",), "at least 2"),
        (("data.held_out=0",), "eval.every = 0"),
        (("objective.name=nope",), "there are: gspo"),
        (("objective.clip_lo=1",), "clip_low"),
    ]:
        with pytest.raises(ConfigError, match=words):
            train(tiny(*overrides), display)
    assert not run_of(tiny()).exists()


def test_dr_grpo_divides_by_the_length_limit_of_the_run(tiny: Callable[..., Config]) -> None:
    from gspo.build import run_objective

    assert run_objective(tiny("objective.name=dr_grpo")).aggregate.max_length == 10  # type: ignore[attr-defined]
    assert run_objective(tiny("objective.name=dr_grpo", "objective.max_length=7")).aggregate.max_length == 7  # type: ignore[attr-defined]


def test_tensorboard_sink(tiny: Callable[..., Config], display: Any) -> None:
    pytest.importorskip("tensorboard")
    config = tiny("log.sinks=tensorboard")
    train(config, display)
    assert list((run_of(config) / "tensorboard").glob("events.*"))


def test_a_failing_sink_is_disabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gspo.record import sinks

    class FailingSink:
        def __init__(self, *_: Any) -> None:
            self.calls = 0

        def log(self, *_: Any) -> None:
            raise ConnectionError("down")

        def close(self) -> None:
            raise AssertionError("closed although it was disabled")

    monkeypatch.setitem(sinks.SINKS, "wandb", FailingSink)
    messages: list[str] = []
    failing = sinks.Sinks(["wandb"], name="x", run=tmp_path, settings={}, complain=messages.append)
    failing.log(1, {"a": 1})
    failing.log(2, {"a": 1})
    failing.close()
    assert len(messages) == 1
    assert "down" in messages[0]


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_the_same(tmp_path: Path) -> None:
    """Kill a real process repeatedly. The log must equal that of an uninterrupted run."""
    command = [
        sys.executable,
        "-m",
        "gspo.cli",
        "train",
        "demo",
        "--steps=6",
        "--cold_start.steps=30",
        "--rollout.prompts=8",
        "--data.held_out=16",
        "--eval.every=2",
        "--checkpoint.every=1",
        "--cold_start.check_every=30",
    ]
    subprocess.run([*command, f"--run-dir={tmp_path}/golden"], check=True, capture_output=True, timeout=240)
    golden = (tmp_path / "golden/metrics.jsonl").read_bytes()
    again = [sys.executable, "-m", "gspo.cli", "train", "--resume", f"{tmp_path}/cut"]
    start = [*command, f"--run-dir={tmp_path}/cut"]
    log = tmp_path / "cut/metrics.jsonl"
    kills = 0
    for extra in (0.0, 0.15, 0.4, 0.7):
        before = log.stat().st_size if log.exists() else 0
        child = subprocess.Popen(again if kills else start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 100
        while (
            child.poll() is None and time.monotonic() < deadline and not (log.exists() and log.stat().st_size > before)
        ):
            time.sleep(0.01)
        time.sleep(extra)
        if child.poll() is None:
            kills += 1
        child.kill()
        child.wait()
    assert kills >= 3
    subprocess.run(again, check=True, capture_output=True, timeout=240)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == golden


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_prints_how_to_resume(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gspo.cli",
        "demo",
        "--cold_start.steps=20",
        "--data.held_out=16",
        f"--run-dir={tmp_path}/run",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (tmp_path / "run/rollouts/000002.jsonl").exists():
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"train --resume {tmp_path}/run" in output
    assert "Traceback" not in output
    assert checkpoint.newest(tmp_path / "run/checkpoints")[0].name >= "000002"


def test_a_resumed_vespo_run_of_an_earlier_version_warns_of_its_denominator(
    tiny: Callable[..., Config], display: Any
) -> None:
    """Once: the run then records what its objective does now."""
    config = tiny("steps=1", "eval.every=0", "objective.name=vespo")
    train(config, display)
    file = Path(config.run_dir) / "run.json"
    recorded = json.loads(file.read_text())
    assert recorded["objective"]["ratio"] == "ProductRatio"
    recorded["objective"]["ratio"] = "product"
    file.write_text(json.dumps(recorded))
    resume(config.run_dir, display)
    warnings = [e["message"] for e in read_events(Path(config.run_dir)) if e["event"] == "warning"]
    assert sum("measures against the recomputed old policy" in text for text in warnings) == 1
    assert any("recomputed old policy" in text for text in display.messages)
    resume(config.run_dir, display)
    assert [e["message"] for e in read_events(Path(config.run_dir)) if e["event"] == "warning"] == warnings

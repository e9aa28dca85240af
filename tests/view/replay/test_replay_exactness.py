"""A recomputed step agrees with the run for every kind of run, and any difference is reported."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import copy_of, make_run, rebuild_step
from misaligned import misalign_loading
from safetensors.torch import load_file, save_file

from gspo.errors import CheckpointError, DataError
from gspo.record.progress import PlainDisplay
from gspo.record.run_dir import read_jsonl
from gspo.rollout.engines.local import LocalEngine
from gspo.trainer import resume
from gspo.types import Completion
from gspo.view.completions import Completions
from gspo.view.replay.source import open_run

KINDS = {
    "KL penalty, entropy bonus, top-p": (
        "objective.name=grpo",
        "objective.entropy=0.01",
        "rollout.temperature=0.7",
        "rollout.top_p=0.9",
    ),
    "KL in the reward, overlong filter, no chat template": (
        "data.chat=no",
        "objective.name=reinforce_pp",
        "objective.kl=0.1",
        "objective.shape=overlong_filter",
    ),
    "random token selection, micro-batches": (
        "objective.name=clip_cov",
        "objective.select_fraction=0.2",
        "objective.cov_low=0.01",
        "learner.micro_batch_tokens=64",
    ),
    "sampler log-probs in the loss, gradient checkpointing": (
        "objective.name=vespo",
        "model.gradient_checkpointing=true",
    ),
    "discarded and refilled groups, bfloat16": (
        "objective.name=dapo",
        "objective.overlong_limit=8",
        "model.dtype=bfloat16",
    ),
    "adaptive clip range, routing replay of the old policy": (
        "objective.clip_low=auto:0.3",
        "objective.clip_high=auto:0.3",
        "model.build=tiny_moe",
        "routing.replay=old",
    ),
    "routing replay of the sampler, load balancing": (
        "model.build=tiny_moe",
        "routing.replay=sampler",
        "routing.balance_loss=0.01",
    ),
    "stop strings, minimum length, thinking budget": (
        "model.build=tiny_moe",
        "routing.replay=sampler",
        'rollout.stop=["7", "1"]',
        "rollout.min_tokens=3",
        "rollout.thinking_budget=4",
        "rollout.thinking_end=o",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_recomputed_exactly_across_a_step_without_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """Step 2 starts from the weights of the recomputed step 1."""
    run = make_run(tmp_path, "steps=2", "checkpoint.every=5", *KINDS[kind])
    replayed = rebuild_step(run, 2)
    assert replayed.start == 0
    assert [a.step for a in replayed.agreements] == [1, 2]
    assert [a.weights for a in replayed.agreements] == [None, True], "the last step has a checkpoint"
    for found in replayed.agreements:
        assert found.exact, found
        assert found.tokens >= 10
        assert found.metrics > 20
    assert replayed.agreements[1].logp_new > 0, "a difference of 0 would mean that nothing was compared"


@pytest.mark.parametrize("everything", [False, True])
def test_the_completions_that_the_run_computed_are_computed_again(
    everything: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions computed completions with advantage 0, too. Their runs are recomputed exactly."""
    with monkeypatch.context() as patch:
        if everything:
            patch.setattr("gspo.learner.batch._computes_all", lambda context: True)
        run = make_run(tmp_path, "steps=2", "learner.mini_batches=4", "learner.micro_batch_tokens=64")
    lines = [r for step in (1, 2) for r in read_jsonl(run / "rollouts" / f"{step:06d}.jsonl")]
    records = [r for r in lines if r["trained"]]
    assert any(r["advantage"] == 0 for r in records)
    assert all(("logp_old" in r) == (everything or r["advantage"] != 0) for r in records)
    complete: list[bool] = []

    def before_update(learner: Any, recorded: Any, batch: Any, index: int) -> None:
        complete.append(bool(batch.old.computed_N.all()) and not batch.tokens.logp_old_N.isnan().any())

    replayed = rebuild_step(run, 2, before_update)
    assert complete == [True] * 4, "other objectives need all log-probs"
    for found in replayed.agreements:
        assert found.exact, found
        assert not found.other_completions
    assert bool(replayed.learned.computed_N.all()) == everything


def test_a_run_with_unsampled_tokens_is_recomputed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second completion has two tokens in the middle that the model did not sample, like a tool result."""
    generate = LocalEngine.generate

    def with_given_tokens(self: LocalEngine, prompts: Any, options: Any) -> list[list[Completion]]:
        return [
            [c if c.sample % 2 else _with_given_tokens(c) for c in group] for group in generate(self, prompts, options)
        ]

    monkeypatch.setattr(LocalEngine, "generate", with_given_tokens)
    run = make_run(tmp_path, "steps=1", "rollout.prompts=4", "model.build=tiny_moe")
    records = [json.loads(line) for line in (run / "rollouts" / "000001.jsonl").read_text().splitlines()]
    masks = [record.get("sampled") for record in records]
    assert [mask is None for mask in masks] == [record["sample"] % 2 == 1 for record in records]
    for record, mask in zip(records, masks, strict=True):
        sampled = sum(mask) if mask else len(record["token_ids"])
        names = ("logp_sampler", "logp_old", "logp_new", "flipped_experts")
        assert all(len(record[name]) == sampled for name in names if name in record)
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    lengths = [len(record["logp_sampler"]) for record in records]
    assert metrics["tokens/generated"] == sum(lengths)
    assert metrics["length/mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert metrics["length/max"] == max(lengths)
    replayed = rebuild_step(run, 1).agreements[0]
    assert replayed.exact, replayed
    assert replayed.tokens == metrics["tokens/generated"]
    shown = Completions(run).completion(1, 0, 0)
    assert shown is not None
    assert shown["sampled"] == masks[0]
    assert [value is not None for value in shown["logp_sampler"]] == [bool(own) for own in masks[0] or ()]


def _with_given_tokens(completion: Completion) -> Completion:
    ids, own = completion.token_ids, len(completion.token_ids) - 1
    sampled = (True,) + (False,) * 2 + (True,) * own
    return dataclasses.replace(completion, token_ids=(ids[0], 5, 6, *ids[1:]), sampled=sampled, routes=None)


def test_recomputed_steps_reproduce_the_weights_of_a_later_checkpoint(run: Path, tmp_path: Path) -> None:
    direct = rebuild_step(run, 3)
    assert direct.start == 2
    from_start = rebuild_step(copy_of(run, tmp_path, without=(1, 2)), 3)
    assert from_start.start == 0
    assert all(a.exact for a in from_start.agreements)
    found, expected = (step.learned.tokens.logp_N for step in (from_start, direct))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    every = rebuild_step(run, 3, start=0).agreements
    assert [(a.step, a.exact, a.weights) for a in every] == [(1, True, True), (2, True, True), (3, True, True)]


def test_the_adapters_of_a_checkpoint_are_reproduced(run: Path, tmp_path: Path) -> None:
    base = f"model.path={run / 'checkpoints/000003'}"
    adapted = make_run(tmp_path, "steps=2", "model.build=", base, "model.lora.rank=2", "learner.learning_rate=1e-2")
    assert [(a.exact, a.weights) for a in rebuild_step(adapted, 2, start=0).agreements] == [(True, True)] * 2
    for name in ("model", "adapter_model"):
        assert (adapted / f"checkpoints/000001/{name}.safetensors").is_file() == (name == "adapter_model")
    file = adapted / "checkpoints/000001/adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: weight + 1e-6 for name, weight in weights.items()}, file, metadata={"format": "pt"})
    _remove_from_manifest(file.parent, file.name)
    assert [a.weights for a in rebuild_step(adapted, 2, start=0).agreements] == [False, True]


def test_a_checkpoint_with_other_weights_than_the_recomputed_ones_is_reported(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    folder = copy / "checkpoints" / "000002"
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    weights[name][0, 0] = torch.nextafter(weights[name][0, 0], torch.tensor(torch.inf))
    save_file(weights, file, metadata={"format": "pt"})
    _remove_from_manifest(folder)
    agreements = rebuild_step(copy, 3, start=0).agreements
    assert [(a.weights, a.exact) for a in agreements] == [(True, True), (False, False), (True, True)]


@pytest.mark.parametrize("offset", [8, 16, 32, 48])
def test_the_memory_alignment_of_the_weights_does_not_change_the_step(
    offset: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of(run, tmp_path, without=(1, 2))
    misalign_loading(offset, monkeypatch.setattr)
    agreements = rebuild_step(copy, 3).agreements
    assert len(agreements) == 3
    assert all(a.exact for a in agreements)


def test_a_changed_weight_is_detected(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    file = copy / "checkpoints" / "000002" / "model.safetensors"
    weights = load_file(file)
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    weights[name][0, 0] += 0.01
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="contents differ from the manifest"):
        rebuild_step(copy, 3)
    _remove_from_manifest(copy / "checkpoints" / "000002")
    found = rebuild_step(copy, 3).agreements[-1]
    assert not found.exact
    assert found.logp_old > 1e-6


def _remove_from_manifest(checkpoint: Path, name: str = "model.safetensors") -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest[name]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("logp_new", lambda v: [v[0] + 2e-6, *v[1:]]),
        ("logp_old", lambda v: [None, *v[1:]]),
        ("reward", lambda v: v + 1.0),
        ("token_ids", lambda v: [v[0] + 1, *v[1:]]),
        ("prompt", lambda v: v.replace("<assistant>", " <assistant>")),
        ("trained", lambda v: False),
    ],
)
def test_a_changed_record_is_detected(run: Path, tmp_path: Path, field: str, change: Any) -> None:
    copy = copy_of(run, tmp_path)
    file = copy / "rollouts" / "000003.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line["sample"] == 0 and abs(line["advantage"]) > 0)
    lines[at][field] = change(lines[at][field])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = rebuild_step(copy, 3).agreements[-1]
    assert not found.exact, found


def test_changed_metrics_are_detected_and_missing_ones_are_no_error(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    file = copy / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])
    file.write_text("".join(lines[:-1]) + json.dumps(last | {"grad/norm": last["grad/norm"] * 1.001}) + "\n")
    found = rebuild_step(copy, 3).agreements[-1]
    assert found.worst_metric == "grad/norm"
    assert math.isclose(found.worst_difference, 1e-3, rel_tol=0.01)
    assert not found.exact
    file.write_text("".join(lines[:-1]))
    found = rebuild_step(copy, 3).agreements[-1]
    assert (found.metrics, found.exact) == (0, True)


def test_a_schedule_extended_by_a_resume(tmp_path: Path) -> None:
    """Each step uses the learning rate of the schedule that was planned when the run took it."""
    run = make_run(tmp_path, "steps=2", "learner.schedule=linear")
    resume(run, PlainDisplay(), steps=4)
    source = open_run(run)
    assert [source.steps_planned(step) for step in (1, 2, 3, 4)] == [2, 2, 4, 4]
    for step in (2, 3):
        assert rebuild_step(run, step).agreements[-1].exact


def test_a_learning_rate_changed_by_a_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path, "steps=2")
    resume(run, PlainDisplay(), steps=3, overrides=["learner.learning_rate=1e-5"])
    resume(run, PlainDisplay(), steps=4, overrides=["learner.learning_rate=1e-4"])
    source = open_run(run)
    assert [source.learner_at(step).learning_rate for step in (1, 2, 3, 4)] == [1e-3, 1e-3, 1e-5, 1e-4]
    copy = copy_of(run, tmp_path, without=(1, 2, 3))
    assert all(a.exact for a in rebuild_step(copy, 4).agreements)


@pytest.mark.parametrize(
    "event",
    [{"event": "resume"}, {"event": "resume", "step": 1, "changed": [1]}, {"event": "steps_changed", "steps": "x"}],
)
def test_invalid_events_are_refused(run: Path, tmp_path: Path, event: dict[str, Any]) -> None:
    copy = copy_of(run, tmp_path)
    with (copy / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    with pytest.raises(DataError, match=r"events\.jsonl"):
        rebuild_step(copy, 2)


def test_records_without_the_samplers_experts_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, "steps=1", "model.build=tiny_moe", "routing.replay=sampler")
    file = run / "rollouts" / "000001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "routes"}) + "\n" for line in lines))
    with pytest.raises(DataError, match="the sampler's experts are not recorded"):
        rebuild_step(run, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "line 1: not JSON"), ('{"prompt_id": "train/1"}', "line 1: no sample"), ("", "has no completions")],
)
def test_damaged_records_are_refused(run: Path, tmp_path: Path, text: str, message: str) -> None:
    copy = copy_of(run, tmp_path)
    (copy / "rollouts" / "000003.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        rebuild_step(copy, 3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", [10**6, 1], "tokens outside the model's vocabulary"),
        ("token_ids", [1], "1 tokens, but 2 log-probs"),
        ("sampled", [1, 0], "1 tokens, but 2 log-probs"),
        ("sampled", [1], "sampled must be a 0 or 1 for each of the 2 tokens"),
        ("sampled", [1, "x"], "sampled must be a 0 or 1 for each of the 2 tokens"),
        ("stop", "tired", "invalid record"),
        ("prompt", 3, "invalid record"),
    ],
)
def test_invalid_records_are_refused(run: Path, tmp_path: Path, field: str, value: Any, message: str) -> None:
    copy = copy_of(run, tmp_path)
    file = copy / "rollouts" / "000003.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0] |= {"token_ids": [1, 1], "logp_sampler": [0.0, 0.0], field: value}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=message):
        rebuild_step(copy, 3)

"""Sampling ahead of learning: batches in flight, their versions, and the state from which a run collects them again.

A run has one batch in flight. These tests collect a second one before the first is trained on, by hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.clock import Clock
from gspo.config import Config, flat
from gspo.context import RunContext
from gspo.learner import checkpoint
from gspo.learner.checkpoint import TrainerState
from gspo.record.metrics import rollout_records
from gspo.record.run_dir import read_jsonl
from gspo.rollout.buffer import RolloutBuffer
from gspo.rollout.gather import CollectResult, RolloutState
from gspo.step import collect, learn
from gspo.trainer import resume, train


def learn_from(context: RunContext, collected: CollectResult, step: int) -> int:
    """Train on a batch. Returns its lag: the optimizer steps since its weights."""
    lag = context.optimizer.updates - collected.version
    learn(context, collected.rollouts.groups, step=step)
    return lag


def run_with(context: RunContext, *, capacity: int, batches: int) -> list[tuple[CollectResult, int]]:
    """Fill the buffer before every step. Each batch with its lag."""
    buffer = RolloutBuffer(capacity=capacity, start=RolloutState())
    done = []
    for step in range(1, batches + 1):
        while not buffer.full:
            buffer.put(collect(context, buffer.end, clock=Clock()))
        collected = buffer.take()
        done.append((collected, learn_from(context, collected, step)))
    return done


REFILL = ("objective.keep=mixed", "rollout.group_size=2", "rollout.refill_budget=2")


@pytest.mark.parametrize("overrides", [(), REFILL], ids=["all groups", "refilled groups"])
def test_a_batch_knows_its_number_version_and_place_in_the_data(
    overrides: tuple[str, ...], tiny: Callable[..., Config], parts_of: Any
) -> None:
    synchronous = run_with(parts_of(tiny(*overrides, run_dir="a")), capacity=1, batches=3)
    ahead = run_with(parts_of(tiny(*overrides, run_dir="b")), capacity=2, batches=3)
    assert [c.batch for c, _ in synchronous] == [c.batch for c, _ in ahead] == [1, 2, 3]
    # Two updates per step: every batch after the first is one step older than in the synchronous run.
    assert [(c.version, lag) for c, lag in synchronous] == [(0, 0), (2, 0), (4, 0)]
    assert [(c.version, lag) for c, lag in ahead] == [(0, 0), (0, 2), (2, 2)]
    for collected, _ in synchronous + ahead:
        versions = {c.version for g in collected.rollouts.sampled for c in g.completions}
        assert versions == {collected.version}


def test_sampling_ahead_changes_neither_data_order_nor_random_streams(
    tiny: Callable[..., Config], parts_of: Any
) -> None:
    """With a learning rate of 0 all versions have the same weights, so the completions must be the same, too."""
    frozen = ("learner.learning_rate=0", "learner.weight_decay=0")
    synchronous = run_with(parts_of(tiny(*frozen, run_dir="a")), capacity=1, batches=3)
    ahead = run_with(parts_of(tiny(*frozen, run_dir="b")), capacity=3, batches=3)
    assert [lag for _, lag in ahead] == [0, 2, 4]
    for (ours, _), (theirs, _) in zip(ahead, synchronous, strict=True):
        assert ours.after == theirs.after
        assert [text_of(g) for g in ours.rollouts.sampled] == [text_of(g) for g in theirs.rollouts.sampled]


def text_of(group: Any) -> tuple[Any, ...]:
    return group.prompt.id, [(c.token_ids, c.logp_sampler) for c in group.completions], group.scores


def test_the_records_of_a_batch_name_the_version_that_sampled_it(tiny: Callable[..., Config], parts_of: Any) -> None:
    context = parts_of(tiny())
    buffer = RolloutBuffer(capacity=2, start=RolloutState())
    for _ in range(2):
        buffer.put(collect(context, buffer.end, clock=Clock()))
    learn_from(context, buffer.take(), 1)
    second = buffer.take()
    learned = learn(context, second.rollouts.groups, step=2)
    records = list(rollout_records(context.objective, second, learned, routes=False))
    assert {r["version"] for r in records} == {0}
    assert context.optimizer.updates == 4


def test_batches_in_flight_are_collected_again_from_the_saved_state(
    tiny: Callable[..., Config], parts_of: Any, tmp_path: Path
) -> None:
    config = tiny()
    context = parts_of(config)
    buffer = RolloutBuffer(capacity=2, start=RolloutState())
    for _ in range(2):
        buffer.put(collect(context, buffer.end, clock=Clock()))
    trained = buffer.take()
    assert trained.after != buffer.end
    state = TrainerState(step=1, rollout=trained.after, settings=flat(config))
    checkpoint.save(tmp_path, context.policy, context.optimizer, state, keep=0)
    read = checkpoint.read_state(tmp_path / "000001")
    assert read == state
    assert collect(context, read.rollout, clock=Clock()) == buffer.take()


def test_a_state_may_have_collected_more_batches_than_it_has_trained_on(
    tiny: Callable[..., Config], parts_of: Any, tmp_path: Path
) -> None:
    config = tiny()
    context = parts_of(config)
    state = TrainerState(step=3, rollout=RolloutState(batch=5, cursor=20), settings=flat(config))
    checkpoint.save(tmp_path, context.policy, context.optimizer, state, keep=0)
    assert checkpoint.read_state(tmp_path / "000003") == state


def test_a_checkpoint_that_holds_the_plain_cursor_resumes_exactly(tiny: Callable[..., Config], display: Any) -> None:
    """Checkpoints had one `cursor` before batches had numbers."""
    whole, cut = tiny(run_dir="whole"), tiny(run_dir="cut")
    train(whole, display)
    train(replace(cut, steps=2), display)
    path = Path(cut.run_dir) / "checkpoints/000002"
    fields = json.loads((path / "trainer.json").read_text())
    rollout = fields.pop("rollout")
    assert rollout == {"batch": 2, "cursor": 8}
    (path / "trainer.json").write_text(json.dumps(fields | {"cursor": rollout["cursor"]}))
    manifest = json.loads((path / "manifest.json").read_text())
    data = (path / "trainer.json").read_bytes()
    manifest["trainer.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.read_state(path).rollout == RolloutState(batch=2, cursor=8)
    assert resume(cut.run_dir, display, steps=3).step == 3
    for name in ("metrics.jsonl", "rollouts/000003.jsonl"):
        assert (Path(cut.run_dir) / name).read_bytes() == (Path(whole.run_dir) / name).read_bytes()


def test_a_run_saves_where_sampling_stands_apart_from_its_steps(tiny: Callable[..., Config], display: Any) -> None:
    config = tiny(*REFILL)
    train(config, display)
    cursor = 0
    for step in range(1, 4):
        state = checkpoint.read_state(Path(config.run_dir) / f"checkpoints/{step:06d}")
        prompts = {r["prompt_id"] for r in read_jsonl(Path(config.run_dir) / f"rollouts/{step:06d}.jsonl")}
        cursor += len(prompts)
        assert state.rollout == RolloutState(batch=step, cursor=cursor)

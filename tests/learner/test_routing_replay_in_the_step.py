"""Routing replay within a training step: what flips, what both forwards use, and what never changes a gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import Family, plain_choices
from replay_cases import (
    MOE,
    REPLAYS,
    GradientRecorder,
    disturb,
    flips,
    forced_alone,
    reply_logp,
    reply_part,
    rows_learned,
    stepped,
    unpacked,
    with_altered_routes,
)
from torch import Tensor

from gspo.clock import Clock
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.learner.optimizer import Update
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn


class Photographer:
    """An optimizer that keeps a copy of the model after each of its steps."""

    def __init__(self, inner: Any, model: Any) -> None:
        self.inner, self.model = inner, model
        self.copies = [copy.deepcopy(model)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, **arguments: Any) -> Update:
        done: Update = self.inner.step(**arguments)
        self.copies.append(copy.deepcopy(self.model))
        return done


TINY_MOE = Family(kind="", gate=None)
"""What `model.build = tiny_moe` gives: 2 layers of 8 experts, of which 2 are chosen by the best logits."""


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_step_says_what_flipped_and_starts_at_ratio_one(
    replay: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(*MOE, *REPLAYS[replay], "learner.mini_batches=4", "learner.micro_batch_tokens=60"))
    watched = Photographer(parts.optimizer, parts.policy.model)
    learned, metrics = stepped(replace(parts, optimizer=watched))
    routed, rows = learned.routed, rows_learned(learned)
    assert routed is not None
    first = routed.update_N == 0
    assert 0 < int(first.sum()) < len(first)
    assert set(routed.update_N.tolist()) == {0, 1, 2, 3}
    assert (learned.ratio_N[first] == 1.0).all()
    assert torch.equal(learned.tokens.logp_N[first], learned.tokens.logp_old_N[first])
    # Flips by hand: each row's learning forward came after `update` updates.
    lengths = [len(row.completion_ids) for row in rows]
    updates = [int(u[0]) for u in routed.update_N.split(lengths)]
    choices = {
        (r, u): plain_choices(TINY_MOE, watched.copies[u], rows[r].prompt_ids + rows[r].completion_ids)[
            reply_part(rows[r])
        ]
        for r, u in {*((r, 0) for r in range(len(rows))), *enumerate(updates)}
    }
    counted = [flips(choices[r, u], choices[r, 0]) for r, u in enumerate(updates)]
    by_hand = sum(sum(c) for c, u in zip(counted, updates, strict=True) if u) / (4 * int((~first).sum()))
    assert by_hand > 0.01
    assert metrics["routing/flip_fraction_sampler"] == 0.0 if replay == "sampler" else True
    if replay == "off":
        assert routed.flipped_N.tolist() == [n for c in counted for n in c]
        assert metrics["routing/flip_fraction"] == pytest.approx(by_hand)
        assert "routing/flip_fraction_native" not in metrics
    else:
        assert metrics["routing/flip_fraction"] == 0.0
        assert routed.flipped_N.sum() == 0
        assert metrics["routing/flip_fraction_native"] > 0.01
    by_update = [routed.native_N[routed.update_N == u].double().mean() / 4 for u in (1, 3)]
    assert metrics["routing/flip_fraction_first"] == pytest.approx(float(by_update[0]))
    assert metrics["routing/flip_fraction_last"] == pytest.approx(float(by_update[1]))


@pytest.mark.parametrize("replay", ["off", "sampler"])
def test_a_single_mini_batch_is_looked_at_again_after_its_update(
    replay: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(*MOE, *REPLAYS[replay], "learner.mini_batches=1", "learner.micro_batch_tokens=90"))
    watched = Photographer(parts.optimizer, parts.policy.model)
    learned, metrics = stepped(replace(parts, optimizer=watched))
    assert learned.routed is not None
    assert (learned.ratio_N == 1.0).all()
    assert set(learned.routed.update_N.tolist()) == {0, 1}
    if replay == "sampler":
        assert metrics["routing/flip_fraction"] == 0.0
        assert metrics["routing/flip_fraction_native"] > 0
        return
    rows, at = rows_learned(learned), 0
    for row in rows:
        n = len(row.completion_ids)
        part = slice(at, at + n)
        at += n
        if int(learned.routed.update_N[part][0]) == 1:
            both = [
                plain_choices(TINY_MOE, m, row.prompt_ids + row.completion_ids)[reply_part(row)] for m in watched.copies
            ]
            assert learned.routed.flipped_N[part].tolist() == flips(both[1], both[0])
        else:
            assert learned.routed.flipped_N[part].sum() == 0
    assert metrics["routing/flip_fraction"] > 0


def test_replay_of_the_old_choice_without_a_later_update_is_refused(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"routing\.replay"):
        tiny(*MOE, "routing.replay=old", "learner.mini_batches=1")


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_altered_routes_of_the_sampler_are_what_both_forwards_use(
    checkpointing: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    config = tiny(*MOE, "routing.replay=sampler", f"model.gradient_checkpointing={checkpointing}")
    parts = parts_of(config)
    pristine = copy.deepcopy(parts.policy.model)
    learned, metrics = stepped(parts, with_altered_routes)
    assert metrics["routing/flip_fraction"] == 0.0
    assert metrics["routing/flip_fraction_sampler"] == 0.0
    assert metrics["routing/flip_fraction_native"] > 0.3
    expected = []
    for row, c in zip(rows_learned(learned), learned.samples, strict=True):
        assert c.completion.routes is not None
        chosen = torch.cat([unpacked(c.completion.routes), torch.zeros(1, 2, 2, dtype=torch.long)])
        logits, _ = forced_alone(pristine, row, chosen, torch.arange(row.length) < row.length - 1)
        expected.append(reply_logp(row, logits))
    torch.testing.assert_close(learned.tokens.logp_old_N.double(), torch.cat(expected), rtol=0, atol=2e-5)
    assert learned.tokens.logp_sampler_N is not None
    assert (learned.tokens.logp_old_N - learned.tokens.logp_sampler_N).abs().max() > 1e-3
    assert metrics["mismatch/k3"] > 1e-6
    assert learned.routed is not None
    first = learned.routed.update_N == 0
    assert torch.equal(learned.tokens.logp_N[first], learned.tokens.logp_old_N[first])


@pytest.mark.parametrize("replay", ["off", "old"])
def test_altered_routes_are_only_counted_when_they_are_not_replayed(
    replay: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    plain, _ = stepped(parts_of(tiny(*MOE, *REPLAYS[replay])))
    learned, metrics = stepped(parts_of(tiny(*MOE, *REPLAYS[replay], run_dir="b")), with_altered_routes)
    assert torch.equal(learned.tokens.logp_old_N, plain.tokens.logp_old_N)
    assert torch.equal(learned.tokens.logp_N, plain.tokens.logp_N)
    # {a, b} against {a + 1, b + 1} modulo 8: one of two differs when a and b are neighbors, else both.
    expected = []
    for c in learned.samples:
        assert c.completion.routes is not None
        shifted = unpacked(c.completion.routes)[len(c.prompt.token_ids) - 1 :]
        expected += flips((shifted - 1) % 8, shifted)
    assert learned.routed is not None
    assert learned.routed.sampler_N.tolist() == expected
    assert metrics["routing/flip_fraction_sampler"] == pytest.approx(sum(expected) / len(expected) / 4)


@pytest.mark.parametrize("replay", ["old", "sampler"])
@pytest.mark.parametrize(
    "objective", [("objective.name=clip_cov", "objective.cov_low=0"), ("objective.name=kl_cov",)], ids=str
)
def test_tokens_are_singled_out_by_the_replayed_forward(
    objective: tuple[str, ...], replay: str, tiny: Callable[..., Config], parts_of: Any, monkeypatch: Any
) -> None:
    from gspo.learner import batch as update_file

    asked: list[Tensor] = []
    inner = update_file.select

    def select(row: Any, tokens: Any, seed: int) -> Any:
        asked.append(tokens.logp_N.clone())
        return inner(row, tokens, seed)

    monkeypatch.setattr(update_file, "select", select)
    options = (*MOE[:2], *objective, "objective.select_fraction=0.2", *REPLAYS[replay])
    learned, metrics = stepped(parts_of(tiny(*options)), with_altered_routes)
    assert learned.routed is not None
    assert metrics["routing/flip_fraction"] == 0.0
    assert metrics["routing/flip_fraction_native"] > 0.01
    assert len(asked) == 2
    for index, logp in enumerate(asked):
        assert torch.equal(logp, learned.tokens.logp_N[learned.routed.update_N == index])


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_reference_model_routes_by_itself(replay: str, tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny(*MOE[:2], "objective.name=grpo", *REPLAYS[replay]))
    reference = copy.deepcopy(parts.policy.model).requires_grad_(False)
    disturb(reference)
    parts = replace(parts, reference=reference)
    pristine = copy.deepcopy(reference)
    learned, metrics = stepped(parts, with_altered_routes)
    expected = []
    for row in rows_learned(learned):
        with torch.no_grad():
            logits = pristine(torch.tensor([row.prompt_ids + row.completion_ids]), use_cache=False).logits[0]
        expected.append(reply_logp(row, logits))
    assert learned.tokens.logp_ref_N is not None
    torch.testing.assert_close(learned.tokens.logp_ref_N.double(), torch.cat(expected), rtol=0, atol=2e-5)
    assert metrics["kl/ref"] > 0
    for a, b in zip(reference.parameters(), pristine.parameters(), strict=True):
        assert torch.equal(a, b)


class DisturbingRecorder(GradientRecorder):
    """Moves the routers after each step, the same way each time."""

    def step(self, *, loss_finite: bool, **weights: Any) -> Update:
        done = super().step(loss_finite=loss_finite, **weights)
        disturb(self.model, 0.1)
        return done


@pytest.mark.parametrize("balance", [0.0, 0.5])
@pytest.mark.parametrize("replay", REPLAYS)
def test_cutting_differently_changes_no_gradient(
    replay: str, balance: float, tiny: Callable[..., Config], double_parts: Any
) -> None:
    parts = double_parts(tiny(*MOE, *REPLAYS[replay], f"routing.balance_loss={balance}"))
    model, config = parts.policy.model, parts.config
    collected = collect(parts, RolloutState(), clock=Clock())
    groups, weights = with_altered_routes(collected.rollouts.groups), copy.deepcopy(model.state_dict())
    found = []
    for cut in (10**6, 1, 70):
        model.load_state_dict(weights)
        recorder = DisturbingRecorder(model)
        learner = replace(config.learner, micro_batch_tokens=cut)
        learned = learn(replace(parts, config=replace(config, learner=learner), optimizer=recorder), groups, step=1)
        assert learned is not None
        assert learned.routed is not None
        found.append((recorder.gradients, learned))
    gradients, learned = found[0]
    routed: Any = learned.routed
    assert len(gradients) == 2
    assert all(g.abs().max() > 1e-4 for g in gradients)
    assert routed.native_N.sum() > 5
    assert (routed.flipped_N.sum() == 0) == (replay != "off")
    other: Any
    for others, other in found[1:]:
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(other.tokens.logp_N, learned.tokens.logp_N, rtol=0, atol=1e-5)
        for name in ("flipped_N", "native_N", "sampler_N", "load_LE", "update_N"):
            assert torch.equal(getattr(routed, name), getattr(other.routed, name)), name
        assert other.routed.balance_losses == pytest.approx(routed.balance_losses, rel=1e-5)


@pytest.mark.parametrize("mini_batches", [2, 1])
@pytest.mark.parametrize("replay", ["off", "sampler"])
def test_memory_that_runs_out_changes_nothing_that_is_counted(
    replay: str, mini_batches: int, tiny: Callable[..., Config], double_parts: Any
) -> None:
    # One mini-batch: the forward that looks at the routing after a single update may run out of memory too.
    options = (*REPLAYS[replay], "routing.balance_loss=0.5", f"learner.mini_batches={mini_batches}")
    parts = double_parts(tiny(*MOE, *options))
    model, found = parts.policy.model, []
    collected = collect(parts, RolloutState(), clock=Clock())
    groups, weights = with_altered_routes(collected.rollouts.groups), copy.deepcopy(model.state_dict())

    def full(module: Any, args: Any) -> None:
        if args[0].numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for small in (False, True):
        model.load_state_dict(weights)
        handle = model.get_input_embeddings().register_forward_pre_hook(full) if small else None
        recorder = DisturbingRecorder(model)
        learned = learn(replace(parts, optimizer=recorder), groups, step=1)
        if handle:
            handle.remove()
        assert learned is not None
        assert (learned.halvings > 0) == small
        found.append((recorder.gradients, learned.routed))
    (gradients, routed), (others, other) = found
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
    names = ["sampler_N", "load_LE"]
    if mini_batches > 1:
        names += ["flipped_N", "native_N", "update_N"]
    for name in names:
        assert torch.equal(getattr(routed, name), getattr(other, name)), name
    assert routed is not None
    assert other is not None
    assert other.balance_losses == pytest.approx(routed.balance_losses, rel=1e-5)
    assert (other.update_N > 0).any()

"""Completions with advantage 0 are not computed. Gradients, denominators and what is trained stay the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_optimizer import FakeOptimizer
from torch import Tensor

import gspo
from gspo.clock import Clock
from gspo.config import Config
from gspo.context import RunContext
from gspo.learner import forward
from gspo.learner.batch import loss_weights, plan_batch, prepare_batch
from gspo.learner.optimizer import Update
from gspo.objectives.adaptive_clip import AdaptiveClip
from gspo.objectives.advantage import advantage_rule
from gspo.objectives.samples import train_samples
from gspo.objectives.sequences import Sequences, Tokens
from gspo.objectives.table import TABLE
from gspo.objectives.table import objective as build
from gspo.record.alarms import active_alarms
from gspo.record.metrics import rollout_records, step_metrics
from gspo.record.run_dir import read_jsonl, read_metrics
from gspo.reduction import combined
from gspo.rollout.gather import CollectResult, RolloutState
from gspo.step import collect, learn
from gspo.trainer import resume, train
from gspo.types import Group

SKIPPING = [name for name, o in TABLE.items() if not o.needs_zero_advantage and o.advantage.scope == "group"]
"""Objectives of the table that compare within a group and do not need completions with advantage 0."""


class Sgd(FakeOptimizer):
    """Replaces the optimizer: keeps the gradient of every update and takes a plain step along it."""

    def __init__(self, model: Any) -> None:
        self.model, self.updates = model, 0
        self.gradients: list[Tensor] = []

    def step(self, *, loss_finite: bool, **weights: Any) -> Update:
        assert loss_finite
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        self.gradients.append(torch.cat([g.flatten() for g in grads]).clone())
        with torch.no_grad():
            for weight, gradient in zip(self.model.parameters(), grads, strict=True):
                weight -= 0.3 * gradient
        self.model.zero_grad()
        return Update(applied=True, grad_norm=float(self.gradients[-1].norm()), learning_rate=0.3)


def uniform(groups: Sequence[Group], which: Sequence[int]) -> list[Group]:
    """The groups, with equal rewards in some of them."""
    return [
        replace(g, scores=[replace(s, reward=1.0) for s in g.scores]) if i in which else g for i, g in enumerate(groups)
    ]


def sampled(parts: RunContext) -> CollectResult:
    return collect(parts, RolloutState(), clock=Clock())


def computed(learned: Any) -> list[int]:
    """The sequences that were computed. A sequence is computed as a whole."""
    found_B = learned.tokens.sequences.mean(learned.computed_N.double())
    assert set(found_B.tolist()) <= {0.0, 1.0}
    return list(found_B.nonzero().flatten().tolist())


def gradients_of(parts: RunContext, groups: Sequence[Group], **options: Any) -> tuple[list[Tensor], Any]:
    """The gradient of every update, and the result; the weights are restored."""
    model = parts.policy.model
    weights = copy.deepcopy(model.state_dict())
    recorder = Sgd(model)
    learned = learn(replace(parts, optimizer=recorder), groups, step=1, **options)
    model.load_state_dict(weights)
    return recorder.gradients, learned


@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize("budget", [1, 60, 10**6])
def test_gradients_are_those_of_computing_everything(
    name: str, budget: int, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(f"learner.micro_batch_tokens={budget}", "rollout.prompts=6", "learner.mini_batches=3"))
    parts.policy.model.double()
    # A length penalty would separate completions with equal rewards.
    parts = replace(parts, objective=build(name, **({"shape": "none"} if TABLE[name].shape != "none" else {})))
    groups = uniform(sampled(parts).rollouts.groups, [0, 3, 4])
    expected, everything = gradients_of(parts, groups, complete=True)
    found, learned = gradients_of(parts, groups)
    assert everything.computed_N.all()
    assert computed(learned) == [i for i, a in enumerate(everything.advantage_B.tolist()) if a]
    assert not any(learned.samples[i].group in (0, 3, 4) for i in computed(learned))
    assert (everything.ratio_N[learned.computed_N] != 1).any() or parts.objective.ratio.__name__ == "none"
    assert len(expected) == 3
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6 * float(a.abs().max()) + 1e-12)
    assert max(float(g.abs().max()) for g in found) > 1e-4
    torch.testing.assert_close(learned.advantage_B, everything.advantage_B, rtol=0, atol=0)
    for a, b in zip(everything.losses, learned.losses, strict=True):
        assert float(b.policy) == pytest.approx(float(a.policy), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["gspo", "dapo", "dr_grpo", "rloo"])
def test_weights_and_updates_are_those_of_all_completions(
    name: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny("learner.mini_batches=2"))
    objective = build(name)
    samples = train_samples(uniform(sampled(parts).rollouts.groups, [1, 2]), objective, max_tokens=10)
    plans = [plan_batch(parts, samples, 1, ids) for ids in ((), {0, 1, 5, 9}, set(range(len(samples))))]
    for plan in plans[1:]:
        assert plan.sequence_ids == plans[0].sequence_ids
        for update in range(2):
            assert torch.equal(loss_weights(objective, plan, update), loss_weights(objective, plans[0], update))
    assert sorted(s for ids in plans[1].sequence_ids for s in ids) == list(range(len(samples)))
    in_micro_batches = {s for update in plans[1].updates for micro in update for s in micro.sequence_ids}
    assert in_micro_batches == set(range(len(samples))) - {0, 1, 5, 9}
    assert plans[2].updates == ((), ())


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
def test_nothing_is_computed_for_them_and_update_0_has_no_old_forward(
    model: str, mini_batches: int, tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"model.build={model}", f"learner.mini_batches={mini_batches}", "learner.micro_batch_tokens=60")
    parts = parts_of(tiny(*settings))
    groups = uniform(sampled(parts).rollouts.groups, [1])
    plain = forward.completion_logprobs
    seen: dict[bool, list[int]] = {True: [], False: []}

    def counting(model: Any, batch: Any, *args: Any, **options: Any) -> Any:
        seen[torch.is_grad_enabled()] += batch.sequence_ids
        return plain(model, batch, *args, **options)

    monkeypatch.setattr(forward, "completion_logprobs", counting)
    learned = learn(parts, groups, step=1)
    assert learned is not None
    rows = [i for i, a in enumerate(learned.advantage_B.tolist()) if a]
    assert not any(learned.samples[i].group == 1 for i in rows)
    assert sorted(seen[True]) == rows == computed(learned)
    first = plan_batch(parts, learned.samples, 1).sequence_ids[0]
    assert sorted(seen[False]) == [i for i in rows if i not in first]
    assert (len(seen[False]) == 0) == (mini_batches == 1)
    if learned.routed:
        assert (learned.routed.update_N[~learned.computed_N] == -1).all()
        length = sum(len(learned.samples[i].prompt.token_ids) for i in rows)
        length += sum(len(learned.samples[i].completion.token_ids) for i in rows)
        assert learned.routed.load_LE.sum() == learned.routed.choices * length


NEEDED = {
    "KL in the loss": ("objective.kl=0.1",),
    "KL in the reward": ("objective.kl=0.1", "objective.kl_in=reward"),
    "entropy bonus": ("objective.entropy=0.01",),
    "balance loss": ("model.build=tiny_moe", "routing.balance_loss=0.01"),
    "clip_cov": ("objective.name=clip_cov",),
    "kl_cov": ("objective.name=kl_cov",),
}


@pytest.mark.parametrize("case", NEEDED)
def test_they_are_computed_where_they_matter(case: str, tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny(*NEEDED[case]))
    parts = replace(parts, reference=copy.deepcopy(parts.policy.model) if parts.objective.kl else None)
    collected = sampled(parts)
    learned = learn(parts, uniform(collected.rollouts.groups, [0, 1, 2, 3]), step=1)
    assert learned is not None
    assert learned.computed_N.all()
    assert combined([step_metrics(parts.objective, collected, learned)])["learner/uncomputed_fraction"] == 0


def test_an_advantage_of_0_among_others_of_its_group_or_batch(tiny: Callable[..., Config], parts_of: Any) -> None:
    @advantage_rule("batch")
    def minus_one(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
        return reward_B - 1.0

    parts = parts_of(tiny())
    parts.policy.model.double()
    groups = [
        replace(g, scores=[replace(s, reward=float(i % 3)) for i, s in enumerate(g.scores)])
        for g in sampled(parts).rollouts.groups
    ]
    parts = replace(parts, objective=replace(parts.objective, advantage=minus_one))
    expected, _ = gradients_of(parts, groups, complete=True)
    found, learned = gradients_of(parts, groups)
    uncomputed = [i for i, s in enumerate(learned.samples) if s.score.reward == 1.0]
    assert uncomputed
    assert sorted({*range(len(learned.samples))} - {*computed(learned)}) == uncomputed
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6 * float(a.abs().max()))


@pytest.mark.parametrize("name", gspo.objective_names())
def test_every_trust_region_says_whether_advantage_0_has_a_gradient(name: str) -> None:
    """By value, gradient and statistics: with advantage 0 and any ratio, the term of a token is exactly 0."""
    objective = TABLE[name]
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(60, generator=generator).requires_grad_()
    old, sampler = (torch.randn(60, generator=generator) for _ in range(2))
    tokens = Tokens(
        logp_N=logp,
        logp_old_N=old,
        logp_sampler_N=sampler,
        advantage_N=torch.zeros(60),
        sequences=Sequences(torch.arange(60) // 6, 10),
        selected_N=torch.arange(60) % 4 == 0,
    )
    term_N = objective.trust_region(tokens, objective.ratio(tokens)).objective_N
    (gradient,) = torch.autograd.grad(term_N.sum(), logp, allow_unused=True)
    if objective.trust_region.needs_zero_advantage:
        assert objective.trust_region.selects_tokens
    else:
        assert not term_N.any()
        assert gradient is None or not gradient.any()


# ---------------------------------------------------------------------------- nothing to compute


@pytest.mark.parametrize(
    "settings", [(), ("model.build=tiny_moe",), ("learner.mini_batches=1", "model.dtype=bfloat16")]
)
def test_an_update_without_a_gradient_is_stepped_as_one_of_0(
    settings: Sequence[str], tiny: Callable[..., Config], parts_of: Any
) -> None:
    """Momentum still moves the weights, moments decay, and the schedule advances."""
    states = []
    for complete in (False, True):
        parts = parts_of(tiny(*settings, "learner.weight_decay=0.1", run_dir=f"run{complete}"))
        groups = sampled(parts).rollouts.groups
        learn(parts, groups, step=1)
        before = copy.deepcopy(parts.policy.model.state_dict())
        forwards: list[int] = []
        hook = parts.policy.model.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        learned = learn(parts, uniform(groups, range(len(groups))), step=2, complete=complete)
        hook.remove()
        assert learned is not None
        assert all(u.applied and u.grad_norm == 0 for u in learned.updates)
        assert bool(forwards) == complete
        after = parts.policy.model.state_dict()
        assert any(not torch.equal(before[k], after[k]) for k in before), "momentum moves the weights"
        states.append({**after, **parts.optimizer.state(), "updates": torch.tensor(parts.optimizer.updates)})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
def test_metrics_that_need_log_probs_are_absent_if_nothing_is_computed(
    model: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(f"model.build={model}"))
    collected = sampled(parts)
    every = uniform(collected.rollouts.groups, range(9))
    collected = replace(collected, rollouts=replace(collected.rollouts, groups=tuple(every)))
    learned = learn(parts, every, step=1)
    found = combined([step_metrics(parts.objective, collected, learned)])
    for key in found:
        assert not key.startswith(("ratio/", "mismatch/", "entropy/", "noise/", "kl/", "routing/", "clip/fraction"))
    assert found["learner/uncomputed_fraction"] == 1
    assert found["samples/trained"] == 16
    assert found["tokens/trained"] == sum(len(c.token_ids) for g in every for c in g.completions)
    assert found["loss/policy"] == found["grad/norm"] == found["advantage/std"] == 0
    assert not any(isinstance(v, float) and math.isnan(v) for v in found.values())
    rows = [{"step": i, **found} for i in range(1, 9)]
    assert [alarm.name for alarm in active_alarms(rows, 5)] == ["uniform rewards"]


def test_the_engines_log_probs_are_checked_on_a_mini_batch_that_is_computed(
    tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny("learner.old_logp=sampler", "rollout.prompts=4", "learner.mini_batches=2"))
    groups = sampled(parts).rollouts.groups
    samples = train_samples(groups, parts.objective, max_tokens=10)
    first = {samples[i].group for i in plan_batch(parts, samples, 1).sequence_ids[0]}
    learned = learn(parts, uniform(groups, sorted(first)), step=1)
    assert learned is not None
    assert len(learned.log_rho_M) == int(learned.computed_N.sum()) < len(learned.computed_N)
    assert learned.log_rho_M.abs().max() < 1e-4
    nothing = learn(parts, uniform(groups, range(9)), step=2)
    assert nothing is not None
    assert len(nothing.log_rho_M) == 0


# ---------------------------------------------------------------------------- readers


def test_metrics_are_over_computed_completions(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("learner.learning_rate=0.01"))
    collected = sampled(parts)
    groups = uniform(collected.rollouts.groups, [2])
    learned = learn(parts, groups, step=1)
    assert learned is not None
    found = combined([step_metrics(parts.objective, collected, learned)])
    known = learned.computed_N
    log_ratio = (learned.tokens.logp_N - learned.tokens.logp_old_N)[known]
    assert found["ratio/token_log_std"] == pytest.approx(float(log_ratio.std(correction=0)), rel=1e-5)
    assert found["clip/fraction_tokens"] == pytest.approx(float(learned.clipped_N[known].double().mean()))
    assert found["learner/uncomputed_fraction"] == pytest.approx(1 - float(known.double().mean()))
    assert found["tokens/trained"] == len(known)
    assert found["entropy/mean"] == pytest.approx(float(learned.entropy_M.mean()), rel=1e-6)
    assert len(learned.entropy_M) == int(known.sum())
    for name in ("logp_N", "logp_old_N"):
        assert torch.equal(torch.isnan(getattr(learned.tokens, name)), ~known)
    collected = replace(collected, rollouts=replace(collected.rollouts, groups=tuple(groups)))
    records = list(rollout_records(parts.objective, collected, learned, routes=False))
    fields = {"sequence_ratio", "clipped_fraction", "clipped_tokens", "logp_old", "logp_new"}
    assert len(computed(learned)) < len(records)
    for i, record in enumerate(records):
        assert record["trained"]
        if i not in computed(learned):
            assert record["computed"] is False
            assert record["advantage"] == 0
            assert not fields & record.keys()
        else:
            assert "computed" not in record
            assert all(math.isfinite(v) for v in (*record["logp_old"], *record["logp_new"]))


def test_the_adaptive_clip_range_counts_all_trained_tokens(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("learner.mini_batches=4"))
    groups = uniform(sampled(parts).rollouts.groups, [2])
    weights = copy.deepcopy(parts.policy.model.state_dict())
    scales = []
    for complete in (False, True):
        parts.policy.model.load_state_dict(weights)
        recorder = Sgd(parts.policy.model)
        learned = learn(replace(parts, optimizer=recorder), groups, step=1, complete=complete)
        assert learned is not None
        adaptive = AdaptiveClip(target=0.02, sides=("clip_low", "clip_high"))
        scales.append(adaptive.next_scale(parts.objective, 1.0, learned.tokens))
    assert scales[0] != 1
    assert scales[0] == pytest.approx(scales[1], rel=1e-3)


def test_a_complete_batch_has_log_probs_of_all_completions(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny())
    samples = train_samples(uniform(sampled(parts).rollouts.groups, [0, 1]), parts.objective, max_tokens=10)
    batch = prepare_batch(parts, samples, step=1, complete=True)
    assert batch.old.computed_N.all()
    assert not torch.isnan(batch.tokens.logp_old_N).any()


SOME = """
def some(prompts, completions, **columns):
    mixed = [len(p) % 2 == 0 for p in prompts]
    return [float(len(c) % 3) if m else 1.0 for m, c in zip(mixed, completions)]
"""


def test_a_resumed_run_is_bitwise_identical(tiny: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(SOME)
    settings = (f'reward.functions=["{tmp_path}/some.py:some"]', "rollout.prompts=6", "learner.mini_batches=3")
    whole = train(tiny(*settings, "steps=4", run_dir="whole"), display).run
    train(tiny(*settings, "steps=2", run_dir="part"), display)
    part = tmp_path / "part"
    resume(part, display, steps=4)
    rows = read_metrics(whole)
    assert any(0 < row.get("learner/uncomputed_fraction", 0) < 1 for row in rows)
    assert read_metrics(part) == rows
    for step in range(1, 5):
        assert read_jsonl(part / "rollouts" / f"{step:06d}.jsonl") == read_jsonl(
            whole / "rollouts" / f"{step:06d}.jsonl"
        )
    weights = [next((run / "checkpoints" / "000004").glob("*.safetensors")).read_bytes() for run in (whole, part)]
    assert weights[0] == weights[1]

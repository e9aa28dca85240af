"""A training step on a real, tiny model: its gradient, and what must not change it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_optimizer import FakeOptimizer

import gspo
from gspo.clock import Clock
from gspo.config import Config
from gspo.context import RunContext
from gspo.learner.batch import OldLogprobs, TrainBatch, plan_batch
from gspo.learner.forward import NoRouting, completion_logprobs, plan_logprobs
from gspo.learner.plan import make_plan
from gspo.model.micro_batch import TokenSequence
from gspo.objectives.advantage import advantage_rule
from gspo.objectives.samples import train_samples
from gspo.objectives.sequences import Sequences
from gspo.objectives.table import objective as build
from gspo.rollout.gather import RolloutState
from gspo.step import accumulate_gradients, collect, learn
from gspo.types import Group, StopReason

RUN_OBJECTIVES = [name for name in gspo.objective_names() if name != "ppo_clip"]


def groups_of(parts: RunContext) -> tuple[Group, ...]:
    return collect(parts, RolloutState(), clock=Clock()).rollouts.groups


class GradientRecorder(FakeOptimizer):
    """Replaces the optimizer: records the gradient of every step and changes no weight."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.updates = 0
        self.gradients: list[Any] = []

    def step(self, *, loss_finite: bool, **weights: Any) -> Any:
        self.gradients.append(
            torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).clone()
        )
        self.model.zero_grad()
        from gspo.learner.optimizer import Update

        return Update(applied=True, grad_norm=float(self.gradients[-1].norm()), learning_rate=0.0)


def settings_for(name: str) -> dict[str, Any]:
    """At this size the selection of a few tokens would be empty, so widen it."""
    wide = {"clip_cov": {"select_fraction": 0.2, "cov_low": 0.0}, "kl_cov": {"select_fraction": 0.2}}
    return wide.get(name, {})


@pytest.mark.parametrize("name", RUN_OBJECTIVES)
def test_the_gradient_does_not_depend_on_micro_batches(name: str, tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny())
    parts.policy.model.double()
    objective = build(name, **settings_for(name))
    groups = groups_of(parts)
    gradients = []
    for variant in range(4):
        # A new plan of the same sequences with another token budget and another order. Old log-probs and advantages
        # are the same values, looked up by sequence.
        recorder = GradientRecorder(parts.policy.model)
        batch = _batch(parts, objective, groups, budget=[10**9, 1, 40, 90][variant], shuffle=variant)
        context = replace(parts, objective=objective, optimizer=recorder)
        recorder.step(loss_finite=accumulate_gradients(context, batch, 0).finite)
        gradients.append(recorder.gradients[0])
    assert gradients[0].abs().max() > 1e-4
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-6, atol=1e-9)


def _batch(parts: RunContext, objective: Any, groups: tuple[Group, ...], *, budget: int, shuffle: int) -> Any:
    from gspo.objectives.advantage import apply_rule
    from gspo.objectives.sequences import Tokens

    samples = train_samples(groups, objective, max_tokens=10)
    rows = [TokenSequence(prompt_ids=r.prompt.token_ids, completion_ids=r.completion.token_ids) for r in samples]
    group_ids = [r.group for r in samples]
    plan = make_plan(rows, group_ids, mini_batches=1, token_budget=budget, pad_id=0, seed=str(shuffle))
    micro = list(plan.updates[0])
    random.Random(shuffle).shuffle(micro)
    plan = replace(plan, updates=(tuple(micro),))
    logp_old, _ = plan_logprobs(parts.policy.model, plan, 1.0, parts.policy.device)
    generator = torch.Generator().manual_seed(1)
    logp_old = logp_old + 0.05 * torch.randn(logp_old.shape, generator=generator)
    advantage = apply_rule(objective.advantage, torch.tensor([r.reward for r in samples]), group_ids)
    sequences = Sequences(plan.sequence_N, len(rows))
    tokens = Tokens(
        logp_N=logp_old,
        logp_old_N=logp_old,
        logp_sampler_N=logp_old - 0.01,
        logp_ref_N=logp_old + 0.1,
        advantage_N=sequences.expand(advantage),
        sequences=sequences,
    )
    old = OldLogprobs(
        logp_N=logp_old,
        logp_sampler_N=logp_old,
        learner_N=logp_old,
        entropy_N=logp_old,
        computed_N=plan.computed_N,
    )
    return TrainBatch(
        plan=plan,
        samples=tuple(samples),
        tokens=tokens,
        reward_B=advantage,
        old=old,
        temperature=1.0,
        routing=NoRouting(),
        only_rounding=False,
        seed="3",
    )


@pytest.mark.parametrize("name", RUN_OBJECTIVES)
def test_every_objective_trains(name: str, tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny(f"objective.name={name}"))
    if parts.objective.kl:
        parts = replace(parts, reference=parts.policy.model)
    before = [p.clone() for p in parts.policy.model.parameters()]
    result = learn(parts, groups_of(parts), step=1)
    assert result is not None
    assert all(u.applied and u.grad_norm > 0 for u in result.updates)
    assert any(not torch.equal(a, b) for a, b in zip(before, parts.policy.model.parameters(), strict=True))


def test_the_ratio_is_exactly_one_at_the_first_update(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("learner.mini_batches=4", "learner.micro_batch_tokens=60"))
    result = learn(parts, groups_of(parts), step=1)
    assert result is not None
    first = {row for micro in _plan(parts, result).updates[0] for row in micro.sequence_ids}
    in_first = torch.tensor([int(s) in first for s in result.tokens.sequences.index_N])
    assert (result.ratio_N[in_first] == 1.0).all()
    assert torch.equal(result.tokens.logp_N[in_first], result.tokens.logp_old_N[in_first])
    assert (result.ratio_N[~in_first] != 1.0).any()


def _plan(parts: RunContext, result: Any) -> Any:
    return plan_batch(parts, result.samples, 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampler_and_learner_agree_at_any_temperature(
    temperature: float, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(f"rollout.temperature={temperature}"))
    result = learn(parts, groups_of(parts), step=1)
    assert result is not None
    gap = (result.tokens.logp_old_N - result.tokens.logp_sampler_N).abs().max()
    assert gap < 1e-5


def test_the_eos_token_is_trained_on_and_padding_is_not(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny())
    groups = groups_of(parts)
    result = learn(parts, groups, step=1)
    assert result is not None
    lengths = [len(r.completion.token_ids) for r in result.samples]
    assert result.tokens.sequences.length_B.tolist() == lengths
    ended = [r for r in result.samples if r.completion.stop is StopReason.EOS]
    assert ended
    assert all(r.completion.token_ids[-1] in parts.policy.stop_ids for r in ended)


def test_padding_does_not_affect_log_probs(tiny: Callable[..., Config], parts_of: Any) -> None:
    model = parts_of(tiny()).policy.model.double()
    rows = [
        TokenSequence(prompt_ids=(5, 6), completion_ids=(7, 8, 9)),
        TokenSequence(prompt_ids=(5,) * 20, completion_ids=(6,) * 9),
    ]
    together = make_plan(rows, [0, 1], mini_batches=1, token_budget=999, pad_id=3, seed="")
    other_pad = make_plan(rows, [0, 1], mini_batches=1, token_budget=999, pad_id=11, seed="")
    alone = make_plan(rows[:1], [0], mini_batches=1, token_budget=999, pad_id=3, seed="")
    device = torch.device("cpu")
    values = [plan_logprobs(model, plan, 1.0, device)[0][:3] for plan in (together, other_pad, alone)]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
    torch.testing.assert_close(values[0], values[2], rtol=0, atol=1e-6)


def test_log_probs_match_a_plain_forward(tiny: Callable[..., Config], parts_of: Any) -> None:
    model = parts_of(tiny()).policy.model
    row = TokenSequence(prompt_ids=(5, 6, 7), completion_ids=(8, 9, 1))
    plan = make_plan([row], [0], mini_batches=1, token_budget=999, pad_id=0, seed="")
    with torch.no_grad():
        logp, entropy = completion_logprobs(model, plan.updates[0][0], 0.7)
        logits = model(torch.tensor([[5, 6, 7, 8, 9, 1]])).logits[0].double() / 0.7
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(
        logp.double(), expected[torch.tensor([2, 3, 4]), torch.tensor([8, 9, 1])], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1)[2:5], rtol=0, atol=1e-5)
    assert logp.dtype == torch.float32


def test_groups_stay_together_and_every_sequence_is_used_once() -> None:
    rows = [TokenSequence(prompt_ids=(1,) * (1 + i % 5), completion_ids=(2,) * (1 + i % 7)) for i in range(24)]
    groups = [i // 4 for i in range(24)]
    plan = make_plan(rows, groups, mini_batches=3, token_budget=30, pad_id=0, seed="x")
    used = [[row for micro in step for row in micro.sequence_ids] for step in plan.updates]
    assert sorted(r for step in used for r in step) == list(range(24))
    for step in used:
        assert len(step) == 8
        assert all(sum(groups[r] == g for r in step) in (0, 4) for g in range(6))
    for step in plan.updates:
        for micro in step:
            assert micro.input_ids.numel() <= 30 or len(micro.sequence_ids) == 1
            for n in range(len(micro.target_N)):
                assert micro.input_ids.flatten()[micro.output_N[n] + 1] == micro.target_N[n]


def test_unscored_completions_are_in_no_mean_and_no_denominator(tiny: Callable[..., Config], parts_of: Any) -> None:
    from gspo.types import Score, Status

    parts = parts_of(tiny())
    groups = list(groups_of(parts))
    unscored = Score(status=Status.UNSCORED, failure="raised: x")
    marked = [replace(g, scores=[unscored, *g.scores[1:]]) for g in groups]
    without = [replace(g, completions=g.completions[1:], scores=g.scores[1:]) for g in groups]
    recorder = GradientRecorder(parts.policy.model)
    fake = replace(parts, optimizer=recorder)
    learn(fake, marked, step=1)
    learn(fake, without, step=1)
    assert torch.equal(recorder.gradients[0], recorder.gradients[2])
    assert torch.equal(recorder.gradients[1], recorder.gradients[3])
    # A completion that is the only scored one of its group is excluded too.
    alone = [replace(groups[0], scores=[groups[0].scores[0], unscored, unscored, unscored])]
    assert train_samples(alone, parts.objective, max_tokens=10) == []
    assert learn(fake, alone, step=1) is None


def test_overlong_shaping(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny())
    groups = groups_of(parts)
    truncated = [c for g in groups for c in g.completions if c.stop is StopReason.LENGTH]
    assert truncated
    filtered = train_samples(groups, build("gspo", shape="overlong_filter"), max_tokens=10)
    assert all(r.completion.stop is StopReason.EOS for r in filtered)
    soft = train_samples(groups, build("gspo", shape="soft_overlong", overlong_cache=5), max_tokens=10)
    for r in soft:
        assert r.score.reward is not None
        assert r.reward == pytest.approx(r.score.reward + min(0.0, (5 - len(r.completion.token_ids)) / 5))


def test_kl_in_the_reward_reaches_the_advantage(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("objective.name=rloo", "objective.kl=0.5", "objective.kl_in=reward"))
    other = parts_of(tiny("seed=5", run_dir="other")).policy.model
    parts = replace(parts, reference=other, optimizer=GradientRecorder(parts.policy.model))
    result = learn(parts, groups_of(parts), step=1)
    assert result is not None
    k1 = result.tokens.sequences.sum(result.tokens.logp_old_N - result.tokens.logp_ref_N)
    reward = torch.tensor([r.reward for r in result.samples]) - 0.5 * k1
    expected = gspo.group_advantage("rloo", reward, [r.group for r in result.samples])
    torch.testing.assert_close(result.advantage_B, expected, rtol=1e-4, atol=1e-5)


def test_reinforce_pp_whitens_returns_to_go_over_all_tokens(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("objective.name=reinforce_pp", "objective.kl=0.3"))
    other = parts_of(tiny("seed=5", run_dir="other")).policy.model
    parts = replace(parts, reference=other, optimizer=GradientRecorder(parts.policy.model))
    result = learn(parts, groups_of(parts), step=1)
    assert result is not None
    returns = []
    at = 0
    k1 = (result.tokens.logp_old_N - result.tokens.logp_ref_N).double().tolist()
    for r in result.samples:
        n = len(r.completion.token_ids)
        returns += [r.reward - 0.3 * sum(k1[at + t : at + n]) for t in range(n)]
        at += n
    expected = torch.tensor(returns, dtype=torch.float64)
    expected = (expected - expected.mean()) / expected.std()
    torch.testing.assert_close(result.tokens.advantage_N.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_new_advantage_rule_over_the_batch_is_used(tiny: Callable[..., Config], parts_of: Any) -> None:
    @advantage_rule("batch")
    def halved(reward_B: torch.Tensor, group_B: torch.Tensor, groups: int) -> torch.Tensor:
        return 0.5 * (reward_B - reward_B.mean())

    parts = parts_of(tiny())
    learned = learn(replace(parts, objective=replace(parts.objective, advantage=halved)), groups_of(parts), step=1)
    assert learned is not None
    expected = 0.5 * (learned.reward_B - learned.reward_B.mean())
    assert expected.abs().max() > 0
    torch.testing.assert_close(learned.advantage_B.double(), expected, rtol=1e-5, atol=1e-6)

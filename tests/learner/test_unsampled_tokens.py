"""Completions in which the model did not sample every token, as with the result of a tool in the middle.

The naive computation here runs each sequence alone, without packing, padding or micro-batches, and follows the papers'
formulas over the sampled positions only. Attention sees all tokens.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_optimizer import FakeOptimizer
from torch import Tensor

from gspo.config import Config
from gspo.context import RunContext
from gspo.learner.batch import TrainBatch
from gspo.learner.optimizer import Update
from gspo.model.routing import ForcedExperts
from gspo.objectives.samples import TrainSample
from gspo.step import learn
from gspo.types import Completion, Group, Routes, Score, Status, StopReason

MASKS = (
    (1, 1, 1, 0, 0, 0, 1, 1),  # a tool result in the middle
    (1, 1, 0, 1, 0, 0, 1, 1, 1),  # two of them
    (1, 1, 1, 1, 1),  # nothing but its own tokens
    (0, 0, 1, 1, 1, 1, 1, 1, 1),  # given tokens first
    (1, 1, 1, 0, 0, 0, 0, 0),  # given tokens last
    (1, 0, 1, 1, 0, 1, 1, 0, 1),
)


class Sgd(FakeOptimizer):
    """Replaces the optimizer: keeps the gradient of every update and takes a plain step along it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.updates = 0
        self.gradients: list[Tensor] = []

    def step(self, *, loss_finite: bool, **weights: Any) -> Update:
        assert loss_finite
        self.gradients.append(flat_gradient(self.model))
        with torch.no_grad():
            for weight in self.model.parameters():
                weight -= 0.3 * weight.grad
        self.model.zero_grad()
        self.updates += 1
        return Update(applied=True, grad_norm=float(self.gradients[-1].norm()), learning_rate=0.3)


def in_double(parts: RunContext) -> Any:
    """The model in float64, with an implementation of experts that supports it."""
    parts.policy.model.set_experts_implementation("eager")
    return parts.policy.model.double()


def flat_gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def groups_of(parts: RunContext) -> list[Group]:
    """Two groups of three completions with random tokens, rewards and sampler log-probs."""
    rng = random.Random(5)
    vocabulary = parts.policy.model.get_input_embeddings().num_embeddings
    groups = []
    for number in range(2):
        prompt = parts.problems.train[number]
        completions = [
            Completion(
                prompt_id=prompt.id,
                sample=sample,
                token_ids=tuple(rng.randrange(vocabulary) for _ in mask),
                text="",
                logp_sampler=tuple(rng.uniform(-5, -1) for own in mask if own),
                stop=StopReason.LENGTH,
                version=0,
                sampled=() if all(mask) else tuple(map(bool, mask)),
            )
            for sample, mask in enumerate(MASKS[3 * number : 3 * number + 3])
        ]
        scores = [Score(status=Status.SCORED, reward=rng.uniform(0, 1)) for _ in completions]
        groups.append(Group(prompt=prompt, completions=completions, scores=scores))
    return groups


def naive_logprobs(model: Any, sample: TrainSample, temperature: float) -> Tensor:
    """Log-probs of the sampled tokens, one sequence at a time."""
    prompt, completion = sample.prompt.token_ids, sample.completion
    logits = model(input_ids=torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits / temperature, dim=-1)
    own = completion.sampled or (True,) * len(completion.token_ids)
    at = [len(prompt) + i for i, is_own in enumerate(own) if is_own]
    return torch.stack([logp[i - 1, (prompt + completion.token_ids)[i]] for i in at])


def shaped_reward(sample: TrainSample, objective: Any) -> float:
    assert sample.score.reward is not None
    if not objective.shape:
        return sample.score.reward
    # DAPO's ramp over the last 2 of 10 tokens: it counts sampled tokens.
    return sample.score.reward + max(-1.0, min(0.0, (8 - len(sample.completion.logp_sampler)) / 2))


def naive_loss(model: Any, old_model: Any, batch: TrainBatch, index: int, objective: Any) -> Tensor:
    """The loss of one update by the formulas of GSPO, and of DAPO with truncated importance sampling."""
    rewards = [shaped_reward(s, objective) for s in batch.samples]
    chosen = [i for micro in batch.plan.updates[index] for i in micro.sequence_ids]
    low, high = objective.trust_region.clip_low, objective.trust_region.clip_high
    terms = []
    for i in chosen:
        sample = batch.samples[i]
        members = [r for r, s in zip(rewards, batch.samples, strict=True) if s.group == sample.group]
        advantage = (rewards[i] - statistics.mean(members)) / statistics.stdev(members)
        logp = naive_logprobs(model, sample, batch.temperature)
        old = naive_logprobs(old_model, sample, batch.temperature).detach()
        if objective.name == "gspo":
            ratio = (logp - old).mean().exp()
            terms.append(torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage).expand(len(logp)))
        else:
            ratio = (logp - old).exp()
            weight = (old - torch.tensor(sample.completion.logp_sampler)).exp().clamp(max=2.0)
            terms.append(weight * torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
    if objective.name == "gspo":
        return -torch.stack([term.mean() for term in terms]).mean()
    return -torch.cat(terms).mean()


OBJECTIVES = {
    "gspo": ("objective.name=gspo", "objective.clip_low=3e-3", "objective.clip_high=4e-3"),
    "dapo": ("objective.name=dapo", "objective.mismatch=token_tis"),
}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_those_of_the_sampled_tokens(
    name: str, model: str, layout: str, tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "padded":
        monkeypatch.setattr("gspo.learner.batch.supports_packing", lambda model: False)
    settings = (f"model.build={model}", "rollout.temperature=0.8", "learner.micro_batch_tokens=60")
    full = ("rollout.prompts=2", "rollout.group_size=3")  # the groups below are a full batch
    parts = parts_of(tiny(*OBJECTIVES[name], *full, *settings))
    parts = replace(parts, optimizer=Sgd(in_double(parts)))
    before = copy.deepcopy(parts.policy.model)
    losses, gradients = [], []

    def compute_naively(batch: TrainBatch, index: int) -> None:
        assert batch.plan.packed == (layout == "packed")
        now = copy.deepcopy(parts.policy.model)
        loss = naive_loss(now, before, batch, index, parts.objective)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(flat_gradient(now))

    result = learn(parts, groups_of(parts), step=1, before_update=compute_naively)
    assert result is not None
    assert result.tokens.sequences.length_B.tolist() == [sum(mask) for mask in MASKS]
    assert (result.ratio_N != 1).any()
    assert len(losses) == 2
    for index in range(2):
        assert float(result.losses[index].total) == pytest.approx(losses[index], rel=1e-4, abs=1e-6)
        scale = float(gradients[index].abs().max())
        assert scale > 1e-3
        torch.testing.assert_close(parts.optimizer.gradients[index], gradients[index], rtol=0, atol=1e-4 * scale)


def routes_of(parts: RunContext, model: Any, group: Group) -> list[Routes]:
    """The experts that another model uses for every token but the last."""
    found = []
    for completion in group.completions:
        ids = torch.tensor([group.prompt.token_ids + completion.token_ids])[:, :-1]
        with parts.policy.routers.watch() as trace, torch.no_grad():
            model(input_ids=ids, use_cache=False)
        found.append(parts.policy.routers.pack(trace.used_ILK))
    return found


def forced_logprobs(parts: RunContext, sample: TrainSample) -> Tensor:
    """Log-probs of the sampled tokens with the experts of the sampler."""
    routers = parts.policy.routers
    chosen_ILK = routers.unpack(sample.completion.routes)
    chosen_ILK = torch.cat([chosen_ILK, torch.zeros_like(chosen_ILK[:1])])
    known_I = torch.arange(len(chosen_ILK)) < len(chosen_ILK) - 1
    with routers.watch(ForcedExperts(chosen_ILK=chosen_ILK, known_I=known_I)), torch.no_grad():
        return naive_logprobs(parts.policy.model, sample, 1.0)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_routing_replay_finds_the_experts_of_every_token(
    layout: str, tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "padded":
        monkeypatch.setattr("gspo.learner.batch.supports_packing", lambda model: False)
    full = ("rollout.prompts=2", "rollout.group_size=3")
    parts = parts_of(tiny("model.build=tiny_moe", "routing.replay=sampler", *full))
    model = in_double(parts)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    routes = [routes_of(parts, model, group) for group in groups_of(parts)]
    model.load_state_dict(weights)
    groups = [
        replace(g, completions=[replace(c, routes=r) for c, r in zip(g.completions, found, strict=True)])
        for g, found in zip(groups_of(parts), routes, strict=True)
    ]
    result = learn(replace(parts, optimizer=Sgd(model)), groups, step=1)
    assert result is not None
    model.load_state_dict(weights)
    expected = torch.cat([forced_logprobs(parts, sample) for sample in result.samples])
    torch.testing.assert_close(result.tokens.logp_old_N, expected.float(), rtol=1e-5, atol=1e-5)
    assert result.routed is not None
    assert result.routed.sampler_N.tolist() == [0] * sum(map(sum, MASKS))
    assert result.routed.flipped_N.tolist() == [0] * sum(map(sum, MASKS))
    assert (result.routed.native_N > 0).any(), "without replay some experts differ"


def test_a_completion_without_sampled_tokens_is_not_trained_on(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny())
    group = groups_of(parts)[0]
    given = replace(group.completions[0], logp_sampler=(), sampled=(False,) * len(group.completions[0].token_ids))
    result = learn(parts, [replace(group, completions=[given, *group.completions[1:]])], step=1)
    assert result is not None
    assert [s.sample for s in result.samples] == [1, 2]

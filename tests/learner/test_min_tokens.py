"""`rollout.min_tokens`: the learner's log-probs are those of the distribution that was sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.clock import Clock
from gspo.config import Config
from gspo.context import RunContext
from gspo.learner import forward
from gspo.learner.batch import plan_batch, prepare_batch
from gspo.learner.forward import completion_logprobs, plan_logprobs
from gspo.objectives.samples import TrainSample, train_samples
from gspo.rollout.gather import RolloutState
from gspo.step import collect

SETTINGS = (
    "rollout.min_tokens=4",
    "rollout.max_tokens=8",
    "rollout.temperature=0.8",
    "learner.micro_batch_tokens=60",
    "objective.kl=0.1",
)


def samples_of(parts: RunContext) -> list[TrainSample]:
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.sampled
    return train_samples(groups, parts.objective, max_tokens=8)


@pytest.fixture(params=["packed", "padded"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "padded":
        monkeypatch.setattr("gspo.learner.batch.supports_packing", lambda model: False)
    return str(request.param)


@pytest.fixture(params=["fused", "logits"])
def head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without the LM head as a plain matrix."""
    if request.param == "logits":
        monkeypatch.setattr(forward, "lm_head", lambda model: None)
    return str(request.param)


def masked_logp(model: Any, sample: TrainSample, stop_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of one sequence, from a softmax without the end tokens at the first positions."""
    prompt, ids = sample.prompt.token_ids, sample.completion.token_ids
    logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.8
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[:4, list(stop_ids)] = True
    logp = logits.masked_fill(mask, -torch.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(mask, 0)).sum(-1)
    return logp.gather(1, torch.tensor(ids)[:, None])[:, 0], entropy


def test_engine_and_learner_agree(layout: str, head: str, tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny(*SETTINGS))
    parts = replace(parts, reference=parts.policy.model)
    samples = samples_of(parts)
    assert {len(s.completion.token_ids) for s in samples} >= {5, 8}
    batch = prepare_batch(parts, samples, step=1, complete=True)
    for logp_N in (batch.tokens.logp_old_N, batch.tokens.logp_ref_N):
        assert logp_N is not None
        torch.testing.assert_close(logp_N, batch.tokens.logp_sampler_N, rtol=0, atol=2e-5)
    unmasked = plan_batch(replace(parts, config=tiny(*SETTINGS[1:])), samples, 1)
    plain_N, _ = plan_logprobs(parts.policy.model, unmasked, 0.8, parts.policy.device)
    assert float((plain_N - batch.tokens.logp_sampler_N).abs().max()) > 1e-3, "the mask matters"


def test_values_and_gradients_are_those_of_a_masked_softmax(
    layout: str, head: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(*SETTINGS))
    samples = samples_of(parts)
    plan = plan_batch(parts, samples, 1)
    assert plan.packed == (layout == "packed")
    model = parts.policy.model.double()
    gain_N = torch.randn(2, plan.tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [torch.cat(part) for part in zip(*(masked_logp(model, s, parts.policy.stop_ids) for s in samples))]  # noqa: B905
    (gain_N * torch.stack(expected)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    for micro in (m for update in plan.updates for m in update):
        assert micro.excluded is not None
        values = completion_logprobs(model, micro, 0.8, entropy_gradient=True)
        for value, part in zip(values, expected, strict=True):
            torch.testing.assert_close(value, part[micro.at_N].float(), rtol=1e-5, atol=1e-5)
        (gain_N[:, micro.at_N] * torch.stack(values)).sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))


def test_without_min_tokens_nothing_is_excluded(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny(*SETTINGS[1:]))
    plan = plan_batch(parts, samples_of(parts), 1)
    assert all(micro.excluded is None for update in plan.updates for micro in update)

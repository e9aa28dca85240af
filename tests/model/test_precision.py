"""The claims of docs/precision.md: the dtype of each tensor when bfloat16 weights are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.clock import Clock
from gspo.config import Config, LearnerConfig
from gspo.learner.optimizer import Optimizer
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn


@pytest.fixture(scope="module", params=["tiny_dense", "tiny_moe"])
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_dtypes_of_training(
    tiny: Callable[..., Config], parts_of: Any, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(tiny(f"model.build={build}", "model.dtype=bfloat16", "learner.micro_batch_tokens=64"))
    seen: set[torch.dtype] = set()
    step = Optimizer.step

    def recording(self: Optimizer, **options: Any) -> Any:
        seen.update(p.grad.dtype for p in parts.policy.model.parameters() if p.grad is not None)
        return step(self, **options)

    monkeypatch.setattr(Optimizer, "step", recording)
    learned = learn(parts, collect(parts, RolloutState(), clock=Clock()).rollouts.groups, step=1)
    assert learned is not None
    assert seen == {torch.float32}
    weights = dict(parts.policy.model.named_parameters())
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    state = parts.optimizer.state()
    assert {v.dtype for k, v in state.items() if k.startswith(("exp_avg", "master"))} == {torch.float32}
    for name, weight in weights.items():
        assert torch.equal(weight, state[f"master/{name}"].bfloat16()), (
            "weights are the master weights rounded to nearest"
        )
    tokens = learned.tokens
    values = (tokens.logp_N, tokens.logp_old_N, tokens.logp_sampler_N, learned.entropy_M, learned.ratio_N)
    assert {v.dtype for v in values} == {torch.float32}
    assert learned.reward_B.dtype == torch.float64


def test_updates_too_small_for_bfloat16_accumulate() -> None:
    """Near 1, the spacing of bfloat16 is 2^-7; forty updates of 1e-4 are half of that."""
    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    optimizer = Optimizer(model, LearnerConfig(learning_rate=1e-4, spike=0.0), 100)
    for update in range(60):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(loss_finite=True)
        if update < 10:
            assert torch.equal(model.weight, torch.ones(1, 4, dtype=torch.bfloat16))
    assert (model.weight < 1).all()


def test_the_fused_update_on_a_cpu_is_adamw() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(16, 16), torch.randn(8, 16)
    twin = torch.nn.Linear(16, 16)
    twin.load_state_dict(model.state_dict())
    before = model.weight.detach().clone()
    config = LearnerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9, spike=0.0)
    ours = Optimizer(model, config, 100)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for _ in range(20):
        model(x).square().mean().backward()
        twin(x).square().mean().backward()
        ours.step(loss_finite=True)
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-6)
    assert (model.weight - before).abs().max() > 0.01, "the update must be large enough to reveal a difference"

"""One forward pass of the first micro-batch serves the old log-probs and the first update. Nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from patched_forward import patch_forward

from gspo.clock import Clock
from gspo.config import Config
from gspo.learner import batch as learner_batch
from gspo.learner.forward import NoRouting
from gspo.learner.routing_replay import RecordedRouting
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn

CASES = {
    "dense": (),
    "mixture of experts": ("model.build=tiny_moe",),
    "many micro-batches": ("learner.micro_batch_tokens=40",),
    "one update": ("learner.mini_batches=1",),
    "entropy bonus": ("objective.entropy=0.01",),
    "bfloat16": ("model.dtype=bfloat16",),
    "float16": ("model.dtype=float16",),
    "checkpointing": ("model.gradient_checkpointing=true",),
}


def train_on_batch(parts: Any, forwards: list[int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Result of one batch and the weights after it. Appends to `forwards` for each forward pass."""
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    hook = parts.policy.model.register_forward_hook(lambda *_: forwards.append(1))
    out = learn(parts, groups, step=1)
    hook.remove()
    return out, {k: v.clone() for k, v in parts.policy.model.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_results_are_bitwise_identical_with_one_fewer_forward_pass(
    tiny: Callable[..., Config], parts_of: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[list[int]] = [[], []]
    cached, weights = train_on_batch(parts_of(tiny(*CASES[case])), counts[0])
    for kind in (NoRouting, RecordedRouting):
        monkeypatch.setattr(kind, "repeats", property(lambda self: False))
    plain, expected = train_on_batch(parts_of(tiny(*CASES[case], run_dir="plain")), counts[1])
    assert len(counts[0]) == len(counts[1]) - 1
    assert all(torch.equal(weights[k], expected[k]) for k in expected)
    for name in ("logp_old_N", "logp_N"):
        assert torch.equal(getattr(cached.tokens, name), getattr(plain.tokens, name))
    for name in ("entropy_M", "ratio_N", "clipped_N"):
        assert torch.equal(getattr(cached, name), getattr(plain, name))
    assert [u.grad_norm for u in cached.updates] == [u.grad_norm for u in plain.updates]
    if cached.routed:
        assert all(torch.equal(v, vars(plain.routed)[k]) for k, v in vars(cached.routed).items() if torch.is_tensor(v))


@pytest.mark.parametrize(
    "override", ["routing.replay=old", "routing.replay=sampler", "routing.balance_loss=0.01", "objective.name=clip_cov"]
)
def test_features_that_need_more_from_the_forward_do_not_share_it(
    tiny: Callable[..., Config], parts_of: Any, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(tiny("model.build=tiny_moe", override))
    cached: list[Any] = []
    monkeypatch.setattr(learner_batch, "CachedForward", lambda *args: cached.append(args))
    train_on_batch(parts, [])
    assert cached == []


def test_a_forward_that_does_not_fit_with_its_autograd_graph_runs_without_it(
    tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_on_batch(parts_of(tiny()), [])[1]
    parts = parts_of(tiny(run_dir="full"))
    failures: list[int] = []

    def full_once(plain: Any) -> Any:
        def instead(*args: Any, **options: Any) -> Any:
            if not failures:
                failures.append(1)
                raise torch.OutOfMemoryError("full")
            return plain(*args, **options)

        return instead

    patch_forward(monkeypatch, full_once, training=True)
    found = train_on_batch(parts, [])[1]
    assert failures
    assert all(torch.equal(found[k], expected[k]) for k in expected)

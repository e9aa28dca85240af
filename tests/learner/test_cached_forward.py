"""The first micro-batch is computed once for the old log-probabilities and the first update: nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from patched_forward import patch_forward

from gspo.clock import Clock
from gspo.config import Config
from gspo.learner import old_logprobs
from gspo.learner.routing_replay import NoRouting, Routing
from gspo.step import collect, learn

CASES = {
    "dense": (),
    "mixture of experts": ("model.build=tiny_moe",),
    "many micro-batches": ("learner.micro_batch_tokens=40",),
    "one update": ("learner.mini_batches=1",),
    "entropy bonus": ("objective.entropy=0.01",),
    "bfloat16": ("model.dtype=bfloat16",),
    "checkpointing": ("model.gradient_checkpointing=true",),
}


def learned(parts: Any, forwards: list[int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """What a batch teaches, the weights after it, and how many forwards that took."""
    groups = collect(parts, step=1, cursor=0, clock=Clock()).gathered.groups
    hook = parts.policy.model.register_forward_hook(lambda *_: forwards.append(1))
    out = learn(parts, groups, step=1)
    hook.remove()
    return out, {k: v.clone() for k, v in parts.policy.model.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_the_same_to_the_bit_with_one_forward_less(
    tiny: Callable[..., Config], parts_of: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[list[int]] = [[], []]
    kept, weights = learned(parts_of(tiny(*CASES[case])), counts[0])
    for kind in (NoRouting, Routing):
        monkeypatch.setattr(kind, "repeats", property(lambda self: False))
    plain, expected = learned(parts_of(tiny(*CASES[case], run_dir="plain")), counts[1])
    assert len(counts[0]) == len(counts[1]) - 1
    assert all(torch.equal(weights[k], expected[k]) for k in expected)
    for name in ("logp_old_N", "logp_N"):
        assert torch.equal(getattr(kept.tokens, name), getattr(plain.tokens, name))
    for name in ("entropy_M", "ratio_N", "clipped_N"):
        assert torch.equal(getattr(kept, name), getattr(plain, name))
    assert [u.grad_norm for u in kept.updates] == [u.grad_norm for u in plain.updates]
    if kept.routed:
        assert all(torch.equal(v, vars(plain.routed)[k]) for k, v in vars(kept.routed).items() if torch.is_tensor(v))


@pytest.mark.parametrize(
    "override", ["routing.replay=old", "routing.replay=sampler", "routing.balance_loss=0.01", "objective.name=clip_cov"]
)
def test_what_has_more_to_do_gets_its_own_forward(
    tiny: Callable[..., Config], parts_of: Any, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, made = parts_of(tiny("model.build=tiny_moe", override)), []
    monkeypatch.setattr(old_logprobs, "CachedForward", lambda *given: made.append(given))
    learned(parts, [])
    assert made == []


def test_a_forward_that_does_not_fit_with_its_graph_is_run_without(
    tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = learned(parts_of(tiny()), [])[1]
    parts, failed = parts_of(tiny(run_dir="full")), []

    def full_once(plain: Any) -> Any:
        def instead(*given: Any, **options: Any) -> Any:
            if not failed:
                failed.append(1)
                raise torch.OutOfMemoryError("full")
            return plain(*given, **options)

        return instead

    patch_forward(monkeypatch, full_once, training=True)
    found = learned(parts, [])[1]
    assert failed
    assert all(torch.equal(found[k], expected[k]) for k in expected)

"""The training forwards of the first update give its old log-probs: one forward less per micro-batch, same results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from patched_forward import patch_forward

from gspo.clock import Clock
from gspo.config import Config
from gspo.learner.batch import plan_batch
from gspo.learner.forward import NoRouting, plan_logprobs
from gspo.learner.routing_replay import RecordedRouting
from gspo.objectives.samples import train_samples
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn

CASES = {
    "dense": (),
    "mixture of experts": ("model.build=tiny_moe",),
    "many micro-batches": ("learner.micro_batch_tokens=40",),
    "many micro-batches, mixture of experts": ("learner.micro_batch_tokens=40", "model.build=tiny_moe"),
    "one update": ("learner.mini_batches=1",),
    "entropy bonus": ("objective.entropy=0.01",),
    "mismatch correction": ("objective.name=dapo", "objective.mismatch=token_tis"),
    "bfloat16": ("model.dtype=bfloat16",),
    "checkpointing": ("model.gradient_checkpointing=true", "model.build=tiny_moe"),
}


def train_on_batch(parts: Any, forwards: list[int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Result of one batch and the weights after it. Appends to `forwards` for each forward pass."""
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    hook = parts.policy.model.register_forward_hook(lambda *_: forwards.append(1))
    out = learn(parts, groups, step=1)
    hook.remove()
    return out, {k: v.clone() for k, v in parts.policy.model.state_dict().items()}


def compute_all_old_log_probs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (NoRouting, RecordedRouting):
        monkeypatch.setattr(kind, "repeats", property(lambda self: False))


@pytest.mark.parametrize("case", CASES)
def test_results_are_bitwise_identical_to_those_of_separate_forwards(
    tiny: Callable[..., Config], parts_of: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(tiny(*CASES[case]))
    counts: list[list[int]] = [[], []]
    found, weights = train_on_batch(parts, counts[0])
    compute_all_old_log_probs_first(monkeypatch)
    plain, expected = train_on_batch(parts_of(tiny(*CASES[case], run_dir="plain")), counts[1])
    assert len(counts[1]) - len(counts[0]) == len(plan_batch(parts, found.samples, 1).updates[0])
    assert all(torch.equal(weights[k], expected[k]) for k in expected)
    for name in ("logp_old_N", "logp_N"):
        assert torch.equal(getattr(found.tokens, name), getattr(plain.tokens, name))
    for name in ("entropy_M", "log_rho_M", "rounding_M", "ratio_N", "clipped_N"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    assert [u.grad_norm for u in found.updates] == [u.grad_norm for u in plain.updates]
    if found.routed:
        assert all(torch.equal(v, vars(plain.routed)[k]) for k, v in vars(found.routed).items() if torch.is_tensor(v))


def test_old_log_probs_are_those_of_a_forward_before_any_update(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("learner.micro_batch_tokens=60", "learner.mini_batches=3", "learner.learning_rate=0.05"))
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    plan = plan_batch(parts, train_samples(groups, parts.objective, max_tokens=10), 1)
    before, entropy = plan_logprobs(parts.policy.model, plan, 1.0, parts.policy.device)
    result = learn(parts, groups, step=1)
    assert result is not None
    assert torch.equal(result.tokens.logp_old_N, before)
    assert torch.equal(result.entropy_M, entropy)
    first = torch.zeros(plan.tokens, dtype=torch.bool)
    for micro in plan.updates[0]:
        first[micro.at_N] = True
    assert (result.ratio_N[first] == 1).all()
    assert torch.equal(result.tokens.logp_N[first], before[first])
    assert (result.ratio_N[~first] != 1).any()


@pytest.mark.parametrize(
    "override",
    [
        "routing.replay=old",
        "routing.replay=sampler",
        "routing.balance_loss=0.01",
        "objective.name=clip_cov",
        "objective.name=reinforce_pp",
    ],
)
def test_features_that_need_old_log_probs_before_the_first_update_get_them(
    tiny: Callable[..., Config], parts_of: Any, override: str
) -> None:
    parts = parts_of(tiny("model.build=tiny_moe", override))
    parts = replace(parts, reference=copy.deepcopy(parts.policy.model) if parts.objective.kl else None)
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    known: list[bool] = []
    learn(parts, groups, step=1, before_update=lambda batch, index: known.append(bool(batch.old.computed_N.all())))
    assert known == [True, True]


def test_an_observer_changes_no_result(tiny: Callable[..., Config], parts_of: Any) -> None:
    _, expected = train_on_batch(parts_of(tiny()), [])
    parts = parts_of(tiny(run_dir="observed"))
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    known: list[float] = []
    learn(parts, groups, step=1, before_update=lambda batch, index: known.append(float(batch.old.computed_N.sum())))
    assert 0 < known[0] < known[1], "the first update has computed the rest"
    assert all(torch.equal(v, expected[k]) for k, v in parts.policy.model.state_dict().items())


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
def test_old_log_probs_are_those_of_the_attempt_that_fits_into_memory(
    tiny: Callable[..., Config], parts_of: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"model.build={model}", "learner.micro_batch_tokens=90", "learner.mini_batches=2")
    plain, _ = train_on_batch(parts_of(tiny(*settings)), [])
    parts = parts_of(tiny(*settings, run_dir="full"))
    runs: list[Any] = []

    def full_at_the_second(forward: Any) -> Any:
        def instead(*args: Any, **options: Any) -> Any:
            runs.append(1)
            if len(runs) == 2:
                raise torch.OutOfMemoryError("full")
            return forward(*args, **options)

        return instead

    patch_forward(monkeypatch, full_at_the_second, training=True)
    found, _ = train_on_batch(parts, [])
    assert found.halvings == 1
    first = torch.zeros(len(found.ratio_N), dtype=torch.bool)
    for micro in plan_batch(parts, found.samples, 1).updates[0]:
        first[micro.at_N] = True
    assert (found.ratio_N[first] == 1).all()
    assert torch.equal(found.tokens.logp_N[first], found.tokens.logp_old_N[first])
    torch.testing.assert_close(found.tokens.logp_old_N, plain.tokens.logp_old_N, rtol=0, atol=1e-5)
    if found.routed:
        assert torch.equal(found.routed.load_LE, plain.routed.load_LE), "a repeated forward counts once"

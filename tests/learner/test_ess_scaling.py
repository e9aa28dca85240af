"""The learning rate scaled by the effective sample size (VCPO): formula, invariance, and what it does to a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.clock import Clock
from gspo.config import Config, LearnerConfig
from gspo.learner.optimizer import Optimizer, effective_sample_size
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn
from gspo.trainer import resume, train
from gspo.types import Group


def share(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.mark.parametrize("weights", [[1.0], [2.0, 2.0, 2.0], [1.0, 0.0001, 3.0, 0.5], [1e-6, 1.0]])
def test_the_formula(weights: list[float]) -> None:
    log_weight_B = torch.tensor([math.log(w) for w in weights])
    assert effective_sample_size(log_weight_B) == pytest.approx(share(weights), rel=1e-5)


def test_ratios_of_long_completions_do_not_overflow() -> None:
    assert effective_sample_size(torch.tensor([900.0, 900.0, -900.0, -900.0])) == pytest.approx(0.5)
    assert effective_sample_size(torch.tensor([-2000.0, -2000.0])) == pytest.approx(1.0)


def off_policy(groups: tuple[Group, ...]) -> list[Group]:
    """The same completions, as if an engine with other weights had sampled them."""
    generator = torch.Generator().manual_seed(3)

    def moved(group: Group) -> Group:
        completions = [
            replace(c, logp_sampler=tuple((torch.tensor(c.logp_sampler) - _noise(len(c.logp_sampler))).tolist()))
            for c in group.completions
        ]
        return replace(group, completions=completions)

    def _noise(count: int) -> torch.Tensor:
        return 0.5 * torch.randn(count, generator=generator)

    return [moved(group) for group in groups]


def weights_of(learned: Any) -> list[float]:
    """prod pi/mu of each completion, from the log-probs at which it was trained on."""
    tokens = learned.tokens
    ratios: dict[int, float] = {}
    for i, new, sampler in zip(
        tokens.sequences.index_N.tolist(), tokens.logp_N.tolist(), tokens.logp_sampler_N.tolist(), strict=True
    ):
        ratios[i] = ratios.get(i, 0.0) + new - sampler
    return [math.exp(r) for r in ratios.values()]


@pytest.mark.parametrize("rule", ["off", "sqrt", "linear"])
@pytest.mark.parametrize("budget", [16384, 1])
def test_an_update_is_scaled_by_the_share_of_its_completions(
    rule: str, budget: int, tiny: Callable[..., Config], parts_of: Any
) -> None:
    """The budget of 1 token makes every completion a micro-batch."""
    config = tiny("learner.mini_batches=1", f"learner.micro_batch_tokens={budget}", f"learner.ess_scaling={rule}")
    parts = parts_of(config)
    groups = off_policy(collect(parts, RolloutState(), clock=Clock()).rollouts.groups)
    before = [p.detach().clone() for p in parts.policy.model.parameters()]
    learned = learn(parts, groups, step=1)
    assert learned is not None
    (update,) = learned.updates
    expected = share(weights_of(learned))
    assert expected < 0.9
    assert update.ess == pytest.approx(expected, rel=1e-5)
    factor = {"off": 1.0, "sqrt": math.sqrt(expected), "linear": expected}[rule]
    assert update.ess_factor == pytest.approx(factor, rel=1e-5)
    assert update.learning_rate == pytest.approx(1e-3 * factor, rel=1e-5)
    # AdamW's first step moves a weight by the learning rate, whatever the gradient.
    moved = max(float((p - b).abs().max()) for p, b in zip(parts.policy.model.parameters(), before, strict=True))
    assert moved == pytest.approx(1e-3 * factor, rel=1e-2)


def test_each_update_has_the_share_of_its_own_completions(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny("learner.mini_batches=4", "learner.learning_rate=0"))
    groups = off_policy(collect(parts, RolloutState(), clock=Clock()).rollouts.groups)
    learned = learn(parts, groups, step=1)
    assert learned is not None
    found = [u.ess for u in learned.updates]
    assert len(set(found)) == 4
    # With a learning rate of 0 the policy is the same in all updates, so groups of four completions are the updates.
    weights = weights_of(learned)
    by_update = [share(weights[i : i + 4]) for i in range(0, 16, 4)]
    assert sorted(found) == pytest.approx(sorted(by_update), rel=1e-5)


def test_an_unknown_share_does_not_move_the_weights() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Optimizer(model, LearnerConfig(learning_rate=0.1, ess_scaling="sqrt"), 10)
    before = model.weight.detach().clone()
    model(torch.ones(2)).backward()
    update = optimizer.step(loss_finite=True, log_weight_B=torch.tensor([math.nan, 0.0]))
    assert update.ess_factor == 0
    assert torch.equal(model.weight, before)


def test_a_run_reports_it_and_resumes_bitwise(tiny: Callable[..., Config], display: Any) -> None:
    settings = ("learner.ess_scaling=sqrt", "rollout.top_k=3", "eval.every=0")  # top-k: the sampler is another policy
    whole, cut = tiny(*settings, run_dir="whole"), tiny(*settings, "steps=1", run_dir="cut")
    train(whole, display)
    train(cut, display)
    resume(cut.run_dir, display, steps=3)
    first, second = (Path(c.run_dir) / "metrics.jsonl" for c in (whole, cut))
    assert first.read_bytes() == second.read_bytes()
    rows = [json.loads(line) for line in first.read_text().splitlines()][1:]
    assert all(row["ratio/ess_factor"] < 0.99 for row in rows)
    assert all(row["ratio/ess"] < row["ratio/ess_factor"] for row in rows)
    # It may be switched off in a run that is in progress, as the learning rate may be changed.
    resume(cut.run_dir, display, steps=4, overrides=["learner.ess_scaling=off"])
    last = json.loads(second.read_text().splitlines()[-1])
    assert (last["step"], last["ratio/ess_factor"]) == (4, 1.0)

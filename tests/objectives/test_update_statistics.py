"""Statistics of an update, against plain loops: clipping by probability, drift of completions."""

from __future__ import annotations

import math

import pytest
import torch

import gspo

OLD = torch.tensor([[0.05, 0.5, 0.95, 0.02], [0.09, 0.1, 0.9, 0.99], [0.3, 0.6, 0.01, 0.7]], dtype=torch.float64)
RATIO = torch.tensor([[1.5, 1.5, 1.01, 1.0], [0.5, 0.5, 0.5, 0.99], [1.0, 1.3, 1.3, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
ADVANTAGE = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)


def stats(name: str = "grpo") -> dict[str, float]:
    objective = gspo.objective(name, kl=0.0) if name == "grpo" else gspo.objective(name)
    return gspo.policy_loss(objective, (OLD * RATIO).log(), OLD.log(), ADVANTAGE, MASK).stats


def test_clipped_tokens_by_the_probability_of_the_old_policy() -> None:
    inside: dict[str, list[bool]] = {"low": [], "middle": [], "high": []}
    for i in range(3):
        for t in range(4):
            if not MASK[i, t]:
                continue
            old, ratio, a = float(OLD[i, t]), float(RATIO[i, t]), float(ADVANTAGE[i])
            name = "low" if old < 0.1 else "high" if old > 0.9 else "middle"
            inside[name].append(ratio > 1.2 if a > 0 else ratio < 0.8)
    found = stats()
    for name, clipped in inside.items():
        assert clipped
        assert found[f"clip_probability_{name}"] == pytest.approx(sum(clipped) / len(clipped)), name
    assert found["clip_fraction_tokens"] == pytest.approx(sum(map(sum, inside.values())) / 11)


def test_a_probability_without_tokens_has_no_share() -> None:
    old = torch.full((1, 3), math.log(0.5))
    found = gspo.policy_loss("gspo", old, old, torch.ones(1), torch.ones(1, 3, dtype=torch.bool)).stats
    assert found["clip_probability_middle"] == 0
    assert math.isnan(found["clip_probability_low"])
    assert math.isnan(found["clip_probability_high"])


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_drift_of_completions(name: str) -> None:
    drift = []
    for i in range(3):
        logs = [math.log(float(RATIO[i, t])) for t in range(4) if MASK[i, t]]
        drift.append(abs(sum(logs) / len(logs)))
    found = stats(name)
    assert found["ratio_sequence_log_abs_mean"] == pytest.approx(sum(drift) / 3)
    assert found["ratio_sequence_log_abs_max"] == pytest.approx(max(drift))


def test_a_drift_that_all_completions_share_has_no_spread() -> None:
    old = torch.full((2, 3), -1.0, dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    found = gspo.policy_loss("gspo", old + 0.1, old, torch.ones(2), mask).stats
    assert found["ratio_sequence_log_std"] == pytest.approx(0.0, abs=1e-12)
    assert found["ratio_sequence_log_abs_mean"] == pytest.approx(0.1)

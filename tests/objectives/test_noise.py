"""Rounding noise: the level at which it is judged, that it has the size of the noise in real ratios, and the alarm."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.clock import Clock
from gspo.config import Config
from gspo.learner.batch import plan_batch
from gspo.learner.forward import plan_logprobs
from gspo.objectives.rounding import rounding_noise
from gspo.objectives.samples import train_samples
from gspo.objectives.sequences import Sequences
from gspo.objectives.table import objective as build
from gspo.record.metrics import step_metrics
from gspo.record.run_dir import read_jsonl
from gspo.reduction import combined
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn
from gspo.trainer import train

TWO = Sequences(torch.tensor([0, 0, 1, 1]), 2)


def test_a_sequence_ratio_averages_the_noise_of_its_tokens() -> None:
    """+-0.01 cancels within the first sequence; the second is off by 0.02 as a whole."""
    rounding_N = torch.tensor([0.01, -0.01, 0.02, 0.02])
    sequence = rounding_noise(build("gspo", clip_low=3e-3, clip_high=4e-3), TWO, rounding_N)
    token = rounding_noise(build("grpo", clip_low=0.015, clip_high=0.015), TWO, rounding_N)
    assert sequence is not None
    assert token is not None
    assert sequence.log_ratio == pytest.approx(0.02 / 2**0.5)
    assert sequence.beyond_clip == 0.5
    assert token.log_ratio == pytest.approx((0.001 / 4) ** 0.5)
    assert token.beyond_clip == 0.5


def test_noise_follows_the_length_norm_of_the_ratio() -> None:
    """Two tokens: 0.02 each is 0.02 on average, 0.04 / sqrt(2), and 0.04 in total."""
    rounding_N = torch.tensor([0.01, -0.01, 0.02, 0.02])
    for length_norm, size in (("mean", 0.02), ("sqrt", 0.04 / 2**0.5), ("none", 0.04)):
        noise = rounding_noise(build("gspo", length_norm=length_norm), TWO, rounding_N)
        assert noise is not None
        assert noise.log_ratio_M.tolist() == pytest.approx([0.0, size], abs=1e-8)
    # FSPO's range is for the sum over sqrt(T).
    for clip, beyond in ((0.028, 0.5), (0.029, 0.0)):
        noise = rounding_noise(build("fspo", clip_low=clip, clip_high=clip), TWO, rounding_N)
        assert noise is not None
        assert noise.beyond_clip == beyond


def test_each_side_of_the_range_counts() -> None:
    wide_above = build("gspo", clip_low=1e-3, clip_high=0.1)
    noise = rounding_noise(wide_above, TWO, torch.tensor([-0.01, -0.01, 0.02, 0.02]))
    assert noise is not None
    assert noise.beyond_clip == 0.5


def test_a_range_in_log_space_is_judged_in_log_space() -> None:
    """GMPO bounds log r by 0.4, so a log-ratio of 0.39 is inside, though r = 1.48 is more than 1.4."""
    noise = rounding_noise(build("gmpo"), TWO, torch.tensor([0.39, -0.39, 0.41, -0.41]))
    assert noise is not None
    assert noise.beyond_clip == 0.5
    assert build("gmpo").trust_region.noise_limit == pytest.approx(0.4)
    assert build("grpo").trust_region.noise_limit == pytest.approx(math.log(1.2))


@pytest.mark.parametrize("name", ["sapo", "vespo", "rloo"])
def test_an_objective_without_a_clip_range_has_no_rounding_noise(name: str) -> None:
    assert rounding_noise(build(name), TWO, torch.ones(4)) is None


@pytest.mark.parametrize(
    ("overrides", "beyond"),
    [
        (("model.dtype=bfloat16", "objective.clip_low=1e-4", "objective.clip_high=1e-4"), (0.32, 1.0)),
        (("model.dtype=bfloat16", "objective.name=grpo"), (0.0, 0.0)),
        (("objective.clip_low=1e-4", "objective.clip_high=1e-4"), (0.0, 0.0)),
    ],
    ids=["bfloat16, narrow sequence range", "bfloat16, token range", "float32, narrow sequence range"],
)
def test_the_alarm_is_raised_if_rounding_exceeds_the_clip_range(
    tiny: Callable[..., Config], display: Any, overrides: tuple[str, ...], beyond: tuple[float, float]
) -> None:
    run = train(tiny(*overrides, "alarms.steps=3", "eval.every=0", "checkpoint.every=50"), display).run
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    assert all(beyond[0] <= row["noise/beyond_clip"] <= beyond[1] for row in rows)
    alarms = [e for e in read_jsonl(run / "events.jsonl") if e["event"] == "alarm" and e["name"] == "rounding noise"]
    assert len(alarms) == (beyond[1] > 0.32)
    assert all('model.dtype = "float16"' in e["message"] for e in alarms)


@pytest.mark.parametrize(
    "override", ["learner.mini_batches=1", "rollout.top_k=5", "rollout.engine=scripted", "objective.name=sapo"]
)
def test_no_noise_metric_if_the_difference_is_more_than_rounding_or_nothing_clips(
    tiny: Callable[..., Config], parts_of: Any, override: str
) -> None:
    assert "noise/log_ratio" in _metrics(parts_of(tiny()))
    assert "noise/log_ratio" not in _metrics(parts_of(tiny(override, run_dir="other")))


def test_completions_of_older_weights_are_not_noise(tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny())
    collected = collect(parts, RolloutState(), clock=Clock())
    parts.optimizer.updates += 1
    learned = learn(parts, collected.rollouts.groups, step=1)
    assert learned is not None
    assert learned.rounding_M is None


def _metrics(parts: Any) -> dict[str, Any]:
    collected = collect(parts, RolloutState(), clock=Clock())
    learned = learn(parts, collected.rollouts.groups, step=1)
    assert learned is not None
    return combined([step_metrics(parts.objective, collected, learned)])


@pytest.mark.parametrize("build_as", ["tiny_dense", "tiny_moe"])
def test_rounding_noise_has_the_size_of_the_noise_in_real_ratios(
    tiny: Callable[..., Config], parts_of: Any, build_as: str
) -> None:
    """The true noise is the log-ratio of a weight change in bfloat16 minus the log-ratio of the same change in
    float32."""
    parts = parts_of(tiny(f"model.build={build_as}", "model.dtype=bfloat16", "rollout.max_tokens=24"))
    groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
    samples = train_samples(groups, parts.objective, max_tokens=24)
    plan, model = plan_batch(parts, samples, 1), parts.policy.model
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 1e-3 * torch.randn(weight.shape, generator=generator)

    def logp(which: Any) -> torch.Tensor:
        return plan_logprobs(which, plan, 1.0, parts.policy.device)[0]

    old, new = logp(model), logp(moved)
    sampler = torch.tensor([x for r in samples for x in r.completion.logp_sampler])
    truth = (new - old) - (logp(copy.deepcopy(moved).float()) - logp(copy.deepcopy(model).float()))
    sequences = Sequences(plan.sequence_N, len(samples))
    for objective in (build("gspo"), build("grpo")):
        measured, real = (rounding_noise(objective, sequences, x) for x in (old - sampler, truth))
        assert measured is not None
        assert real is not None
        # In an MoE model one expert choice that flips between precisions outweighs all rounding, and how many
        # flip differs by CPU.
        factor = 4 if build_as == "tiny_dense" else 16
        assert real.log_ratio / factor < measured.log_ratio < factor * real.log_ratio

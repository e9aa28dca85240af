"""What recording and replaying experts costs: bytes, memory and time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.clock import Clock
from gspo.config import Config
from gspo.record.metrics import step_metrics
from gspo.reduction import combined
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn
from gspo.trainer import train


@pytest.mark.parametrize(("settings", "copies"), [((), 2), (("routing.balance_loss=0.01",), 3)])
def test_bytes_are_those_of_every_choice(
    settings: tuple[str, ...], copies: int, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny("model.build=tiny_moe", "routing.replay=sampler", *settings))
    batch = collect(parts, RolloutState(), clock=Clock())
    learned = learn(parts, batch.rollouts.groups, step=1)
    assert learned is not None
    found = combined([step_metrics(parts.objective, batch, learned)])
    routers = parts.policy.routers
    lengths = [len(s.prompt.token_ids) + len(s.completion.token_ids) for s in learned.samples]
    choices = routers.layers * routers.top_k  # one byte each, with at most 256 experts
    # The engine samples the last token without reading it.
    assert found["routing/sampler_bytes"] == sum(length - 1 for length in lengths) * choices
    # The learner also stores which tokens the engine has reported.
    assert found["routing/stored_bytes"] == sum(lengths) * (copies * choices + 1)
    assert learned.routed is not None
    assert learned.routed.seconds > 0


def test_time_is_written_for_models_with_experts_only(tiny: Callable[..., Config], display: Any) -> None:
    for build, expected in (("tiny_moe", True), ("tiny_dense", False)):
        config = tiny(f"model.build={build}", "steps=1", "eval.every=0", run_dir=build)
        train(config, display)
        (timings,) = [json.loads(line) for line in (Path(config.run_dir) / "timings.jsonl").read_text().splitlines()]
        metrics = json.loads((Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()[-1])
        assert ("time/routing_s" in timings) == ("routing/stored_bytes" in metrics) == expected
        if expected:
            assert 0 < timings["time/routing_s"] < timings["time/learn_s"]

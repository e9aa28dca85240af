"""Whole runs that sample with the real vLLM, in process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import needs_vllm

from gspo.config import Config
from gspo.record.run_dir import read_jsonl
from gspo.rollout.vllm.in_process import InProcessHost
from gspo.trainer import resume, train

pytestmark = pytest.mark.vllm
MOE = ("rollout.engine=vllm", "model.build=tiny_moe", "model.build_options={head_dim = 32}")


def test_a_run_trains_on_samples_of_the_current_policy_and_resumes(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    needs_vllm()
    assert train(tiny(*MOE, "routing.replay=sampler", "learner.learning_rate=1e-2"), display).step == 3
    assert InProcessHost.alive == 0, "a run closes its engine"
    assert resume(tmp_path / "run", display, steps=5).step == 5
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    for row in rows:
        assert row["mismatch/abs_max"] < 1e-3
        assert row["routing/flip_fraction"] == row["routing/flip_fraction_sampler"] == 0
        assert row["grad/norm"] > 0
    rollouts = [read_jsonl(tmp_path / "run" / "rollouts" / f"{step:06d}.jsonl") for step in range(1, 6)]
    assert [{r["version"] for r in step} for step in rollouts] == [{0}, {2}, {4}, {6}, {8}]


def test_unsupported_head_sizes_are_refused_before_sampling(tiny: Callable[..., Config], display: Any) -> None:
    needs_vllm()
    with pytest.raises(ValueError, match=r"heads of size 16.*model\.build_options\.head_dim"):
        train(tiny("rollout.engine=vllm", "model.build=tiny_moe"), display)


def test_a_run_samples_with_the_adapter(tiny: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    """The adapter is sent as an adapter, and the run logs it."""
    needs_vllm()
    train(tiny("steps=0", "eval.every=0", "model.build_options={head_dim = 32}", run_dir="base"), display)
    base = f"model.path={tmp_path / 'base' / 'checkpoints' / '000000'}"
    lora = ("rollout.engine=vllm", base, "model.build=", "model.lora.rank=4", "learner.learning_rate=3e-2")
    assert train(tiny(*lora), display).step == 3
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-3
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert ["sent as an adapter" in e["message"] for e in events if e["event"] == "engine"] == [True]
    assert rows[0]["kl/old_new"] > 1e-5, "the policy moved, so an engine without the adapter would be detected"

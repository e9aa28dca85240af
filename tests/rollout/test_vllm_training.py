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

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
MIXTURE = ("rollout.engine=vllm", "model.build=tiny_moe", "model.build_options={head_dim = 32}")


def test_a_run_learns_from_what_the_current_policy_drew_and_goes_on_after_a_stop(
    tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    needs_vllm()
    assert train(tiny(*MIXTURE, "routing.replay=sampler", "learner.learning_rate=1e-2"), display).step == 3
    assert InProcessHost.alive == 0, "a run closes its engine"
    assert resume(tmp_path / "run", display, steps=5).step == 5
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    for row in rows:
        assert row["mismatch/abs_max"] < 1e-3
        assert row["routing/flip_fraction"] == row["routing/flip_fraction_sampler"] == 0
        assert row["grad/norm"] > 0
    replies = [read_jsonl(tmp_path / "run" / "rollouts" / f"{step:06d}.jsonl") for step in range(1, 6)]
    assert [{r["version"] for r in step} for step in replies] == [{0}, {2}, {4}, {6}, {8}]


def test_heads_that_vllm_cannot_compute_are_named_before_anything_is_drawn(
    tiny: Callable[..., Config], display: Any
) -> None:
    needs_vllm()
    with pytest.raises(ValueError, match=r"heads of size 16.*model\.build_options\.head_dim"):
        train(tiny("rollout.engine=vllm", "model.build=tiny_moe"), display)


def test_adapters_are_sampled_with(tiny: Callable[..., Config], display: Any, tmp_path: Path) -> None:
    """Sent as adapters, and the run says so."""
    needs_vllm()
    train(tiny("steps=0", "eval.every=0", "model.build_options={head_dim = 32}", run_dir="base"), display)
    base = f"model.path={tmp_path / 'base' / 'checkpoints' / '000000'}"
    lora = ("rollout.engine=vllm", base, "model.build=", "model.lora.rank=4", "learner.learning_rate=3e-2")
    assert train(tiny(*lora), display).step == 3
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-3
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert ["sent as an adapter" in e["what"] for e in events if e["event"] == "engine"] == [True]
    assert rows[0]["kl/old_new"] > 1e-5, "the policy moved, so an engine without the adapters would be seen"

"""Whole runs with routing replay or an adaptive clip range resume bitwise identical."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_cases import (
    stepped,
)
from safetensors.torch import load_file

from gspo.config import Config
from gspo.errors import ConfigError
from gspo.record.run_dir import read_jsonl
from gspo.trainer import resume, train

RUNS = {
    "replay old": ("model.build=tiny_moe", "routing.replay=old"),
    "replay sampler, recomputed and balanced": (
        *("model.build=tiny_moe", "routing.replay=sampler", "routing.balance_loss=0.01"),
        *("model.gradient_checkpointing=true", "learner.micro_batch_tokens=80"),
    ),
    "a range that adapts": ("objective.clip_low=auto:0.15", "objective.clip_high=auto:0.15"),
    "one side that adapts, with replay": (
        *("model.build=tiny_moe", "routing.replay=old", "objective.name=grpo"),
        *("objective.clip_low=0.01", "objective.clip_high=auto:0.1"),
    ),
}


def contents(run: Path) -> dict[str, Any]:
    """Everything that must be byte-identical."""
    found: dict[str, Any] = {p.name: p.read_bytes() for p in sorted((run / "rollouts").iterdir())}
    found["metrics"] = (run / "metrics.jsonl").read_bytes()
    state = json.loads((run / "checkpoints/000004/trainer.json").read_text())
    found["trainer"] = {k: v for k, v in state.items() if k != "offsets"}  # lengths of files with times in them
    for name in ("model.safetensors", "trainer.tensors"):
        weights = load_file(run / "checkpoints/000004" / name)
        found[name] = {k: v.view(torch.uint8).numpy().tobytes() if v.dim() else v.item() for k, v in weights.items()}
    return found


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS.keys())
def test_a_resumed_run_is_the_uninterrupted_run_to_the_byte(
    overrides: tuple[str, ...], tiny: Callable[..., Config], display: Any
) -> None:
    whole = tiny(*overrides, "steps=4", "learner.learning_rate=1e-2", "eval.every=0", run_dir="whole")
    train(whole, display)
    run = Path(whole.run_dir).parent / "cut"
    shutil.copytree(whole.run_dir, run)
    for step in (3, 4):  # forget the end, as if killed during step 3
        shutil.rmtree(run / f"checkpoints/{step:06d}")
    assert resume(run, display, trust_run=True).step == 4
    assert contents(run) == contents(Path(whole.run_dir))
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    if "routing.replay=old" in overrides or "routing.replay=sampler" in overrides:
        assert all(row["routing/flip_fraction"] == 0.0 for row in rows)
        assert rows[-1]["routing/flip_fraction_native"] > 0
        completions = read_jsonl(run / "rollouts/000004.jsonl")
        assert all(set(r["flipped_experts"]) == {0} for r in completions if r["trained"])
        assert all(len(r["flipped_experts"]) == len(r["token_ids"]) for r in completions if r["trained"])


def test_an_engine_that_reports_no_experts_cannot_be_replayed(tiny: Callable[..., Config], parts_of: Any) -> None:
    options = ("model.build=tiny_moe", "rollout.engine=scripted")
    with pytest.raises(ConfigError, match="does not report the experts"):
        parts_of(tiny(*options, "routing.replay=sampler"))
    _, metrics = stepped(
        parts_of(
            tiny(
                *options,
                "routing.replay=old",
                "rollout.engine_options.default=1 2",
                "objective.entropy=0.01",  # equal completions have advantage 0 and would not be computed
                run_dir="b",
            )
        )
    )
    assert metrics["routing/flip_fraction"] == 0.0
    assert metrics["routing/flip_fraction_sampler"] != metrics["routing/flip_fraction_sampler"]  # not measured: NaN

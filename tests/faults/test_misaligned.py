"""Tensors read from files lie at other addresses than fresh ones: nothing that a run or a command computes may depend on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ends import run_of, same_end
from misaligned import misalign_loading

from gspo.cli import main
from gspo.config import Config, ModelConfig
from gspo.model.load import build_model, char_tokenizer
from gspo.trainer import resume, train

VARIANTS = {
    "float32": (8, ()),
    "float32, at 16 bytes": (16, ()),
    "float32, at 32 bytes": (32, ()),
    "float32, at 48 bytes": (48, ()),
    "bfloat16 with float32 masters": (8, ("model.dtype=bfloat16",)),
    "mixture of experts": (8, ("model.build=tiny_moe",)),
    "a reference": (8, ("objective.name=grpo",)),
    "a cold start": (8, ("cold_start.steps=2",)),
}


@pytest.mark.parametrize(("offset", "overrides"), VARIANTS.values(), ids=VARIANTS.keys())
def test_a_resume_from_misaligned_tensors_is_the_uninterrupted_run(
    offset: int, overrides: tuple[str, ...], tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A single slot and a prompt at a time: the products of single rows are those that round by alignment.
    options = ("steps=3", "rollout.prompts=2", "rollout.engine_options.slots=1", "learner.micro_batch_tokens=16")
    whole, cut = (tiny(*options, *overrides, run_dir=name) for name in ("whole", "cut"))
    train(whole, display)
    shutil.copytree(whole.run_dir, cut.run_dir)
    for step in (2, 3):
        shutil.rmtree(run_of(cut) / f"checkpoints/{step:06d}")
    misalign_loading(offset, monkeypatch.setattr)
    resume(cut.run_dir, display, trust_run=True)
    same_end(run_of(cut), run_of(whole))


def test_adapters_are_evaluated_merged_and_resumed_the_same(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = char_tokenizer("sort 0123456789")
    build_model(ModelConfig(build="tiny_dense"), tokenizer, 3).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    adapted = ("model.build=", f"model.path={tmp_path / 'base'}", "model.lora.rank=2", "rollout.engine_options.slots=1")
    config, ends = tiny(*adapted, "steps=2"), []
    train(config, display)
    for offset in (0, 8, 16, 32, 48):
        run, out = tmp_path / f"run{offset}", tmp_path / f"out{offset}"
        shutil.copytree(config.run_dir, run)
        shutil.rmtree(run / "checkpoints/000002")
        misalign_loading(offset, monkeypatch.setattr)
        resume(run, display, trust_run=True)
        out.mkdir()
        replies = str(out / "replies.jsonl")
        assert main(["eval", str(run), "--limit", "2", "--samples", "2", "--replies", replies]) == 0
        assert main(["merge", str(run), str(out / "merged")]) == 0
        last = run / "checkpoints/000002"
        kept = (run / "metrics.jsonl", last / "adapter_model.safetensors", last / "trainer.tensors")
        made = (out / "replies.jsonl", out / "merged" / "model.safetensors")
        ends.append([file.read_bytes() for file in (*kept, *made)])
    assert all(end == ends[0] for end in ends)

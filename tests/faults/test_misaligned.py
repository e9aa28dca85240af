"""Tensors read from files have a different alignment than fresh ones. No result of a run or command depends on it."""

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
    "float32": ((8, 16, 32, 48), ()),
    "bfloat16 with float32 master weights": ((8,), ("model.dtype=bfloat16",)),
    "mixture of experts": ((8,), ("model.build=tiny_moe",)),
    "a reference": ((8,), ("objective.name=grpo",)),
    "a cold start": ((8,), ("cold_start.steps=2",)),
}


@pytest.mark.parametrize(("offsets", "overrides"), VARIANTS.values(), ids=VARIANTS.keys())
def test_a_resume_from_misaligned_tensors_equals_the_uninterrupted_run(
    offsets: tuple[int, ...],
    overrides: tuple[str, ...],
    tiny: Callable[..., Config],
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One slot and one prompt at a time: the rounding of single-row matrix products depends on alignment.
    options = ("steps=2", "rollout.prompts=2", "rollout.engine_options.slots=1", "learner.micro_batch_tokens=16")
    whole = tiny(*options, "data.held_out=2", *overrides, run_dir="whole")
    train(whole, display)
    for offset in offsets:
        cut = run_of(whole).with_name(f"cut{offset}")
        shutil.copytree(whole.run_dir, cut)
        shutil.rmtree(cut / "checkpoints/000002")
        misalign_loading(offset, monkeypatch.setattr)
        resume(cut, display, trust_run=True)
        same_end(cut, run_of(whole))


def test_evaluation_merge_and_resume_of_adapters_ignore_alignment(
    tiny: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = char_tokenizer("sort 0123456789")
    build_model(ModelConfig(build="tiny_dense"), tokenizer, 3).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    adapted = ("model.build=", f"model.path={tmp_path / 'base'}", "model.lora.rank=2", "rollout.engine_options.slots=1")
    config = tiny(*adapted, "steps=2", "rollout.prompts=2", "data.held_out=2")
    ends = []
    train(config, display)
    for offset in (0, 8, 16, 32, 48):
        run, out = tmp_path / f"run{offset}", tmp_path / f"out{offset}"
        shutil.copytree(config.run_dir, run)
        shutil.rmtree(run / "checkpoints/000002")
        misalign_loading(offset, monkeypatch.setattr)
        resume(run, display, trust_run=True)
        out.mkdir()
        completions = str(out / "completions.jsonl")
        assert main(["eval", str(run), "--limit", "2", "--samples", "2", "--completions", completions]) == 0
        assert main(["merge", str(run), str(out / "merged")]) == 0
        last = run / "checkpoints/000002"
        checkpoint_files = (run / "metrics.jsonl", last / "adapter_model.safetensors", last / "trainer.tensors")
        output_files = (out / "completions.jsonl", out / "merged" / "model.safetensors")
        ends.append([file.read_bytes() for file in (*checkpoint_files, *output_files)])
    assert all(end == ends[0] for end in ends)

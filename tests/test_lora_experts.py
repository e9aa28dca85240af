"""LoRA for experts that an MoE model stores in one tensor per layer: trained, saved, resumed, merged and sent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.cli import main
from gspo.config import Config, LoraConfig, ModelConfig
from gspo.errors import ConfigError
from gspo.model import adapter
from gspo.model.load import build_model, char_tokenizer, load_policy, load_tokenizer
from gspo.rollout.vllm.weights import named_weights
from gspo.trainer import resume, train

IDS = torch.tensor([[5, 9, 12, 7, 6, 11], [8, 8, 10, 6, 5, 9]])


@pytest.fixture
def config(tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """Make the config of a run that trains adapters of all linear layers and experts."""
    tokenizer = char_tokenizer("sort 0123456789")
    for build in ("tiny_moe", "tiny_dense"):
        build_model(ModelConfig(build=build), tokenizer, 3).save_pretrained(tmp_path / build)
        tokenizer.save_pretrained(tmp_path / build)

    def make(*overrides: str, build: str = "tiny_moe", run_dir: str = "run") -> Config:
        settings = ("model.build=", f"model.path={tmp_path / build}", "model.lora.rank=3", "model.lora.experts=true")
        return tiny(*settings, *overrides, run_dir=run_dir)

    return make


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def randomized(model: Any) -> Any:
    """The model with adapters that change its output."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if adapter.is_adapter_parameter(name):
            torch.nn.init.normal_(weight, std=0.1)
    return model


def loaded(path: str, lora: LoraConfig | None = None, dtype: str = "float32") -> Any:
    config = ModelConfig(path=path, device="cpu", lora=lora or LoraConfig(), dtype=dtype)  # type: ignore[arg-type]
    return load_policy(config, load_tokenizer(config), seed=0).model


def last(config: Config) -> Path:
    return max(Path(config.run_dir, "checkpoints").iterdir())


def test_every_expert_has_a_low_rank_change_of_its_own(config: Callable[..., Config]) -> None:
    """Against the definition: the experts compute with W + (alpha / rank) B A, with A and B from each expert's part of
    peft's matrices."""
    settings = config().model
    model = randomized(loaded(settings.path, settings.lora))
    before = loaded(settings.path).state_dict()
    expected = loaded(settings.path)
    for name, merged in named_weights(model):
        change = merged - before[name]
        if change.dim() == 3:
            ranks = [int(torch.linalg.matrix_rank(expert, atol=1e-4)) for expert in change]
            assert ranks == [3] * len(change)
        expected.get_parameter(name).data.copy_(merged)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model), logits(loaded(settings.path)), atol=1e-2)
    with adapter.adapters_disabled(model):
        assert torch.equal(logits(model), logits(loaded(settings.path)))


def test_training_changes_the_adapters_of_experts_only(config: Callable[..., Config], display: Any) -> None:
    run = config("routing.replay=sampler")
    train(run, display)
    saved = load_file(last(run) / "adapter_model.safetensors")
    experts = {name: weight for name, weight in saved.items() if ".experts." in name}
    assert len(experts) == 2 * 2 * 2, "two layers, two tensors, A and B"
    assert all(bool(weight.any()) for weight in experts.values())
    model = loaded(str(last(run)), run.model.lora)
    base = loaded(run.model.path).state_dict()
    for name, weight in named_weights(model, merge=False):
        assert torch.equal(weight, base[name]), name


def test_a_resumed_run_equals_the_uninterrupted_run(config: Callable[..., Config], display: Any) -> None:
    whole, cut = (config(run_dir=name) for name in ("whole", "cut"))
    train(whole, display)
    shutil.copytree(whole.run_dir, cut.run_dir)
    shutil.rmtree(Path(cut.run_dir, "checkpoints", "000003"))
    assert resume(cut.run_dir, display, trust_run=True).step == 3
    for file in ("adapter_model.safetensors", "trainer.tensors"):
        ours, theirs = load_file(last(cut) / file), load_file(last(whole) / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_peft_and_the_merged_model_agree(
    dtype: str, config: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = config(f"model.dtype={dtype}", "learner.learning_rate=1e-2")
    train(run, display)
    ours = logits(loaded(str(last(run)), run.model.lora, dtype))
    plain = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=getattr(torch, dtype)).eval()
    assert not torch.allclose(logits(plain), ours, atol=1e-2)
    theirs = PeftModel.from_pretrained(plain, str(last(run)), autocast_adapter_dtype=False).eval()
    torch.testing.assert_close(logits(theirs), ours, atol=1e-6, rtol=1e-5)
    assert main(["merge", run.run_dir, str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=getattr(torch, dtype)).eval()
    assert "lora" not in str(merged)
    exact = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(logits(merged), ours, **exact)


def test_what_has_no_expert_tensors_is_refused(config: Callable[..., Config]) -> None:
    settings = config(build="tiny_dense").model
    with pytest.raises(ConfigError, match=r"model.lora.experts: Qwen3ForCausalLM has none; leave it out"):
        loaded(settings.path, settings.lora)


def test_a_saved_adapter_keeps_its_choice_of_experts(config: Callable[..., Config], display: Any) -> None:
    run = config("steps=1")
    train(run, display)
    with pytest.raises(ConfigError, match=r"model.lora.experts: the adapter in .* has adapters.*set it to true"):
        loaded(str(last(run)), LoraConfig(rank=3))

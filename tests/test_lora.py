"""LoRA: runs that train only adapters, saved, resumed, merged and disabled, and invalid settings."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.build import run_objective
from gspo.cli import main
from gspo.config import Config, LoraConfig, ModelConfig, to_toml
from gspo.errors import ConfigError
from gspo.loop import Loop
from gspo.model import adapter
from gspo.model.load import build_model, char_tokenizer, load_policy, load_tokenizer
from gspo.model.quantization import dequantize_layer, linear_layers, parameter_count
from gspo.record.run_dir import read_jsonl
from gspo.trainer import resume, train

IDS = torch.tensor([[5, 9, 12, 7, 6, 11], [8, 8, 10, 6, 5, 9]])


@pytest.fixture
def base(tmp_path: Path) -> Callable[..., str]:
    """Write a small base model. Returns its directory."""

    def make(build: str = "tiny_dense", **shape: Any) -> str:
        path = tmp_path / build
        tokenizer = char_tokenizer("sort 0123456789")
        build_model(ModelConfig(build=build, build_options=shape), tokenizer, 3).save_pretrained(path)  # type: ignore[arg-type]
        tokenizer.save_pretrained(path)
        return str(path)

    return make


@pytest.fixture
def adapting(tiny: Callable[..., Config], base: Callable[..., str]) -> Callable[..., Config]:
    """Make the config of a run that trains adapters."""

    def make(*overrides: str, build: str = "tiny_dense", run_dir: str = "run") -> Config:
        path = base(build)
        return tiny("model.build=", f"model.path={path}", "model.lora.rank=3", *overrides, run_dir=run_dir)

    return make


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def last(config: Config) -> Path:
    return max(Path(config.run_dir, "checkpoints").iterdir())


VARIANTS = {
    "float32": (),
    "bfloat16 with float32 master weights": ("model.dtype=bfloat16",),
    "float16 with loss scaling": ("model.dtype=float16",),
    "KL to the base model": ("objective.name=grpo",),
    "gradient checkpointing": ("model.gradient_checkpointing=true",),
    "4-bit base weights": ("model.quantize=nf4", "model.dtype=bfloat16"),
    "4-bit base weights, float16": ("model.quantize=nf4", "model.dtype=float16"),
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_resumed_run_is_byte_identical_to_the_uninterrupted_run(
    overrides: tuple[str, ...], adapting: Callable[..., Config], display: Any
) -> None:
    whole, cut = (adapting(*overrides, "steps=4", run_dir=name) for name in ("whole", "cut"))
    train(whole, display)
    shutil.copytree(whole.run_dir, cut.run_dir)
    for step in (3, 4):
        os.rename(f"{cut.run_dir}/checkpoints/{step:06d}", f"{cut.run_dir}/.gone-{step}")
    assert resume(cut.run_dir, display, trust_run=True).step == 4
    assert Path(cut.run_dir, "metrics.jsonl").read_bytes() == Path(whole.run_dir, "metrics.jsonl").read_bytes()
    for file in ("adapter_model.safetensors", "trainer.tensors"):
        ours, theirs = load_file(last(cut) / file), load_file(last(whole) / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_only_adapters_are_trained_and_saved(adapting: Callable[..., Config], parts_of: Any, display: Any) -> None:
    config = adapting()
    parts = parts_of(config)
    trained = [name for name, p in parts.policy.model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    train(adapting(run_dir="other"), display)
    saved = load_file(last(adapting(run_dir="other")) / "adapter_model.safetensors")
    assert len(saved) == len(trained)
    assert any(bool(w.any()) for name, w in saved.items() if "lora_B" in name), "the adapters did not change"
    assert not (last(adapting(run_dir="other")) / "model.safetensors").exists()


def test_an_adapted_model_starts_as_the_base_model(base: Callable[..., str]) -> None:
    config = ModelConfig(path=base(), device="cpu")
    tokenizer = load_tokenizer(config)
    plain = load_policy(config, tokenizer, seed=0).model
    fresh = load_policy(ModelConfig(path=config.path, device="cpu", lora=LoraConfig(rank=4)), tokenizer, seed=0).model
    assert type(fresh) is type(plain)
    assert torch.equal(logits(fresh), logits(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checkpoint_loads_in_plain_peft(dtype: str, adapting: Callable[..., Config], display: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = adapting(f"model.dtype={dtype}")
    train(config, display)
    plain = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, dtype)).eval()
    before = logits(plain)
    theirs = PeftModel.from_pretrained(plain, str(last(config)), autocast_adapter_dtype=False).eval()
    adapted = ModelConfig(path=str(last(config)), dtype=dtype, device="cpu", lora=config.model.lora)  # type: ignore[arg-type]
    ours = load_policy(adapted, load_tokenizer(config.model), seed=0)
    torch.testing.assert_close(logits(theirs), logits(ours.model), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(logits(theirs), before, atol=1e-3)


def test_disabled_adapters_give_the_base_model_and_stay_trainable(
    adapting: Callable[..., Config], display: Any
) -> None:
    config = adapting()
    train(config, display)
    model = load_policy(
        ModelConfig(path=str(last(config)), device="cpu", lora=config.model.lora), load_tokenizer(config.model), seed=0
    ).model
    plain = load_policy(ModelConfig(path=config.model.path, device="cpu"), load_tokenizer(config.model), seed=0).model
    enabled = logits(model)
    trainable = [p.requires_grad for p in model.parameters()]
    with adapter.adapters_disabled(model):
        assert torch.equal(logits(model), logits(plain))
        assert [p.requires_grad for p in model.parameters()] == trainable
    assert torch.equal(logits(model), enabled)
    assert not torch.equal(enabled, logits(plain))


def test_the_model_option_overrides_the_recipe(
    adapting: Callable[..., Config], base: Callable[..., str], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(replace(adapting("steps=1"), run_dir="")).replace(base(), "nowhere"))
    assert main(["train", str(recipe), "--model", base(), "--run-dir", str(tmp_path / "run")]) == 0
    assert main(["train", str(recipe), f"--model={base()}", "--run-dir", str(tmp_path / "other")]) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--model", base()]) == 1


def test_the_reference_equals_a_separate_copy(
    adapting: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run, once with disabled adapters and once with a separate model as the reference."""
    disabled, separate = (
        adapting("objective.name=grpo", "objective.kl=0.1", run_dir=name) for name in ("disabled", "separate")
    )
    train(disabled, display)
    base_model = load_policy(
        ModelConfig(path=separate.model.path, device="cpu"), load_tokenizer(separate.model), seed=0
    ).model

    def keep(loop: Loop) -> None:
        loop.context = replace(loop.context, reference=base_model)

    monkeypatch.setattr(Loop, "_freeze_reference", keep)
    train(separate, display)
    mine, theirs = (read_jsonl(Path(c.run_dir, "metrics.jsonl")) for c in (disabled, separate))
    assert mine == theirs
    assert mine[-1]["loss/kl"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_merged_model_is_plain_and_gives_the_same_logits(
    dtype: str, adapting: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = adapting(f"model.dtype={dtype}")
    train(config, display)
    assert main(["save", config.run_dir, str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.dtype == getattr(torch, dtype)
    assert "lora" not in str(merged)
    adapted = ModelConfig(path=str(last(config)), dtype=dtype, device="cpu", lora=config.model.lora)  # type: ignore[arg-type]
    ours = load_policy(adapted, load_tokenizer(config.model), seed=0)
    torch.testing.assert_close(
        logits(merged),
        logits(ours.model),
        rtol=1e-4 if dtype == "float32" else 0.05,
        atol=1e-5 if dtype == "float32" else 0.02,
    )


def test_a_run_with_adapters_can_be_evaluated_and_trained_further_in_full(
    adapting: Callable[..., Config],
    tiny: Callable[..., Config],
    display: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = adapting()
    train(config, display)
    assert main(["eval", config.run_dir, "--limit", "4"]) == 0
    assert "avg@1" in capsys.readouterr().out
    full = tiny("model.build=", f"model.path={last(config)}", "steps=1", run_dir="full")
    train(full, display)
    assert (last(full) / "model.safetensors").is_file()


def test_attention_of_an_moe_model_gets_adapters_and_routing_replay_works(
    adapting: Callable[..., Config], display: Any
) -> None:
    config = adapting("routing.replay=sampler", build="tiny_moe")
    train(config, display)
    names = {name.split(".")[-3] for name in load_file(last(config) / "adapter_model.safetensors")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert read_jsonl(Path(config.run_dir, "metrics.jsonl"))[-1]["routing/flip_fraction"] == 0


# ------------------------------------------------------------------------------------------------- 4 bits


def test_4_bit_weights_are_small_and_close_to_the_base_weights(base: Callable[..., str]) -> None:
    path = base(hidden_size=256)
    whole, small = (
        load_policy(
            ModelConfig(path=path, device="cpu", quantize=q, lora=LoraConfig(rank=2)),
            char_tokenizer("sort 0123456789"),
            seed=0,
        ).model  # type: ignore[arg-type]
        for q in ("", "nf4")
    )
    layer = small.model.layers[0].mlp.down_proj.get_base_layer()
    assert layer.weight.numel() * layer.weight.element_size() == layer.in_features * layer.out_features / 2
    assert type(small.lm_head) is torch.nn.Linear
    assert [parameter_count(p) for p in small.parameters()] == [p.numel() for p in whole.parameters()]
    assert {n for n, p in small.named_parameters() if p.requires_grad} == {
        n for n, p in whole.named_parameters() if p.requires_grad
    }
    error = (logits(small) - logits(whole)).std() / logits(whole).std()
    assert 0 < error < 0.3


@pytest.mark.parametrize("targets", ["", "model.lora.targets=q_proj"])
def test_an_adapter_merged_into_4_bit_weights_gives_the_same_logits(
    targets: str, adapting: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = adapting("model.quantize=nf4", *filter(None, [targets]))
    train(config, display)
    assert main(["save", config.run_dir, str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    adapted = ModelConfig(path=str(last(config)), device="cpu", lora=config.model.lora, quantize="nf4")
    ours = load_policy(adapted, load_tokenizer(config.model), seed=0).model
    torch.testing.assert_close(logits(merged), logits(ours), rtol=1e-3, atol=1e-4)


def test_a_checkpoint_trained_on_4_bit_weights_is_loaded_as_such(
    adapting: Callable[..., Config], tiny: Callable[..., Config], display: Any
) -> None:
    config = adapting("model.quantize=nf4")
    train(config, display)
    folder = str(last(config))
    tokenizer = load_tokenizer(config.model)
    ours = load_policy(
        ModelConfig(path=folder, device="cpu", lora=config.model.lora, quantize="nf4"), tokenizer, seed=0
    )
    merged = load_policy(ModelConfig(path=folder, device="cpu"), tokenizer, seed=0)
    torch.testing.assert_close(logits(merged.model), logits(ours.model), rtol=1e-3, atol=1e-4)
    with pytest.raises(
        ConfigError, match=r'model.quantize: .* with 4-bit weights; set model.quantize = "nf4", or merge'
    ):
        load_policy(ModelConfig(path=folder, device="cpu", lora=config.model.lora), tokenizer, seed=0)
    full = tiny("model.build=", f"model.path={folder}", "steps=1", run_dir="full")
    train(full, display)
    assert (last(full) / "model.safetensors").is_file()


def test_4_bit_weights_do_not_hide_weights_beyond_float16(base: Callable[..., str], tmp_path: Path) -> None:
    config = ModelConfig(path=base(), device="cpu")
    policy = load_policy(config, load_tokenizer(config), seed=0)
    policy.model.model.layers[0].mlp.up_proj.weight.data.fill_(7e4)
    policy.model.save_pretrained(tmp_path / "large")
    policy.tokenizer.save_pretrained(tmp_path / "large")
    lora = LoraConfig(rank=2)
    config = ModelConfig(path=str(tmp_path / "large"), device="cpu", quantize="nf4", dtype="float16", lora=lora)
    with pytest.raises(ConfigError, match=r"model.dtype: .*layers.0.mlp.up_proj.*65504"):
        load_policy(config, policy.tokenizer, seed=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("instructions", [True, False], ids=["with bfloat16 instructions", "without"])
def test_4_bit_layers_compute_with_their_dequantized_weights_on_every_cpu(
    instructions: bool, dtype: str, base: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling runs first, without gradients. Training must still get them, and the merged model must agree."""
    import bitsandbytes.functional
    import bitsandbytes.nn.modules

    for module in (bitsandbytes.functional, bitsandbytes.nn.modules):
        monkeypatch.setattr(module, "has_avx512bf16", lambda: instructions)
    config = ModelConfig(
        path=base(attention_bias=True), device="cpu", quantize="nf4", dtype=dtype, lora=LoraConfig(rank=2)
    )  # type: ignore[arg-type]
    tokenizer = load_tokenizer(config)
    small, whole = (load_policy(config, tokenizer, seed=0).model for _ in range(2))
    for layer in adapter.layers(whole).values():
        layer.base_layer = dequantize_layer(layer.base_layer, whole.dtype).requires_grad_(False)
    for model in (small, whole):
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(weight, std=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled = logits(small)
        for model in (small, whole):
            model(input_ids=IDS).logits.float().square().sum().backward()
    exact = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(sampled, logits(whole), **exact)
    for ours, theirs in zip(small.parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            scale = theirs.grad.abs().max()
            torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, **exact)
    adapter.merge(small)
    atol = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}[dtype]
    torch.testing.assert_close(logits(small), sampled, rtol=1e-2, atol=atol)


# -------------------------------------------------------------------------------- location of the base model


def test_an_adapter_finds_its_model_from_anywhere(
    adapting: Callable[..., Config], display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = adapting()
    monkeypatch.chdir(tmp_path)
    config = replace(config, model=replace(config.model, path=Path(config.model.path).name))
    train(config, display)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert adapter.base_of(str(last(config))) == str(tmp_path / "tiny_dense")
    assert main(["eval", config.run_dir, "--limit", "4"]) == 0


@pytest.mark.parametrize("overrides", [(), ("model.lora.rank=0", "objective.name=grpo", "objective.kl=0.1")])
def test_a_resume_refuses_a_changed_base_model(
    overrides: tuple[str, ...], adapting: Callable[..., Config], display: Any
) -> None:
    config = adapting(*overrides)
    train(config, display)
    file = Path(config.model.path, "model.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"\x01\x02\x03\x04")
    with pytest.raises(ConfigError, match=r"model.path: the weights in .*tiny_dense are not those the run began with"):
        resume(config.run_dir, display, steps=5)
    file.write_bytes(whole)
    assert resume(config.run_dir, display, steps=5).step == 5


def test_a_missing_base_model_is_named(
    adapting: Callable[..., Config], display: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = adapting()
    train(config, display)
    os.rename(config.model.path, tmp_path / "moved")
    assert main(["merge", config.run_dir, str(tmp_path / "out")]) == 1
    output = capsys.readouterr().err
    assert f"{config.model.path}: does not exist, and it is the base model of the adapter in {last(config)}" in output
    os.symlink(tmp_path / "moved", config.model.path)
    assert main(["merge", config.run_dir, str(tmp_path / "out")]) == 0
    assert str(last(config)) in capsys.readouterr().out


def test_a_damaged_checkpoint_is_skipped_with_a_message(
    adapting: Callable[..., Config], display: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = adapting()
    train(config, display)
    file = last(config) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    for command in (["merge", config.run_dir, str(tmp_path / "out")], ["eval", config.run_dir, "--limit", "4"]):
        assert main(command) == 0
        output = capsys.readouterr().err
        assert "skipped a damaged checkpoint: 000003: " in output
        assert "using 000002" in output
    assert main(["merge", str(last(config)), str(tmp_path / "other")]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_failed_merge_leaves_no_files(
    adapting: Callable[..., Config],
    display: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = adapting()
    train(config, display)
    assert main(["merge", config.run_dir, f"{config.run_dir}/config.toml/out"]) == 1
    assert "cannot be written" in capsys.readouterr().err
    save = type(load_tokenizer(config.model)).save_pretrained

    def full(self: Any, folder: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(load_tokenizer(config.model)), "save_pretrained", full)
    before = sorted(tmp_path.iterdir())
    assert main(["merge", config.run_dir, str(tmp_path / "out")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.setattr(type(load_tokenizer(config.model)), "save_pretrained", save)
    assert main(["merge", config.run_dir, str(tmp_path / "out")]) == 0


def test_routers_are_neither_adapted_nor_quantized() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = torch.nn.Linear(4, 4)
            self.gate_proj = torch.nn.Linear(4, 4)
            self.shared_expert_gate = torch.nn.Linear(4, 1)
            self.gate = torch.nn.Linear(4, 2)
            self.router = torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 2), "classifier": torch.nn.Linear(4, 2)})
            self.get_output_embeddings = lambda: None

    assert [path for path, _ in linear_layers(Layer())] == ["up_proj", "gate_proj"]


# ------------------------------------------------------------------------------------------------- invalid settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.lora.targets=q_pro",),
            "model.lora.targets: .* has no linear layer 'q_pro' .did you mean q_proj.*; there are: .*v_proj",
        ),
        (("model.lora.targets=lm_head",), "model.lora.targets: 'lm_head' is the LM head, which gets no adapter"),
        (("model.lora.rank=-1",), "model.lora.rank: must be at least 0"),
        (("model.lora.rank=1000",), "model.lora.rank: 1000 is more than the rank of any layer .64."),
        (
            ("model.lora.rank=0", "model.quantize=nf4"),
            "model.quantize: 4-bit weights cannot be trained; set model.lora.rank",
        ),
        (("model.lora.rank=0", "model.lora.alpha=4"), "model.lora.alpha: has no effect without model.lora.rank"),
        (
            ("model.lora.rank=0", "model.lora.targets=q_proj"),
            "model.lora.targets: has no effect without model.lora.rank",
        ),
    ],
)
def test_invalid_settings_are_refused(
    overrides: tuple[str, ...], message: str, adapting: Callable[..., Config], display: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(adapting(*overrides), display)


def test_adapters_on_fused_experts_are_refused(adapting: Callable[..., Config], display: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"model.lora.targets: 'gate_up_proj' holds all experts of a layer in one tensor"
    ):
        train(adapting("model.lora.targets=q_proj,gate_up_proj", build="tiny_moe"), display)


def test_a_built_model_and_a_cold_start_with_a_reference_are_refused(
    tiny: Callable[..., Config], adapting: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=r"model.lora.rank: a model built from scratch"):
        tiny("model.lora.rank=2")
    with pytest.raises(ConfigError, match=r"cold_start.steps: with model.lora the reference"):
        run_objective(adapting("cold_start.steps=2", "objective.name=grpo", "objective.kl=0.1"))


def test_without_peft_the_error_names_the_fix(
    adapting: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.model.adapter.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.lora: adapters need the peft package; run: pip install peft"):
        train(adapting(), display)


def test_further_training_of_an_adapter_keeps_its_layers(adapting: Callable[..., Config], display: Any) -> None:
    config = adapting("model.lora.targets=q_proj,v_proj")
    train(config, display)
    again = adapting(f"model.path={last(config)}", "model.lora.targets=q_proj", run_dir="again")
    with pytest.raises(ConfigError, match=r"model.lora.targets: the adapter in .* has q_proj, v_proj"):
        train(again, display)
    train(
        adapting(f"model.path={last(config)}", "model.lora.targets=v_proj,q_proj", "steps=1", run_dir="same"), display
    )


@pytest.mark.parametrize("harm", ["config", "weights", "other model"])
def test_an_adapter_that_does_not_match_is_refused(
    harm: str, adapting: Callable[..., Config], base: Callable[..., str], display: Any
) -> None:
    config = adapting()
    train(config, display)
    path = last(config)
    if harm == "config":
        (path / "adapter_config.json").write_text("{}")
    elif harm == "weights":
        (path / "adapter_model.safetensors").write_bytes(b"nothing")
    else:
        shutil.rmtree(config.model.path)
        base(hidden_size=32)
    with pytest.raises(ConfigError, match=r"model.path: "):
        load_policy(ModelConfig(path=str(path), device="cpu"), load_tokenizer(config.model), seed=0)


def test_merging_anything_but_an_adapter_is_refused(
    base: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, message in ((base(), "it is already a full model"), (str(tmp_path / "none"), "no such directory")):
        assert main(["merge", source, str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err

"""`model.build` with a directory: a model of a given shape with random weights, trained, resumed and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.config import Config, ModelConfig
from gspo.errors import ConfigError
from gspo.model.load import char_tokenizer, load_policy, load_tokenizer
from gspo.trainer import resume, train


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A directory with the config of a small Mixtral, and no weights."""
    from transformers import MixtralConfig

    folder = tmp_path / "shape"
    MixtralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=512,
        eos_token_id=299,
    ).save_pretrained(folder)
    return folder


def checkpoint_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"{step:06d}"
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {f"{file.name}/{key}": value for file in files for key, value in load_file(file).items()}


def test_the_model_has_the_shape_of_the_file_and_weights_from_the_seed(shape: Path) -> None:
    config = ModelConfig(build=str(shape), build_options={"num_hidden_layers": 3}, device="cpu")
    tokenizer = load_tokenizer(config)
    first, again, other = (load_policy(config, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert type(first.model).__name__ == "MixtralForCausalLM"
    assert len(first.model.model.layers) == 3
    assert first.model.get_input_embeddings().weight.shape == (300, 32)
    # The directory has no tokenizer, so the end token is that of the character tokenizer.
    assert first.stop_ids == (tokenizer.eos_token_id,)
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name]), name
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)


def test_a_tokenizer_in_the_directory_is_used(shape: Path) -> None:
    char_tokenizer("xyz").save_pretrained(shape)
    tokenizer = load_tokenizer(ModelConfig(build=str(shape)), alphabet="0123")
    assert tokenizer("xyz").input_ids == char_tokenizer("xyz")("xyz").input_ids
    policy = load_policy(ModelConfig(build=str(shape), device="cpu"), tokenizer, seed=0)
    assert 299 in policy.stop_ids


def test_weights_in_the_directory_are_not_read(shape: Path) -> None:
    (shape / "model.safetensors").write_bytes(b"damaged")
    config = ModelConfig(build=str(shape), device="cpu")
    load_policy(config, load_tokenizer(config), seed=0)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_resumed_run_equals_the_uninterrupted_run(
    tiny: Callable[..., Config], display: Any, shape: Path, tmp_path: Path, rank: int
) -> None:
    whole, cut = (
        tiny(f"model.build={shape}", f"model.lora.rank={rank}", "routing.replay=old", run_dir=name)
        for name in ("whole", "cut")
    )
    train(whole, display)
    shutil.copytree(whole.run_dir, cut.run_dir)
    shutil.rmtree(Path(cut.run_dir, "checkpoints", "000003"))
    assert resume(cut.run_dir, display, trust_run=True).step == 3
    ours, theirs = (checkpoint_tensors(Path(config.run_dir), 3) for config in (cut, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert any("lora_A" in key for key in ours) == bool(rank)


def test_adapters_are_not_resumed_on_another_shape(tiny: Callable[..., Config], display: Any, shape: Path) -> None:
    config = tiny(f"model.build={shape}", "model.lora.rank=2", "steps=1")
    train(config, display)
    file = shape / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"initializer_range": 0.5}))
    with pytest.raises(ConfigError, match=rf"model.build: {file} is not the one the run began with"):
        resume(config.run_dir, display, steps=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.build=nowhere",), "model.build: .*nowhere: no such directory with a config.json"),
        (("model.build={shape}", "model.trust_remote_code=true"), "model.trust_remote_code: has no effect"),
        (("model.build={shape}", "model.build_options={num_layer = 3}"), "build_options.num_layer: mixtral"),
        (("model.build={shape}", "model.build_options={vocab_size = 3}"), "build_options.vocab_size"),
        (("model.lora.rank=2",), "model.lora.rank: a model built from scratch"),
    ],
)
def test_what_cannot_be_built_is_refused(
    tiny: Callable[..., Config], parts_of: Any, shape: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts_of(tiny(*(text.replace("{shape}", str(shape)) for text in overrides)))

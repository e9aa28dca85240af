"""A .gguf file as a model: it provides weights, tokenizer, chat template and end token, and can be trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo.activity import current
from gspo.config import Config, ModelConfig
from gspo.errors import ConfigError
from gspo.model.load import load_policy, load_tokenizer
from gspo.trainer import train

gguf = pytest.importorskip("gguf")

HEADS, KEYS, LAYERS = 4, 2, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"


def given_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokens()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(shape).eval()


def tokens() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return ["<|pad|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "th"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query and key rows in the order of llama.cpp."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path: Path, model: Any) -> None:
    out, config = gguf.GGUFWriter(str(path), "llama"), model.config
    out.add_context_length(256)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KEYS)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_dimension_count(config.hidden_size // HEADS)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens())
    out.add_token_types([3, 3, 3] + [1] * (len(tokens()) - 3))
    out.add_token_merges(["t h"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(0)
    out.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, value in model.state_dict().items():
        name, weight = key.removesuffix(".weight"), value.numpy()
        if name not in outer:
            _, _, layer, rest = name.split(".", 3)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KEYS}.get(rest)
            weight, name = permuted(weight, heads) if heads else weight, f"blk.{layer}.{names[rest]}"
        out.add_tensor(f"{outer.get(name, name)}.weight", np.ascontiguousarray(weight))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "model.gguf", given_model())
    return tmp_path / "model.gguf"


def test_the_loaded_model_gives_the_same_logits(file: Path) -> None:
    config = ModelConfig(path=str(file), device="cpu")
    tokenizer = load_tokenizer(config)
    policy = load_policy(config, tokenizer, seed=0)
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(policy.model(input_ids=ids).logits, given_model()(input_ids=ids).logits)
    assert policy.stop_ids == (2,)
    assert tokenizer.decode(tokenizer("a b\nc")["input_ids"]) == "a b\nc"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "7+5"}], tokenize=False)
    assert chat == "<|im_start|>7+5<|im_end|><|im_start|>"


def test_loading_draws_nothing_and_is_counted(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def look(*event: object) -> None:
        seen.extend(f"{one.name} of {one.total}" for path in current() for one in path)

    config = ModelConfig(path=str(file), device="cpu")
    handle = torch.nn.modules.module.register_module_parameter_registration_hook(look)
    try:
        load_policy(config, load_tokenizer(config), seed=0)
    finally:
        handle.remove()
    said = capfd.readouterr()
    assert said.out + said.err == ""
    assert "weights of 21" in seen


@pytest.mark.parametrize("lora", [0, 2])
def test_training_saves_a_plain_model_or_an_adapter(
    lora: int, file: Path, tiny: Callable[..., Config], display: Any
) -> None:
    config = tiny("model.build=", f"model.path={file}", f"model.lora.rank={lora}", "steps=1")
    outcome = train(config, display)
    saved = outcome.run / "checkpoints" / "000001"
    again = load_policy(
        ModelConfig(path=str(saved), device="cpu"), load_tokenizer(ModelConfig(path=str(saved))), seed=0
    )
    assert again.stop_ids == (2,)
    assert (saved / ("adapter_model.safetensors" if lora else "model.safetensors")).is_file()


def test_a_missing_file_and_a_missing_package_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model.path: .*none.gguf: no such file"):
        load_tokenizer(ModelConfig(path=str(file.with_name("none.gguf"))))
    monkeypatch.setattr("gspo.model.source.importlib.util.find_spec", lambda name: None)
    needed = r"reading it needs the packages gguf and accelerate; run: pip install 'gspo\[gguf\]'"
    with pytest.raises(ConfigError, match=needed):
        load_tokenizer(ModelConfig(path=str(file)))

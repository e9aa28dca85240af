"""Tokenizer files that are damaged, missing or of another model: the error is one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from gspo.config import ModelConfig
from gspo.errors import ConfigError
from gspo.model.load import char_tokenizer, load_policy, load_tokenizer

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = char_tokenizer("0123456789+= \n")
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    ).save_pretrained(tmp_path)
    return tmp_path


def changed(**parts: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | parts)


DAMAGE: dict[str, tuple[str, Callable[[str], str]]] = {
    "truncated": (TOKENIZER, lambda text: text[:300]),
    "empty": (TOKENIZER, lambda _: ""),
    "an empty object": (TOKENIZER, lambda _: "{}"),
    "a list": (TOKENIZER, lambda _: "[]"),
    "nested too deeply": (TOKENIZER, lambda _: "[" * 100_000),
    "an unknown model": (TOKENIZER, changed(model={"type": "Nope"})),
    "a merge of unknown tokens": (TOKENIZER, changed(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]})),
    "truncated settings": (SETTINGS, lambda text: text[:20]),
    "settings that are a list": (SETTINGS, lambda _: "[1]"),
    "a class that is a number": (SETTINGS, lambda _: '{"tokenizer_class": 5}'),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    file, damage = DAMAGE[name]
    (folder / file).write_text(damage((folder / file).read_text()))
    with pytest.raises(ConfigError, match=r"model\.path: .*download the tokenizer's files again") as error:
        load_tokenizer(ModelConfig(path=str(folder)))
    assert str(folder) in str(error.value)
    assert file in str(error.value)
    assert "\n" not in str(error.value)


def test_a_binary_file_is_named(folder: Path) -> None:
    (folder / TOKENIZER).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=TOKENIZER):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_tokenizer_without_files_is_an_error(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_tokenizer_of_another_model_is_an_error_at_load_time(folder: Path) -> None:
    config = Qwen2Config.from_pretrained(folder)
    config.vocab_size = 5
    Qwen2ForCausalLM(config).save_pretrained(folder)
    settings = ModelConfig(path=str(folder), device="cpu")
    tokenizer = load_tokenizer(settings)
    with pytest.raises(ConfigError, match=rf"model\.path: .*has {tokenizer.vocab_size} tokens, and the model embeds 5"):
        load_policy(settings, tokenizer, seed=0)


def test_an_intact_tokenizer_loads(folder: Path) -> None:
    assert load_tokenizer(ModelConfig(path=str(folder)))("1+2")["input_ids"]

"""A model by its hub name without a network."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from gspo.config import ModelConfig
from gspo.errors import ConfigError
from gspo.model.load import build_model, load_policy, load_tokenizer
from gspo.model.source import resolve_model_source, weights_fingerprint
from gspo.network import hub

HOST = "hub.invalid"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a network; the directory of its hub cache."""

    def nothing(*given: Any, **options: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", f"https://{HOST}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    cache = tmp_path / "cache"
    real = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *given: real(*given, cache_dir=cache))
    return cache


def cached_model(cache: Path, name: str) -> Path:
    """A small model in the layout of the hub cache."""
    folder, commit = cache / f"models--{name.replace('/', '--')}", "0" * 40
    built = ModelConfig(build="tiny_dense")
    tokenizer = load_tokenizer(built)
    for part in (build_model(built, tokenizer, 0), tokenizer):
        part.save_pretrained(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit


@pytest.mark.parametrize("name", ["someone/some-model", "some-model"])
def test_a_model_that_cannot_be_downloaded_fails_immediately(offline: Path, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        load_tokenizer(ModelConfig(path=name))
    assert time.monotonic() - began < 30, "the hub's own retries take longer"
    assert str(error.value).startswith(f"model.path: {name!r} is neither a directory nor in the local cache")
    assert HOST in str(error.value)
    assert "give a directory or a .gguf file" in str(error.value)


def test_a_cached_model_is_used(offline: Path) -> None:
    snapshot = cached_model(offline, "someone/some-model")
    config = ModelConfig(path="someone/some-model", dtype="float32")
    assert resolve_model_source(config) == (str(snapshot), {})
    policy = load_policy(config, load_tokenizer(config), seed=0)
    assert policy.stop_ids
    assert weights_fingerprint(config) == ""  # the same with and without a network


def test_with_a_proxy_or_a_network_the_hub_resolves_the_name(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(path="someone/some-model")
    with monkeypatch.context() as patch:
        patch.setattr(hub, "getproxies", lambda: {"https": "http://proxy.invalid"})
        assert resolve_model_source(config) == ("someone/some-model", {})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given: [])
    assert resolve_model_source(config) == ("someone/some-model", {})


def test_contradicting_model_files_are_reported_in_one_line(tmp_path: Path) -> None:
    built = ModelConfig(build="tiny_dense")
    tokenizer = load_tokenizer(built)
    for part in (build_model(built, tokenizer, 0), tokenizer):
        part.save_pretrained(tmp_path)
    file, heads = tmp_path / "config.json", '"num_attention_heads": 4'
    assert heads in file.read_text()
    file.write_text(file.read_text().replace(heads, heads.replace("4", "0")))
    config = ModelConfig(path=str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match=r"cannot load .*contradict each other"):
        load_policy(config, load_tokenizer(config), seed=0)

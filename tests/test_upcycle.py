"""An upcycled model is the dense model until training separates its experts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.config import ModelConfig, RoutingConfig
from gspo.model.load import char_tokenizer, load_policy, load_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


@pytest.fixture
def upcycle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    yield importlib.import_module("upcycle")
    sys.modules.pop("upcycle", None)


def dense(folder: Path, kind: str, **options: Any) -> Path:
    tokenizer = char_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **tokens, vocab_size=len(tokenizer), bos_token_id=None, **options)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)  # biases of 0 would not show that they are copied
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(upcycle: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["upcycle.py", *map(str, arguments)])
    result: int = upcycle.main()
    return result


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    """By transformers alone."""
    # The default implementation of experts has no float64.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    result: torch.Tensor = model(input_ids=torch.arange(24).reshape(2, 12)).logits
    return result


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {"tie_word_embeddings": True}), ("llama", {"head_dim": 16}), ("qwen2", {}), ("qwen3", {})],
)
def test_the_logits_are_those_of_the_dense_model(
    upcycle: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    source = dense(tmp_path / "dense", kind, **options)
    assert run(upcycle, monkeypatch, source, tmp_path / "moe", "--experts", 6, "--top-k", 3) == 0
    torch.testing.assert_close(logits(tmp_path / "moe"), logits(source), rtol=1e-5, atol=1e-5)
    # gspo finds its routers, so it can be trained with routing replay.
    config = ModelConfig(path=str(tmp_path / "moe"), device="cpu", dtype="float32")
    routers = load_policy(config, load_tokenizer(config), seed=0, routing=RoutingConfig(replay="old")).routers
    assert routers is not None
    assert (routers.layers, routers.experts, routers.top_k) == (2, 6, 3)


def test_the_router_and_the_noise_follow_the_seed(
    upcycle: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = dense(tmp_path / "dense", "llama")
    for name, seed, noise in (("a", 1, 0.1), ("b", 1, 0.1), ("c", 2, 0.1), ("d", 1, 0)):
        run(upcycle, monkeypatch, source, tmp_path / name, "--experts", 4, "--seed", seed, "--noise", noise)
    a, b, c, d = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "abcd")
    assert all(torch.equal(a[name], b[name]) for name in a)
    experts = [name for name in a if "experts" in name]
    assert all(not torch.equal(a[name], c[name]) for name in a if "gate" in name or name in experts)
    for name in experts:
        copied = d[name][0]
        assert all(torch.equal(expert, copied) for expert in d[name])
        # Every expert has noise of its own, a tenth of the weight's own deviation.
        assert ((a[name] - copied).std() / copied.std()).item() == pytest.approx(0.1, rel=0.05)
        assert not torch.equal(a[name][0], a[name][1])
    assert not torch.allclose(logits(tmp_path / "a"), logits(source), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("llama", {"mlp_bias": True}, "no place for model.layers.0.mlp.down_proj.bias"),
        ("gpt_neox", {}, "gpt_neox models cannot be upcycled"),
    ],
)
def test_a_model_that_has_no_moe_twin_is_refused(
    upcycle: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    options: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(SystemExit):
        run(upcycle, monkeypatch, dense(tmp_path / "dense", kind, **options), tmp_path / "moe")
    assert reason in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "moe").exists()

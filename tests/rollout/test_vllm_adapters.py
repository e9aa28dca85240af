"""Engine `vllm` in process, for a policy with low-rank adapters: after the first time the adapter alone is sent, and is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_vllm
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm_cases import apart, context_of, drawn, small_moe, some_prompts

from gspo.config import LoraConfig
from gspo.errors import WeightSyncError
from gspo.model import adapter
from gspo.rollout.engine import build_engine
from gspo.rollout.vllm.in_process import InProcessHost
from gspo.rollout.vllm.memory import SHARED

pytestmark = pytest.mark.vllm
NEAR = 1e-4
"""Rounding: 4e-6 at first, 2e-5 after the adapters have grown by several of `trained`; an adapter left out is off by 4 nats."""


def small_dense() -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    return Qwen3ForCausalLM(Qwen3Config(**shape, initializer_range=0.2, eos_token_id=1)).eval()


def adapted(model: Any, **settings: Any) -> Any:
    adapter.attach(model, LoraConfig(**{"rank": 4} | settings), base="a model", seed=0)
    return model


@torch.no_grad()
def trained(model: Any, amount: float = 0.1) -> None:
    """Another adapter, changed in place as an optimiser would."""
    generator = torch.Generator().manual_seed(int(next(model.parameters())._version))
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.add_(amount * torch.randn(p.shape, generator=generator))


def followed(engine: Any, *, versions: int) -> list[list[tuple[int, ...]]]:
    """Each version's replies are the model's, which is then trained on; the tokens of each version."""
    tokens, model, prompts = [], engine.context.model, some_prompts()
    for version in range(versions):
        replies = drawn(engine, prompts, version=version)
        difference = apart(model, prompts, replies).max()
        print(f"version {version}: max |difference| {difference:.1e}")
        assert difference < NEAR
        assert {r.version for r in replies} == {version}
        tokens.append([r.token_ids for r in replies])
        trained(model)
    return tokens


class Sent:
    """What is sent to an engine: numbers of tensors of the model's own, and sizes of adapter files."""

    def __init__(self, engine: Any, patch: pytest.MonkeyPatch) -> None:
        self.weights: list[int] = []
        self.adapters: list[int] = []
        self.numbers: list[int] = []
        self.folders: list[Path] = []
        send, llm = engine.host._send, engine.host.llm.llm_engine
        add = llm.add_lora

        def watched_send(pairs: Any, label: str) -> None:
            self.weights.append(len(pairs))
            send(pairs, label)

        def watched_add(request: Any) -> Any:
            self.folders.append(Path(request.lora_path))
            self.numbers.append(request.lora_int_id)
            self.adapters.append(os.path.getsize(self.folders[-1] / adapter.WEIGHTS))
            return add(request)

        patch.setattr(engine.host, "_send", watched_send)
        patch.setattr(llm, "add_lora", watched_add)


@pytest.mark.parametrize("case", ["a mixture", "q alone", "asked for whole weights"])
def test_other_policies_with_adapters(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM joins q, k and v, of which one may have an adapter; of a mixture it takes none on a CPU."""
    needs_vllm()
    assert InProcessHost.alive == 0, "there is one at a time, so these come before those that share one"
    model = adapted(small_moe()) if case == "a mixture" else adapted(small_dense(), targets=("q_proj",), alpha=6)
    built = build_engine("vllm", context_of(model), {"adapters": False} if case == "asked for whole weights" else {})
    try:
        sent = Sent(built, monkeypatch)
        for _ in range(2):
            trained(model)
            assert apart(model, some_prompts(), drawn(built, some_prompts())).max() < NEAR
        why = {"a mixture": "kernel for experts that needs a GPU", "q alone": "is sent as an adapter"}
        assert why.get(case, "engine_options.adapters is false") in built.about
        assert (len(sent.weights), len(sent.adapters)) == ((1, 2) if case == "q alone" else (2, 0))
    finally:
        built.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    needs_vllm()
    built = build_engine("vllm", context_of(adapted(small_dense())), {})
    yield built
    built.close()


def test_the_models_own_weights_travel_once_and_then_the_adapter_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sent = engine.context.model, Sent(engine, monkeypatch)
    assert engine.about.startswith("the low-rank adapter is sent as an adapter")
    tokens = followed(engine, versions=4)
    assert all(before != after for before, after in pairwise(tokens))
    whole = sum(p.numel() * 4 for name, p in model.named_parameters())
    own = sum(p.numel() * 4 for name, p in model.named_parameters() if "lora_" in name)
    assert len(sent.weights) == 1
    assert len(sent.adapters) == 4
    assert all(own < size < own + 8192 for size in sent.adapters)
    assert own + 8192 < whole
    assert len(set(sent.numbers)) == 4, "a number is never used again"
    assert engine.host.llm.llm_engine.list_loras() == {sent.numbers[-1]}
    assert all(SHARED in folder.parents and not folder.exists() for folder in sent.folders)


def test_a_model_whose_own_weights_changed_is_sent_anew(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = engine.context.model, some_prompts()
    drawn(engine, prompts)
    sent = Sent(engine, monkeypatch)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    assert apart(model, prompts, drawn(engine, prompts)).max() < NEAR
    assert len(sent.weights) == 1


@pytest.mark.parametrize("changed", [0.0, 0.1])
def test_an_engine_that_leaves_the_adapter_out_is_caught(
    engine: Any, changed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the adapter changes nothing that the log-probabilities could show (every B is 0)."""
    model, prompts = engine.context.model, some_prompts()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    trained(model, changed)
    generate = engine.host.llm.generate
    with monkeypatch.context() as patched:
        patched.setattr(engine.host.llm, "generate", lambda *a, lora_request, **kw: generate(*a, **kw))
        with pytest.raises(WeightSyncError, match="without its adapter"):
            drawn(engine, prompts)
    assert apart(model, prompts, drawn(engine, prompts)).max() < NEAR, "and the next call sends it again"


@pytest.mark.parametrize("fault", ["a bit changed", "an old one", "a layer dropped"])
def test_an_adapter_that_did_not_arrive_is_an_error(engine: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = engine.context.model, some_prompts()
    drawn(engine, prompts)
    old = {name: w.detach().clone() for name, w in adapter._weights(model).items()}
    trained(model)
    save = adapter.save_file

    def faulty(tensors: dict[str, torch.Tensor], path: Path) -> None:
        tensors = {name: t.clone() for name, t in (old if fault == "an old one" else tensors).items()}
        name = next(iter(tensors))
        if fault == "a bit changed":
            tensors[name].view(-1)[3] += 1e-6
        if fault == "a layer dropped":
            layer = name.rpartition(".lora_")[0]
            tensors = {n: t for n, t in tensors.items() if not n.startswith(layer)}
        save(tensors, path)

    with monkeypatch.context() as patched:
        patched.setattr(adapter, "save_file", faulty)
        with pytest.raises(WeightSyncError, match="adapter that arrived"):
            drawn(engine, prompts)
    assert apart(model, prompts, drawn(engine, prompts)).max() < NEAR


def test_the_same_prompt_after_an_update_does_not_meet_old_keys_in_the_cache(engine: Any) -> None:
    model, prompts = engine.context.model, some_prompts(length=200)
    for _ in range(2):
        assert apart(model, prompts, drawn(engine, prompts)).max() < NEAR
        trained(model)

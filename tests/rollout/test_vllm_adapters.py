"""Engine `vllm` in process, for a policy with LoRA adapters: after the first sync, only the adapter is sent."""

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
from vllm_cases import context_of, differences, generate, small_moe, some_prompts

from gspo.config import LoraConfig
from gspo.errors import WeightSyncError
from gspo.model import adapter
from gspo.rollout.engine import build_engine
from gspo.rollout.vllm.in_process import InProcessHost
from gspo.rollout.vllm.policy import LearnerPolicy
from gspo.rollout.vllm.transfer_folder import SHARED
from gspo.rollout.vllm.weights import Part

pytestmark = pytest.mark.vllm
NEAR = 1e-4
"""Rounding: 4e-6 at first, 2e-5 after several calls of `perturb_adapter`. Without the adapter the difference is 4
nats."""


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


def with_adapter(model: Any, **settings: Any) -> Any:
    adapter.attach(model, LoraConfig(**{"rank": 4} | settings), base="a model", seed=0)
    return model


@torch.no_grad()
def perturb_adapter(model: Any, amount: float = 0.1) -> None:
    """Change the adapter in place, as an optimizer does."""
    generator = torch.Generator().manual_seed(int(next(model.parameters())._version))
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.add_(amount * torch.randn(p.shape, generator=generator))


def assert_follows(engine: Any, *, versions: int) -> list[list[tuple[int, ...]]]:
    """Check that each version's completions match the model, which is then changed; the tokens of each version."""
    tokens = []
    model = engine.context.model
    prompts = some_prompts()
    for version in range(versions):
        completions = generate(engine, prompts, version=version)
        difference = differences(model, prompts, completions).max()
        print(f"version {version}: max |difference| {difference:.1e}")
        assert difference < NEAR
        assert {r.version for r in completions} == {version}
        tokens.append([r.token_ids for r in completions])
        perturb_adapter(model)
    return tokens


class TransferLog:
    """What is sent to an engine: the number of base tensors, and the sizes of adapter files."""

    def __init__(self, engine: Any, patch: pytest.MonkeyPatch) -> None:
        self.weights: list[int] = []
        self.adapters: list[int] = []
        self.numbers: list[int] = []
        self.folders: list[Path] = []
        send = engine.host._send
        llm = engine.host.llm.llm_engine
        add = llm.add_lora

        def watched_send(policy: LearnerPolicy, part: Part, label: str) -> None:
            self.weights.append(len(policy.shapes(part)))
            send(policy, part, label)

        def watched_add(request: Any) -> Any:
            self.folders.append(Path(request.lora_path))
            self.numbers.append(request.lora_int_id)
            self.adapters.append(os.path.getsize(self.folders[-1] / adapter.WEIGHTS))
            return add(request)

        patch.setattr(engine.host, "_send", watched_send)
        patch.setattr(llm, "add_lora", watched_add)


@pytest.mark.parametrize("case", ["an MoE model", "q_proj only", "merged by request"])
def test_other_policies_with_adapters(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM fuses q, k and v, of which only one may have an adapter. On a CPU it supports no adapters of MoE models."""
    needs_vllm()
    assert InProcessHost.alive == 0, "only one can run at a time, so these tests precede those that share one"
    model = (
        with_adapter(small_moe())
        if case == "an MoE model"
        else with_adapter(small_dense(), targets=("q_proj",), alpha=6)
    )
    built = build_engine("vllm", context_of(model), {"adapters": False} if case == "merged by request" else {})
    try:
        sent = TransferLog(built, monkeypatch)
        for _ in range(2):
            perturb_adapter(model)
            assert differences(model, some_prompts(), generate(built, some_prompts())).max() < NEAR
        why = {"an MoE model": "MoE kernel needs a GPU", "q_proj only": "is sent as an adapter"}
        assert why.get(case, "engine_options.adapters is false") in built.about
        assert (len(sent.weights), len(sent.adapters)) == ((1, 2) if case == "q_proj only" else (2, 0))
    finally:
        built.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    needs_vllm()
    built = build_engine("vllm", context_of(with_adapter(small_dense())), {})
    yield built
    built.close()


def test_the_base_weights_are_sent_once_and_then_only_the_adapter(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sent = engine.context.model, TransferLog(engine, monkeypatch)
    assert engine.about.startswith("the LoRA adapter is sent as an adapter")
    tokens = assert_follows(engine, versions=4)
    assert all(before != after for before, after in pairwise(tokens))
    whole = sum(p.numel() * 4 for name, p in model.named_parameters())
    own = sum(p.numel() * 4 for name, p in model.named_parameters() if "lora_" in name)
    assert len(sent.weights) == 1
    assert len(sent.adapters) == 4
    assert all(own < size < own + 8192 for size in sent.adapters)
    assert own + 8192 < whole
    assert len(set(sent.numbers)) == 4, "an adapter id is never reused"
    assert engine.host.llm.llm_engine.list_loras() == {sent.numbers[-1]}
    assert all(SHARED in folder.parents and not folder.exists() for folder in sent.folders)


def test_changed_base_weights_are_sent_again(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = engine.context.model, some_prompts()
    generate(engine, prompts)
    sent = TransferLog(engine, monkeypatch)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    assert differences(model, prompts, generate(engine, prompts)).max() < NEAR
    assert len(sent.weights) == 1


@pytest.mark.parametrize("changed", [0.0, 0.1])
def test_an_engine_that_ignores_the_adapter_is_detected(
    engine: Any, changed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the adapter has no effect on the log-probs (every B is 0)."""
    model, prompts = engine.context.model, some_prompts()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    perturb_adapter(model, changed)
    llm_generate = engine.host.llm.generate
    with monkeypatch.context() as patched:
        patched.setattr(engine.host.llm, "generate", lambda *a, lora_request, **kw: llm_generate(*a, **kw))
        with pytest.raises(WeightSyncError, match="without its adapter"):
            generate(engine, prompts)
    assert differences(model, prompts, generate(engine, prompts)).max() < NEAR, "and the next call sends it again"


@pytest.mark.parametrize("fault", ["a bit changed", "an old one", "a layer dropped"])
def test_an_adapter_that_did_not_arrive_is_an_error(engine: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = engine.context.model, some_prompts()
    generate(engine, prompts)
    old = {name: w.detach().clone() for name, w in adapter._weights(model).items()}
    perturb_adapter(model)
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
            generate(engine, prompts)
    assert differences(model, prompts, generate(engine, prompts)).max() < NEAR


def test_the_prefix_cache_is_reset_by_an_update(engine: Any) -> None:
    model, prompts = engine.context.model, some_prompts(length=200)
    for _ in range(2):
        assert differences(model, prompts, generate(engine, prompts)).max() < NEAR
        perturb_adapter(model)

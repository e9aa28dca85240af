"""Paged decoding of many families: the log-probs of plain forward passes, far beyond the window of attention."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from families import ATTENTION, FAMILIES, SMOKE, Family
from interpreted import CUDA
from paged_cases import DEVICE, assert_same, decode_paged, logprob_error, logprob_errors
from torch import Tensor

from gspo.model.load import position_limit
from gspo.model.packed_forward import obstacle_to_packing, supports_packing
from gspo.model.routing import find_routers
from gspo.rollout.local import attention, decoder, paged
from gspo.rollout.local.attention import UnsupportedAttention, attention_layers, window_of
from gspo.rollout.local.cuda_graphs import CudaGraphs
from gspo.rollout.local.decoder import fused_modules, obstacle_to_paging
from gspo.rollout.local.states import obstacle_to_cache
from gspo.types import Sampling

ALL = {**FAMILIES, **SMOKE, **ATTENTION}
REFUSED = ("llama4", "qwen3-next")
PAGED = [name for name in ALL if name not in REFUSED]
FUSED = {
    *("llama", "llama, dynamic rotary embedding", "qwen2-moe", "qwen3-moe", "qwen3-moe, some layers dense"),
    *("qwen3, some windows", "mistral, window", "mixtral", "mixtral, window", "granite", "granitemoe"),
}
DOCUMENTED = {
    "Llama": "llama",
    "Qwen2-MoE": "qwen2-moe",
    "Qwen3 with sliding windows": "qwen3, some windows",
    "Qwen3-MoE": "qwen3-moe",
    "Mistral with a sliding window": "mistral, window",
    "Ministral 3": "ministral3",
    "Mixtral": "mixtral",
    "Granite": "granite",
    "Granite-MoE": "granitemoe",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3",
    "Gemma 3n": "gemma3n",
    "Gemma 4": "gemma4",
    "Gemma 4 with a shared KV cache": "gemma4, shared KV cache",
    "GPT-OSS": "gpt-oss",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "OLMoE": "olmoe",
    "Phi-3, Phi-4-mini": "phi3, longrope",
    "Phi-3 with a sliding window": "phi3, window",
    "GLM-4": "glm4",
    "GLM-4-MoE": "glm4-moe",
    "SmolLM3": "smollm3",
    "Command R7B (Cohere 2)": "cohere2",
    "ERNIE 4.5": "ernie4.5",
    "Hunyuan": "hunyuan",
    "MiniMax-M2": "minimax-m2",
    "DeepSeek-V2": "deepseek-v2",
    "DeepSeek-V3": "deepseek-v3",
    "GPT-2": "gpt2",
    "Llama 4": "llama4",
    "Qwen3-Next, Qwen3.5": "qwen3-next",
}
"""Rows of the table in docs/engines.md, and their models."""
LENGTHS = (3, 70, 130)
"""Of prompts: within one block, beyond it, beyond two. The window of all families has 8 tokens."""
SAMPLING = Sampling(max_tokens=24)


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = ALL[name].model(dtype).to(DEVICE)
    # The attention 'sdpa' of transformers ignores soft caps.
    if name == "gemma2":
        model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", PAGED)
def test_log_probs_are_those_of_plain_forwards_beyond_the_window(name: str) -> None:
    model = build(name)
    assert obstacle_to_paging(model) is None
    assert (fused_modules(model) is not None) == (name in FUSED)
    own = model.config._attn_implementation
    result = decode_paged(model, LENGTHS, 2, SAMPLING, slots=4)
    assert model.config._attn_implementation == own
    assert logprob_error(model, LENGTHS, 2, result) < 2e-5


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4, shared KV cache", "deepseek-v3"])
def test_preemption_and_packing_do_not_change_completions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    lengths, sampling = (30, 100), Sampling(max_tokens=50)
    expected = decode_paged(model, lengths, 3, sampling, slots=6)
    preempted: list[int] = []
    preempt = paged.PagedBatch._preempt
    monkeypatch.setattr(paged.PagedBatch, "_preempt", lambda self: (preempted.append(1), preempt(self))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        supports_packing(model)  # the learner replaces the attention of models that can be packed
    assert_same(decode_paged(model, lengths, 3, sampling, slots=6, blocks=10), expected)
    assert preempted


def test_experts_match_those_of_plain_decoding() -> None:
    model = build("gpt-oss")
    routers = find_routers(model)
    result = decode_paged(model, LENGTHS, 2, SAMPLING, routers=routers)
    assert routers is not None
    assert all(routes is not None and routes.layers == 2 for routes in result.routes)


@pytest.mark.skipif(CUDA, reason="a GPU has a kernel for these experts")
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "deepseek-v3", "glm4-moe"])
def test_experts_in_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of all experts together, as on a GPU in bfloat16."""
    model = build(name)
    launches: list[int] = []

    def one_by_one(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        launches.append(1)
        starts = [0, *offs.tolist()]
        return torch.cat([x[a:b] @ weight[e] for e, (a, b) in enumerate(pairwise(starts))])

    monkeypatch.setattr(decoder, "grouped_products", lambda model: True)
    monkeypatch.setattr(decoder, "grouped_mm", one_by_one)
    assert obstacle_to_paging(model) is None
    assert logprob_error(model, LENGTHS, 2, decode_paged(model, LENGTHS, 2, SAMPLING)) < 2e-5
    assert launches


def documented() -> dict[str, tuple[str, str]]:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    table = page.split("| family | decoding | training |\n", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return {family: (decoding, training) for family, decoding, training, *_ in rows}


def test_the_table_names_all_families() -> None:
    assert list(documented()) == list(DOCUMENTED)


@pytest.mark.parametrize("label", DOCUMENTED)
def test_the_table_says_what_a_family_gets(label: str) -> None:
    """With the model as a run loads it: packing comes first. To update the table, replace what differs."""
    model = ALL[DOCUMENTED[label]].model().to(DEVICE)
    training = "packed" if obstacle_to_packing(model) is None else "padded"
    if obstacle_to_paging(model) is None:
        decoding = "paged, fused" if fused_modules(model) else "paged"
    else:
        decoding = "KV cache" if obstacle_to_cache(model) is None else "recompute"
    assert documented()[label] == (decoding, training)


# --- What the layers compute ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_that_round_otherwise_are_not_replaced(dtype: torch.dtype) -> None:
    """GPT-OSS multiplies with the weight before it rounds; weights of 1, as at the start, would hide that."""
    for name, plain in (("phi3", True), ("gpt-oss", dtype == torch.float32), ("gemma3", False)):
        norm = build(name, dtype).model.norm
        assert decoder._is_norm(norm) == plain


def test_windows_sinks_and_shared_caches_are_found() -> None:
    layers = attention_layers(build("gpt-oss"))
    assert [(a.window, a.has_sinks) for a in layers] == [(8, True), (None, True)]
    layers = attention_layers(build("gemma4, shared KV cache"))
    assert [(a.window, a.source) for a in layers] == [(8, 0), (None, 1), (8, 0), (None, 1)]
    assert [a.bytes_per_block > 0 for a in layers] == [True, True, False, False]
    assert {(a.key_size, a.value_size) for a in attention_layers(build("deepseek-v3"))} == {(16, 8)}
    assert {a.softcap for a in attention_layers(build("gemma2"))} == {2.0}


@pytest.mark.parametrize("window", [1, 2, 100, 4095, None])
def test_the_window_is_read_from_the_function_of_the_mask(window: int | None) -> None:
    def mask(row: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (True if window is None else key > query - window)

    assert window_of(mask, 4096, torch.device("cpu")) == window


@pytest.mark.parametrize(
    "mask",
    [
        lambda row, head, query, key: (key <= query) & (key // 1000 == query // 1000),
        lambda row, head, query, key: key <= query + 1,
        lambda row, head, query, key: abs(query - key) < 100,
        lambda row, head, query, key: (key <= query) & ((key > query - 100) | (key < 4)),
    ],
    ids=["chunks", "the next token", "both sides", "first tokens"],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(UnsupportedAttention, match="not causal with a window"):
        window_of(mask, 4096, torch.device("cpu"))


# --- Refusals ---


@pytest.mark.parametrize(("name", "reason"), [(name, "layers other than full and sliding") for name in REFUSED])
def test_other_layers_are_refused(name: str, reason: str) -> None:
    assert reason in (obstacle_to_paging(build(name)) or "")


REFUSED_CONFIGS = {
    "number of cached tokens": Family(kind="opt", fields={"ffn_dim": 24, "word_embed_proj_dim": 32}),
    "one layer number per call": Family(kind="diffllama"),
    "cannot be replaced": Family(kind="bloom", fields={"n_layer": 2, "n_head": 4}),
    "softcap=2.0": ATTENTION["gemma2"],
}


@pytest.mark.parametrize("reason", REFUSED_CONFIGS)
def test_attention_that_is_not_understood_is_refused(reason: str) -> None:
    assert reason in (obstacle_to_paging(REFUSED_CONFIGS[reason].model().to(DEVICE)) or "")


def changed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make every attention layer hand over these options."""
    attend = attention._Recorder.attend

    def attend_with(self: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, options: Any) -> Any:
        return attend(self, module, query, key, value, mask, {**options, **changes})

    monkeypatch.setattr(attention._Recorder, "attend", attend_with)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position_bias": 1.0}, "unknown options: position_bias"),
        ({"sliding_window": 5}, "declares a window of 5 tokens, but its mask has None"),
        ({"scaling": torch.ones(1)}, "scale is not a number"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_unknown_options_are_refused(changes: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, **changes)
    assert reason in (obstacle_to_paging(build("phi3")) or "")


def test_a_mask_that_the_model_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention._Recorder.attend

    def biased(self: Any, module: Any, query: Any, key: Any, value: Any, mask: Tensor, options: Any) -> Any:
        return attend(self, module, query, key, value, mask.clone(), options)

    monkeypatch.setattr(attention._Recorder, "attend", biased)
    assert "uses a mask other than" in (obstacle_to_paging(build("phi3")) or "")


@pytest.mark.parametrize("window", [100, 4096])
@pytest.mark.parametrize("error", [-1, 1])
def test_the_kernel_is_compared_with_the_models_own_attention(
    window: int, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the window, which a trial of a few tokens does not reach."""
    model = ALL["mistral, window"].model(sliding_window=window, max_position_embeddings=8192).to(DEVICE)
    assert obstacle_to_paging(model) is None
    found = attention.window_of
    monkeypatch.setattr(attention, "window_of", lambda *args: (found(*args) or 0) + error)
    monkeypatch.setattr(attention._Recorder, "_options", _undeclared(attention._Recorder._options))
    assert "computes something else" in (obstacle_to_paging(model) or "")


def _undeclared(options: Any) -> Any:
    return lambda self, mask, size, given: options(self, mask, size, {**given, "sliding_window": None})


def test_longrope_is_limited_to_the_original_length() -> None:
    """Beyond it all frequencies change, also those of keys in the cache."""
    model = build("phi3, longrope")
    assert position_limit(model) == 256
    with torch.no_grad():
        model(input_ids=torch.ones(1, 300, dtype=torch.int64, device=DEVICE))  # leaves the other frequencies behind
    assert logprob_error(model, (3,), 2, decode_paged(model, (3,), 2, SAMPLING)) < 2e-5


# --- CUDA graphs ---


NOT_CAPTURED = {("gemma3n", torch.bfloat16), ("gemma3n", torch.float16), ("gpt-oss", torch.float16)}
"""Their own code copies from or to the host in each step: a constant in Gemma 3n, and in GPT-OSS the offsets of grouped
products, for which PyTorch has no kernel in float16."""


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAGED)
def test_decoding_uses_cuda_graphs(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, dtype)
    captured: list[int] = []
    capture = CudaGraphs._capture
    monkeypatch.setattr(CudaGraphs, "_capture", lambda self, rows: (captured.append(rows), capture(self, rows))[1])
    assert obstacle_to_paging(model) is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = decode_paged(model, LENGTHS, 8, SAMPLING, slots=24, prefill_tokens=4000)
    messages = [str(w.message) for w in caught if "without CUDA graphs" in str(w.message)]
    assert bool(messages) == ((name, dtype) in NOT_CAPTURED), messages
    assert captured[0] == 24
    # The mean, because a near-tie in a router may send a single token to another expert. Rounding to bfloat16 alone
    # gives up to 0.03.
    assert float(logprob_errors(model, LENGTHS, 8, result).mean()) < 0.1

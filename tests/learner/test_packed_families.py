"""Packed attention: kernels equal formulas, and families with sliding windows, attention sinks and soft caps equal
separate forwards with the model's own attention."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import BASE, FAMILIES
from packing_cases import (
    DOUBLE,
    build_model,
    forward_backward,
    plan_of,
    rows_of,
)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from gspo.learner.plan import make_plan
from gspo.model.kernels import attention_probe
from gspo.model.kernels import packed_attention as attention
from gspo.model.packed_forward import obstacle_to_packing, supports_packing

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore:log-probs are computed from all logits")

MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, **MIXED}
SHARED: dict[str, Any] = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": MIXED["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 50,
}
GEMMA_3N = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None}
WINDOWED: dict[str, Callable[..., Any]] = {
    "mistral": lambda dtype, window: build_model("mistral", dtype, sliding_window=window),
    "phi3": lambda dtype, window: build_model("phi3", dtype, sliding_window=window),
    "olmo3": lambda dtype, window: build_model("olmo3", dtype, sliding_window=window, **MIXED),
    # The default cap is far above the scores of a tiny model.
    "gemma2": lambda dtype, window: build_model(
        "gemma2", dtype, sliding_window=window, attn_logit_softcapping=1.0, **GEMMA
    ),
    "gemma3": lambda dtype, window: build_model("gemma3_text", dtype, sliding_window=window, **GEMMA),
    "gemma3n, shared KV": lambda dtype, window: build_model(
        "gemma3n_text", dtype, sliding_window=window, **SHARED, **GEMMA_3N
    ),
    "gemma4, shared KV": lambda dtype, window: build_model(
        "gemma4_text", dtype, sliding_window=window, global_head_dim=16, **SHARED
    ),
    "gpt-oss": lambda dtype, window: FAMILIES["gpt-oss"].model(dtype, sliding_window=window, **MIXED),
    "granite-swa": lambda dtype, window: build_model("granite_swa", dtype, sliding_window=window, head_dim=8, **MIXED),
}
"""Tiny models with sliding windows: name to (dtype, window) -> model."""


# --- attention alone ---


def test_scores_in_blocks_of_rows_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(5, 4, 6, 8, requires_grad=True), torch.randn(5, 2, 6, 8)
    mask = torch.ones(5, 1, 6, 6, dtype=torch.bool).tril()
    mask[3, :, :, 0] = False
    mask[3, :, 0, 0] = True
    found = []
    for most in (10**6, 1, 2 * 4 * 36):
        monkeypatch.setattr(attention, "SCORES", most)
        output = attention._with_scores(query, key, key, mask, 0.3, 1.5, torch.ones(4))
        found.append((output, *torch.autograd.grad(output.square().sum(), query)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("kind", ["causal", "one mask", "mask per row", "additive mask"])
def test_inputs_for_the_memory_efficient_kernel_are_aligned_and_give_the_same_result(kind: str) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, 4, 13, 8), torch.randn(3, 2, 13, 8)
    seen = attention._causal(13, None if kind == "causal" else 5, query.device).expand(3, 1, -1, -1)
    mask: Tensor | None = {
        "causal": None,
        "one mask": seen,
        "mask per row": seen.clone(),
        "additive mask": torch.zeros(3, 1, 13, 13).masked_fill(~seen, torch.finfo(torch.float32).min),
    }[kind]
    found = attention._plain_inputs(query, key, key, mask, 0.3)
    torch.testing.assert_close(found.transpose(1, 2), attention._scored(query, key, key, seen, 0.3, None, None))
    if mask is not None:
        aligned = attention._aligned(mask, torch.float32)
        assert aligned.shape == (1 if kind == "one mask" else 3, 1, 13, 13)
        assert aligned.stride()[-2:] == (16, 1)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_padded_batches_work_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """The heads of Qwen3-0.6B, and 8 prompts with 8 completions of about 512 tokens: it failed inside `sdpa`."""
    fields = {"sliding_window": 100} if kind == "mistral" else {}
    shape = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1024}
    model = build_model(kind, dtype, **shape, **fields).cuda()
    exact = copy.deepcopy(model).float()
    assert supports_packing(model)
    for most in (512, 509):
        rows, of = rows_of([(50 + 7 * i, [most - 3 * j for j in range(8)]) for i in range(8)])
        padded, separate, packed = (
            make_plan(rows, of, mini_batches=1, token_budget=budget, pad_id=0, seed="", packed=packed)
            for packed, budget in ((False, 10**6), (False, 1), (True, 10**6))
        )
        expected = forward_backward(exact, separate)
        for plan in (padded, packed):
            for found, right in zip(forward_backward(model, plan), expected, strict=True):
                error = float((found.double() - right).norm() / right.norm())
                assert error < (1e-4 if dtype == torch.float32 else 5e-2), plan.packed


# --- models ---


@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("name", WINDOWED)
def test_values_and_gradients_equal_those_of_separate_sequences(name: str, window: int) -> None:
    """Windows are shorter than most sequences, and shorter and longer than prompts."""
    model = WINDOWED[name](DOUBLE, window)
    if name == "gemma2":
        model.set_attn_implementation("eager")  # `sdpa` ignores soft caps
    separate = forward_backward(model, plan_of(False, budget=1))
    assert obstacle_to_packing(model) is None
    for plan in (plan_of(True), plan_of(True, budget=30), plan_of(False)):
        for found, expected in zip(forward_backward(model, plan), separate, strict=True):
            # Norms, and some softmaxes, round to float32.
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", WINDOWED)
def test_on_a_gpu_packing_rounds_no_worse_than_separate_sequences(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float32 on the same rounded weights, with sequences of many windows."""
    calls = []
    plain = attention.shared_prompt_attention
    monkeypatch.setattr(attention, "shared_prompt_attention", lambda *a: calls.append(a) or plain(*a))
    rows, of = rows_of([(40, (30, 5, 70)), (7, (60, 20, 1)), (100, (90,))])
    packed, separate = (
        make_plan(rows, of, mini_batches=1, token_budget=budget, pad_id=0, seed="", packed=packed)
        for packed, budget in ((True, 10**6), (False, 1))
    )
    model = WINDOWED[name](dtype, 16).cuda()
    exact = copy.deepcopy(model).float()
    for each in (model, exact):
        each.set_attn_implementation("eager")
    expected = forward_backward(exact, separate)
    eager = forward_backward(model, separate)
    assert obstacle_to_packing(model) is None
    found = forward_backward(model, packed)
    assert bool(calls) == (dtype != torch.float32 and name != "gemma2")
    for ours, theirs, right in zip(found, eager, expected, strict=True):
        ours, theirs = ((t.double() - right).norm() / right.norm() for t in (ours, theirs))
        assert ours <= (1e-4 if dtype == torch.float32 else 2 * theirs + 1e-3)


def test_the_text_part_of_a_multimodal_model_is_packed() -> None:
    """As the larger Gemma 3 are loaded. The vision tower takes no part in a text, so it has no gradient."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**BASE, **GEMMA, "sliding_window": 3},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=DOUBLE).train()
    separate = forward_backward(model, plan_of(False, budget=1))
    assert obstacle_to_packing(model) is None
    for found, expected in zip(forward_backward(model, plan_of(True)), separate, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --- the trial ---


@pytest.mark.parametrize("window", [128, 4096])
def test_a_trial_of_few_tokens_finds_a_layer_with_another_window(window: int) -> None:
    model = WINDOWED["gemma3"](torch.float32, window)
    assert obstacle_to_packing(model) is None
    model.model.layers[0].self_attn.sliding_window = window - 1
    model.set_attn_implementation("sdpa")
    assert "differs from the sliding window in its config" in str(obstacle_to_packing(model))
    model.model.layers[0].self_attn.sliding_window = None
    assert "differs from the sliding window in its config" in str(obstacle_to_packing(model))
    assert model.config._attn_implementation == "sdpa"


def test_a_trial_ignores_models_of_other_threads() -> None:
    model, other = WINDOWED["gemma3"](torch.float32, 128), WINDOWED["gemma3"](torch.float32, 4096)
    assert supports_packing(other)

    def use_other(*inputs: Any) -> None:
        thread = threading.Thread(target=lambda: other(input_ids=torch.tensor([[1, 2, 3]])))
        thread.start()
        thread.join()

    model.register_forward_pre_hook(use_other)
    assert obstacle_to_packing(model) is None


def test_the_trial_finds_an_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WINDOWED["mistral"](torch.float32, 4)
    layer = type(model.model.layers[0].self_attn)
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *a, **k: plain(self, *a, **k, temperature=torch.ones(1)))
    assert "packed attention does not support temperature" in str(obstacle_to_packing(model))


def test_the_trial_finds_missing_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WINDOWED["gpt-oss"](torch.float32, 4).requires_grad_(False)
    plain = attention.attention

    def without(*args: Any, s_aux: Any = None, **options: Any) -> Any:
        return plain(*args, **options)

    with monkeypatch.context() as patch:
        patch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, without)
        assert "gives other logits" in str(obstacle_to_packing(model))
    assert supports_packing(model)


def test_windows_of_mask_functions() -> None:
    window_of = attention_probe.window_of
    sliding = masking_utils.sliding_window_causal_mask_function
    assert window_of(masking_utils.causal_mask_function) is None
    for window in (1, 2, 128, 4096, 131072):
        assert window_of(sliding(window)) == window
    padding = masking_utils.padding_mask_function(torch.ones(1, 4, dtype=torch.bool))
    for other in (
        masking_utils.bidirectional_mask_function,
        masking_utils.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64)),
        masking_utils.and_masks(sliding(4), padding),
        lambda b, h, q, k: (k <= q) & (q // 1000 == k // 1000),
        lambda b, h, q, k: (k <= q) & ((q - k < 64) | (k < 4)),
    ):
        assert window_of(other) == attention_probe.UNKNOWN

"""Engine `vllm` in process: the prefix cache, and the experts that were used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from needs import needs_vllm
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm_cases import context_of, differences, generate, perturb, small_moe, some_prompts

from gspo.model.routing import ForcedExperts
from gspo.rollout.engine import build_engine
from gspo.types import Completion, Sampling

pytestmark = pytest.mark.vllm


def test_the_prefix_cache_is_reset_by_a_sync() -> None:
    needs_vllm()
    context = dataclasses.replace(context_of(small_moe()), routers=None)
    engine = build_engine("vllm", context, {"settings": {"block_size": 32}})
    prompts = some_prompts(length=100)
    try:
        for _ in range(2):
            assert differences(context.model, prompts, generate(engine, prompts)).max() < 2e-5
            perturb(context.model)
    finally:
        engine.close()


@pytest.mark.parametrize("tied", [True, False])
def test_changed_weights_of_a_dense_model_are_in_use(tied: bool) -> None:
    """With tied weights the LM head is not sent separately, but kernels may keep a copy of it."""
    needs_vllm()
    torch.manual_seed(0)
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(**shape, tie_word_embeddings=tied, initializer_range=0.2, eos_token_id=1)
    ).eval()
    engine = build_engine("vllm", context_of(model), {})
    try:
        for _ in range(2):
            assert differences(model, some_prompts(), generate(engine, some_prompts())).max() < 2e-5
            perturb(model)
    finally:
        engine.close()


def test_replaying_the_experts_closes_the_mismatch_of_a_bfloat16_moe_model() -> None:
    needs_vllm()
    model = small_moe(torch.bfloat16, hidden_size=128, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4)
    engine = build_engine("vllm", context_of(model), {})
    prompts = some_prompts(8)
    try:
        completions = generate(engine, prompts, samples=4, sampling=Sampling(max_tokens=64), routes=True)
    finally:
        engine.close()
    free = differences(model, prompts, completions)
    forced = _replay(engine_routers(model), model, prompts, completions)
    print(f"max |difference| {free.max():.3f} free, {forced.max():.3f} replayed")
    print(f"mean |difference| {free.mean():.4f} free, {forced.mean():.4f} replayed")
    assert free.max() > 0.3
    assert forced.max() < 0.1
    assert forced.mean() < free.mean() / 2


def engine_routers(model: Any) -> Any:
    return context_of(model).routers


@torch.no_grad()
def _replay(routers: Any, model: Any, prompts: Any, completions: list[Completion]) -> torch.Tensor:
    by_id = {p.id: p for p in prompts}
    parts = []
    for completion in completions:
        assert completion.routes is not None
        chosen = routers.unpack(completion.routes)
        ids = torch.tensor([by_id[completion.prompt_id].token_ids + completion.token_ids])
        assert len(chosen) == ids.shape[1] - 1
        with routers.watch(ForcedExperts(chosen_ILK=chosen, known_I=torch.ones(len(chosen), dtype=torch.bool))):
            logits = model(ids[:, :-1]).logits[0]
        logp = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[-len(completion.token_ids) :, 0]
        parts.append((logp - torch.tensor(completion.logp_sampler)).abs())
    return torch.cat(parts)

"""Engine `vllm` in process: what is cached, and which experts were used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from needs import needs_vllm
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm_cases import apart, context_of, drawn, small_moe, some_prompts, stirred

from gspo.model.routing import ForcedExperts
from gspo.rollout.engine import build_engine
from gspo.types import Completion, Sampling

pytestmark = pytest.mark.vllm


def test_the_same_prompt_after_a_sync_does_not_meet_old_keys_in_the_cache() -> None:
    needs_vllm()
    context = dataclasses.replace(context_of(small_moe()), routers=None)
    engine = build_engine("vllm", context, {"settings": {"block_size": 32}})
    prompts = some_prompts(length=100)
    try:
        for _ in range(2):
            assert apart(context.model, prompts, drawn(engine, prompts)).max() < 2e-5
            stirred(context.model)
    finally:
        engine.close()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_dense_model_that_change_are_in_use(tied: bool) -> None:
    """Tied: the output matrix is not sent, it is the input's; kernels may keep a copy of it."""
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
            assert apart(model, some_prompts(), drawn(engine, some_prompts())).max() < 2e-5
            stirred(model)
    finally:
        engine.close()


def test_replaying_the_engines_experts_closes_the_gap_of_a_bfloat16_mixture() -> None:
    needs_vllm()
    model = small_moe(torch.bfloat16, hidden_size=128, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4)
    engine = build_engine("vllm", context_of(model), {})
    prompts = some_prompts(8)
    try:
        replies = drawn(engine, prompts, samples=4, sampling=Sampling(max_tokens=64), routes=True)
    finally:
        engine.close()
    free, forced = apart(model, prompts, replies), _replayed(engine_routers(model), model, prompts, replies)
    print(
        f"max |difference| {free.max():.3f} free, {forced.max():.3f} replayed; mean {free.mean():.4f}, {forced.mean():.4f}"
    )
    assert free.max() > 0.3
    assert forced.max() < 0.1
    assert forced.mean() < free.mean() / 2


def engine_routers(model: Any) -> Any:
    return context_of(model).routers


@torch.no_grad()
def _replayed(routers: Any, model: Any, prompts: Any, replies: list[Completion]) -> torch.Tensor:
    by_id, parts = {p.id: p for p in prompts}, []
    for reply in replies:
        assert reply.routes is not None
        chosen = routers.unpack(reply.routes)
        ids = torch.tensor([by_id[reply.prompt_id].token_ids + reply.token_ids])
        assert len(chosen) == ids.shape[1] - 1
        with routers.watch(ForcedExperts(chosen_ILK=chosen, known_I=torch.ones(len(chosen), dtype=torch.bool))):
            logits = model(ids[:, :-1]).logits[0]
        logp = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[-len(reply.token_ids) :, 0]
        parts.append((logp - torch.tensor(reply.logp_sampler)).abs())
    return torch.cat(parts)

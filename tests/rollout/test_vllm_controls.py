"""Completions of engine `vllm` that consist of several requests, with a simulated vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_vllm import SimulatedVllm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.model.routing import find_routers
from gspo.rollout.engine import EngineContext, ExtendOptions, Extension, GenerateOptions, begun
from gspo.rollout.engines import vllm
from gspo.rollout.engines.vllm import VllmEngine
from gspo.types import Completion, Prompt, Sampling, StopReason

EOS = 0


class Letters:
    """A tokenizer with one letter per token."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def batch_decode(self, ids_B: list[list[int]], **options: Any) -> list[str]:
        return ["".join(chr(ord("a") + i) for i in ids) for ids in ids_B]


@pytest.fixture(scope="module")
def context() -> EngineContext:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=26, head_dim=8, initializer_range=0.2, **sizes, **moe)).eval()
    return EngineContext(model=model, tokenizer=Letters(), stop_ids=(EOS,), routers=find_routers(model))


PROMPTS = [Prompt(id=f"p/{n}", content="", text="", token_ids=tuple(range(1, n + 1))) for n in (3, 5)]


def sample(context: EngineContext, sampling: Sampling) -> tuple[list[Completion], SimulatedVllm]:
    host = SimulatedVllm(context.model, experts=4)
    engine = VllmEngine(context, host)
    options = GenerateOptions(samples=12, sampling=sampling, seed=1, stream="s", version=2, routes=True)
    groups = engine.generate(PROMPTS, options)
    return [completion for group in groups for completion in group], host


def experts(context: EngineContext, completion: Completion) -> list[int]:
    assert context.routers is not None
    assert completion.routes is not None
    return [int(row[0, 0]) for row in context.routers.unpack(completion.routes)]


def test_a_completion_without_text_controls_is_one_request(context: EngineContext) -> None:
    completions, host = sample(context, Sampling(max_tokens=9, min_tokens=2))
    assert len(host.asked) == len(completions)
    assert {request.settings()["min_tokens"] for request in host.asked} == {2}


def test_requests_continue_until_a_stop_string_is_complete(
    context: EngineContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two tokens each, which may come from two requests.
    stop = tuple(a + b for a in "kq" for b in "bcdefghijklmnopqrstuvwxyz")
    monkeypatch.setattr(vllm, "ROUND", 4)
    completions, host = sample(context, Sampling(max_tokens=30, min_tokens=5, stop=stop))
    assert any(c.stop is StopReason.STOP for c in completions)
    for c in completions:
        ends = [i + 1 for i in range(5, len(c.text)) if c.text[: i + 1].endswith(stop)]
        assert ends == ([len(c.text)] if c.stop is StopReason.STOP else [])
        assert 0 not in c.token_ids[:5]
        prompt = next(p for p in PROMPTS if p.id == c.prompt_id)
        assert experts(context, c) == list(range(len(prompt.token_ids) + len(c.token_ids) - 1))
        assert c.spans == ()
        assert c.version == 2
    # Each request asks for one round, with the tokens so far as its prompt and a seed of its own.
    assert {request.sampling.max_tokens for request in host.asked} <= {1, 2, 3, 4}
    assert len({request.seed for request in host.asked}) == len(host.asked)
    assert {request.settings()["min_tokens"] for request in host.asked} == {4, 1, 0}


def test_the_experts_of_inserted_tokens_come_from_the_next_request(context: EngineContext) -> None:
    sampling = Sampling(max_tokens=20, min_tokens=12, thinking_budget=6, thinking_end="xyz")
    completions, host = sample(context, sampling)
    assert len(host.asked) == 2 * len(completions)
    cut = [c for c in completions if c.thinking_cut]
    assert cut
    for c in cut:
        assert c.text[6:9] == "xyz"
        assert c.sampled == tuple(not 6 <= i < 9 for i in range(len(c.token_ids)))
        assert len(c.logp_sampler) == len(c.token_ids) - 3
        assert len(c.token_ids) > 12
        prompt = next(p for p in PROMPTS if p.id == c.prompt_id)
        assert experts(context, c) == list(range(len(prompt.token_ids) + len(c.token_ids) - 1))


def test_weights_that_change_between_requests_are_in_the_spans(
    context: EngineContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "ROUND", 4)
    host = SimulatedVllm(context.model)
    engine = VllmEngine(context, host)
    generate = host.generate

    def between(requests: Any, **options: Any) -> Any:
        outputs = generate(requests, **options)
        if options["routes"] is False and len(host.asked) == 2:
            engine._labels["later"] = 3
            host._label = "later"
        return outputs

    monkeypatch.setattr(host, "generate", between)
    sampling = Sampling(max_tokens=6, min_tokens=6, stop=("none",))
    options = GenerateOptions(samples=2, sampling=sampling, seed=1, stream="s", version=2)
    ((a, b),) = engine.generate(PROMPTS[:1], options)
    assert a.spans == b.spans == ((2, 0), (3, 4))


def test_requests_share_cached_keys_and_values_only_if_their_weights_are_the_same(context: EngineContext) -> None:
    host = SimulatedVllm(context.model)
    engine = VllmEngine(context, host)
    sampling = Sampling(max_tokens=6, min_tokens=6)
    completions = begun(PROMPTS[0], 2, 2)
    salts = []
    for version in (2, 2, 3):
        extension = Extension(prompt=PROMPTS[0], completions=completions, stream="s", tokens=2)
        (found,) = engine.extend([extension], ExtendOptions(sampling=sampling, seed=1, version=version))
        completions = tuple(found)
        (salt,) = {request.salt for request in host.asked[-2:]}
        salts.append(salt)
    assert salts[0] == salts[1] != salts[2]
    assert all(salts)
    assert [c.spans for c in completions] == [((2, 0), (3, 4))] * 2

"""What every engine promises, asked of every file in `gspo/rollout/engines`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from needs import needs_vllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.errors import EngineError
from gspo.rollout.engine import Engine, EngineContext, build_engine, engine_names
from gspo.rollout.engines.scripted import ScriptedEngine
from gspo.types import Completion, Prompt, Sampling, StopReason

SYMBOLS = ["<pad>", "<eos>", *"0123456789+-=*;|abcdefghijklmnop"]
EOS = SYMBOLS.index("<eos>")
OPTIONS: dict[str, dict[str, Any]] = {
    "scripted": {"replies": {"train/0": ["1+2=3", "4", "abc"], "5+6": ["11"]}, "default": "abcdefghijklmnop"},
    "vllm served": {"start": 1},
}
"""Options that make an engine's replies worth testing, where its defaults do not; the second word of a name is a variant."""
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def context() -> EngineContext:
    torch.manual_seed(0)
    inner = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    config = Qwen3MoeConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        initializer_range=0.1,
        max_position_embeddings=128,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    return EngineContext(model=model, tokenizer=tokenizer, stop_ids=(EOS,))


ENGINES = [
    pytest.param(name, marks=pytest.mark.vllm if name.startswith("vllm") else ())
    for name in [*engine_names(), *(key for key in OPTIONS if " " in key)]
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, context: EngineContext) -> Iterator[Engine]:
    if request.param.startswith("vllm"):
        needs_vllm()
    built = build_engine(request.param.split()[0], context, OPTIONS.get(request.param, {}))
    yield built
    built.close()
    built.close()


@pytest.fixture(scope="module")
def prompts(context: EngineContext) -> list[Prompt]:
    texts = ["1+2", "5+6", "abc;abc;abc", "7"]
    return [
        Prompt(id=f"train/{i}", content=text, text=text, token_ids=tuple(context.tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts)
    ]


def drawn(engine: Engine, prompts: list[Prompt], samples: int = 5, **changes: Any) -> list[list[Completion]]:
    settings: dict[str, Any] = {"sampling": SAMPLING, "seed": 3, "stream": "train/1", "version": 7, **changes}
    return engine.generate(prompts, samples=samples, **settings)


def close_to(ours: list[list[Completion]], theirs: list[list[Completion]]) -> bool:
    """The same tokens, and the same log-probabilities up to rounding."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return all(
        a.token_ids == b.token_ids and a.logp_sampler == pytest.approx(b.logp_sampler, abs=1e-5) for a, b in pairs
    )


def test_every_prompt_gets_its_replies_in_sample_order(engine: Engine, prompts: list[Prompt]) -> None:
    groups = drawn(engine, prompts)
    assert [[reply.prompt_id for reply in group] for group in groups] == [[p.id] * 5 for p in prompts]
    assert all([reply.sample for reply in group] == [0, 1, 2, 3, 4] for group in groups)
    assert {reply.version for group in groups for reply in group} == {7}


def test_a_tokenizer_that_panics_over_a_completion_is_an_error(
    engine: Engine, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def batch_decode(*values: Any, **options: Any) -> list[str]:
        raise panic("index out of bounds")

    monkeypatch.setattr(engine.context.tokenizer, "batch_decode", batch_decode, raising=False)  # type: ignore[attr-defined]
    with pytest.raises(
        EngineError, match=r"its tokenizer cannot decode a completion: index out of bounds; tokenizer.json"
    ):
        drawn(engine, prompts, samples=1)


def test_no_prompts_no_replies(engine: Engine) -> None:
    assert drawn(engine, []) == []


def test_a_reply_stops_at_its_first_end_token_or_at_the_limit(engine: Engine, prompts: list[Prompt]) -> None:
    replies = [reply for group in drawn(engine, prompts, samples=20) for reply in group]
    assert {reply.stop for reply in replies} == {StopReason.EOS, StopReason.LENGTH}
    for reply in replies:
        assert EOS not in reply.token_ids[:-1]
        assert 1 <= len(reply.token_ids) <= SAMPLING.max_tokens
        assert (reply.token_ids[-1] == EOS) == (reply.stop is StopReason.EOS)
        assert reply.stop is StopReason.EOS or len(reply.token_ids) == SAMPLING.max_tokens


def test_every_token_has_a_log_probability(engine: Engine, prompts: list[Prompt]) -> None:
    for group in drawn(engine, prompts):
        for reply in group:
            assert len(reply.logp_sampler) == len(reply.token_ids)
            assert all(isinstance(value, float) and value <= 0 for value in reply.logp_sampler)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_models(
    engine: Engine, prompts: list[Prompt], context: EngineContext, temperature: float
) -> None:
    sampling = Sampling(max_tokens=12, temperature=temperature)
    for prompt, group in zip(prompts, drawn(engine, prompts, sampling=sampling), strict=True):
        for reply in group:
            ids = torch.tensor([prompt.token_ids + reply.token_ids])
            with torch.no_grad():
                logp = (context.model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
            expected = logp.gather(1, ids[0, 1:, None])[len(prompt.token_ids) - 1 :, 0].tolist()
            assert reply.logp_sampler == pytest.approx(expected, abs=2e-5)


def test_greedy_is_certain(engine: Engine, prompts: list[Prompt]) -> None:
    groups = drawn(engine, prompts, sampling=Sampling(max_tokens=12, temperature=0))
    assert {value for group in groups for reply in group for value in reply.logp_sampler} == {0.0}


def test_the_last_completion_of_a_prompt_can_be_greedy(engine: Engine, prompts: list[Prompt]) -> None:
    both = drawn(engine, prompts, samples=4, sampling=replace(SAMPLING, greedy_last=True))
    assert close_to([group[:3] for group in both], drawn(engine, prompts, samples=3))
    if not isinstance(engine, ScriptedEngine):  # whose completions depend on their number alone
        assert close_to([group[3:] for group in both], drawn(engine, prompts, samples=1, sampling=SAMPLING.greedy))
    assert {value for group in both for value in group[3].logp_sampler} == {0.0}


def test_the_text_is_the_decoded_tokens(engine: Engine, prompts: list[Prompt], context: EngineContext) -> None:
    for group in drawn(engine, prompts):
        for reply in group:
            assert reply.text == context.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
            assert "<eos>" not in reply.text


def test_the_same_call_draws_the_same_replies(engine: Engine, prompts: list[Prompt]) -> None:
    assert drawn(engine, prompts) == drawn(engine, prompts)


def test_replies_do_not_depend_on_the_batch(engine: Engine, prompts: list[Prompt]) -> None:
    together = drawn(engine, prompts)
    assert close_to(together, [drawn(engine, [prompt])[0] for prompt in prompts])
    assert close_to(together, drawn(engine, prompts[::-1])[::-1])
    assert close_to([group[:2] for group in together], drawn(engine, prompts, samples=2))


def test_a_prompt_may_come_twice(engine: Engine, prompts: list[Prompt]) -> None:
    twice = drawn(engine, [prompts[0], prompts[1], prompts[0]])
    assert close_to(twice, [*drawn(engine, prompts[:2]), drawn(engine, prompts[:1])[0]])

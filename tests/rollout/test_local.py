"""The local engine: it samples from the right distribution, for many architectures, without wasted work."""

from __future__ import annotations

import math
import warnings
from itertools import chain
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import ConfigError, DataError, NumericalError
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines import local
from gspo.rollout.local import states
from gspo.rollout.local.decoder import Decoder
from gspo.rollout.local.sampling import sample_from_logits, uniform
from gspo.types import Completion, Prompt, Sampling, StopReason

VOCABULARY, EOS = 48, 0
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
HEADS = {**SIZES, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
WINDOW = {"sliding_window": 5}
CACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", HEADS),
    "qwen3, half sliding": ("Qwen3Config", {**HEADS, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-moe": ("Qwen3MoeConfig", {**HEADS, **EXPERTS, "num_experts": 4}),
    "llama": ("LlamaConfig", SIZES),
    "qwen2": ("Qwen2Config", SIZES),
    "mixtral, all sliding": (
        "MixtralConfig",
        {**SIZES, **WINDOW, "num_local_experts": 4, "output_router_logits": True},
    ),
    "olmoe": ("OlmoeConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gemma2": ("Gemma2Config", {**HEADS, **WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {**HEADS, **WINDOW, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": ("GptOssConfig", {**HEADS, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **{**SIZES, "num_key_value_heads": 4},
            **{**EXPERTS, **LATENT},
            **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        },
    ),
}
RECOMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "bloom (alibi)": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


class Digits:
    """A minimal tokenizer that writes out the token ids."""

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(str(i) for i in row if not (skip_special_tokens and i == EOS)) for row in ids]


def model_of(name: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields)).eval()


def engine_of(model: Any, stop_ids: tuple[int, ...] = (EOS,), **options: Any) -> local.LocalEngine:
    return local.build(EngineContext(model=model, tokenizer=Digits(), stop_ids=stop_ids), **options)


def prompt_of(name: str, length: int) -> Prompt:
    ids = tuple((5 * length + 3 * j + 2) % VOCABULARY for j in range(length))
    return Prompt(id=name, content="", text="", token_ids=ids)


def generate(
    engine: local.LocalEngine, prompts: list[Prompt], samples: int = 3, **changes: Any
) -> list[list[Completion]]:
    arguments: dict[str, Any] = {"sampling": Sampling(max_tokens=14), "seed": 1, "stream": "train/0", "version": 0}
    return engine.generate(prompts, GenerateOptions(samples=samples, **{**arguments, **changes}))


def plain_logits(model: Any, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """The logits that each token was sampled from, by one forward pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt.token_ids + completion.token_ids]), use_cache=False).logits[0].float()
    return logits[len(prompt.token_ids) - 1 : -1]


def assert_logp(model: Any, prompts: list[Prompt], groups: list[list[Completion]], tolerance: float = 3e-5) -> None:
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            logp = plain_logits(model, prompt, completion).log_softmax(-1)
            expected = logp.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()
            assert completion.logp_sampler == pytest.approx(expected, abs=tolerance)


def ids_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(*CACHED["qwen3-moe"])


@pytest.fixture
def prompts() -> list[Prompt]:
    return [prompt_of(f"p/{length}", length) for length in (1, 3, 12, 7, 2)]


# --- Architectures ---


@pytest.mark.parametrize("name", CACHED)
def test_decoding_with_a_kv_cache_matches_a_plain_forward(name: str, prompts: list[Prompt]) -> None:
    model = model_of(*CACHED[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        engine = engine_of(model, slots=5, prefill_tokens=20)
    assert engine.cached
    groups = generate(engine, prompts)
    assert_logp(model, prompts, groups)
    assert ids_of(generate(engine_of(model, slots=100), prompts[::-1])[::-1]) == ids_of(groups)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_models_without_a_usable_kv_cache_are_recomputed(name: str, prompts: list[Prompt]) -> None:
    model = model_of(*RECOMPUTED[name])
    with pytest.warns(RuntimeWarning, match="recomputes every token"):
        engine = engine_of(model, slots=5, prefill_tokens=20)
    assert not engine.cached
    groups = generate(engine, prompts)
    assert_logp(model, prompts, groups)
    assert ids_of([generate(engine, [prompt])[0] for prompt in prompts]) == ids_of(groups)


def test_the_trial_detects_a_model_that_ignores_positions() -> None:
    model = model_of(*CACHED["llama"])
    rotary, inner = model.model.rotary_emb, model.model.rotary_emb.forward
    rotary.forward = lambda x, position_ids: inner(x, torch.arange(x.shape[1])[None].expand(len(x), -1))
    with pytest.warns(RuntimeWarning, match="different logits"):
        assert not engine_of(model).cached


def test_buffers_grow_with_long_completions(model: Any, prompts: list[Prompt]) -> None:
    engine = engine_of(model, stop_ids=(), slots=4)
    groups = generate(engine, prompts[:2], samples=3, sampling=Sampling(max_tokens=2 * states.BLOCK + 30))
    assert {len(completion.token_ids) for group in groups for completion in group} == {2 * states.BLOCK + 30}
    assert_logp(model, prompts[:2], groups)


# --- The distribution ---


def expected_p(model: Any, prompt: Prompt, sampling: Sampling) -> torch.Tensor:
    """The distribution of the first token, computed token by token from the definition."""
    with torch.no_grad():
        p = (model(torch.tensor([prompt.token_ids])).logits[0, -1].double() / sampling.temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, mass, kept = sum(p[i].item() for i in order), 0.0, []
    for i in order:
        if mass >= sampling.top_p:
            break
        kept.append(i)
        mass += p[i].item() / total
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}],
    ids=str,
)
def test_tokens_follow_the_reported_distribution(model: Any, changes: dict[str, Any]) -> None:
    sampling, prompt, n = Sampling(max_tokens=1, **changes), prompt_of("p", 6), 6000
    completions = generate(engine_of(model, slots=n), [prompt], samples=n, sampling=sampling)[0]
    p = expected_p(model, prompt, sampling)
    count = torch.bincount(torch.tensor([completion.token_ids[0] for completion in completions]), minlength=VOCABULARY)
    assert count[p == 0].sum() == 0
    kept = p > 0
    chi2 = ((count[kept] - n * p[kept]) ** 2 / (n * p[kept])).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 1
    for completion in completions[:50]:
        assert completion.logp_sampler[0] == pytest.approx(math.log(p[completion.token_ids[0]]), abs=1e-5)


def test_greedy_takes_the_most_likely_token(model: Any, prompts: list[Prompt]) -> None:
    groups = generate(engine_of(model), prompts, samples=2, sampling=Sampling(max_tokens=10, temperature=0))
    for prompt, group in zip(prompts, groups, strict=True):
        assert group[0].token_ids == group[1].token_ids
        assert group[0].token_ids == tuple(plain_logits(model, prompt, group[0]).argmax(-1).tolist())
        assert set(group[0].logp_sampler) == {0.0}


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_uniform_is_splitmix64(key: int, index: int) -> None:
    word = 2**64 - 1
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    z ^= z >> 31
    u = uniform(torch.tensor([key]), torch.tensor([index])).item()
    assert u == ((z >> 12) + 0.5) / 2**52
    assert 0 < u < 1


@settings(deadline=None)
@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=12),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
    st.integers(0, 4),
    st.floats(0.01, 1),
)
def test_a_sampled_token_has_nonzero_probability(logits: list[float], u: float, top_k: int, top_p: float) -> None:
    sampling = Sampling(max_tokens=1, top_k=top_k, top_p=top_p)
    token, logp = sample_from_logits(torch.tensor([logits]), sampling, torch.tensor([u], dtype=torch.float64))
    assert 0 <= token.item() < len(logits)
    assert -math.inf < logp.item() <= 0


def test_seed_stream_prompt_and_sample_each_give_a_new_random_stream(model: Any) -> None:
    engine, prompt = engine_of(model, stop_ids=()), prompt_of("p", 6)
    groups = [
        *generate(engine, [prompt, prompt_of("other", 6)], samples=2),
        *generate(engine, [prompt], samples=2, seed=2),
        *generate(engine, [prompt], samples=2, stream="train/1"),
    ]
    assert len({completion.token_ids for group in groups for completion in group}) == 8


# --- Batching ---


@pytest.mark.parametrize("options", [{"slots": 1}, {"slots": 3}, {"slots": 7, "prefill_tokens": 1}], ids=str)
def test_the_number_of_slots_does_not_change_completions(
    model: Any, prompts: list[Prompt], options: dict[str, int]
) -> None:
    wide = generate(engine_of(model), prompts, samples=6)
    narrow = generate(engine_of(model, **options), prompts, samples=6)
    assert ids_of(wide) == ids_of(narrow)
    for a, b in zip(chain(*wide), chain(*narrow), strict=True):
        assert a.logp_sampler == pytest.approx(b.logp_sampler, abs=1e-5)


def test_each_prompt_is_prefilled_once_and_no_finished_row_is_computed(model: Any) -> None:
    prompts = [prompt_of("a", 8), prompt_of("b", 8), prompt_of("c", 5)]
    engine, shapes = engine_of(model, slots=6), []
    hook = model.register_forward_pre_hook(
        lambda _, a, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    groups = generate(engine, prompts, samples=20, sampling=Sampling(max_tokens=60))
    hook.remove()
    assert [tuple(shape) for shape in shapes if shape[1] > 1] == [(2, 7)], (
        "two distinct prompts, without their last token"
    )
    tokens = sum(len(completion.token_ids) for group in groups for completion in group)
    assert sum(rows for rows, width in shapes if width == 1) == tokens
    assert {completion.stop for group in groups for completion in group} == {StopReason.EOS, StopReason.LENGTH}


# --- Model state and errors ---


def test_the_model_can_be_trained_afterwards(prompts: list[Prompt]) -> None:
    model = model_of(*CACHED["qwen3"])
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    generate(engine_of(model), prompts)
    assert [module.training for module in model.modules()] == modes
    ids = torch.tensor([prompts[2].token_ids])
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_new_weights_take_effect_immediately(prompts: list[Prompt]) -> None:
    model = model_of(*CACHED["qwen3"])
    engine = engine_of(model)
    before = generate(engine, prompts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    after = generate(engine, prompts)
    assert ids_of(before) != ids_of(after)
    assert_logp(model, prompts, after, tolerance=1e-4)


def test_an_interruption_leaves_the_engine_usable(model: Any, prompts: list[Prompt]) -> None:
    engine = engine_of(model, slots=4)
    expected, calls = generate(engine, prompts), []

    def interrupt(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 8:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, prompts)
    hook.remove()
    assert generate(engine, prompts) == expected


@pytest.mark.parametrize("paged", [False, True])
def test_out_of_memory_restarts_with_fewer_slots(
    model: Any, prompts: list[Prompt], paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generate(engine_of(model), prompts)
    owner: Any = Decoder if paged else states.KVCacheState
    name = "logits" if paged else "step"
    step = getattr(owner, name)
    together: list[int] = []
    most = 4

    def scarce(self: Any, first: Any, *rest: Any) -> Any:
        together.append(first if paged else len(first))
        if together[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(self, first, *rest)

    monkeypatch.setattr(owner, name, scarce)
    engine = engine_of(model)
    engine.paged = paged
    with pytest.warns(RuntimeWarning, match="out of memory; .* at most 3 completions at a time"):
        found = generate(engine, prompts)
    assert ids_of(found) == ids_of(whole)
    assert_logp(model, prompts, found)
    together.clear()
    assert ids_of(generate(engine, prompts)) == ids_of(whole)
    assert max(together) == 3, "the limit holds for the rest of the run"
    most = 0
    with pytest.warns(RuntimeWarning, match="at most 1 "), pytest.raises(torch.OutOfMemoryError):
        generate(engine, prompts)


def test_too_long_completions_are_refused_before_sampling(model: Any, prompts: list[Prompt]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens.*at most 244"):
        generate(engine_of(model), prompts, sampling=Sampling(max_tokens=245))


def test_an_empty_prompt_is_an_error(model: Any) -> None:
    with pytest.raises(DataError, match="p/empty"):
        generate(engine_of(model), [prompt_of("p/empty", 0)])


def test_diverged_weights_are_an_error(prompts: list[Prompt]) -> None:
    model = model_of(*CACHED["llama"])
    engine = engine_of(model)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(NumericalError, match="NaN"):
        generate(engine, prompts)


def test_options_and_closing(model: Any, prompts: list[Prompt]) -> None:
    with pytest.raises(ConfigError, match="slots"):
        engine_of(model, slots=0)
    engine = engine_of(model)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        generate(engine, prompts)

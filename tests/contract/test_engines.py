"""The contract of an engine, tested for every file in `gspo/rollout/engines`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_vllm
from simulated_vllm import SimulatedVllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.errors import ConfigError, EngineError
from gspo.rollout import engines
from gspo.rollout.engine import (
    Engine,
    EngineContext,
    ExtendOptions,
    Extension,
    GenerateOptions,
    begun,
    build_engine,
    engine_names,
    engine_traits,
)
from gspo.rollout.engines.scripted import ScriptedEngine
from gspo.rollout.engines.vllm import VllmEngine
from gspo.types import Completion, Prompt, Sampling, StopReason

SYMBOLS = ["<pad>", "<eos>", *"0123456789+-=*;|abcdefghijklmnop"]
EOS = SYMBOLS.index("<eos>")
OPTIONS: dict[str, dict[str, Any]] = {
    "scripted": {"completions": {"train/0": ["1+2=3", "4", "abc"], "5+6": ["11"]}, "default": "abcdefghijklmnop"},
    "vllm served": {"start": 1},
}
"""Options for engines whose defaults give nothing to test. The second word of a name is a variant."""
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


SIMULATED = "vllm, simulated"
"""Engine `vllm` with a few lines of torch in place of vLLM."""
ENGINES = [
    SIMULATED,
    *(
        pytest.param(name, marks=pytest.mark.vllm if name.startswith("vllm") else ())
        for name in [*engine_names(), *(key for key in OPTIONS if " " in key)]
    ),
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, context: EngineContext) -> Iterator[Engine]:
    if request.param == SIMULATED:
        engine: Engine = VllmEngine(context, SimulatedVllm(context.model))
    else:
        if request.param.startswith("vllm"):
            needs_vllm()
        engine = build_engine(request.param.split()[0], context, OPTIONS.get(request.param, {}))
    engine.sync(0)  # allowed before the first completion
    yield engine
    engine.close()
    engine.close()  # closing twice is allowed


@pytest.fixture(scope="module")
def prompts(context: EngineContext) -> list[Prompt]:
    texts = ["1+2", "5+6", "abc;abc;abc", "7"]
    return [
        Prompt(id=f"train/{i}", content=text, text=text, token_ids=tuple(context.tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts)
    ]


def sample(engine: Engine, prompts: list[Prompt], samples: int = 5, **changes: Any) -> list[list[Completion]]:
    settings: dict[str, Any] = {"sampling": SAMPLING, "seed": 3, "stream": "train/1", "version": 7, **changes}
    return engine.generate(prompts, GenerateOptions(samples=samples, **settings))


def close_to(ours: list[list[Completion]], theirs: list[list[Completion]]) -> bool:
    """The same tokens, and the same log-probs up to rounding."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return all(
        a.token_ids == b.token_ids and a.logp_sampler == pytest.approx(b.logp_sampler, abs=1e-5) for a, b in pairs
    )


def test_every_prompt_gets_its_completions_in_sample_order(engine: Engine, prompts: list[Prompt]) -> None:
    groups = sample(engine, prompts)
    assert [[completion.prompt_id for completion in group] for group in groups] == [[p.id] * 5 for p in prompts]
    assert all([completion.sample for completion in group] == [0, 1, 2, 3, 4] for group in groups)
    assert {completion.version for group in groups for completion in group} == {7}


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
        sample(engine, prompts, samples=1)


@pytest.mark.parametrize("method", ["generate", "extend"])
def test_an_engine_with_other_parameters_is_an_error_before_the_run(
    method: str, context: EngineContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"generate": "extend", "extend": "generate"}[method]
    (tmp_path / f"older_{method}.py").write_text(
        "from gspo.rollout.engine import EngineTraits\n"
        "TRAITS = EngineTraits(extends=True)\n"
        "class Older:\n"
        f"    def {method}(self, requests, *, sampling, seed, version, routes=False): ...\n"
        f"    def {other}(self, requests, options): ...\n"
        "def build(context): return Older()\n"
    )
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    message = rf"engine 'older_{method}' declares {method}\(requests, \*, .*; declare {method}\(self, .*Options\)"
    with pytest.raises(ConfigError, match=message):
        build_engine(f"older_{method}", context, {})


def test_the_engine_of_the_documentation_works(
    prompts: list[Prompt], context: EngineContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "documented.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    built = build_engine("documented", context, {"text": "abc"})
    completions = flat(sample(built, prompts))
    assert {(c.text, c.token_ids[-1], c.stop, c.version) for c in completions} == {("abc", EOS, StopReason.EOS, 7)}
    assert {len(c.token_ids) for c in flat(sample(built, prompts, sampling=Sampling(max_tokens=2)))} == {2}


def test_no_prompts_give_no_completions(engine: Engine) -> None:
    assert sample(engine, []) == []


def test_a_completion_stops_at_its_first_eos_token_or_at_the_limit(engine: Engine, prompts: list[Prompt]) -> None:
    completions = [completion for group in sample(engine, prompts, samples=20) for completion in group]
    assert {completion.stop for completion in completions} == {StopReason.EOS, StopReason.LENGTH}
    for completion in completions:
        assert EOS not in completion.token_ids[:-1]
        assert 1 <= len(completion.token_ids) <= SAMPLING.max_tokens
        assert (completion.token_ids[-1] == EOS) == (completion.stop is StopReason.EOS)
        assert completion.stop is StopReason.EOS or len(completion.token_ids) == SAMPLING.max_tokens


def test_every_token_has_a_log_prob(engine: Engine, prompts: list[Prompt]) -> None:
    for group in sample(engine, prompts):
        for completion in group:
            assert len(completion.logp_sampler) == len(completion.token_ids)
            assert all(isinstance(value, float) and value <= 0 for value in completion.logp_sampler)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_model(
    engine: Engine, prompts: list[Prompt], context: EngineContext, temperature: float
) -> None:
    sampling = Sampling(max_tokens=12, temperature=temperature)
    for prompt, group in zip(prompts, sample(engine, prompts, sampling=sampling), strict=True):
        for completion in group:
            ids = torch.tensor([prompt.token_ids + completion.token_ids])
            with torch.no_grad():
                logp = (context.model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
            expected = logp.gather(1, ids[0, 1:, None])[len(prompt.token_ids) - 1 :, 0].tolist()
            assert completion.logp_sampler == pytest.approx(expected, abs=2e-5)


def test_greedy_log_probs_are_zero(engine: Engine, prompts: list[Prompt]) -> None:
    groups = sample(engine, prompts, sampling=Sampling(max_tokens=12, temperature=0))
    assert {value for group in groups for completion in group for value in completion.logp_sampler} == {0.0}


def test_the_last_completion_of_a_prompt_can_be_greedy(engine: Engine, prompts: list[Prompt]) -> None:
    both = sample(engine, prompts, samples=4, sampling=replace(SAMPLING, greedy_last=True))
    assert close_to([group[:3] for group in both], sample(engine, prompts, samples=3))
    if not isinstance(engine, ScriptedEngine):  # its completions depend only on the sample number
        assert close_to([group[3:] for group in both], sample(engine, prompts, samples=1, sampling=SAMPLING.greedy))
    assert {value for group in both for value in group[3].logp_sampler} == {0.0}


def test_the_text_is_the_decoded_tokens(engine: Engine, prompts: list[Prompt], context: EngineContext) -> None:
    for group in sample(engine, prompts):
        for completion in group:
            assert completion.text == context.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert "<eos>" not in completion.text


def test_the_same_call_samples_the_same_completions(engine: Engine, prompts: list[Prompt]) -> None:
    assert sample(engine, prompts) == sample(engine, prompts)


def test_completions_do_not_depend_on_the_batch(engine: Engine, prompts: list[Prompt]) -> None:
    together = sample(engine, prompts)
    assert close_to(together, [sample(engine, [prompt])[0] for prompt in prompts])
    assert close_to(together, sample(engine, prompts[::-1])[::-1])
    assert close_to([group[:2] for group in together], sample(engine, prompts, samples=2))


def test_a_prompt_may_appear_twice(engine: Engine, prompts: list[Prompt]) -> None:
    twice = sample(engine, [prompts[0], prompts[1], prompts[0]])
    assert close_to(twice, [*sample(engine, prompts[:2]), sample(engine, prompts[:1])[0]])


def test_an_engine_can_say_something_about_itself(engine: Engine) -> None:
    assert isinstance(engine.about, str)
    assert "\n" not in engine.about


def test_a_sync_changes_nothing_if_the_weights_have_not_changed(engine: Engine, prompts: list[Prompt]) -> None:
    before = sample(engine, prompts)
    engine.sync(7)
    assert sample(engine, prompts) == before


def test_after_a_sync_completions_come_from_the_current_weights(
    engine: Engine, prompts: list[Prompt], context: EngineContext
) -> None:
    weight = context.model.lm_head.weight
    saved = weight.detach().clone()
    before = sample(engine, prompts)
    try:
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)), alpha=0.3)
        engine.sync(8)
        test_log_probs_are_those_of_the_model(engine, prompts, context, 1.0)
        assert not close_to(sample(engine, prompts, version=8), before)
    finally:
        with torch.no_grad():
            weight.copy_(saved)


# --- Sampling controls ---


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def model_logp(context: EngineContext, prompt: Prompt, completion: Completion, min_tokens: int) -> list[float]:
    """Log-probs of the sampled tokens, from one forward and an explicit mask."""
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    with torch.no_grad():
        logits = context.model(ids).logits[0, len(prompt.token_ids) - 1 : -1].float()
    logits[:min_tokens, EOS] = -torch.inf
    logp = logits.log_softmax(-1).gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0].tolist()
    own = completion.sampled or (True,) * len(logp)
    return [value for value, sampled in zip(logp, own, strict=True) if sampled]


def first_stop(context: EngineContext, ids: tuple[int, ...], stop: tuple[str, ...], min_tokens: int) -> int | None:
    """The length of a completion with stop strings, one token at a time. Every token is a character here."""
    for i in range(min_tokens, len(ids)):
        text = context.tokenizer.decode(ids[: i + 1])
        if any(text.endswith(s) for s in stop):
            return i + 1
    return None


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(
    engine: Engine, prompts: list[Prompt], context: EngineContext, min_tokens: int
) -> None:
    without = flat(sample(engine, prompts, samples=20, sampling=replace(SAMPLING, min_tokens=min_tokens)))
    texts = sorted({c.text for c in without if len(c.text) > 4})
    stop = (texts[0][3:5], texts[-1][1:3], texts[len(texts) // 2][:4], "nowhere")
    sampling = replace(SAMPLING, stop=stop, min_tokens=min_tokens)
    reasons = set()
    for plain, stopped in zip(without, flat(sample(engine, prompts, samples=20, sampling=sampling)), strict=True):
        length = first_stop(context, plain.token_ids, stop, min_tokens)
        assert stopped.token_ids == plain.token_ids[:length]
        assert stopped.logp_sampler == pytest.approx(plain.logp_sampler[:length], abs=1e-5)
        assert stopped.text == context.tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
        assert stopped.stop is (plain.stop if length is None else StopReason.STOP)
        assert stopped.sampled == ()
        reasons.add(stopped.stop)
    assert StopReason.STOP in reasons
    assert len(reasons) > 1


def test_the_name_of_a_special_token_is_a_stop_string(engine: Engine, prompts: list[Prompt]) -> None:
    """The end token stays what it is, and no text ends in its middle."""
    sampling = replace(SAMPLING, stop=("<eos>", "<pad>"))
    completions = flat(sample(engine, prompts, samples=20, sampling=sampling))
    for completion in completions:
        assert (completion.token_ids[-1] == EOS) == (completion.stop is StopReason.EOS)
        assert (completion.token_ids[-1] == 0) == (completion.stop is StopReason.STOP)
        assert 0 not in completion.token_ids[:-1]
    assert isinstance(engine, ScriptedEngine) or StopReason.STOP in {c.stop for c in completions}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_no_completion_ends_before_min_tokens(engine: Engine, prompts: list[Prompt], temperature: float) -> None:
    sampling = Sampling(max_tokens=12, min_tokens=7, temperature=temperature)
    completions = flat(sample(engine, prompts, samples=20, sampling=sampling))
    assert min(len(completion.token_ids) for completion in completions) >= 7
    assert all(EOS not in completion.token_ids[:7] for completion in completions)
    if temperature:
        assert {completion.stop for completion in completions} == {StopReason.EOS, StopReason.LENGTH}


def test_with_min_tokens_log_probs_are_those_of_the_masked_distribution(
    engine: Engine, prompts: list[Prompt], context: EngineContext
) -> None:
    groups = sample(engine, prompts, sampling=replace(SAMPLING, min_tokens=7))
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.logp_sampler == pytest.approx(model_logp(context, prompt, completion, 7), abs=2e-5)


def test_the_end_of_thinking_is_inserted_when_the_budget_is_spent(
    engine: Engine, prompts: list[Prompt], context: EngineContext
) -> None:
    plain = flat(sample(engine, prompts, samples=20))
    end = next(c.text for c in plain if len(c.text) > 4)[2]
    forced = context.tokenizer(end)["input_ids"]
    sampling = replace(SAMPLING, thinking_budget=4, thinking_end=end)
    groups = sample(engine, prompts, samples=20, sampling=sampling)
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.logp_sampler == pytest.approx(model_logp(context, prompt, completion, 0), abs=2e-5)
    completions = flat(groups)
    for before, completion in zip(plain, completions, strict=True):
        ids = completion.token_ids
        assert ids[:4] == before.token_ids[:4]
        assert completion.thinking_cut == (len(before.token_ids) > 4 and forced[0] not in before.token_ids[:4])
        if completion.thinking_cut:
            assert list(ids[4:5]) == forced
            assert completion.sampled == tuple(i != 4 for i in range(len(ids)))
            assert len(ids) > 5
        else:
            assert completion.sampled == ()
        assert completion.text == context.tokenizer.decode(ids, skip_special_tokens=True)
        assert len(ids) <= 12
        assert len(ids) == 12 or ids[-1] == EOS
    assert {completion.thinking_cut for completion in completions} == {True, False}


def test_all_controls_together(engine: Engine, prompts: list[Prompt], context: EngineContext) -> None:
    sampling = replace(SAMPLING, stop=("b", "e", "5"), min_tokens=3, thinking_budget=4, thinking_end="|;")
    groups = sample(engine, prompts, samples=20, sampling=sampling)
    assert groups == sample(engine, prompts, samples=20, sampling=sampling)
    assert close_to(groups, [sample(engine, [prompt], samples=20, sampling=sampling)[0] for prompt in prompts])
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.logp_sampler == pytest.approx(model_logp(context, prompt, completion, 3), abs=2e-5)
            at_stop = first_stop(context, completion.token_ids, sampling.stop, 3)
            assert at_stop == (len(completion.token_ids) if completion.stop is StopReason.STOP else None)
    assert {c.stop for c in flat(groups)} >= {StopReason.STOP}
    assert {c.thinking_cut for c in flat(groups)} == {True, False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thinking_end": "?"}, "rollout.thinking_end: the tokenizer cannot write"),
        ({"thinking_end": "a<eos>"}, "contains an end token"),
        ({"thinking_end": "abc", "thinking_budget": 9}, "rollout.thinking_budget: 9 and the 3 tokens"),
    ],
)
def test_an_end_of_thinking_that_cannot_work_is_an_error(
    engine: Engine, prompts: list[Prompt], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(engine, prompts, sampling=replace(SAMPLING, **{"thinking_budget": 4, **changes}))


# --- Completions that are cut and continued ---


def in_parts(
    engine: Any, prompts: list[Prompt], parts: list[int], sampling: Sampling = SAMPLING, **changes: Any
) -> list[list[list[Completion]]]:
    """The completions after each part, which has at most so many tokens; versions count from 7."""
    groups: list[list[Completion]] = [list(begun(prompt, 5, 7)) for prompt in prompts]
    found = []
    for version, tokens in enumerate(parts, start=7):
        extensions = [
            Extension(prompt=prompt, completions=tuple(group), stream="train/1", tokens=tokens)
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        options = ExtendOptions(sampling=sampling, seed=3, version=changes.get("version", version))
        groups = engine.extend(extensions, options)
        found.append(groups)
    return found


def extends(engine: Engine) -> bool:
    return engine_traits(type(engine).__module__.rpartition(".")[2]).extends


CONTROLLED = [
    SAMPLING,
    Sampling(max_tokens=12, min_tokens=6, stop=("1", "b")),
    Sampling(max_tokens=12, min_tokens=10, thinking_budget=4, thinking_end="-="),
]


@pytest.mark.parametrize("sampling", CONTROLLED, ids=["plain", "stop strings", "thinking budget"])
@pytest.mark.parametrize("parts", [[4, 5, 12], [5, 3, 12]])
def test_a_completion_sampled_in_parts_is_the_completion_sampled_at_once(
    engine: Engine, prompts: list[Prompt], sampling: Sampling, parts: list[int]
) -> None:
    if not extends(engine):
        pytest.skip("it does not continue completions")
    *early, last = in_parts(engine, prompts, parts, sampling, version=7)
    for number, groups in enumerate(early, start=1):
        for c in (c for group in groups for c in group):
            # Inserted tokens stay together in some engines.
            assert c.stop is not StopReason.CUT or len(c.token_ids) >= sum(parts[:number])
            assert c.stop is StopReason.CUT or c in [c for group in last for c in group]
    assert any(c.stop is StopReason.CUT for group in early[0] for c in group)
    whole = sample(engine, prompts, sampling=sampling)
    assert {c.stop for group in last for c in group} <= {StopReason.EOS, StopReason.STOP, StopReason.LENGTH}
    assert all(c.spans == () and c.version == 7 for group in last for c in group)
    if isinstance(engine, VllmEngine):  # its random numbers restart with every request
        for c in (c for group in last for c in group):
            assert c.sampled_count == len(c.logp_sampler)
            assert len(c.token_ids) == sampling.max_tokens or c.stop is not StopReason.LENGTH
        return
    assert close_to(last, whole)
    fields = ("stop", "text", "sampled", "thinking_cut", "sample", "prompt_id")
    for a, b in zip((c for g in last for c in g), (c for g in whole for c in g), strict=True):
        assert [getattr(a, f) for f in fields] == [getattr(b, f) for f in fields]


def test_log_probs_and_versions_of_parts_are_those_of_the_weights_that_sampled_them(
    engine: Engine, prompts: list[Prompt], context: EngineContext
) -> None:
    if not extends(engine):
        pytest.skip("it does not continue completions")
    head = context.model.lm_head.weight
    before = head.detach().clone()

    def expected(prompt: Prompt, completion: Completion) -> list[float]:
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        with torch.no_grad():
            logp = context.model(ids).logits[0, :-1].float().log_softmax(-1)
        return logp.gather(1, ids[0, 1:, None])[len(prompt.token_ids) - 1 :, 0].tolist()  # type: ignore[no-any-return]

    (first,) = in_parts(engine, prompts, [4])
    try:
        with torch.no_grad():
            head.mul_(1.5)
        again = [
            Extension(prompt=prompt, completions=tuple(group), stream="train/1", tokens=12)
            for prompt, group in zip(prompts, first, strict=True)
        ]
        options = ExtendOptions(sampling=SAMPLING, seed=3, version=8)
        last = engine.extend(again, options)  # type: ignore[attr-defined]
        new = [[expected(prompt, c) for c in group] for prompt, group in zip(prompts, last, strict=True)]
    finally:
        with torch.no_grad():
            head.copy_(before)
    old = [[expected(prompt, c) for c in group] for prompt, group in zip(prompts, last, strict=True)]
    changed = [
        (c, o, n)
        for group, old_G, new_G in zip(last, old, new, strict=True)
        for c, o, n in zip(group, old_G, new_G, strict=True)
        if c.spans
    ]
    assert changed
    for c, o, n in changed:
        assert c.spans == ((7, 0), (8, 4))
        assert c.sampled_by_version == ((7, 4), (8, len(c.token_ids) - 4))
        assert c.logp_sampler[:4] == pytest.approx(o[:4], abs=2e-5)
        assert c.logp_sampler[4:] == pytest.approx(n[4:], abs=2e-5)
        assert c.logp_sampler[4:] != pytest.approx(o[4:], abs=1e-3)

"""Engine `vllm` with the real vLLM in this process: it samples with the learner's weights, or raises an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from needs import needs_vllm
from vllm_cases import context_of, differences, generate, perturb, small_moe, some_prompts

from gspo.errors import ConfigError, WeightSyncError
from gspo.rollout.engine import build_engine
from gspo.types import Sampling

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    needs_vllm()
    built = build_engine("vllm", context_of(small_moe()), {})
    yield built
    built.close()


def test_weights_that_changed_are_sent_before_the_next_token(engine: Any) -> None:
    prompts, model = some_prompts(), engine.context.model
    before = generate(engine, prompts)
    assert differences(model, prompts, before).max() < 2e-5
    perturb(model)
    assert differences(model, prompts, before).mean() > 1e-2, "the change is large enough to be detected"
    after = generate(engine, prompts, version=8)
    assert differences(model, prompts, after).max() < 2e-5
    assert {r.version for r in after} == {8}


def test_unchanged_weights_are_not_sent_again(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(engine, some_prompts())
    monkeypatch.setattr(engine.host, "sync", lambda *_: pytest.fail("sent again"))
    assert {r.version for r in generate(engine, some_prompts())} == {7}


def test_a_change_within_a_version_is_detected(engine: Any) -> None:
    generate(engine, some_prompts(), version=0)
    perturb(engine.context.model)
    completions = generate(engine, some_prompts(), version=0)
    assert differences(engine.context.model, some_prompts(), completions).max() < 2e-5


@pytest.mark.parametrize("fault", ["a tensor dropped", "nothing applied", "a bit changed"])
def test_weights_that_did_not_arrive_are_an_error(engine: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo.rollout.vllm import worker

    receive = worker.Receiver.receive_weights

    def faulty(self: Any, info: Any) -> None:
        pairs = [(name, tensor.clone()) for name, tensor in worker.OFFERED[info.handed]]
        if fault == "a tensor dropped":
            del pairs[5]
        if fault == "a bit changed":
            pairs[5][1].view(-1)[3] += 1e-3
        worker.OFFERED[info.handed] = pairs
        if fault != "nothing applied":
            receive(self, info)

    perturb(engine.context.model)
    with monkeypatch.context() as patched:
        patched.setattr(worker.Receiver, "receive_weights", faulty)
        with pytest.raises(WeightSyncError):
            generate(engine, some_prompts())
    completions = generate(engine, some_prompts())
    assert differences(engine.context.model, some_prompts(), completions).max() < 2e-5, (
        "and the next call sends them again"
    )


def test_the_canary_detects_experts_in_a_stale_kernel_layout(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU kernel gives wrong results without an error when experts are loaded again. This test disables the
    workaround, and the canary must raise. (If it fails with a newer vLLM, the workaround may no longer be needed.)"""
    from gspo.rollout.vllm import worker

    perturb(engine.context.model)
    generate(engine, some_prompts())
    perturb(engine.context.model)
    runner = engine.host.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    patched_methods = [
        m.quant_method
        for m in runner.get_model().modules()
        if "_setup_kernel" in vars(getattr(m, "quant_method", None) or Any)
    ]
    assert patched_methods
    for method in patched_methods:
        del method._setup_kernel
    with monkeypatch.context() as patched:
        patched.setattr(worker, "repack_experts", lambda model: None)
        with pytest.raises(WeightSyncError, match="does not compute what the learner"):
            generate(engine, some_prompts())
    assert differences(engine.context.model, some_prompts(), generate(engine, some_prompts())).max() < 2e-5


def test_only_one_engine_runs_in_a_process(engine: Any) -> None:
    with pytest.raises(ConfigError, match="one at a time"):
        build_engine("vllm", engine.context, {})


def test_first_tokens_follow_the_models_probabilities(engine: Any) -> None:
    """Each request has its own generator, seeded by its stream: thousands of first tokens must follow the
    distribution."""
    prompts, count = some_prompts(1), 4000
    completions = generate(engine, prompts, samples=count, sampling=Sampling(max_tokens=1))
    with torch.no_grad():
        expected = engine.context.model(torch.tensor([prompts[0].token_ids])).logits[0, -1].softmax(-1) * count
    found = torch.bincount(torch.tensor([r.token_ids[0] for r in completions]), minlength=len(expected))
    often = expected >= 8
    assert often.sum() > 20
    squares = ((found - expected).square() / expected)[often].sum()
    degrees = int(often.sum())
    assert abs(float(squares) - degrees) < 4 * (2 * degrees) ** 0.5


def test_log_probs_include_top_p_and_top_k(engine: Any) -> None:
    prompts = some_prompts(1)
    completions = generate(engine, prompts, sampling=Sampling(max_tokens=4, top_k=1))
    assert {value for r in completions for value in r.logp_sampler} == {0.0}
    nucleus = generate(engine, prompts, sampling=Sampling(max_tokens=8, top_p=0.5))
    whole = generate(engine, prompts, sampling=Sampling(max_tokens=8))
    assert differences(engine.context.model, prompts, nucleus).min() > 0.1, (
        "more likely than under the whole distribution"
    )
    assert differences(engine.context.model, prompts, whole).max() < 2e-5


def test_settings_of_gspo_cannot_be_overridden(engine: Any) -> None:
    with pytest.raises(ConfigError, match="logprobs_mode: is set by gspo"):
        build_engine("vllm", engine.context, {"settings": {"logprobs_mode": "raw_logprobs"}})

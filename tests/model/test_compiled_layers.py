"""Compiled decoder layers: the same values and gradients, the old forward bitwise the new one, and the fallback."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gspo import config as settings
from gspo.errors import KernelWarning
from gspo.learner.forward import completion_logprobs
from gspo.model import compiled_layers
from gspo.model.gradient_checkpointing import recompute_activations
from gspo.model.kernels import experts
from gspo.model.kernels.experts import is_gated_experts
from gspo.model.micro_batch import MicroBatch, micro_batch
from gspo.model.packed_forward import supports_packing, trial_sequences
from gspo.model.routing import find_routers
from gspo.record.progress import PlainDisplay
from gspo.record.run_dir import read_jsonl
from gspo.trainer import train

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 99, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.for_model(kind, **SIZES, **HEADS, **(EXPERTS if "moe" in kind else {}))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval()


def batch_of(model: Any, chosen: tuple[int, ...] = (0, 1, 2, 3)) -> MicroBatch:
    return micro_batch(trial_sequences(model), chosen, 0, supports_packing(model)).to(DEVICE)


def gradients(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logp_N, _ = completion_logprobs(model, batch, 1.0)
    model.zero_grad()
    logp_N.sum().backward()
    return logp_N.detach(), [p.grad.clone() for p in model.parameters()]


def traced(function: Any, **options: Any) -> Any:
    """Traces and differentiates as the compiler does; on a CPU without generating code, which would take minutes."""
    return _compile(function, **options, **({} if CUDA else {"backend": "aot_eager"}))


_compile = torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_layers_give_the_same_gradients(kind: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", traced)
    model = build(kind)
    plain_N, plain = gradients(model, batch_of(model))
    again = build(kind)
    if recomputed:
        recompute_activations(again)
    compiled_layers.request_compilation(again, "on")
    compiled_N, compiled = gradients(again, batch_of(again))
    assert compiled_layers._forwards[again]
    torch.testing.assert_close(compiled_N, plain_N, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        old_N, _ = completion_logprobs(again, batch_of(again), 1.0)
    assert not old_N.requires_grad
    assert torch.equal(old_N, compiled_N)
    # Outside of the learner's forwards, the layers are as they were.
    assert all(("forward" in vars(layer)) == recomputed for layer in again.model.layers)
    before = compiled_layers.compile_seconds()
    gradients(again, batch_of(again, (2, 3)))
    assert compiled_layers.compile_seconds() - before < before / 2  # another number of tokens, the same graph


@pytest.mark.slow
def test_routers_of_compiled_layers_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", traced)
    model = build("qwen3_moe")
    routers = find_routers(model)
    assert routers is not None
    batch = batch_of(model)
    completion_logprobs(model, batch, 1.0)  # the first call runs a trial of the LM head, which must not be recorded
    with torch.no_grad(), routers.watch() as plain:
        completion_logprobs(model, batch, 1.0)
    compiled_layers.request_compilation(model, "on")
    completion_logprobs(model, batch, 1.0)
    assert compiled_layers._forwards[model]
    before = compiled_layers.compile_seconds()
    for _ in range(3):  # each watch replaces the routers' forwards, which must not compile the layers again
        with torch.no_grad(), routers.watch() as compiled:
            completion_logprobs(model, batch, 1.0)
        assert torch.equal(compiled.used_ILK, plain.used_ILK)
    assert compiled_layers.compile_seconds() == before


@pytest.mark.slow
def test_a_run_trains_compiled_layers_and_reports_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", traced)
    tree = {
        "run_dir": str(tmp_path / "run"),
        "steps": 2,
        "model": {"build": "tiny_dense", "compile": "on"},
        "data": {"task": "addition", "held_out": 0},
        "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 4},
        # Rewards differ, so that there is something to train on.
        "reward": {"functions": [f"{tmp_path}/reward.py:score"]},
        "eval": {"every": 0},
    }
    (tmp_path / "reward.py").write_text(
        "def score(completions, **_):\n    return [float(i % 2) for i in range(len(completions))]\n"
    )
    run = train(settings.from_tree(tree, where="test"), PlainDisplay()).run
    first, second = read_jsonl(run / "timings.jsonl")[-2:]
    assert first["time/compile_s"] > second.get("time/compile_s", 0.0)


def test_a_model_that_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **options: Any) -> Any:
        def fails(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no compiler\nsecond line")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    model = build("qwen3")
    plain_N, _ = gradients(model, batch_of(model))
    again = build("qwen3")
    compiled_layers.request_compilation(again, "on")
    with pytest.warns(
        RuntimeWarning, match=r"without compiled layers: .* does not compile \(RuntimeError: no compiler$"
    ):
        compiled_N, _ = gradients(again, batch_of(again))
    assert torch.equal(compiled_N, plain_N)


def test_a_failing_kernel_is_reported_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback to layers as they are would hide it."""

    def broken(*args: Any) -> Any:
        raise ValueError("num_warps must be a power of 2")

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(compiled_layers, "supports_experts", is_gated_experts)
    monkeypatch.setattr(experts, "_kernels", FunctionType(broken.__code__, vars(experts)))
    model = build("qwen3_moe")
    compiled_layers.request_compilation(model, "on")
    with pytest.warns(KernelWarning, match="training fails for Qwen3MoeForCausalLM; please report"):
        assert not compiled_layers.prepare_layers(model, batch_of(model))


def test_a_model_that_compiles_to_something_else_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: lambda *args, **kwargs: function(*args, **kwargs) * 1.5
    )
    model = build("qwen3")
    compiled_layers.request_compilation(model, "on")
    with pytest.warns(RuntimeWarning, match="gives other results when compiled"):
        gradients(model, batch_of(model))


@pytest.mark.parametrize(("when", "size", "expected"), [("auto", 10**8, CUDA), ("on", 0, True), ("off", 10**8, False)])
def test_when_layers_are_compiled(when: str, size: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "SMALL_PARAMETERS", 1 if size else 10**9)
    model = build("qwen3")
    compiled_layers.request_compilation(model, when)
    assert compiled_layers._requested[model] == expected

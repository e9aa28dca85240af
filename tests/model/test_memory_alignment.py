"""Results do not depend on the memory addresses of weights: all loaded weights are aligned to 64 bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from misaligned import misalign_loading, placed
from torch import Tensor

from gspo.clock import Clock
from gspo.config import Config, LoraConfig, ModelConfig
from gspo.learner import checkpoint
from gspo.learner.optimizer import Optimizer
from gspo.model.load import build_model, char_tokenizer, load_policy, load_tokenizer
from gspo.model.memory_alignment import align
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn
from gspo.trainer import train

OFFSETS = (8, 16, 32, 48)


def misaligned(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, t in tensors if t.data_ptr() % 64 or t.storage_offset() or not t.is_contiguous()]


def misaligned_in(model: Any) -> list[str]:
    return misaligned((*model.named_parameters(), *model.named_buffers()))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], str]:
    """The directory of a small model, as a user would give it."""

    def make(build: str) -> str:
        tokenizer = char_tokenizer("sort 0123456789")
        build_model(ModelConfig(build=build), tokenizer, 3).save_pretrained(tmp_path / build)  # type: ignore[arg-type]
        tokenizer.save_pretrained(tmp_path / build)
        return str(tmp_path / build)

    return make


MODELS = {
    "dense": ("tiny_dense", {}),
    "mixture of experts": ("tiny_moe", {}),
    "bfloat16": ("tiny_dense", {"dtype": "bfloat16"}),
    "float16": ("tiny_dense", {"dtype": "float16"}),
    "LoRA": ("tiny_dense", {"lora": LoraConfig(rank=2)}),
    "4-bit": ("tiny_dense", {"lora": LoraConfig(rank=2), "quantize": "nf4"}),
}


@pytest.mark.parametrize(("build", "settings"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("offset", OFFSETS)
def test_loaded_weights_are_aligned_and_tied_weights_stay_tied(
    offset: int, build: str, settings: dict[str, Any], folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=folder(build), device="cpu", **settings)
    misalign_loading(offset, monkeypatch.setattr)
    model = load_policy(config, load_tokenizer(config), seed=0).model
    assert misaligned_in(model) == []
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    built = load_policy(ModelConfig(build=build, device="cpu"), char_tokenizer("0123"), seed=0)  # type: ignore[arg-type]
    assert misaligned_in(built.model) == []


def test_shared_memory_stays_shared_and_other_layouts_become_contiguous() -> None:
    """Two parameters that share memory, a slice of a larger tensor, and a transposed matrix."""
    model = torch.nn.Module()
    both = placed(torch.arange(64.0).view(8, 8), 8)
    model.one, model.other = torch.nn.Parameter(both), torch.nn.Parameter(both)
    model.part = torch.nn.Parameter(torch.arange(96.0)[32:])
    model.transposed = torch.nn.Parameter(torch.arange(64.0).view(8, 8).T)
    model.register_buffer("numbers", placed(torch.arange(5), 48))
    before = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    align(model)
    assert misaligned_in(model) == []
    assert model.one.data_ptr() == model.other.data_ptr()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, before[name])
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_aligned_weights_are_not_copied() -> None:
    model = torch.nn.Linear(64, 64)
    before = [p.data_ptr() for p in model.parameters()]
    align(model)
    assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.parametrize("overrides", [(), ("model.dtype=bfloat16",), ("model.lora.rank=2", "model.dtype=bfloat16")])
def test_masters_and_moments_are_aligned(
    overrides: tuple[str, ...],
    tiny: Callable[..., Config],
    folder: Callable[[str], str],
    display: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny("model.build=", f"model.path={folder('tiny_dense')}", "steps=1", *overrides)
    train(config, display)
    path = checkpoint.saved(Path(config.run_dir, "checkpoints"))[-1]
    for offset in OFFSETS:
        misalign_loading(offset, monkeypatch.setattr)
        model = replace(config.model, path=str(path))
        policy = load_policy(model, load_tokenizer(model), seed=0)
        optimizer = Optimizer(policy.model, config.learner, 2)
        checkpoint.restore(path, optimizer, 2)
        state = optimizer.state()
        assert {key.split("/")[0] for key in state} >= {"exp_avg", "exp_avg_sq"} | ({"master"} if overrides else set())
        assert misaligned_in(policy.model) == []
        assert misaligned(state.items()) == []


def test_completions_log_probs_and_gradients_are_bitwise_identical_at_every_offset(
    tiny: Callable[..., Config], folder: Callable[[str], str], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("tiny_dense")
    seen = []
    step = Optimizer.step

    def recording(self: Optimizer, **options: Any) -> Any:
        gradients.append({n: p.grad.clone() for n, p in parts.policy.model.named_parameters()})
        return step(self, **options)

    monkeypatch.setattr(Optimizer, "step", recording)
    for offset in (0, *OFFSETS):
        misalign_loading(offset, monkeypatch.setattr)
        # One prompt, one slot: products with a single row are the ones whose rounding depends on alignment.
        options = ("rollout.prompts=1", "rollout.engine_options.slots=1", "learner.mini_batches=1")
        parts, gradients = parts_of(tiny("model.build=", f"model.path={path}", *options, run_dir=f"at{offset}")), []
        collected = collect(parts, RolloutState(), clock=Clock())
        learned = learn(parts, collected.rollouts.groups, step=1)
        assert learned is not None
        assert misaligned_in(parts.policy.model) == []
        completions = [c for g in collected.rollouts.sampled for c in g.completions]
        seen.append(([(c.token_ids, c.logp_sampler) for c in completions], learned.tokens.logp_N, gradients))
    for completions, logp_N, gradients in seen[1:]:
        assert completions == seen[0][0]
        assert torch.equal(logp_N, seen[0][1])
        assert all(torch.equal(g[n], first[n]) for g, first in zip(gradients, seen[0][2], strict=True) for n in first)

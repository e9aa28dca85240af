"""Training in float16: the loss scale changes nothing but underflow and overflow, and no update is lost to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gspo.step
from gspo.clock import Clock
from gspo.config import Config, LearnerConfig, ModelConfig
from gspo.errors import ConfigError, NumericalError
from gspo.learner.loss_scale import LARGEST
from gspo.learner.optimizer import Optimizer
from gspo.model.load import load_policy, load_tokenizer
from gspo.record.run_dir import read_jsonl
from gspo.rollout.engine import GenerateOptions
from gspo.rollout.gather import RolloutState
from gspo.step import collect, learn
from gspo.trainer import resume, train

SCALE = "gspo.learner.loss_scale"
HALF = "model.dtype=float16"
PLAIN = LearnerConfig(learning_rate=1e-2, max_grad_norm=1e9, spike=0.0)


def half_layer(value: float = 1.0) -> torch.nn.Linear:
    layer = torch.nn.Linear(4, 1, bias=False, dtype=torch.float16)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def output_sum(layer: torch.nn.Linear) -> Tensor:
    """Its gradient is 1 for each weight."""
    return layer(torch.ones(1, 4, dtype=torch.float16)).float().sum()


def events(config: Config, name: str) -> list[dict[str, Any]]:
    return [e for e in read_jsonl(Path(config.run_dir) / "events.jsonl") if e["event"] == name]


def rows(config: Config) -> list[dict[str, Any]]:
    return read_jsonl(Path(config.run_dir) / "metrics.jsonl")[1:]


# --------------------------------------------------------------------------------------- the scale of one update


def test_a_gradient_that_underflows_in_float16_survives_with_scaling() -> None:
    layer = half_layer()
    optimizer = Optimizer(layer, PLAIN, 10)
    (1e-9 * output_sum(layer)).backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any(), "1e-9 is below half of the smallest float16, 6e-8"
    layer.weight.grad = None
    optimizer.scale_loss(1e-9 * output_sum(layer)).backward()
    update = optimizer.step(loss_finite=True)
    assert update.grad_norm == pytest.approx(2e-9, rel=2e-3), "reported without the scale"
    assert update.applied
    assert (layer.weight < 1).all()


def test_an_overflow_halves_the_scale_until_the_gradient_is_finite_and_changes_no_weight() -> None:
    layer = half_layer()
    optimizer = Optimizer(layer, PLAIN, 10)
    attempts = 0
    while True:
        attempts += 1
        optimizer.scale_loss(5 * output_sum(layer)).backward()
        if not optimizer.retry_after_overflow(loss_finite=True):
            break
        assert layer.weight.grad is None
        assert torch.equal(layer.weight, torch.ones(1, 4, dtype=torch.float16))
    assert optimizer.loss_scale == 2.0**13, "5 x 2^14 exceeds 65504"
    update = optimizer.step(loss_finite=True)
    assert (update.overflows, update.loss_scale, attempts) == (3, 2.0**13, 4)
    assert update.grad_norm == 10
    optimizer.scale_loss(output_sum(layer)).backward()
    assert not optimizer.retry_after_overflow(loss_finite=True)
    assert optimizer.step(loss_finite=True).overflows == 0


def test_a_gradient_that_is_not_finite_at_any_scale_is_skipped_and_leaves_the_scale_alone() -> None:
    layer = half_layer()
    layer.weight.register_hook(lambda gradient: gradient * float("nan"))
    optimizer = Optimizer(layer, PLAIN, 10)
    attempts = 0
    while True:
        attempts += 1
        optimizer.scale_loss(output_sum(layer)).backward()
        if not optimizer.retry_after_overflow(loss_finite=True):
            break
    update = optimizer.step(loss_finite=True)
    assert attempts == 17, "from 2^16 down to 1"
    assert not update.applied
    assert 'model.dtype = "bfloat16"' in update.skipped
    assert update.overflows == 0
    assert optimizer.loss_scale == 2.0**16
    assert torch.equal(layer.weight, torch.ones(1, 4, dtype=torch.float16))


def test_a_loss_that_is_not_finite_is_not_retried() -> None:
    layer = half_layer()
    optimizer = Optimizer(layer, PLAIN, 10)
    optimizer.scale_loss(float("nan") * output_sum(layer)).backward()
    assert not optimizer.retry_after_overflow(loss_finite=False)
    assert optimizer.loss_scale == 2.0**16
    assert not optimizer.step(loss_finite=False).applied


def apply_updates(optimizer: Optimizer, layer: torch.nn.Linear, count: int) -> list[float | None]:
    scales = []
    for _ in range(count):
        optimizer.scale_loss(1e-3 * output_sum(layer)).backward()
        assert not optimizer.retry_after_overflow(loss_finite=True)
        scales.append(optimizer.step(loss_finite=True).loss_scale)
    return scales


def test_the_scale_doubles_after_200_applied_updates_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = half_layer()
    optimizer = Optimizer(layer, LearnerConfig(learning_rate=0, spike=0.0), 10)
    assert apply_updates(optimizer, layer, 201) == [2.0**16] * 200 + [2.0**17]
    optimizer.scale_loss(output_sum(layer)).backward()
    optimizer.step(loss_finite=False)
    assert apply_updates(optimizer, layer, 199)[-1] == 2.0**17
    assert apply_updates(optimizer, layer, 1) == [2.0**18], "skipped updates do not count"
    monkeypatch.setattr(f"{SCALE}.GROWTH_INTERVAL", 1)
    optimizer.load({"loss_scale": torch.tensor([LARGEST / 2, 0.0], dtype=torch.float64)}, 0)
    tiny_gradient = 1e-9 * output_sum(layer)
    for _ in range(3):
        optimizer.scale_loss(tiny_gradient).backward(retain_graph=True)
        optimizer.step(loss_finite=True)
    assert optimizer.loss_scale == LARGEST


def test_state_and_restored_state_continue_alike_and_old_states_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SCALE}.GROWTH_INTERVAL", 5)
    layer = half_layer()
    optimizer = Optimizer(layer, PLAIN, 100)
    apply_updates(optimizer, layer, 8)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    twin = half_layer()
    twin.load_state_dict(layer.state_dict())
    restored = Optimizer(twin, PLAIN, 100)
    restored.load(state, optimizer.updates)
    assert apply_updates(restored, twin, 4) == apply_updates(optimizer, layer, 4) == [2.0**17] * 2 + [2.0**18] * 2
    assert torch.equal(layer.weight, twin.weight)
    older = Optimizer(half_layer(), PLAIN, 100)
    older.load({name: tensor for name, tensor in state.items() if name != "loss_scale"}, 8)
    assert older.loss_scale == 2.0**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_have_no_scale(dtype: torch.dtype) -> None:
    optimizer = Optimizer(half_layer().to(dtype), PLAIN, 10)
    loss = torch.ones(())
    assert optimizer.scale_loss(loss) is loss
    assert "loss_scale" not in optimizer.state()
    assert not optimizer.retry_after_overflow(loss_finite=True)
    assert optimizer.step(loss_finite=True).loss_scale is None


def test_gradients_through_frozen_float16_weights_are_scaled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), half_layer())
    model[1].requires_grad_(False)
    assert Optimizer(model, PLAIN, 10).loss_scale == 2.0**16


# --------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("build", ["tiny_dense", "tiny_moe"])
def test_gradients_and_losses_are_those_of_float32_up_to_rounding(
    build: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    """The same completions and the same weights, which float16 has rounded. Experts are replayed, so that a near-tie
    in a router makes no difference."""
    replay = ("routing.replay=sampler",) if build == "tiny_moe" else ()
    half = parts_of(tiny(f"model.build={build}", HALF, "learner.learning_rate=0", *replay))
    groups = collect(half, RolloutState(), clock=Clock()).rollouts.groups
    found = learn(half, groups, step=1)
    full = parts_of(tiny(f"model.build={build}", "learner.learning_rate=0", *replay, run_dir="float32"))
    full.policy.model.load_state_dict(half.policy.model.state_dict())
    expected = learn(full, groups, step=1)
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found.tokens.logp_N, expected.tokens.logp_N, rtol=0, atol=0.02)
    assert (found.tokens.logp_N - expected.tokens.logp_N).abs().mean() < 1e-3
    for ours, theirs in zip(found.updates, expected.updates, strict=True):
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=5e-3)
    for half_loss, full_loss in zip(found.losses, expected.losses, strict=True):
        assert float(half_loss.total) == pytest.approx(float(full_loss.total), abs=1e-5)


def test_an_overflow_costs_no_update_and_the_run_is_the_one_that_began_with_the_lower_scale(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SCALE}.INITIAL", 2.0**30)
    high = tiny(HALF, "learner.max_skipped=1", "learner.micro_batch_tokens=64", run_dir="high")
    train(high, display)
    reported = events(high, "gradient_overflow")
    assert reported
    assert not events(high, "update_skipped")
    assert any("overflowed float16" in message for message in display.messages)
    assert sum(row["grad/overflows"] for row in rows(high)) == sum(e["overflows"] for e in reported)
    assert all(row["grad/skipped"] == 0 for row in rows(high))
    last = rows(high)[-1]["grad/loss_scale"]
    assert last == reported[-1]["loss_scale"] == 2.0 ** (30 - sum(e["overflows"] for e in reported))
    monkeypatch.setattr(f"{SCALE}.INITIAL", last)
    low = tiny(HALF, "learner.micro_batch_tokens=64", run_dir="low")
    train(low, display)
    assert not events(low, "gradient_overflow")
    ours, theirs = (load_file(Path(c.run_dir) / "checkpoints/000003/model.safetensors") for c in (high, low))
    # Gradients of a scale in between differ from those of the lowest only where float16 is subnormal.
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.float16
        torch.testing.assert_close(ours[name], tensor, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("cut", [1, 3], ids=["right after an overflow", "within a growth interval"])
def test_a_resumed_run_is_byte_identical(
    cut: int, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SCALE}.INITIAL", 2.0**30)
    monkeypatch.setattr(f"{SCALE}.GROWTH_INTERVAL", 4)
    whole, part = (tiny(HALF, "steps=4", "eval.every=0", run_dir=name) for name in ("whole", "part"))
    train(whole, display)
    assert {e["step"] for e in events(whole, "gradient_overflow")} >= {1}
    shutil.copytree(whole.run_dir, part.run_dir)
    for step in range(cut + 1, 5):
        os.rename(f"{part.run_dir}/checkpoints/{step:06d}", f"{part.run_dir}/.gone-{step}")
    scale, good_updates = load_file(f"{part.run_dir}/checkpoints/{cut:06d}/trainer.tensors")["loss_scale"].tolist()
    assert scale < 2.0**30
    assert 0 < good_updates < 4
    resume(part.run_dir, display, trust_run=True)
    assert Path(part.run_dir, "metrics.jsonl").read_bytes() == Path(whole.run_dir, "metrics.jsonl").read_bytes()
    for file in ("model.safetensors", "trainer.tensors"):
        ours, theirs = (load_file(f"{c.run_dir}/checkpoints/000004/{file}") for c in (part, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_cold_start_repeats_a_step_that_overflows(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = ("cold_start.steps=2", "cold_start.check_every=2", "steps=1", "eval.every=0", HALF)
    monkeypatch.setattr(f"{SCALE}.INITIAL", 2.0**30)
    high = tiny(*cold, run_dir="high")
    train(high, display)
    monkeypatch.setattr(f"{SCALE}.INITIAL", 2.0**10)
    low = tiny(*cold, run_dir="low")
    train(low, display)
    ours, theirs = (load_file(f"{c.run_dir}/checkpoints/000000/model.safetensors") for c in (high, low))
    distance = sum(float((ours[n].float() - theirs[n].float()).square().sum()) for n in theirs) ** 0.5
    assert distance < 0.01 * sum(float(t.float().square().sum()) for t in theirs.values()) ** 0.5


def test_a_loss_that_is_not_finite_stops_the_run_and_names_float16(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gspo.step.loss_of

    def broken(*arguments: Any) -> Any:
        loss = real(*arguments)
        return replace(loss, total=loss.total * float("nan"))

    monkeypatch.setattr(gspo.step, "loss_of", broken)
    with pytest.raises(NumericalError, match=r'float16 holds nothing above 65504.*model.dtype = "bfloat16"'):
        train(tiny(HALF, "learner.max_skipped=2", "eval.every=0"), display)


# --------------------------------------------------------------------------------------- sampling


def mismatch(parts: Any) -> float:
    learned = learn(parts, collect(parts, RolloutState(), clock=Clock()).rollouts.groups, step=1)
    assert learned is not None
    return float(learned.log_rho_M.abs().mean())


def test_engine_and_learner_agree_better_than_in_bfloat16(tiny: Callable[..., Config], parts_of: Any) -> None:
    half, brain = (parts_of(tiny(f"model.dtype={d}", run_dir=d)) for d in ("float16", "bfloat16"))
    assert half.policy.model.dtype == torch.float16
    assert 0 < mismatch(half) < mismatch(brain) / 3


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_logits_that_are_nan_name_float16_only_in_float16(
    dtype: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(f"model.dtype={dtype}"))
    with torch.no_grad():
        parts.policy.model.get_input_embeddings().weight.fill_(float("nan"))
    options = GenerateOptions(samples=1, sampling=parts.config.rollout.sampling, seed=0, stream="s", version=0)
    with pytest.raises(NumericalError, match="not numbers") as error:
        parts.engine.generate(parts.problems.train[:1], options)
    assert ("float16" in str(error.value)) == (dtype == "float16")


# --------------------------------------------------------------------------------------- loading


@pytest.fixture
def saved(tiny: Callable[..., Config], parts_of: Any, tmp_path: Path) -> Callable[[str, float], str]:
    """A saved float32 model with one weight matrix filled with a value."""

    def save(name: str, value: float) -> str:
        policy = parts_of(tiny()).policy
        with torch.no_grad():
            policy.model.get_submodule(name).weight.fill_(value)
        policy.model.save_pretrained(tmp_path / "model")
        policy.tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def test_weights_beyond_float16_are_refused(saved: Callable[[str, float], str]) -> None:
    path = saved("model.layers.1.mlp.up_proj", 7e4)
    config = ModelConfig(path=path, dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match=r'model.dtype: .*layers.1.mlp.up_proj.*65504; set model.dtype = "bfloat16"'):
        load_policy(config, load_tokenizer(config), seed=0)
    config = replace(config, dtype="bfloat16")
    assert load_policy(config, load_tokenizer(config), seed=0).model.dtype == torch.bfloat16


def test_activations_beyond_float16_are_refused(saved: Callable[[str, float], str]) -> None:
    path = saved("model.layers.0.mlp.up_proj", 6e4)
    config = ModelConfig(path=path, dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match=r"model.dtype: the activations of Qwen3ForCausalLM exceed 65504"):
        load_policy(config, load_tokenizer(config), seed=0)


def test_an_unknown_precision_names_the_known_ones(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"model.dtype.*float16"):
        tiny("model.dtype=float8")

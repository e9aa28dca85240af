"""8-bit AdamW, and optimizer states in host memory: the same updates, exact resume, and where they are refused."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import unusable
from safetensors.torch import load_file
from torch import Tensor, nn

from gspo.config import Config, LearnerConfig, ModelConfig
from gspo.errors import ConfigError
from gspo.learner import adamw_8bit, checkpoint
from gspo.learner.adamw_8bit import AdamW8bit
from gspo.learner.host_states import LANES, HostStates
from gspo.learner.optimizer import Optimizer, check_optimizer, rule_of
from gspo.learner.weight_states import MOMENT_BYTES, AdamW32bit, DeviceStates, part
from gspo.model.load import build_model, char_tokenizer
from gspo.trainer import resume, train

CPU = torch.device("cpu")
SETTINGS = LearnerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9, spike=0.0)
EIGHT = replace(SETTINGS, optimizer="adamw_8bit")
OFFLOADED = replace(SETTINGS, optimizer_offload=True)
KINDS = {"8 bits": EIGHT, "offloaded": OFFLOADED, "both": replace(EIGHT, optimizer_offload=True)}


@pytest.fixture(autouse=True)
def eight_bits() -> None:
    try:
        adamw_8bit.check_8_bits(CPU)
    except ConfigError as error:
        unusable("bitsandbytes", str(error))


def model_of(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """Weights with 8-bit moments, one of them with an incomplete last block, and small ones without."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(70, 83), nn.Linear(83, 61)).to(dtype)


def backward(model: nn.Module, update: int, scale: float = 1.0) -> None:
    x = torch.randn(16, 70, generator=torch.Generator().manual_seed(update)).to(next(model.parameters()).dtype)
    (model(x).float().square().mean() * scale).backward()


def train_on(model: nn.Module, optimizer: Optimizer, updates: range) -> None:
    for update in updates:
        backward(model, update, optimizer.loss_scale)
        assert optimizer.step(loss_finite=True).applied


def gradients_of(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_updates_are_those_of_torch() -> None:
    ours, twin = model_of(torch.float32), model_of(torch.float32)
    optimizer = Optimizer(ours, SETTINGS, 10)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for update in range(5):
        backward(ours, update)
        backward(twin, update)
        optimizer.step(loss_finite=True)
        plain.step()
        plain.zero_grad()
    assert_equal(dict(ours.named_parameters()), dict(twin.named_parameters()))


def test_8_bit_moments_take_a_quarter_and_follow_adamw() -> None:
    exact, small = model_of(torch.float32), model_of(torch.float32)
    before = {name: p.detach().clone() for name, p in exact.named_parameters()}
    full, eight = Optimizer(exact, SETTINGS, 100), Optimizer(small, EIGHT, 100)
    train_on(exact, full, range(30))
    train_on(small, eight, range(30))
    for name, weight in small.named_parameters():
        reference = dict(exact.named_parameters())[name]
        moved = (reference - before[name]).norm()
        assert (weight - reference).norm() < 0.1 * moved, name
    state = eight.state()
    assert state["exp_avg_8bit/0.weight"].dtype == torch.uint8
    assert "exp_avg/0.bias" in state, "small weights keep moments in float32"
    moments = sum(t.nbytes for key, t in state.items() if key.endswith("/0.weight") and not key.startswith("step"))
    assert moments == pytest.approx(MOMENT_BYTES["adamw_8bit"] * 70 * 83, rel=1e-2)


@pytest.mark.parametrize("settings", [SETTINGS, EIGHT], ids=["float32", "8 bits"])
def test_a_weight_can_be_updated_in_parts(settings: LearnerConfig) -> None:
    rule = rule_of(settings, CPU)
    torch.manual_seed(0)
    whole, gradients = torch.randn(5001), [torch.randn(5001) for _ in range(3)]
    parts = whole.clone()
    state, other = rule.new_state(whole), rule.new_state(parts)
    for gradient in gradients:
        rule.update([whole], [gradient], [state], 1e-2)
        for start in range(0, 5001, 1024):
            stop = min(start + 1024, 5001)
            views = part(other, start, stop) | {"step": other["step"].clone()}
            rule.update([parts[start:stop]], [gradient[start:stop]], [views], 1e-2)
        other["step"].add_(1)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)
    for key in state:
        torch.testing.assert_close(other[key].float(), state[key].float(), rtol=1e-6, atol=1e-7)


def test_large_weights_are_updated_in_8_bits_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, rule = [torch.ones(9000), torch.ones(9000)], AdamW8bit(EIGHT, CPU)
    gradient = torch.randn(9000, generator=torch.Generator().manual_seed(0))
    for weight, most in zip(weights, (1 << 22, 512), strict=True):
        monkeypatch.setattr(adamw_8bit, "MOST", most)
        rule.update([weight], [gradient], [rule.new_state(weight)], 1e-2)
    assert torch.equal(*weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [AdamW32bit(SETTINGS), EIGHT], ids=["float32", "8 bits"])
def test_states_on_the_host_give_the_same_updates(rule: Any, dtype: torch.dtype) -> None:
    """More parts than there are buffers for, and parts of unequal size."""
    rule = AdamW8bit(rule, CPU) if rule is EIGHT else rule
    plain, offloaded = (dict(model_of(dtype).named_parameters()) for _ in range(2))
    near, far = DeviceStates(plain, rule), HostStates(offloaded, rule, part_size=256 * LANES)
    for update in range(4):
        gradients = gradients_of(plain, update)
        if update == 1:
            del gradients["1.weight"]  # without a gradient, nothing of a weight changes
        near.update(gradients, 1e-2)
        far.update(gradients, 1e-2)
    for name, weight in plain.items():
        torch.testing.assert_close(offloaded[name], weight, rtol=1e-6, atol=1e-7)
    assert near.state().keys() == far.state().keys()
    assert [float(far.state()[f"step/{name}"]) for name in plain] == [4, 4, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_a_restored_state_continues_exactly(settings: LearnerConfig, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    optimizer = Optimizer(model, settings, 10)
    train_on(model, optimizer, range(2))
    saved = {key: tensor.clone() for key, tensor in optimizer.state().items()}
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    train_on(model, optimizer, range(2, 4))
    restored = model_of(dtype, seed=1)
    restored.load_state_dict(weights)
    twin = Optimizer(restored, settings, 10)
    train_on(restored, twin, range(1))  # to be discarded, as by a rollback
    restored.load_state_dict(weights)
    twin.load(saved, 2)
    train_on(restored, twin, range(2, 4))
    assert_equal(restored.state_dict(), model.state_dict())
    assert_equal(twin.state(), optimizer.state())


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_an_update_that_is_not_finite_changes_nothing(settings: LearnerConfig) -> None:
    model = model_of()
    optimizer = Optimizer(model, settings, 10)
    train_on(model, optimizer, range(1))
    before = {key: tensor.clone() for key, tensor in (*model.state_dict().items(), *optimizer.state().items())}
    backward(model, 1, scale=float("nan"))
    assert not optimizer.step(loss_finite=True).applied
    assert_equal({**model.state_dict(), **optimizer.state()}, before)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_the_norm_is_clipped_and_reported_as_by_adamw(settings: LearnerConfig) -> None:
    norms = []
    for chosen in (SETTINGS, settings):
        model = model_of()
        optimizer = Optimizer(model, replace(chosen, max_grad_norm=1e-3), 10)
        backward(model, 0)
        norms.append(optimizer.step(loss_finite=True).grad_norm)
    assert norms[0] == norms[1] > 1e-3


def test_float16_gradients_are_divided_by_the_loss_scale() -> None:
    states = []
    for settings in (OFFLOADED, EIGHT):
        model = model_of(torch.float16)
        optimizer = Optimizer(model, settings, 10)
        assert optimizer.loss_scale > 1
        train_on(model, optimizer, range(2))
        states.append(optimizer.state())
    assert states[0]["loss_scale"].tolist() == states[1]["loss_scale"].tolist()
    torch.testing.assert_close(states[0]["master/0.weight"], states[1]["master/0.weight"], rtol=0, atol=4e-3)


@pytest.mark.parametrize("lora_rank", [0, 64], ids=["all weights", "LoRA"])
def test_a_resumed_run_is_bitwise_identical(
    lora_rank: int, tiny: Callable[..., Config], tmp_path: Path, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides: tuple[str, ...] = ()
    if lora_rank:
        tokenizer = char_tokenizer("sort 0123456789")
        build_model(ModelConfig(build="tiny_dense"), tokenizer, 3).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        overrides = ("model.build=", f"model.path={tmp_path / 'base'}", f"model.lora.rank={lora_rank}")
    # A CPU has no memory to save. The same code runs there.
    monkeypatch.setattr("gspo.build.check_optimizer", lambda *arguments: None)
    chosen = ("learner.optimizer=adamw_8bit", "learner.optimizer_offload=true", "model.dtype=bfloat16", "eval.every=0")
    whole = tiny(*chosen, *overrides, run_dir="whole")
    train(whole, display)
    cut = tiny(*chosen, *overrides, "steps=2", run_dir="cut")
    train(cut, display)
    resume(Path(cut.run_dir), display, steps=3, trust_run=True)
    one, other = (Path(config.run_dir, "checkpoints", "000003") for config in (whole, cut))
    states = [load_file(path / checkpoint.TRAINER) for path in (one, other)]
    assert any(key.startswith("exp_avg_8bit/") for key in states[0])
    assert_equal(*states)


def test_a_resume_may_change_where_states_are_held_but_not_their_precision(
    tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.build.check_optimizer", lambda *arguments: None)
    run = Path(tiny("steps=1").run_dir)
    train(tiny("steps=1"), display)
    resume(run, display, steps=2, overrides=["learner.optimizer_offload=true"], trust_run=True)
    with pytest.raises(ConfigError, match=r"learner\.optimizer"):
        resume(run, display, steps=3, overrides=["learner.optimizer=adamw_8bit"], trust_run=True)


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_optimizer(EIGHT, CPU)
    check_optimizer(OFFLOADED, torch.device("cuda"))
    with pytest.raises(ConfigError, match="on a CPU"):
        check_optimizer(OFFLOADED, CPU)
    monkeypatch.setattr(adamw_8bit, "_has_kernel", lambda device: False)
    with pytest.raises(ConfigError, match="has no 8-bit AdamW for cpu"):
        check_optimizer(EIGHT, CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        check_optimizer(EIGHT, CPU)


def test_the_benchmark_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    bench = importlib.import_module("memory_gpu")
    assert bench.main(["same", "resume-both", "full-both", "--device=cpu", "--tiny", "--updates=1"]) == 0
    out = capsys.readouterr().out
    assert out.count("tensors bitwise identical") == 3
    assert "update 1: forward + backward" in out

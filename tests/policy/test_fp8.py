"""One 8-bit forward: quantisation within its bounds, gradients straight through, one policy in engine and learner, and
weights that are quantised anew exactly when they change. On a CPU by the emulation, on a Hopper GPU by its own product."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.config import Config, LearnerConfig, ModelConfig
from gspo.errors import ConfigError
from gspo.observe.clock import Clock
from gspo.observe.run_dir import read_jsonl
from gspo.policy import fp8
from gspo.policy.kernels import blocks
from gspo.policy.kernels.blocks import BLOCK, dequantised, product, quantised_rows, quantised_weight
from gspo.policy.model import load_policy, load_tokenizer
from gspo.policy.optimizer import Optimizer
from gspo.step import collect, learn
from gspo.train import resume, train

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDE = "model.build_options={hidden_size = 128, intermediate_size = 256, num_attention_heads = 4, num_key_value_heads = 4, head_dim = 32}"


@pytest.fixture
def wide(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """A tiny run whose layers fit 128 x 128 blocks; a CPU emulates the product."""
    monkeypatch.setattr(fp8, "obstacle", lambda device: None)
    return lambda *overrides, **options: tiny(WIDE, "model.dtype=bfloat16", "model.fp8=true", *overrides, **options)


def varied(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))


# --- quantisation ---


def test_a_scale_is_the_smallest_power_of_two_that_fits() -> None:
    most = torch.cat([torch.logspace(-20, 20, 999), torch.tensor([448.0, 448.1, 1.75, 1.7500001, 3.5 * 2**-30])])
    scale, inverse = blocks.power_of_two(most)
    assert torch.equal(scale * inverse, torch.ones_like(scale))
    assert torch.equal(scale.frexp().mantissa, torch.full_like(scale, 0.5))
    assert (most * inverse <= 448).all()
    assert (most * inverse > 224).all()


def test_zeros_and_single_outliers_are_no_trouble() -> None:
    x = torch.zeros(3, 2 * BLOCK)
    x[1, 5], x[2] = 3e30, 1.0
    rows = quantised_rows(x)
    back = (rows.values.float().unflatten(1, (2, BLOCK)) * rows.scale.unsqueeze(-1)).flatten(1)
    torch.testing.assert_close(back, x, rtol=2**-4, atol=0)


def test_rounding_is_within_what_three_bits_allow() -> None:
    """Half of 2^-3 relative where E4M3 is normal, half of its smallest step, 2^-9 of the scale, below."""
    x = varied(40, 3 * BLOCK)
    rows = quantised_rows(x)
    scale = rows.scale.repeat_interleave(BLOCK, 1)
    back = rows.values.float() * scale
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2**-4, scale * 2**-10)).all()


def test_a_dequantised_weight_is_exact_in_bfloat16() -> None:
    weight = quantised_weight(varied(2 * BLOCK, 3 * BLOCK))
    assert torch.equal(dequantised(weight, torch.bfloat16).double(), dequantised(weight, torch.float64))


def test_a_row_is_quantised_by_itself() -> None:
    x = varied(9, 2 * BLOCK)
    whole, alone = quantised_rows(x), quantised_rows(x[4:5])
    assert torch.equal(whole.values[4].float(), alone.values[0].float())
    assert torch.equal(whole.scale[4], alone.scale[0])


def test_a_last_bit_of_the_largest_entry_moves_no_other() -> None:
    """What bfloat16 rounds differently in engine and learner must not spread over the block."""
    x = varied(1, BLOCK).bfloat16()
    largest = int(x.abs().argmax())
    nudged = x.clone()
    nudged[0, largest] *= 1 + 2**-7
    before, after = quantised_rows(x), quantised_rows(nudged)
    same = torch.arange(BLOCK) != largest
    assert torch.equal(before.values[:, same].float(), after.values[:, same].float())


# --- the product and its gradient ---


def linear(outputs: int, inputs: int, *, bias: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    plain = torch.nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16, device=DEVICE)
    holder = torch.nn.ModuleDict({"layer": plain})
    holder.get_output_embeddings = lambda: None  # type: ignore[assignment]
    assert fp8.convert(holder) == ["layer"]
    return plain


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 130])
def test_a_layer_is_the_product_of_what_was_quantised(rows: int, bias: bool) -> None:
    layer = linear(3 * BLOCK, 2 * BLOCK, bias=bias)
    x = varied(2, rows, 2 * BLOCK).to(DEVICE, torch.bfloat16)
    flat = x.flatten(0, 1).cpu()
    expected = blocks.emulated(quantised_rows(flat), quantised_weight(layer.weight.cpu()), torch.float32)
    expected += 0 if layer.bias is None else layer.bias.detach().cpu().float()
    found = layer(x).detach().flatten(0, 1).cpu().float()
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 4e-3


def test_gradients_pass_straight_through() -> None:
    layer = linear(3 * BLOCK, 2 * BLOCK, bias=True)
    x = varied(4, 7, 2 * BLOCK).to(DEVICE, torch.bfloat16).requires_grad_()
    gain = varied(4, 7, 3 * BLOCK, seed=3).to(DEVICE, torch.bfloat16)
    layer(x).backward(gain)
    weight = dequantised(quantised_weight(layer.weight), torch.float64)
    flat = gain.double().flatten(0, 1)
    for found, expected in (
        (x.grad, (flat @ weight).view(x.shape)),
        (layer.weight.grad, flat.T @ x.detach().double().flatten(0, 1)),
        (layer.bias.grad, flat.sum(0)),
    ):
        assert float((found.double() - expected).norm() / expected.norm()) < 4e-3


def test_gradients_add_up_in_float32() -> None:
    layer = linear(BLOCK, BLOCK, bias=False)
    Optimizer(layer, LearnerConfig(), 1)
    for _ in range(2):
        layer(varied(4, BLOCK).to(DEVICE, torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype == torch.float32


# --- weights that change ---


def test_a_changed_weight_is_quantised_anew_in_the_same_memory() -> None:
    layer = linear(BLOCK, BLOCK, bias=False)
    optimizer = Optimizer(layer, LearnerConfig(learning_rate=0.1, spike=0.0), 1)
    x = varied(4, BLOCK).to(DEVICE, torch.bfloat16)
    held = layer.fp8.of(layer.weight)
    where, before = held.values.data_ptr(), held.values.float().clone()
    layer(x).sum().backward()
    optimizer.step(loss_finite=True)
    assert held.values.data_ptr() == where
    assert torch.equal(held.values.float(), quantised_weight(layer.weight).values.float())
    assert not torch.equal(held.values.float(), before)


def test_it_is_quantised_once_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, made = linear(BLOCK, BLOCK, bias=False), []
    monkeypatch.setattr(fp8, "quantised_weight", lambda w: made.append(1) or quantised_weight(w))
    x = varied(4, BLOCK).to(DEVICE, torch.bfloat16)
    for _ in range(3):
        layer(x)
    assert made == []
    with torch.no_grad():
        layer.weight.mul_(2)
    layer(x)
    layer(x)
    assert made == [1]


def test_a_weight_that_changes_before_the_backward_is_noticed() -> None:
    layer = linear(BLOCK, BLOCK, bias=False)
    x = varied(4, BLOCK).to(DEVICE, torch.bfloat16)
    loss = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    layer(x)
    with pytest.raises(AssertionError, match="has changed"):
        loss.backward()


def test_rows_that_changed_in_place_are_quantised_again() -> None:
    layer = linear(BLOCK, BLOCK, bias=False)
    x = varied(4, BLOCK).to(DEVICE, torch.bfloat16)
    first = layer(x)
    x.mul_(2)
    assert torch.equal(layer(x), 2 * first)


# --- models and runs ---


def test_engine_and_learner_compute_one_policy(wide: Callable[..., Config], parts_of: Any) -> None:
    """Their difference is that of bfloat16 rounding, far from that between 8 bits and bfloat16."""
    parts = parts_of(wide("model.device=" + DEVICE.type, "rollout.max_tokens=24"))
    learned = learn(parts, collect(parts, step=1, cursor=0, clock=Clock()).gathered.groups, step=1)
    assert learned is not None
    unified = (learned.tokens.logp_old_N - learned.tokens.logp_sampler_N).abs().mean()
    with fp8.in_full(parts.policy.model):
        full = collect(parts, step=1, cursor=0, clock=Clock()).gathered.groups
    mixed = learn(parts, full, step=1)
    assert mixed is not None
    apart = (mixed.tokens.logp_old_N - mixed.tokens.logp_sampler_N).abs().mean()
    assert unified < 0.5 * apart


def test_what_stays_in_full(wide: Callable[..., Config], parts_of: Any) -> None:
    moe = wide("model.build=tiny_moe", "model.device=" + DEVICE.type)
    model = parts_of(moe).policy.model
    found = {name for name, m in model.named_modules() if isinstance(m, fp8.Fp8Linear)}
    assert found == {f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"}
    assert "fp8" not in "".join(model.state_dict())


def test_resume_is_exact(wide: Callable[..., Config], display: Any) -> None:
    whole = train(wide("steps=4", "model.device=" + DEVICE.type), display).run
    half = train(wide("steps=2", "model.device=" + DEVICE.type, run_dir="half"), display).run
    resume(half, display, steps=4)
    assert read_jsonl(half / "metrics.jsonl") == read_jsonl(whole / "metrics.jsonl")


def test_a_checkpoint_loads_in_plain_transformers(wide: Callable[..., Config], display: Any) -> None:
    from transformers import AutoModelForCausalLM

    run = train(wide("steps=1", "model.device=" + DEVICE.type), display).run
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "000001")
    assert model.dtype == torch.bfloat16
    assert not any(isinstance(m, fp8.Fp8Linear) for m in model.modules())


def test_refusals(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'model\.fp8.*set model\.dtype = "bfloat16"'):
        tiny("model.fp8=true")
    narrow = ModelConfig(build="tiny_dense", dtype="bfloat16", fp8=True, device="cpu")
    tokenizer = load_tokenizer(narrow)
    with pytest.raises(ConfigError, match=r"model\.fp8: it needs an NVIDIA Hopper GPU"):
        load_policy(narrow, tokenizer, seed=0)
    monkeypatch.setattr(fp8, "obstacle", lambda device: None)
    with pytest.raises(
        ConfigError, match=r"model\.fp8: model\.layers\.0\..*128 x 64, and both must be multiples of 128"
    ):
        load_policy(narrow, tokenizer, seed=0)


# --- Triton ---


def test_the_triton_kernel_agrees() -> None:
    """In a process of its own, where Triton interprets its kernels."""
    pytest.importorskip("triton", minversion="3.8", reason="needs Triton 3.8, whose interpreter works with this numpy")
    if CUDA or INTERPRETED:
        pytest.skip("the test below runs here itself")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "on_triton"]
    root = Path(blocks.__file__).parents[3]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}, cwd=root, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "..." in done.stdout, "all of them ran, none was skipped"


@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run by the test above")
@pytest.mark.parametrize(("rows", "size"), [(1, 128), (37, 384), (64, 256)])
def test_on_triton(rows: int, size: int) -> None:
    from gspo.policy.kernels import blocks_triton

    x = varied(rows, size)
    # The interpreter rounds 8-bit floats wrongly, so it gets numbers that need no rounding.
    x = x if CUDA else quantised_rows(x).values.float() * 2**-5
    x[0, :128] = 0
    values, scale = blocks_triton.quantised_rows(x.to(DEVICE), 16)
    expected = quantised_rows(x)
    assert values.shape == (-(-rows // 16) * 16, size)
    assert scale.stride() == (1, len(values))
    assert torch.equal(values[:rows].float().cpu(), expected.values.float())
    assert torch.equal(scale[:rows].cpu(), expected.scale)
    assert not values[rows:].float().any()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(256, 1024, 3072), (37, 256, 1536), (2048, 1536, 8960)])
def test_the_gpu_multiplies_what_the_emulation_does(rows: int, outputs: int, inputs: int) -> None:
    if fp8.obstacle(DEVICE):
        pytest.skip(str(fp8.obstacle(DEVICE)))
    x, weight = quantised_rows(varied(rows, inputs).to(DEVICE)), quantised_weight(varied(outputs, inputs).to(DEVICE))
    found, expected = product(x, weight, torch.bfloat16).float(), blocks.emulated(x, weight, torch.float32)
    assert float((found - expected).norm() / expected.norm()) < 4e-3

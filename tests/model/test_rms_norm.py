"""RMSNorm with its own backward pass: the same results as the model's norms, and no other norm is replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES

from gspo.model.kernels.rms_norm import _RMSNorm, replace_norms

DOUBLE = torch.float64


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"logits": logits.detach()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_gives_the_same_values_and_gradients(name: str) -> None:
    """In float64, except for transformers' own norms, which round to float32."""
    model = FAMILIES[name].model(torch.float32).to(DOUBLE)
    model.set_experts_implementation("eager")  # the other implementations do not support float64
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=DOUBLE)
    plain, ids = copy.deepcopy(model), torch.arange(1, 13).view(2, 6)
    replace_norms(model)
    found, expected = gradients(model, ids), gradients(plain, ids)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-5 * float(expected[key].abs().max()))


def test_all_norms_are_replaced_and_weights_do_not_change() -> None:
    model = FAMILIES["qwen3-moe"].model(torch.float32)
    before = copy.deepcopy(model.state_dict())
    assert replace_norms(model) == sum(type(m).__name__.endswith("RMSNorm") for m in model.modules()) > 4
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert replace_norms(FAMILIES["qwen3-moe"].model(torch.bfloat16)) == 0


class PlusOneRMSNorm(torch.nn.Module):
    """Gemma's formula: the weight is added to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def test_a_norm_with_another_formula_is_not_replaced() -> None:
    holder = torch.nn.ModuleList([PlusOneRMSNorm()])
    assert replace_norms(holder) == 0
    assert type(holder[0]) is PlusOneRMSNorm
    assert not holder[0].weight.any()


def test_a_copy_has_its_own_weights() -> None:
    model = FAMILIES["qwen3-moe"].model(torch.float32)
    replace_norms(model)
    other, ids = copy.deepcopy(model), torch.arange(1, 13).view(2, 6)
    before = other(input_ids=ids).logits
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert torch.equal(other(input_ids=ids).logits, before)


def test_gradients_against_finite_differences() -> None:
    x = torch.randn(3, 2, 8, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(8, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: _RMSNorm.apply(a, b, 1e-6), (x, weight))

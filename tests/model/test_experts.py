"""The experts of an MoE layer in training, against the model's own code: values, gradients, reproducibility."""

from __future__ import annotations

from typing import Any

import interpreted
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.model.kernels import experts

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def experts_module(width: int, count: int) -> Any:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=9,
        num_experts=count,
        num_experts_per_tok=2,
        moe_intermediate_size=width,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model.model.layers[0].mlp.experts.to(DEVICE)


def outcome(forward: Any, module: Any, hidden: Tensor, chosen: Tensor, weight: Tensor) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    module.zero_grad()
    output = forward(hidden, chosen, weight)
    (output * torch.arange(output.numel(), device=DEVICE).view_as(output).cos()).sum().backward()
    return [output.detach(), hidden.grad, weight.grad, module.gate_up_proj.grad, module.down_proj.grad]  # type: ignore[list-item]


@pytest.mark.parametrize(("tokens", "width", "count"), [(7, 16, 4), (1, 24, 3), (40, 8, 16)])
def test_experts_equal_the_models_own(tokens: int, width: int, count: int) -> None:
    module = experts_module(width, count)
    assert experts.is_gated_experts(module)
    torch.manual_seed(1)
    hidden = torch.randn(tokens, 32, device=DEVICE)
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)]).to(DEVICE)
    weight = torch.rand(tokens, 2, device=DEVICE)
    own = outcome(module.forward, module, hidden, chosen, weight)
    ours = outcome(lambda *given: experts.experts_forward(module, *given), module, hidden, chosen, weight)
    for a, b in zip(ours, own, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_all_tokens_to_one_expert() -> None:
    row_I, place_TK, ends_E = experts.sort_by_expert(torch.tensor([[2, 0], [2, 0], [2, 0]], device=DEVICE), 4)
    assert row_I.tolist() == [0, 1, 2, 0, 1, 2]
    assert place_TK.tolist() == [[3, 0], [4, 1], [5, 2]]
    assert ends_E.tolist() == [3, 3, 6, 6]


def test_kernels_without_a_gpu() -> None:
    interpreted.run_interpreted(__file__)


CASES = [(5, 3, 24), (1, 1, 8), (9, 2, 40), (4, 8, 16), (2, 2, 33), (3, 4, 64), (6, 1, 7), (8, 2, 12)]


@pytest.mark.skipif(not (CUDA or interpreted.INTERPRETED), reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize(("tokens", "chosen", "size"), CASES)
def test_kernels_equal_plain_pytorch_on_triton(tokens: int, chosen: int, size: int) -> None:
    from gspo.model.kernels import experts_triton

    torch.manual_seed(tokens)
    place_TK = torch.randperm(tokens * chosen, device=DEVICE).view(tokens, chosen)
    x_IH, gradient_TH = (torch.randn(n, size, device=DEVICE) for n in (tokens * chosen, tokens))
    weight_TK = torch.rand(tokens, chosen, device=DEVICE)
    x_I2F = torch.randn(tokens, 2 * size, device=DEVICE)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("combine", (x_IH, place_TK, weight_TK)),
        ("combine", (x_IH, place_TK, None)),
        ("combine_backward", (gradient_TH, x_IH, place_TK, weight_TK)),
        ("gated_silu", (x_I2F,)),
        ("gated_silu_backward", (x_I2F, gradient_TH)),
    ]
    for name, given in calls:
        ours, plain = (getattr(kernels, name)(*given) for kernels in (experts_triton, experts.TorchKernels))
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_experts_in_bfloat16_on_a_gpu() -> None:
    module = experts_module(48, 8).to(torch.bfloat16)
    assert experts.supports_experts(module)
    torch.manual_seed(1)
    hidden = torch.randn(300, 32, device=DEVICE, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(8)[:2] for _ in range(300)]).to(DEVICE)
    weight = torch.rand(300, 2, device=DEVICE, dtype=torch.bfloat16)

    def forward(*given: Any) -> Any:
        return experts.experts_forward(module, *given)

    ours = outcome(forward, module, hidden, chosen, weight)
    assert all(torch.equal(a, b) for a, b in zip(ours, outcome(forward, module, hidden, chosen, weight), strict=True))
    wide = experts_module(48, 8)
    wide.load_state_dict(module.state_dict())
    exact = outcome(wide.forward, wide, hidden.float(), chosen, weight.float())
    for a, b in zip(ours, exact, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 2e-2

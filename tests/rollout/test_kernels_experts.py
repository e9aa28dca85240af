"""The Triton kernels for experts and routers, against plain PyTorch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from interpreted import CUDA, INTERPRETED, run_interpreted
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.model.routing import find_routers
from gspo.rollout.local import decoder, kernels

DEVICE = torch.device("cuda" if CUDA else "cpu")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def test_triton_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


on_triton = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run by the test above")


def fused() -> Any:
    from gspo.rollout.local import kernels_experts_triton

    return kernels_experts_triton


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def one_by_one(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ weight[e].T for e, (a, b) in enumerate(pairwise(starts))])


CHOICES = {
    "several": [[0, 3], [3, 4], [1, 3], [4, 0], [3, 0]],
    "one token": [[2, 4]],
    "all to one expert": [[4]] * 45,
    "two blocks and a loop": [[1, 0]] * 19 + [[1, 3]] * 18,
}


@on_triton
@pytest.mark.parametrize("options", [{}, {"swap": False}, {"tma": True}, {"tma": True, "swap": False}], ids=str)
@pytest.mark.parametrize("choices", CHOICES)
def test_products_of_experts_on_triton(choices: str, options: dict[str, bool]) -> None:
    """With experts that have no token, and widths that are not powers of two."""
    module, experts, size, width = fused(), 5, 40, 48
    expert_RK = torch.tensor(CHOICES[choices], device=DEVICE)
    row_I, _, ends_E = kernels.group_by_expert(expert_RK, experts)
    x = random(len(expert_RK), size)
    gate_up, down = random(experts, 2 * width, size, seed=1), random(experts, size, width, seed=2)
    tiles = module.Tiles(tokens=16, outputs=32, inputs=16, **options)
    gate, up = one_by_one(x[row_I], gate_up, ends_E).chunk(2, -1)
    hidden = module.gated_product(x, row_I, ends_E, gate_up, tiles)
    torch.testing.assert_close(hidden, silu(gate) * up, atol=1e-5, rtol=1e-5)
    expected = one_by_one(hidden, down, ends_E)
    torch.testing.assert_close(module.product(hidden, ends_E, down, tiles), expected, atol=1e-4, rtol=1e-5)


@on_triton
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * CUDA)  # the interpreter's dot has no bfloat16
def test_products_of_experts_are_rounded_as_in_the_model_on_triton(dtype: torch.dtype) -> None:
    module, experts = fused(), 3
    row_I, _, ends_E = kernels.group_by_expert(torch.tensor([[0, 2], [2, 0]], device=DEVICE), experts)
    x, gate_up = random(2, 32, dtype=dtype), random(experts, 96, 32, seed=1, dtype=dtype)
    gate, up = one_by_one(x[row_I].float(), gate_up.float(), ends_E).to(dtype).chunk(2, -1)
    ours = module.gated_product(x, row_I, ends_E, gate_up, module.GATE_UP[16])
    different = ours != silu(gate) * up
    assert float(different.float().mean()) < 0.05, "only where sums round differently"


@on_triton
@pytest.mark.parametrize(("width", "size"), [(768, 32), (96, 136)])
def test_the_mlp_of_experts_on_triton(width: int, size: int) -> None:
    module, experts = fused(), 3
    expert_RK = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 2]], device=DEVICE)
    row_I, _, ends_E = kernels.group_by_expert(expert_RK, experts)
    x, gate_up = random(4, size), random(experts, 2 * width, size, seed=1)
    down = random(experts, size, width, seed=2)
    gate, up = one_by_one(x[row_I], gate_up, ends_E).chunk(2, -1)
    expected = one_by_one(silu(gate) * up, down, ends_E)
    ours = module.expert_mlp(x, row_I, ends_E, gate_up, down)
    torch.testing.assert_close(ours, expected, atol=1e-5 * float(expected.std()), rtol=1e-4)


@on_triton
@pytest.mark.parametrize(("choices", "expected"), [(8, 16), (1024, 16), (2048, 32), (4096, 64), (10**5, 64)])
def test_every_number_of_tokens_has_a_configuration_on_triton(choices: int, expected: int) -> None:
    module = fused()
    assert module.tokens_per_program(choices, 128) == expected
    assert module.GATE_UP[expected].tokens == module.DOWN[expected].tokens == expected
    assert set(module.GATE_UP) == set(module.DOWN)


@on_triton
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (60, 4), (8, 2), (3, 3), (1, 1)])
def test_routing_on_triton(experts: int, chosen: int, normalize: bool) -> None:
    logits = random(9, experts)
    weight, index = fused().choose_experts(logits, chosen, normalize=normalize)
    values, expected = logits.softmax(-1).topk(chosen)
    assert torch.equal(index, expected)
    values = values / values.sum(-1, keepdim=True) if normalize else values
    torch.testing.assert_close(weight, values)


@on_triton
def test_equal_scores_on_triton() -> None:
    """The lowest numbers win, and no expert is chosen twice, also if all other scores are 0."""
    logits = torch.zeros(3, 16, device=DEVICE)
    logits[1, [3, 7, 9]] = 1.0
    logits[2, 5] = 200.0
    weight, index = fused().choose_experts(logits, 4, normalize=True)
    assert index.tolist() == [[0, 1, 2, 3], [3, 7, 9, 0], [5, 0, 1, 2]]
    torch.testing.assert_close(weight.sum(-1), torch.ones(3, device=DEVICE))


@on_triton
def test_nan_scores_choose_existing_experts_on_triton() -> None:
    logits = random(2, 12)
    logits[0, 3] = float("nan")
    weight, index = fused().choose_experts(logits, 4, normalize=True)
    assert weight[0].isnan().all()
    assert int(index.max()) < 12
    assert weight[1].isfinite().all()


@on_triton
@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_decoding_with_these_kernels_on_triton(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the plain model, and the recorded experts are those of the routers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).eval().to(DEVICE)
    for name in ("grouped_products", "fused_routing", "streams_experts"):
        monkeypatch.setattr(decoder, name, lambda *args: True)
    routers = find_routers(model)
    assert routers is not None
    made: list[Any] = []
    init = decoder.Decoder.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, routers, **kwargs)
        made.append(self)

    monkeypatch.setattr(decoder.Decoder, "__init__", recording)
    ids = torch.arange(1, 9, device=DEVICE)
    with torch.no_grad():
        step = decoder._open_trial(model, [tuple(ids[:6].tolist())], 1)
        ours = step(ids[6:7], torch.tensor([6], device=DEVICE))
        routes = made[0].logits(1)[1]
        with routers.watch() as trace:
            expected = model(ids[None, :7]).logits[:, -1]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(routes[0], trace.used_ILK[-1])


@pytest.mark.skipif(not CUDA, reason="compiled kernels need a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [8, 256, 600])
def test_compiled_products_of_experts(dtype: torch.dtype, rows: int) -> None:
    module, experts, size, width, chosen = fused(), 32, 512, 192, 4
    expert_RK = random(rows, experts).topk(chosen).indices
    row_I, _, ends_E = kernels.group_by_expert(expert_RK, experts)
    x = random(rows, size, dtype=dtype)
    gate_up = 0.05 * random(experts, 2 * width, size, seed=1, dtype=dtype)
    down = 0.05 * random(experts, size, width, seed=2, dtype=dtype)
    gate, up = one_by_one(x[row_I].float(), gate_up.float(), ends_E).chunk(2, -1)
    expected = one_by_one(silu(gate) * up, down.float(), ends_E)
    for options in ({}, {"swap": False}, {"tma": True}):
        tiles = module.replace(module.GATE_UP[32], **options)
        hidden = module.gated_product(x, row_I, ends_E, gate_up, tiles)
        ours = module.product(hidden, ends_E, down, tiles).float()
        assert float((ours - expected).norm() / expected.norm()) < (1e-2 if dtype == torch.bfloat16 else 2e-3)

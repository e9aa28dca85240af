"""Fused projections: the logits of the plain model, with and without adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_cases import queue_of
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.config import LoraConfig
from gspo.model.adapter import adapters_disabled, attach, layers
from gspo.rollout.local import decoder, paged
from gspo.rollout.local.prefixes import PrefixStore
from gspo.rollout.local.projections import DOWN, GATE_UP, OUTPUT, QKV, Projections, bytes_of_copies
from gspo.rollout.local.sampling import PrefixReuse

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
MODELS = {
    "qwen3": {**SIZES, "head_dim": 16},
    "qwen2": SIZES,
    "qwen3_moe": {
        **SIZES,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
}
SEQUENCES = [tuple((7 * i + 3 * j + 1) % 48 for j in range(n + 3)) for i, n in enumerate((9, 7, 4, 2))]


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]), dtype=dtype).eval()
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(bias)
    return model.to(DEVICE)


def adapt(model: Any, rank: int = 3, targets: tuple[str, ...] = (), seed: int = 1) -> Any:
    """Attach adapters that are not 0."""
    attach(model, LoraConfig(rank=rank, targets=targets), base="base", seed=seed)
    change(model, seed)
    return model


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for layer in layers(model).values():
        for b in layer.lora_B.values():
            b.weight.copy_(0.2 * torch.randn(b.weight.shape))


@torch.no_grad()
def decoded(model: Any) -> Tensor:
    step = decoder._open_trial(model, [ids[:-3] for ids in SEQUENCES], 3)
    out = []
    for i in range(3):
        position = [len(ids) - 3 + i for ids in SEQUENCES]
        token_R = torch.tensor([ids[p] for ids, p in zip(SEQUENCES, position, strict=True)], device=DEVICE)
        out.append(step(token_R, torch.tensor(position, device=DEVICE)))
    return torch.stack(out, 1)


@torch.no_grad()
def plain(model: Any) -> Tensor:
    return torch.stack([model(torch.tensor([ids], device=DEVICE)).logits[0, -3:].float() for ids in SEQUENCES])


def assert_same_logits(model: Any, tolerance: float = 1e-5) -> None:
    expected = plain(model)
    torch.testing.assert_close(decoded(model), expected, atol=tolerance * float(expected.std()), rtol=0)


def held(model: Any) -> set[tuple[str, ...]]:
    """The groups of layers that are fused somewhere in the model."""
    return {names for _, names in Projections(model, decoder.linear_groups(model), 4)._held}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_the_plain_model(kind: str) -> None:
    model = model_of(kind)
    assert held(model) == {QKV, GATE_UP}
    assert_same_logits(model)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize(
    "targets", [(), ("q_proj",), ("k_proj", "v_proj"), ("o_proj", "up_proj"), ("gate_proj", "down_proj")], ids=str
)
def test_adapters_of_some_layers(kind: str, targets: tuple[str, ...]) -> None:
    model = model_of(kind)
    base = plain(model)
    adapt(model, targets=targets)
    assert (plain(model) - base).abs().max() > 0.1 * base.std()
    assert_same_logits(model)
    single = {names for names in (OUTPUT, DOWN) if not targets or names[0] in targets}
    assert held(model) == {QKV, GATE_UP, *single}


def test_adapters_of_the_attention_of_an_moe_model() -> None:
    model = adapt(model_of("qwen3_moe"), targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    assert held(model) == {QKV, OUTPUT, GATE_UP}
    assert_same_logits(model)


def test_sums_and_the_norms_after_them_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3")
    kernels = decoder.kernels_for(DEVICE)
    calls: list[str] = []
    for name in ("rms_norm", "add_rms_norm"):
        whole = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _n=name, _w=whole, **k: (calls.append(_n), _w(*a, **k))[1])
    decoded(model)
    # In each of the three steps: the first norm alone, then two per layer.
    assert calls.count("add_rms_norm") == 3 * 2 * 2


def test_several_ranks_and_scales() -> None:
    model = model_of("qwen2")
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model

    ranks = {"q_proj": 1, "v_proj": 20, "up_proj": 5, "down_proj": 17}
    settings = Settings(
        r=4,
        lora_alpha=3,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        rank_pattern=ranks,
        alpha_pattern={"q_proj": 7, "down_proj": 5},
        use_rslora=True,
    )
    inject_adapter_in_model(settings, model, "default")
    change(model.to(DEVICE).eval(), 3)
    assert held(model) == {QKV, OUTPUT, GATE_UP, DOWN}
    assert_same_logits(model)


def test_copies_are_never_older_than_the_adapter() -> None:
    model = adapt(model_of("qwen3"))
    before = decoded(model)
    change(model, 5)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.base_layer.weight.mul_(1.5)
    assert (decoded(model) - before).abs().max() > 0.1
    assert_same_logits(model)


def test_disabled_adapters_do_not_act() -> None:
    model = model_of("qwen3")
    base = plain(model)
    adapt(model)
    with adapters_disabled(model):
        assert held(model) == {QKV, GATE_UP}
        torch.testing.assert_close(decoded(model), base, atol=1e-5, rtol=1e-5)
    assert_same_logits(model)


def _dora(model: Any) -> None:
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model

    inject_adapter_in_model(Settings(r=3, target_modules=["k_proj", "down_proj"], use_dora=True), model, "default")
    change(model.to(DEVICE).eval(), 3)


def _hooked(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda module, given, output: 1.5 * output)
        layer.mlp.down_proj.register_forward_hook(lambda module, given, output: 1.5 * output)


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _replaced(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = _Doubled


@pytest.mark.parametrize("special", [_dora, _hooked, _replaced])
def test_other_layers_run_as_their_own_modules(special: Callable[[Any], None]) -> None:
    model = model_of("qwen3")
    special(model)
    assert held(model) == {GATE_UP}
    assert_same_logits(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factors_of_an_adapter_are_not_rounded(dtype: torch.dtype) -> None:
    """Merging would round its update to the precision of the weight."""
    model = adapt(model_of("qwen3", dtype))
    layer = model.model.layers[1].self_attn.o_proj
    made = Projections(model, decoder.linear_groups(model), 4).get(model.model.layers[1].self_attn, OUTPUT)
    assert made is not None
    assert made.narrow is not None
    size = layer.in_features
    assert torch.equal(made.weight_NK[:, :size], layer.weight)
    assert layer.scaling["default"] == 2, "a power of two: the product with it is exact"
    assert torch.equal(made.weight_NK[:, size : size + 3], 2 * layer.lora_B["default"].weight)
    assert torch.equal(made.narrow[:3], layer.lora_A["default"].weight)
    assert made.weight_NK.shape[1] % 16 == 0
    assert not made.weight_NK[:, size + 3 :].any()
    x = torch.randn(4, size, device=DEVICE).to(dtype)
    with torch.no_grad():
        error = (made(x) - layer(x)).float().norm() / layer(x).float().norm()
    assert float(error) < (1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_copies_is_counted(dtype: torch.dtype) -> None:
    model = adapt(model_of("qwen3", dtype))
    groups = decoder.linear_groups(model)
    made = Projections(model, groups, 4)
    assert bytes_of_copies(groups) == sum(p.weight_NK.nbytes for p in made._held.values())
    assert all(p.weight_NK.dtype == dtype for p in made._held.values())


def test_without_copies_every_layer_runs_as_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapt(model_of("qwen3"))
    monkeypatch.setattr(decoder, "_room_for_copies", lambda model: False)
    made: list[Any] = []
    init = decoder.Decoder.__init__
    monkeypatch.setattr(decoder.Decoder, "__init__", lambda self, *a, **k: (made.append(self), init(self, *a, **k))[1])
    assert_same_logits(model)
    assert not made[0].projections._held


@pytest.mark.parametrize(("free", "parts", "copies"), [(1.0, 16, True), (0.5, 16, False), (0.1, 8, False)])
def test_copies_are_left_out_when_memory_is_short(
    free: float, parts: int, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks for all sequences come first."""
    model = model_of("qwen3")
    batch = paged.PagedBatch.__new__(paged.PagedBatch)
    batch.width, batch.prefill_tokens = 2, 64
    batch.reuse = PrefixReuse(queue_of([3], 1), PrefixStore(limit=1000))
    batch.sampling = paged_sampling()
    wanted = 2 + 8 * 2 + 2 * (1 + 2)
    needed = decoder.bytes_per_block(model) * wanted
    all_copies = bytes_of_copies(decoder.linear_groups(model))
    room = {1.0: needed + all_copies, 0.5: needed + all_copies - 10, 0.1: needed / 2}[free]
    logits = 8 * 48 * 8
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(room / paged.MEMORY_SHARE + logits) + 2, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name in ("bytes_per_block", "linear_groups"):
        found = getattr(decoder, name)(model)
        monkeypatch.setattr(paged, name, lambda _, found=found: found)

    class OnDevice:
        """The model, as if it were on a GPU."""

        device = torch.device("cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    count, fused = batch._block_budget(OnDevice(), 8)
    assert (count, fused) == (max(2 + 2 * 2, wanted * parts // 16), copies)
    # What is kept of conversations comes last: it gets what is left.
    assert batch.reuse.store is not None
    batch.reuse.store.put("a", {0: (torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))})
    assert len(batch.reuse.store) == (free == 0.5)


def paged_sampling() -> Any:
    from gspo.types import Sampling

    return Sampling(max_tokens=8)

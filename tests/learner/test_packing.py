"""Sequence packing: values and gradients equal those of separate sequences, for every micro-batch split and for MoE."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from families import FAMILIES, SMOKE
from packing_cases import CPU, DOUBLE, GROUPS, ROUND, ROWS, build_model, forward_backward, plan_of
from patched_forward import patch_forward
from torch import Tensor

import gspo.model.kernels
from gspo.config import Config
from gspo.errors import KernelWarning
from gspo.learner.forward import completion_logprobs, plan_logprobs
from gspo.learner.plan import Plan, Positions, make_plan
from gspo.learner.routing_replay import RecordedRouting
from gspo.model.kernels import packed_attention as attention
from gspo.model.micro_batch import TokenSequence
from gspo.model.packed_forward import obstacle_to_packing, supports_packing
from gspo.model.routing import find_routers
from gspo.trainer import train

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: build_model("qwen3", head_dim=8),
    "llama, tied": lambda: build_model("llama", tie_word_embeddings=True),
    "granite, scaled logits": lambda: build_model("granite", logits_scaling=4.0),
    "qwen3-moe": lambda: FAMILIES["qwen3-moe"].model(DOUBLE),
    "deepseek-v3": lambda: FAMILIES["deepseek-v3"].model(DOUBLE),
    "olmoe": lambda: FAMILIES["olmoe"].model(DOUBLE),
}


@pytest.mark.filterwarnings("ignore:log-probs are computed from all logits")
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_equal_those_of_separate_sequences(name: str) -> None:
    model = MODELS[name]()
    separate = forward_backward(model, plan_of(False, budget=1))
    assert supports_packing(model)
    assert len(separate[2]) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for plan in (plan_of(True), plan_of(True, budget=30), plan_of(True, budget=1)):
        for found, expected in zip(forward_backward(model, plan), separate, strict=True):
            torch.testing.assert_close(found, expected, **ROUND)


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    model = build_model("qwen3", head_dim=8)
    supports_packing(model)
    expected = forward_backward(model, plan_of(True))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for found, plain in zip(forward_backward(model, plan_of(True)), expected, strict=True):
        torch.testing.assert_close(found, plain, **ROUND)


@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (4, 4)])
def test_decoding_without_repeated_keys_gives_the_same_result(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns, size = 5, 9, 8
    query = torch.randn(rows, heads[0], 1, size, generator=generator)
    key, value = torch.randn(2, rows, heads[1], columns + 3, size, generator=generator)[:, :, :, :columns]
    seen = torch.arange(columns) <= torch.tensor([[8], [3], [0], [5], [7]])
    mask = torch.zeros(rows, columns).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    expected, _ = attention.sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **_: (None, None))
    found, _ = attention.attention(module, query, key, value, mask, scaling=0.3)
    assert (found is None) == (heads == (4, 4)), "only with grouped-query attention"
    if found is not None:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert attention.attention(module, query, key, value, mask, scaling=0.3, dropout=0.1)[0] is None


def test_an_unpacked_forward_is_unchanged() -> None:
    model = build_model("qwen3", torch.float32, head_dim=8)
    ids = torch.arange(2, 22).view(2, 10)
    before = model(input_ids=ids).logits
    assert supports_packing(model)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: SMOKE["qwen3-next"].model(), "layers other than full and sliding-window attention"),
        (lambda: build_model("bloom", hidden_size=32, n_layer=2, n_head=4), "cannot be replaced"),
        # Mixing its states across sequences moves logits by 0.09 of their spread, which 16 bits cannot tell apart.
        (
            lambda: build_model(
                "recurrent_gemma", torch.bfloat16, num_hidden_layers=3, lru_width=32, attention_window_size=8
            ),
            "recurrent layers, whose states",
        ),
    ],
    ids=["qwen3-next", "bloom", "recurrent-gemma"],
)
def test_models_that_cannot_read_packed_sequences_warn_once(build: Callable[[], Any], why: str) -> None:
    model = build()
    implementation = model.config._attn_implementation
    with pytest.warns(RuntimeWarning, match=why):
        assert not supports_packing(model)
    assert model.config._attn_implementation == implementation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not supports_packing(model)  # no second warning


def test_a_model_whose_eager_attention_overflows_is_packed() -> None:
    model = build_model("qwen2", torch.float16)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.constant_(projection.bias, 100.0)
    model.set_attn_implementation("eager")
    assert model(input_ids=torch.tensor([[2, 3, 4]])).logits.isnan().any()
    model.set_attn_implementation("sdpa")
    assert supports_packing(model)


def test_the_trial_finds_a_model_that_ignores_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("qwen3", head_dim=8)
    forward = type(model.model).forward

    def without_positions(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", without_positions)
    assert "gives other logits for packed sequences" in str(obstacle_to_packing(model))
    assert model.config._attn_implementation == "sdpa"


def test_a_failing_attention_kernel_is_reported_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback to padded sequences would hide it."""

    def broken(*args: Any) -> Any:
        raise ValueError("num_warps must be a power of 2")

    name = "gspo.model.kernels.packed_attention_triton"
    kernels = ModuleType(name)
    kernels.__dict__["forward"] = FunctionType(broken.__code__, {"__name__": name, "ValueError": ValueError})
    monkeypatch.setitem(sys.modules, name, kernels)
    monkeypatch.setattr(gspo.model.kernels, "packed_attention_triton", kernels, raising=False)
    monkeypatch.setattr(attention, "_kernels_support", lambda *args: True)
    model = build_model("qwen3", head_dim=8)
    with pytest.warns(KernelWarning, match="packed sequences fails for Qwen3ForCausalLM; please report"):
        assert "num_warps" in str(obstacle_to_packing(model))
    assert model.config._attn_implementation == "sdpa"


# --- the plan ---


def test_every_sequence_is_where_the_plan_says() -> None:
    for budget in (40, 10**6):
        for micro in plan_of(True, budget=budget, steps=2).updates[0]:
            assert micro.packing is not None
            assert micro.position_ids is not None
            ids, positions, at = micro.input_ids[0], micro.position_ids[0], micro.input_at[0]
            starts = plan_of(True).input_starts
            for i, (row, owner) in enumerate(zip(micro.sequence_ids, micro.owners, strict=True)):
                whole = ROWS[row].prompt_ids + ROWS[row].completion_ids
                where = micro.packing.rows_RT[i, : len(whole)]
                p = len(ROWS[row].prompt_ids)
                assert tuple(ids[where].tolist()) == whole
                assert positions[where].tolist() == list(range(len(whole)))
                assert at[where[p:]].tolist() == list(range(starts[row] + p, starts[row] + len(whole)))
                assert at[where[:p]].tolist() == list(range(starts[owner], starts[owner] + p))
                outputs = micro.output_N[micro.sequence_N == i]
                assert outputs.tolist() == where[p - 1 : -1].tolist()
                assert tuple(micro.target_N[micro.sequence_N == i].tolist()) == ROWS[row].completion_ids
            assert int(micro.times.sum()) == sum(ROWS[r].length for r in micro.sequence_ids)
            assert (micro.times > 0).all()
            back = micro.packing.rows_RT.flatten()[micro.packing.place_I]
            assert torch.equal(back, torch.arange(len(ids)))


def test_a_prompt_is_computed_once_within_the_token_budget() -> None:
    whole = plan_of(True).updates[0]
    assert len(whole) == 1
    assert whole[0].input_ids.numel() == sum(p + sum(completions) for p, completions in GROUPS)
    for budget in (1, 15, 25, 40):
        micro_batches = plan_of(True, budget=budget).updates[0]
        assert all(m.input_ids.numel() <= budget or len(m.sequence_ids) == 1 for m in micro_batches)
        assert sorted(r for m in micro_batches for r in m.sequence_ids) == list(range(len(ROWS)))


def test_positions_count_padding_and_the_savings_of_packing() -> None:
    rows = [TokenSequence(prompt_ids=(1, 2, 3), completion_ids=(4,) * n) for n in (1, 5)] + [
        TokenSequence(prompt_ids=(5,), completion_ids=(6, 7))
    ]
    for packed, computed, empty in ((True, 3 + 6 + 3, 0), (False, 2 * 4 + 8, 1)):
        plan = make_plan(rows, [0, 0, 1], mini_batches=1, token_budget=16, pad_id=0, seed="s", packed=packed)
        assert plan.positions == Positions(computed=computed, empty=empty, padded=3 * 8), packed
    alone = make_plan(rows, [0, 0, 1], mini_batches=3, token_budget=1, pad_id=0, seed="s")
    assert alone.positions == Positions(computed=4 + 8 + 3, empty=0, padded=4 + 8 + 3)


def test_halving_keeps_the_gradient_and_the_owners_of_prompts() -> None:
    model = build_model("qwen3", head_dim=8)
    supports_packing(model)
    plan = plan_of(True)
    expected = forward_backward(model, plan)
    owner = dict(zip(plan.updates[0][0].sequence_ids, plan.updates[0][0].owners, strict=True))
    halvings = 0
    while (smaller := plan.halved(0)) is not None:
        plan = smaller
        halvings += 1
        for micro in plan.updates[0]:
            assert [owner[r] for r in micro.sequence_ids] == list(micro.owners)
        for found, whole in zip(forward_backward(model, plan), expected, strict=True):
            torch.testing.assert_close(found, whole, **ROUND)
    assert halvings > 2
    assert all(len(m.sequence_ids) == 1 for m in plan.updates[0])


# --- experts ---


def routing_of(model: Any, plan: Plan, *, replay: str = "off", balance: float = 0.0) -> RecordedRouting:
    routers = find_routers(model)
    assert routers is not None
    unknown = [None] * len(plan.sequences)
    return RecordedRouting(routers, plan, unknown, replay=replay, balance=balance, device=CPU)


def perturb_routers(model: Any) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in other.named_parameters():
            if name.endswith("gate.weight"):
                p += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    supports_packing(other)
    return other


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_routing_metrics_equal_those_of_separate_sequences(name: str) -> None:
    model = FAMILIES[name].model(DOUBLE)
    supports_packing(model)
    outcomes = []
    for packed in (False, True):
        routing = routing_of(model, plan_of(packed, budget=40))
        plan_logprobs(model, routing.plan, 1.0, CPU, routed=routing.old)
        other = perturb_routers(model)
        routing.routers = find_routers(other)
        plan_logprobs(other, routing.plan, 1.0, CPU, routed=routing.learning)
        outcomes.append(routing.outcome(other))
    assert outcomes[0].native_N.sum() > 5
    for outcome in outcomes[1:]:
        assert torch.equal(outcome.load_LE, outcomes[0].load_LE)
        assert torch.equal(outcome.native_N, outcomes[0].native_N)


def test_replay_follows_a_shared_prompt_into_smaller_micro_batches() -> None:
    model = FAMILIES["qwen3-moe"].model(DOUBLE)
    supports_packing(model)
    results = []
    for packed in (False, True):
        plan = plan_of(packed)
        routing = routing_of(model, plan, replay="old")
        plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
        other = perturb_routers(model)
        routing.routers = find_routers(other)
        for _ in range(3):
            results.append(plan_logprobs(other, plan, 1.0, CPU, routed=routing.learning)[0])
            assert int(routing.flipped_N.sum()) == 0
            smaller = plan.halved(0)
            assert smaller is not None
            plan = smaller
    native = plan_logprobs(other, plan_of(False), 1.0, CPU)[0]
    assert (results[0] - native).abs().max() > 1e-2, "without an effect of replay the test shows nothing"
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], **ROUND)


def test_the_balance_loss_does_not_depend_on_packing_or_micro_batches() -> None:
    model = FAMILIES["qwen3-moe"].model(DOUBLE)
    supports_packing(model)
    losses = []
    gradients = []
    for packed, budget in ((False, 10**6), (False, 1), (True, 10**6), (True, 25), (True, 1)):
        plan = plan_of(packed, budget=budget)
        routing = routing_of(model, plan, balance=0.1)
        plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
        for micro in plan.updates[0]:
            with routing.learning(micro) as seen:
                completion_logprobs(model, micro, 1.0)
                loss = routing.balance_loss(micro, seen, 0)
            assert isinstance(loss, Tensor)
            loss.backward()
        losses.append(routing.outcome(model).balance_losses[0])
        gradients.append(
            torch.cat([p.grad.flatten() for n, p in model.named_parameters() if n.endswith("gate.weight")])
        )
        model.zero_grad()
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert gradients[0].abs().max() > 1e-4
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-7)


# --- in a run ---


@pytest.mark.parametrize("build", ["tiny_dense", "tiny_moe"])
def test_a_run_packs_and_its_checkpoint_has_the_original_attention(
    build: str, tiny: Callable[..., Config], display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    original = make_plan
    monkeypatch.setattr("gspo.learner.batch.make_plan", lambda *a, **k: plans.append(original(*a, **k)) or plans[-1])
    done = train(tiny(f"model.build={build}", "steps=1", "objective.name=grpo", "objective.kl=0.1"), display)
    assert [plan.packed for plan in plans] == [True]
    saved = Path(done.run) / "checkpoints" / "000001" / "config.json"
    assert attention.NAME not in saved.read_text()
    assert any(
        owner != row
        for micro in plans[0].updates[0]
        for row, owner in zip(micro.sequence_ids, micro.owners, strict=True)
    )


def test_out_of_memory_halves_packed_micro_batches(
    tiny: Callable[..., Config], parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gspo.clock import Clock
    from gspo.rollout.gather import RolloutState
    from gspo.step import collect, learn

    results = []
    for most in (10**9, 60):
        parts = parts_of(tiny("model.build=tiny_moe", "routing.replay=old", run_dir=f"run{most}"))
        parts.policy.model.double().set_experts_implementation("eager")

        def limited(plain: Any, most: int = most) -> Any:
            def instead(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
                if batch.input_ids.numel() > most and len(batch.sequence_ids) > 1:
                    raise torch.OutOfMemoryError("too many tokens")
                return plain(model, batch, *args, **kwargs)

            return instead

        groups = collect(parts, RolloutState(), clock=Clock()).rollouts.groups
        with monkeypatch.context() as patch:
            patch_forward(patch, limited, training=True)
            result = learn(parts, groups, step=1)
        assert result is not None
        results.append(result)
    assert results[0].halvings == 0
    assert results[1].halvings > 0
    torch.testing.assert_close(results[1].tokens.logp_N, results[0].tokens.logp_N, rtol=1e-4, atol=1e-4)
    assert replace(results[1].updates[0]).grad_norm == pytest.approx(results[0].updates[0].grad_norm, rel=1e-3)

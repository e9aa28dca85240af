"""Routers of unmodified Hugging Face models: they are found, recorded, and can be forced."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BASE, FAMILIES, SMOKE, Family, Spy, blocks_of, in_order, layer_output, router_of, some_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo.config import ModelConfig, RoutingConfig
from gspo.errors import ConfigError
from gspo.model.load import _routers, load_policy, load_tokenizer
from gspo.model.memory_alignment import align
from gspo.model.routing import ForcedExperts, Routers, check_replay, count_expert_changes, find_routers, says_it_routes
from gspo.types import Routes

ALL = {**FAMILIES, **SMOKE}


@pytest.fixture(scope="module")
def built() -> dict[str, tuple[Any, Routers]]:
    """Each family's model in float32, built once; tests must not change it."""
    models = {name: family.model() for name, family in ALL.items()}
    return {name: (model, routers_of(model)) for name, model in models.items()}


def routers_of(model: Any) -> Routers:
    routers = find_routers(model)
    assert routers is not None
    return routers


@torch.no_grad()
def logits_of(model: Any, ids: Tensor | None = None) -> Tensor:
    return model(input_ids=some_ids() if ids is None else ids, use_cache=False).logits


def all_of(chosen_ILK: Tensor) -> ForcedExperts:
    return ForcedExperts(chosen_ILK=chosen_ILK, known_I=torch.ones(len(chosen_ILK), dtype=torch.bool))


def other_than(chosen_ILK: Tensor, experts: int, shift: int = 1) -> Tensor:
    return ((chosen_ILK.long() + shift) % experts).to(chosen_ILK.dtype)


# --- Finding and recording ---


@pytest.mark.parametrize("name", ALL)
def test_routers_are_found(name: str, built: Any) -> None:
    model, routers = built[name]
    family = ALL[name]
    assert (routers.layers, routers.experts, routers.top_k) == (family.layers, family.experts, family.top_k)
    assert says_it_routes(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_experts_match_the_familys_formula(name: str, built: Any) -> None:
    model, routers = built[name]
    ids = some_ids(3, 11)
    with Spy(model) as spy, routers.watch() as trace:
        logits_of(model, ids)
    assert trace.used_ILK.shape == (33, routers.layers, routers.top_k)
    assert torch.equal(in_order(trace.used_ILK), in_order(spy.chosen_ILK(FAMILIES[name])))
    assert torch.equal(trace.used_ILK, trace.native_ILK)


@pytest.mark.parametrize("name", ALL)
def test_recording_and_replaying_the_own_choice_are_bitwise_identical(name: str, built: Any) -> None:
    model, routers = built[name]
    plain = logits_of(model)
    with routers.watch() as trace:
        recorded = logits_of(model)
    with routers.watch(all_of(trace.used_ILK)) as again:
        replayed = logits_of(model)
    assert torch.equal(recorded, plain)
    assert torch.equal(replayed, plain)
    assert torch.equal(again.used_ILK, trace.used_ILK)
    assert torch.equal(logits_of(model), plain)


@pytest.mark.parametrize("name", ALL)
def test_forced_experts_are_used_exactly(name: str, built: Any) -> None:
    model, routers = built[name]
    plain = logits_of(model)
    with routers.watch() as own:
        logits_of(model)
    wanted = other_than(own.used_ILK, routers.experts)
    given_to_experts: list[Tensor] = []

    def record(module: Any, args: Any) -> None:
        given_to_experts.extend(a for a in args[1:2] if isinstance(a, Tensor) and not a.is_floating_point())

    handles = [b.experts.register_forward_pre_hook(record) for b in blocks_of(model)]
    with routers.watch(all_of(wanted)) as trace:
        forced = logits_of(model)
    for handle in handles:
        handle.remove()
    assert torch.equal(trace.used_ILK, wanted)
    assert (forced - plain).abs().max() > 1e-3 * plain.std()
    if given_to_experts:  # some families pass one score per expert instead
        used = torch.stack([g.view(-1, routers.top_k) for g in given_to_experts], dim=1)
        assert torch.equal(used, wanted.long())
    # The first layer has the same input, hence the same own choice; later layers depend on the forced experts.
    assert torch.equal(trace.native_ILK[:, 0], own.used_ILK[:, 0])


@pytest.mark.parametrize("name", ALL)
def test_every_replayed_expert_has_a_nonzero_weight_or_replay_is_refused(name: str, built: Any) -> None:
    # deepseek-v2, grouped: DeepseekV2TopkRouter takes topk(scores.masked_fill(~group, 0)) and uses its *values*.
    # Replay gathers from the masked scores, so an expert outside the groups that the current router prefers would get
    # weight 0 and no gradient, although it is reported as used.
    model, routers = built[name]
    try:
        check_replay(model, routers)
    except ConfigError:
        assert name not in FAMILIES
        return
    with routers.watch() as own:
        logits_of(model)
    weights: list[Tensor] = []

    def record(module: Any, args: Any) -> None:
        weights.extend(a for a in args[1:] if isinstance(a, Tensor) and a.is_floating_point())

    handles = [b.experts.register_forward_pre_hook(record) for b in blocks_of(model)]
    for shift in range(1, routers.experts):
        with routers.watch(all_of(other_than(own.used_ILK, routers.experts, shift))):
            logits_of(model)
    for handle in handles:
        handle.remove()
    assert weights or name == "llama4"  # it scales the input of its experts instead
    assert all((w > 0).all() for w in weights)


def test_ranks_are_not_mistaken_for_experts() -> None:
    # Doge's product-key router sorts the experts of a token first and then takes a top-k over the sorted list, so
    # its last top-k returns ranks in a list that changes with the router. If they were mistaken for experts, changed
    # experts would be missed, and replay would use other experts than the old policy did.
    model = Family(kind="doge", fields={"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}).model()
    routers = find_routers(model)
    if routers is None:
        with pytest.raises(ConfigError):
            _routers(model, RoutingConfig(replay="old"))
        return
    real: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.up_embed.register_forward_pre_hook(lambda m, args: real.append(args[0]))
    with routers.watch() as trace:
        logits_of(model)
    assert torch.equal(in_order(trace.used_ILK), in_order(torch.stack([r.view(-1, 2) for r in real], dim=1)))


def test_only_known_tokens_are_forced(built: Any) -> None:
    model, routers = built["qwen3-moe"]
    with routers.watch() as own:
        logits_of(model)
    known = torch.arange(len(own.used_ILK)) % 3 == 0
    wanted = other_than(own.used_ILK, routers.experts, shift=3)
    with routers.watch(ForcedExperts(chosen_ILK=wanted, known_I=known)) as trace:
        logits_of(model)
    assert torch.equal(trace.used_ILK[known], wanted[known])
    assert torch.equal(trace.used_ILK[~known], trace.native_ILK[~known])
    assert (in_order(trace.used_ILK[known]) != in_order(trace.native_ILK[known])).any()


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_bfloat16_weights(name: str) -> None:
    model, reported = FAMILIES[name].model(torch.bfloat16), []
    routers = routers_of(model)
    for block in blocks_of(model):
        router_of(block).register_forward_hook(lambda m, i, output: reported.append(output[2]))
    plain = logits_of(model)
    with routers.watch() as trace:
        assert torch.equal(logits_of(model), plain)
    with routers.watch(all_of(trace.used_ILK)):
        assert torch.equal(logits_of(model), plain)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(trace.used_ILK.long(), torch.stack(reported[: routers.layers], dim=1))


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_autocast(name: str, built: Any) -> None:
    model, routers = built[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = logits_of(model)
        with routers.watch() as trace:
            assert torch.equal(logits_of(model), plain)
        with routers.watch(all_of(trace.used_ILK)):
            assert torch.equal(logits_of(model), plain)
        wanted = other_than(trace.used_ILK, routers.experts)
        with routers.watch(all_of(wanted)) as forced:
            assert not torch.equal(logits_of(model), plain)
    assert torch.equal(forced.used_ILK, wanted)


# --- Gate weights and gradient under replay ---


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("whose", ["own", "another's"])
def test_gate_and_gradient_under_replay_follow_the_formula_on_current_logits(name: str, whose: str) -> None:
    """Each MoE layer against an independent `y = sum_i g_i E_i(x)`: the value, and the gradient of the router."""
    family = FAMILIES[name]
    model = family.model(torch.float64)
    routers, ids = routers_of(model), some_ids(2, 4)
    with routers.watch() as own:
        logits_of(model, ids)
    chosen = own.used_ILK if whose == "own" else other_than(own.used_ILK, routers.experts)
    direction = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with Spy(model) as spy, routers.watch(all_of(chosen)):
        (model(input_ids=ids, use_cache=False).logits @ direction).sum().backward()
    for layer, block in enumerate(spy.blocks):
        router = router_of(block)
        weight = router.weight.detach().clone().requires_grad_()
        y = layer_output(family, block, spy.inputs[layer], chosen[:, layer].long(), weight)
        torch.testing.assert_close(y, spy.outputs[layer], rtol=1e-5, atol=1e-6)
        (expected,) = torch.autograd.grad(y, weight, spy.gradients[layer])
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(router.weight.grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_router_gradient_matches_finite_differences_under_replay() -> None:
    """Without autograd on either side: the experts are fixed, the gate weights change."""
    model, step = FAMILIES["gpt-oss"].model(torch.float64), 3e-3  # its norms round to float32, so no smaller step works
    routers, ids = routers_of(model), some_ids(2, 4)
    with routers.watch() as own:
        logits_of(model, ids)
    forced = all_of(other_than(own.used_ILK, routers.experts, shift=2))
    direction = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with routers.watch(forced):
        (model(input_ids=ids, use_cache=False).logits @ direction).sum().backward()

    def value() -> float:
        with routers.watch(forced):
            return float((logits_of(model, ids) @ direction).sum())

    for block in blocks_of(model):
        weight = router_of(block).weight
        at = int(weight.grad.abs().argmax())
        flat = weight.data.view(-1)
        flat[at] += step
        up = value()
        flat[at] -= 2 * step
        down = value()
        flat[at] += step
        assert float(weight.grad.view(-1)[at]) == pytest.approx((up - down) / (2 * step), rel=3e-3)


# --- Gradient checkpointing ---


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("replay", [False, True], ids=["recorded", "replayed"])
def test_gradient_checkpointing_does_not_change_results(name: str, replay: bool) -> None:
    family = FAMILIES[name]
    ids = some_ids(2, 4)
    direction = torch.randn(50, generator=torch.Generator().manual_seed(1))
    outcomes, calls = [], []
    for recompute in (False, True):
        model = family.model()
        routers = routers_of(model)
        with routers.watch() as own:
            logits_of(model, ids)
        forced = all_of(other_than(own.used_ILK, routers.experts)) if replay else None
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        with Spy(model) as spy, routers.watch(forced) as trace:
            logits = model(input_ids=ids, use_cache=False).logits
            (logits @ direction).sum().backward()
        calls.append(spy.calls)
        gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        assert all(router_of(b).weight.grad.abs().max() > 0 for b in blocks_of(model))
        outcomes.append((trace.used_ILK, trace.native_ILK, logits.detach(), gradients))
    assert calls == [family.layers, 2 * family.layers], "the routers did not run again in the backward pass"
    (used, native, logits, gradients), (used2, native2, logits2, gradients2) = outcomes
    assert torch.equal(used, used2)
    assert torch.equal(native, native2)
    assert torch.equal(logits, logits2)
    assert gradients.keys() == gradients2.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradients2[key], gradient, rtol=0, atol=0, msg=key)


def test_router_logits_keep_their_graph_when_activations_are_recomputed() -> None:
    gradients = []
    for recompute in (False, True):
        model = FAMILIES["qwen3-moe"].model()
        routers = routers_of(model)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        with routers.watch(logits=True) as trace:
            logits = model(input_ids=some_ids(), use_cache=False).logits
            own = sum(x.softmax(-1)[:, 0].sum() for x in trace.logits.values())
            (logits.mean() + own).backward()
        gradients.append([router_of(b).weight.grad for b in blocks_of(model)])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# --- Router logits for the balance loss ---


@pytest.mark.parametrize("name", ALL)
def test_router_logits_are_the_logits_or_refused(name: str, built: Any) -> None:
    """x W^T + b of each layer; an error if a router does not return them, never something else."""
    # llama4: Llama4Router returns (scores, logits), and the scores are 0 for every unselected expert: not logits.
    model, routers = built[name]
    try:
        with Spy(model) as spy, routers.watch(logits=True) as trace:
            logits_of(model)
    except ConfigError as error:
        assert "balance_loss" in str(error)  # noqa: PT017
        assert name not in FAMILIES
        return
    assert sorted(trace.logits) == list(range(routers.layers))
    for layer, (block, x) in enumerate(zip(spy.blocks, spy.inputs, strict=True)):
        router = router_of(block)
        projection = next((m for m in router.modules() if getattr(m, "weight", None) is not None), router)
        bias = getattr(projection, "bias", None)
        expected = x @ projection.weight.T.to(x.dtype) + (0 if bias is None else bias)
        torch.testing.assert_close(trace.logits[layer], expected, rtol=1e-4, atol=1e-4)


# --- Models without routers ---


def test_replay_of_a_dense_model_is_an_error() -> None:
    config = ModelConfig(build="tiny_dense", device="cpu")
    tokenizer = load_tokenizer(config)
    for asked in (RoutingConfig(replay="old"), RoutingConfig(replay="sampler"), RoutingConfig(balance_loss=0.1)):
        key = "balance_loss" if asked.balance_loss else "replay"
        with pytest.raises(ConfigError, match=rf"routing\.{key}: .* is a dense model"):
            load_policy(config, tokenizer, seed=0, routing=asked)
    assert load_policy(config, tokenizer, seed=0, routing=RoutingConfig()).routers is None


def test_experts_without_a_top_k_router_are_an_error() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **fields)).eval()
    assert _routers(model, RoutingConfig()) is None
    for asked in (RoutingConfig(replay="old"), RoutingConfig(replay="sampler"), RoutingConfig(balance_loss=0.1)):
        with pytest.raises(ConfigError, match=r"routing\.\w+: Phimoe\w* is a mixture of experts, but no router"):
            _routers(model, asked)


def test_a_built_moe_model_supports_replay() -> None:
    config = ModelConfig(build="tiny_moe", device="cpu")
    policy = load_policy(config, load_tokenizer(config), seed=0, routing=RoutingConfig(replay="sampler"))
    assert policy.routers is not None
    assert (policy.routers.layers, policy.routers.experts, policy.routers.top_k) == (2, 8, 2)
    unrecorded = load_policy(config, load_tokenizer(config), seed=0, routing=RoutingConfig(record=False))
    assert unrecorded.routers is None
    assert load_policy(config, load_tokenizer(config), seed=0).routers is None


def test_layers_with_different_routers_are_not_recorded() -> None:
    model = FAMILIES["qwen3-moe"].model()
    router_of(blocks_of(model)[1]).top_k = 3
    with pytest.warns(RuntimeWarning, match="differ in how many experts"):
        assert find_routers(model) is None


def test_finding_routers_changes_neither_model_nor_random_state() -> None:
    model = FAMILIES["mixtral"].model()
    before, plain = torch.get_rng_state(), logits_of(model)
    _routers(model, RoutingConfig(replay="old"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits_of(model), plain)
    assert_untouched(model)


def test_replay_that_has_no_effect_is_refused() -> None:
    """A router whose experts come from another computation: it can be recorded, but replay has no effect."""
    model = FAMILIES["qwen3-moe"].model()
    routers = routers_of(model)
    check_replay(model, routers)
    for block in blocks_of(model):
        gate = block.gate
        inner = type(gate).forward

        def stubborn(self: Any, x: Tensor, inner: Any = inner) -> Any:
            logits, weights, _ = inner(self, x)
            order = torch.softmax(logits, -1).argsort(-1, descending=True)[:, : self.top_k]
            return logits, weights * 0 + 0.5, order

        gate.__class__ = type("StubbornRouter", (type(gate),), {"forward": stubborn})
    with pytest.raises(ConfigError, match="no exact effect"):
        check_replay(model, routers)
    for replay in ("old", "sampler"):
        with pytest.raises(ConfigError, match="no exact effect"):
            _routers(model, RoutingConfig(replay=replay))  # type: ignore[arg-type]
    assert _routers(model, RoutingConfig()) is not None


# --- Faults ---


def assert_untouched(model: Any) -> None:
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert module.forward.__func__ is type(module).forward


class Boom(Exception):
    pass


@pytest.mark.parametrize("where", ["before the routers", "in an expert", "after the forward", "nothing ran"])
def test_an_exception_restores_the_routers(where: str, built: Any) -> None:
    model, routers = built["qwen3-moe"]
    plain = logits_of(model)

    def boom(*_: Any) -> None:
        raise Boom

    places = {"before the routers": model.get_input_embeddings(), "in an expert": blocks_of(model)[1].experts}
    handle = places[where].register_forward_pre_hook(boom) if where in places else None
    expected = AssertionError if where == "nothing ran" else Boom
    with pytest.raises(expected), routers.watch():  # noqa: PT012
        if where != "nothing ran":
            logits_of(model)
            raise Boom
    if handle:
        handle.remove()
    assert_untouched(model)
    assert torch.equal(logits_of(model), plain)
    with routers.watch() as trace:
        logits_of(model)
    assert len(trace.used_ILK) == 10


def test_nested_watching_is_refused_and_the_outer_one_continues(built: Any) -> None:
    model, routers = built["qwen3-moe"]
    with routers.watch() as trace:
        with pytest.raises(AssertionError, match="already"), routers.watch():
            pass
        logits_of(model)
    assert len(trace.used_ILK) == 10
    assert_untouched(model)


@pytest.mark.parametrize("count", [9, 11, 1])
def test_experts_for_another_number_of_tokens_are_refused(count: int, built: Any) -> None:
    model, routers = built["qwen3-moe"]
    chosen = torch.zeros(count, routers.layers, routers.top_k, dtype=routers.compact)
    with pytest.raises(AssertionError, match=f"10 tokens, but experts for {count}"), routers.watch(all_of(chosen)):
        logits_of(model)
    assert_untouched(model)


def test_a_forward_patched_by_others_is_restored(built: Any) -> None:
    """Device-placement hooks patch forwards, for example."""
    model = FAMILIES["qwen3-moe"].model()
    routers, gate, calls = routers_of(model), blocks_of(model)[0].gate, []
    inner = gate.forward

    def patched(x: Tensor) -> Any:
        calls.append(len(x))
        return inner(x)

    gate.forward = patched
    with routers.watch():
        logits_of(model)
    assert calls == [10]
    assert gate.__dict__["forward"] is patched


def test_a_watched_model_can_be_copied_and_saved(built: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, routers = built["qwen3-moe"]
    align(model)  # a copy is aligned; a loaded model need not be
    plain = logits_of(model)
    with routers.watch() as own:
        logits_of(model)
    twin = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    align(loaded)
    for other in (twin, loaded):
        assert_untouched(other)
        assert torch.equal(logits_of(other), plain)
    # Watching the original has no effect on the copy.
    with routers.watch(all_of(other_than(own.used_ILK, routers.experts))):
        assert torch.equal(logits_of(twin), plain)
        assert not torch.equal(logits_of(model), plain)
    again = routers_of(twin)
    with again.watch() as trace:
        logits_of(twin)
    assert torch.equal(trace.used_ILK, own.used_ILK)


# --- Compact storage ---


def routers_with(experts: int, layers: int, top_k: int) -> Routers:
    return Routers([None] * layers, experts=experts, top_k=top_k)


@given(st.data(), st.sampled_from([2, 8, 255, 256, 257, 300, 512]), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_packing_choices_round_trips(data: Any, experts: int, layers: int, top_k: int) -> None:
    routers = routers_with(experts, layers, top_k)
    tokens = data.draw(st.integers(1, 12))
    numbers = data.draw(
        st.lists(st.integers(0, experts - 1), min_size=tokens * layers * top_k, max_size=tokens * layers * top_k)
    )
    numbers[-1] = experts - 1
    chosen = torch.tensor(numbers).view(tokens, layers, top_k).to(routers.compact)
    packed = routers.pack(chosen)
    width = 1 if experts <= 256 else 2
    assert isinstance(packed.experts, bytes)
    assert (len(packed.experts), packed.width) == (tokens * layers * top_k * width, width)
    assert [
        int.from_bytes(packed.experts[i : i + width], "little") for i in range(0, len(packed.experts), width)
    ] == numbers
    unpacked = routers.unpack(packed)
    assert unpacked.dtype == routers.compact
    assert unpacked.long().flatten().tolist() == numbers


def test_two_byte_choices_are_unpacked_into_one_byte() -> None:
    routers = routers_with(8, 2, 2)
    chosen = torch.tensor([[[7, 1], [0, 5]], [[2, 3], [6, 4]]])
    routes = Routes(experts=chosen.to(torch.int16).numpy().tobytes(), layers=2, top_k=2, width=2)
    assert torch.equal(routers.unpack(routes).long(), chosen)


def test_more_experts_than_a_byte_holds() -> None:
    model = replace(FAMILIES["qwen3-moe"], experts=300).model(num_experts=300, moe_intermediate_size=4)
    routers = routers_of(model)
    assert (routers.experts, routers.compact) == (300, torch.int16)
    with routers.watch() as own:
        plain = logits_of(model, some_ids(4, 12))
    assert own.used_ILK.dtype == torch.int16
    assert own.used_ILK.max() > 255
    with Spy(model) as spy:
        logits_of(model, some_ids(4, 12))
    assert torch.equal(in_order(own.used_ILK), in_order(spy.chosen_ILK(FAMILIES["qwen3-moe"])))
    with routers.watch(all_of(routers.unpack(routers.pack(own.used_ILK)))):
        assert torch.equal(logits_of(model, some_ids(4, 12)), plain)


@given(st.data(), st.integers(2, 9), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_changed_counts_experts_in_any_order(data: Any, experts: int, layers: int) -> None:
    top_k = data.draw(st.integers(1, experts))

    def choices() -> list[list[list[int]]]:
        return [[data.draw(st.permutations(range(experts)))[:top_k] for _ in range(layers)] for _ in range(3)]

    a, b = choices(), choices()
    expected = [sum(len(set(x) - set(y)) for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True)]
    for dtype in (torch.uint8, torch.int16):
        assert count_expert_changes(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)).tolist() == expected


def test_a_logit_that_happens_to_be_0_is_still_a_logit() -> None:
    model = FAMILIES["qwen3-moe"].model()
    routers = find_routers(model)
    assert routers is not None
    with routers.watch(logits=True):
        logits_of(model)
    with torch.no_grad():
        for module in routers.modules:
            module.weight[0] = 0.0
    with routers.watch(logits=True) as trace:
        logits_of(model)
    assert all((logits[:, 0] == 0).all() and logits.shape[-1] == routers.experts for logits in trace.logits.values())

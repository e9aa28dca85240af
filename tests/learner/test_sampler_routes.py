"""The experts that a sampling engine reports: those of a plain forward, checked before they are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, Digits, Family, Spy, in_order, plain_choices
from replay_cases import (
    CPU,
    DOUBLE,
    ROWS,
    by_row,
    disturb,
    ids_of,
    planned,
    reported,
    routing_of,
    unpacked,
)

from gspo.config import RoutingConfig
from gspo.errors import ConfigError
from gspo.learner.batch import batch_routing
from gspo.learner.forward import NoRouting, plan_logprobs
from gspo.model.load import Policy
from gspo.model.micro_batch import TokenSequence
from gspo.model.routing import ForcedExperts, find_routers
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines import local
from gspo.rollout.local import states as rows_file
from gspo.types import Completion, Prompt, Routes, Sampling

PROMPTS = [1, 4, 13, 7, 2, 13]


def prompts_of(lengths: Sequence[int] = PROMPTS) -> list[Prompt]:
    made = [Prompt(id=f"p/{i}", content="", text="", token_ids=ids_of(n, i)) for i, n in enumerate(lengths)]
    return [*made, replace(made[1], id="p/again")]  # the same text under another id shares its computation


def engine_of(model: Any, monkeypatch: Any, *, cached: bool, stop_ids: tuple[int, ...], **options: Any) -> Any:
    monkeypatch.setattr(local, "obstacle_to_cache", lambda model: None if cached else "the test says so")
    context = EngineContext(model=model, tokenizer=Digits(), stop_ids=stop_ids, routers=find_routers(model))
    if cached:
        return local.build(context, **options)
    with pytest.warns(RuntimeWarning, match="recomputes"):
        return local.build(context, **options)


def sampled(engine: Any, prompts: list[Prompt], *, samples: int = 3, tokens: int = 12, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"seed": 1, "stream": "train/0", "version": 0, "routes": True, **changes}
    return engine.generate(prompts, GenerateOptions(samples=samples, sampling=Sampling(max_tokens=tokens), **arguments))


def assert_routes(family: Family, model: Any, prompts: list[Prompt], groups: list[list[Completion]]) -> None:
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.routes is not None
            expected = plain_choices(family, model, (prompt.token_ids + completion.token_ids)[:-1])
            assert torch.equal(in_order(unpacked(completion.routes)), expected)


ENGINE_FAMILIES = {
    "qwen3-moe": FAMILIES["qwen3-moe"],
    "deepseek-v3": FAMILIES["deepseek-v3"],
    "gpt-oss": FAMILIES["gpt-oss"],
}

SIZES = {
    "all at once": {},
    "few slots": {"slots": 4},
    "prompts in several batches": {"slots": 5, "prefill_tokens": 15},
}


@pytest.mark.parametrize("name", ENGINE_FAMILIES)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "recomputed"])
@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES.keys())
def test_an_engine_reports_the_experts_of_a_plain_forward(
    name: str, cached: bool, options: dict[str, int], monkeypatch: Any
) -> None:
    family = ENGINE_FAMILIES[name]
    model = family.model(DOUBLE)
    # A third of the vocabulary ends a completion, so that many end at once and rows move while others continue.
    engine = engine_of(model, monkeypatch, cached=cached, stop_ids=tuple(range(0, 50, 6)), **options)
    prompts = prompts_of()
    groups = sampled(engine, prompts)
    lengths = {len(completion.token_ids) for group in groups for completion in group}
    assert 1 in lengths
    assert len(lengths) > 4
    assert_routes(family, model, prompts, groups)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "recomputed"])
def test_completions_longer_than_any_buffer_keep_their_experts(cached: bool, monkeypatch: Any) -> None:
    family = FAMILIES["qwen3-moe"]
    model = family.model(DOUBLE)
    length = 2 * rows_file.BLOCK + 7 if cached else rows_file.BLOCK + 7
    engine = engine_of(model, monkeypatch, cached=cached, stop_ids=(), slots=2)
    prompts = prompts_of([1, 6])
    groups = sampled(engine, prompts, samples=1, tokens=length)
    assert {len(completion.token_ids) for group in groups for completion in group} == {length}
    assert_routes(family, model, prompts, groups)


def test_only_one_token_prompts(monkeypatch: Any) -> None:
    """Nothing is computed before the first step: the routes begin with it."""
    family = FAMILIES["qwen3-moe"]
    model = family.model(DOUBLE)
    for cached in (True, False):
        engine = engine_of(model, monkeypatch, cached=cached, stop_ids=tuple(range(0, 50, 3)), slots=2)
        prompts = prompts_of([1, 1])
        assert_routes(family, model, prompts, sampled(engine, prompts))


def test_more_experts_than_a_byte_holds_reach_the_learner(monkeypatch: Any) -> None:
    family = replace(FAMILIES["qwen3-moe"], experts=300)
    model = family.model(DOUBLE, num_experts=300, moe_intermediate_size=4)
    prompts = prompts_of([2, 5])
    groups = sampled(engine_of(model, monkeypatch, cached=True, stop_ids=(0,)), prompts)
    completions = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    assert all(c.routes.width == 2 for _, c in completions)
    assert max(int(unpacked(c.routes).max()) for _, c in completions) > 255
    assert_routes(family, model, prompts, groups)
    plan = planned([TokenSequence(prompt_ids=p.token_ids, completion_ids=c.token_ids) for p, c in completions])
    routing = routing_of(model, plan, [c.routes for _, c in completions], replay="sampler")
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    for found, (_, c) in zip(by_row(plan, routing.old_ILK), completions, strict=True):
        assert torch.equal(found[:-1].long(), unpacked(c.routes))


def test_routes_are_given_when_asked_for_and_known(monkeypatch: Any) -> None:
    model = FAMILIES["qwen3-moe"].model()
    engine = engine_of(model, monkeypatch, cached=True, stop_ids=(0,))
    assert engine.reports_routes
    asked, silent = sampled(engine, prompts_of()), sampled(engine, prompts_of(), routes=False)
    assert all(c.routes is None for group in silent for c in group)
    assert [[c.token_ids for c in g] for g in asked] == [[c.token_ids for c in g] for g in silent]
    blind = local.build(EngineContext(model=model, tokenizer=Digits(), stop_ids=(0,)))
    assert not blind.reports_routes
    assert all(c.routes is None for group in sampled(blind, prompts_of()) for c in group)


def test_the_last_token_of_a_row_routes_itself_in_the_old_forward_and_is_replayed_after() -> None:
    model, plan = FAMILIES["qwen3-moe"].model(DOUBLE), planned()
    sampled = reported(ROWS)
    routing = routing_of(model, plan, sampled, replay="sampler")
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    for row, routes, found in zip(ROWS, sampled, by_row(plan, routing.old_ILK), strict=True):
        assert torch.equal(found[:-1].long(), unpacked(routes))
        known = torch.arange(row.length) < row.length - 1
        padded = torch.cat([unpacked(routes), torch.zeros(1, 2, 2, dtype=torch.long)])
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        with torch.no_grad(), Spy(model) as spy, routing.routers.watch(ForcedExperts(chosen_ILK=padded, known_I=known)):
            model(input_ids=ids, use_cache=False)
        # What the last token would have chosen by itself, after the others were prescribed.
        assert torch.equal(in_order(found[-1]), in_order(spy.chosen_ILK(FAMILIES["qwen3-moe"])[-1]))
    disturb(model)
    (micro,) = plan.updates[0]
    with torch.no_grad(), routing.learning(micro) as seen:
        model(input_ids=micro.input_ids, use_cache=False)
    at, real = micro.input_at.flatten(), micro.input_at.flatten() >= 0
    assert torch.equal(seen.used_ILK[real], routing.old_ILK[at[real]])
    assert (in_order(seen.native_ILK[real]) != in_order(seen.used_ILK[real])).any()
    assert not real.all()
    assert torch.equal(seen.used_ILK[~real], seen.native_ILK[~real])  # nothing is known of padding
    assert routing.outcome(model).sampler_N.sum() == 0


def test_replay_of_a_sampler_that_does_not_say_is_an_error() -> None:
    model, plan = FAMILIES["qwen3-moe"].model(), planned()
    sampled: list[Routes | None] = [*reported(ROWS)]
    sampled[3] = None
    with pytest.raises(ConfigError, match="did not report"):
        routing_of(model, plan, sampled, replay="sampler")
    # Without replay a row may stay silent: it is not counted.
    routing = routing_of(model, plan, sampled)
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    silent = plan.sequence_N == 3
    found = routing.outcome(model).sampler_N
    assert (found[silent] == -1).all()
    assert (found[~silent] >= 0).all()
    assert found[~silent].sum() > 0


WRONG = {
    "another number of tokens": {"less": 0},
    # One layer must not be broadcast over all of them, nor one expert over all places.
    "fewer layers": {"layers": 1},
    "fewer experts per token": {"top_k": 1},
    # To be found when the batch comes in, not in the middle of a forward as an index error (on a GPU: a device assert).
    "an expert that does not exist": {"expert": 200},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_routes_that_do_not_fit_the_model_are_refused(wrong: dict[str, int]) -> None:
    model, plan = FAMILIES["qwen3-moe"].model(), planned()
    with pytest.raises((ConfigError, AssertionError)):
        routing_of(model, plan, reported(ROWS, **wrong), replay="sampler")


def test_a_dense_model_has_nothing_to_route() -> None:
    plan = planned()
    dense = Policy(model=None, tokenizer=None, device=CPU)
    made = batch_routing(dense, RoutingConfig(), plan, [None] * len(ROWS))
    assert type(made) is NoRouting
    micro = plan.updates[0][0]
    with made.old(micro) as nothing, made.learning(micro) as seen:
        assert nothing is None
        assert seen is None
    assert made.balance_loss(micro, None, 0) == 0.0
    assert made.outcome(None) is None

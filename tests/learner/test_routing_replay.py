"""Routing of a batch: choices follow their tokens through every layout, and replay uses them and nothing else."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Digits, Family, Spy, blocks_of, in_order, plain_choices, router_of
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.clock import Clock
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.learner.forward import plan_logprobs
from gspo.learner.optimizer import Update
from gspo.learner.plan import MicroBatch, Plan, TokenSequence, make_plan
from gspo.learner.routing_replay import NoRouting, Routing, route
from gspo.model.routing import ForcedExperts, find_routers
from gspo.record.metrics import step_metrics
from gspo.record.run_dir import read_jsonl
from gspo.rollout.engine import EngineContext
from gspo.rollout.engines import local
from gspo.rollout.local import states as rows_file
from gspo.step import LearnResult, RunContext, collect, learn
from gspo.trainer import resume, train
from gspo.types import Completion, Group, Prompt, Routes, Sampling

CPU = torch.device("cpu")
DOUBLE = torch.float64
ROUND: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
"""Norms and gates round to float32 inside a float64 model."""


def ids_of(length: int, start: int) -> tuple[int, ...]:
    return tuple((start * 11 + 3 * j + j * j) % 46 + 2 for j in range(length))


def row_of(prompt: int, reply: int, start: int) -> TokenSequence:
    return TokenSequence(prompt_ids=ids_of(prompt, start), completion_ids=ids_of(reply, start + 5))


ROWS = [row_of(1, 1, 0), row_of(9, 12, 1), row_of(3, 2, 2), row_of(20, 5, 3), row_of(2, 7, 4), row_of(1, 9, 5)]
"""Very different lengths, so that most of a padded matrix is padding."""


def planned(
    rows: Sequence[TokenSequence] = ROWS, *, budget: int = 10**9, steps: int = 1, pad: int = 0, seed: str = ""
) -> Plan:
    return make_plan(rows, list(range(len(rows))), mini_batches=steps, token_budget=budget, pad_id=pad, seed=seed)


def routing_of(model: Any, plan: Plan, sampled: Any = None, *, replay: str = "off", balance: float = 0.0) -> Routing:
    routers = find_routers(model)
    made = route(
        routers, plan, sampled or [None] * len(plan.rows), replay=replay, balance=balance, device=torch.device("cpu")
    )
    assert isinstance(made, Routing)
    return made


def disturb(model: Any, amount: float = 0.3, seed: int = 1) -> None:
    """Move the routers, so that they choose otherwise by themselves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in blocks_of(model):
            weight = router_of(block).weight
            weight += amount * torch.randn(weight.shape, generator=generator).to(weight.dtype)


def by_row(plan: Plan, of_tokens: Tensor) -> list[Tensor]:
    """Values by input token of the plan, as one tensor per row."""
    return list(of_tokens.split([row.length for row in plan.rows]))


def flips(a: Tensor, b: Tensor) -> list[int]:
    """Experts of each token in `a` but not in `b`, counted with sets."""
    return [
        sum(len(set(x) - set(y)) for x, y in zip(p, q, strict=True))
        for p, q in zip(a.long().tolist(), b.long().tolist(), strict=True)
    ]


def reply_part(row: TokenSequence) -> slice:
    """The positions whose outputs predict the reply."""
    return slice(len(row.prompt_ids) - 1, row.length - 1)


# --- Alignment: padding, cuts and order ---


@pytest.mark.parametrize("name", ["qwen3-moe, some layers dense", "deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("pad", [0, 33])
def test_load_and_records_are_of_real_tokens_only(name: str, pad: int) -> None:
    family = FAMILIES[name]
    model, plan = family.model(DOUBLE), planned(pad=pad)
    routing = routing_of(model, plan)
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    alone = [plain_choices(family, model, row.prompt_ids + row.completion_ids) for row in ROWS]
    load = torch.zeros(family.layers, family.experts, dtype=torch.int64)
    for row in alone:
        for token in row.tolist():
            for layer, experts in enumerate(token):
                for expert in experts:
                    load[layer, expert] += 1
    for found, expected in zip(by_row(plan, routing.old_ILK), alone, strict=True):
        assert torch.equal(in_order(found), expected)
    assert torch.equal(routing.outcome(model).load_LE, load)
    assert int(load.sum()) == sum(row.length for row in ROWS) * family.layers * family.top_k


def test_padding_of_any_kind_changes_no_count() -> None:
    model = FAMILIES["qwen3-moe"].model(DOUBLE)
    outcomes = []
    for pad in (0, 7, 33):
        plan = planned(pad=pad, steps=2)
        routing = routing_of(model, plan, replay="old")
        plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
        disturbed = copy.deepcopy(model)
        disturb(disturbed)
        routing.routers = find_routers(disturbed)  # type: ignore[assignment]
        plan_logprobs(disturbed, plan, 1.0, CPU, routed=routing.learning)
        done = routing.outcome(disturbed)
        outcomes.append((done.flipped_N, done.native_N, done.sampler_N, done.load_LE, done.update_N))
    assert outcomes[0][1].sum() > 0
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


@pytest.mark.parametrize("budget", [1, 30, 10**9])
def test_flips_are_counted_per_reply_token_against_the_old_choice(budget: int) -> None:
    family = FAMILIES["deepseek-v3"]
    model = family.model(DOUBLE)
    plan = planned(budget=budget, steps=2, seed="a")
    routing = routing_of(model, plan)
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    before = [plain_choices(family, model, row.prompt_ids + row.completion_ids) for row in ROWS]
    disturb(model)
    after = [plain_choices(family, model, row.prompt_ids + row.completion_ids) for row in ROWS]
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.learning)
    expected = [
        n for row, a, b in zip(ROWS, after, before, strict=True) for n in flips(a[reply_part(row)], b[reply_part(row)])
    ]
    done = routing.outcome(model)
    assert sum(expected) > 5
    assert done.flipped_N.tolist() == expected
    assert done.native_N.tolist() == expected
    assert done.sampler_N.tolist() == [-1] * len(expected)
    assert done.choices == family.layers * family.top_k
    assert not done.replayed
    first = {r for micro in plan.updates[0] for r in micro.rows}
    assert done.update_N.tolist() == [0 if int(s) in first else 1 for s in plan.sequence_N]


def forced_alone(
    model: Any, row: TokenSequence, chosen_TLK: Tensor, known_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits and experts of one row by itself, with experts prescribed, by the mechanism alone."""
    routers = find_routers(model)
    assert routers is not None
    known = torch.ones(row.length, dtype=torch.bool) if known_T is None else known_T
    with torch.no_grad(), routers.watch(ForcedExperts(chosen_ILK=chosen_TLK, known_I=known)) as seen:
        logits = model(input_ids=torch.tensor([row.prompt_ids + row.completion_ids]), use_cache=False).logits[0]
    return logits, seen.used_ILK


def reply_logp(row: TokenSequence, logits_TV: Tensor) -> Tensor:
    logp_TV = logits_TV.double().log_softmax(-1)[reply_part(row)]
    return logp_TV.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]


@pytest.mark.parametrize("name", ["qwen3-moe, some layers dense", "gpt-oss"])
@pytest.mark.parametrize(("budget", "steps", "seed"), [(1, 1, "b"), (40, 3, "c"), (90, 2, "d")])
def test_records_follow_tokens_through_other_cuts_and_orders(name: str, budget: int, steps: int, seed: str) -> None:
    model, plan = FAMILIES[name].model(DOUBLE), planned(pad=33)
    routing = routing_of(model, plan, replay="old")
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    recorded = by_row(plan, routing.old_ILK)
    disturb(model)
    native, _ = plan_logprobs(model, plan, 1.0, CPU)
    other = planned(budget=budget, steps=steps, pad=7, seed=seed)
    replayed, _ = plan_logprobs(model, other, 1.0, CPU, routed=routing.learning)
    done = routing.outcome(model)
    assert done.flipped_N.sum() == 0
    assert done.native_N.sum() > 5
    alone = [forced_alone(model, row, chosen) for row, chosen in zip(ROWS, recorded, strict=True)]
    expected = torch.cat([reply_logp(row, logits) for row, (logits, _) in zip(ROWS, alone, strict=True)])
    torch.testing.assert_close(replayed.double(), expected, **ROUND)
    assert (native.double() - expected).abs().max() > 1e-2


# --- Alignment: packed rows, and a prompt shared by its replies ---


class Layout:
    """Tokens of a plan in one long row: a micro-batch made by hand, with the mask and positions it needs."""

    def __init__(self, plan: Plan, *, share_prompt: bool) -> None:
        starts, reply_starts = plan.input_starts, [0]
        for row in plan.rows:
            reply_starts.append(reply_starts[-1] + len(row.completion_ids))
        ids: list[int] = []
        at: list[int] = []
        positions: list[int] = []
        sees: list[set[int]] = []
        out: dict[str, list[int]] = {"position": [], "target": [], "at": []}
        self.where: list[list[int]] = []
        """For each row of the plan, where its tokens stand here."""
        prompt_at: list[int] = []

        def place(tokens: Sequence[int], inputs: Sequence[int], first: int, before: Sequence[int]) -> list[int]:
            places = list(range(len(ids), len(ids) + len(tokens)))
            for i, (token, source) in enumerate(zip(tokens, inputs, strict=True)):
                sees.append({*before, *places[: i + 1]})
                ids.append(token)
                at.append(source)
                positions.append(first + i)
            return places

        for r, row in enumerate(plan.rows):
            inputs = range(starts[r], starts[r] + row.length)
            p = len(row.prompt_ids)
            if not share_prompt or r == 0:
                prompt_at = place(row.prompt_ids, inputs[:p], 0, ())
            assert not share_prompt or row.prompt_ids == plan.rows[0].prompt_ids
            reply_at = place(row.completion_ids, inputs[p:], p, prompt_at)
            self.where.append([*prompt_at, *reply_at])
            out["position"] += self.where[-1][p - 1 : -1]
            out["target"] += row.completion_ids
            out["at"] += range(reply_starts[r], reply_starts[r + 1])
        mask = torch.full((len(ids), len(ids)), torch.finfo(DOUBLE).min, dtype=DOUBLE)
        for i, seen in enumerate(sees):
            mask[i, sorted(seen)] = 0.0
        self.arguments = {"attention_mask": mask[None, None], "position_ids": torch.tensor([positions])}
        self.micro = MicroBatch(
            rows=tuple(range(len(plan.rows))),
            owners=tuple(range(len(plan.rows))),
            input_ids=torch.tensor([ids]),
            row_N=torch.zeros(len(out["at"]), dtype=torch.long),
            output_N=torch.tensor(out["position"]),
            target_N=torch.tensor(out["target"]),
            at_N=torch.tensor(out["at"]),
            input_at=torch.tensor([at]),
            times=torch.ones(1, len(at), dtype=torch.long),
        )

    @torch.no_grad()
    def logits(self, model: Any) -> Tensor:
        return model(input_ids=self.micro.input_ids, use_cache=False, **self.arguments).logits[0]


SHARED = [TokenSequence(prompt_ids=ids_of(6, 1), completion_ids=ids_of(n, 20 + n)) for n in (3, 1, 8, 5)]


@pytest.mark.parametrize("name", ["qwen3-moe, some layers dense", "deepseek-v3"])
@pytest.mark.parametrize("share", [False, True], ids=["packed", "one prompt for its replies"])
def test_records_of_separate_rows_replay_in_another_layout(name: str, share: bool) -> None:
    rows = SHARED if share else ROWS
    model, plan = FAMILIES[name].model(DOUBLE), planned(rows, pad=33)
    layout = Layout(plan, share_prompt=share)
    routing = routing_of(model, plan, replay="old")
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    recorded = by_row(plan, routing.old_ILK)
    disturb(model)
    with routing.learning(layout.micro) as seen:
        logits = layout.logits(model)
    assert seen is not None
    done = routing.outcome(model)
    native = layout.logits(model)
    for row, chosen, where in zip(rows, recorded, layout.where, strict=True):
        expected, used = forced_alone(model, row, chosen)
        assert torch.equal(in_order(seen.used_ILK[where]), in_order(used))
        torch.testing.assert_close(logits[where], expected, **ROUND)
    assert (logits - native).abs().max() > 1e-2
    assert done.flipped_N.sum() == 0
    assert done.native_N.sum() > 5


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("share", [False, True], ids=["packed", "one prompt for its replies"])
def test_records_of_another_layout_are_those_of_separate_rows(name: str, share: bool) -> None:
    rows = SHARED if share else ROWS
    model, plan = FAMILIES[name].model(DOUBLE), planned(rows)
    layout = Layout(plan, share_prompt=share)
    separate, together = routing_of(model, plan), routing_of(model, plan)
    plan_logprobs(model, plan, 1.0, CPU, routed=separate.old)
    with together.old(layout.micro):
        layout.logits(model)
    rows_separate, rows_together = by_row(plan, separate.old_ILK), by_row(plan, together.old_ILK)
    for r, (row, a, b) in enumerate(zip(rows, rows_separate, rows_together, strict=True)):
        known = len(row.prompt_ids) if share and r else 0  # the prompt stands only in the first
        assert torch.equal(in_order(a[known:]), in_order(b[known:]))
    disturb(model)
    plan_logprobs(model, plan, 1.0, CPU, routed=separate.learning)
    with together.learning(layout.micro):
        layout.logits(model)
    counts = separate.outcome(model).native_N.tolist()
    assert sum(counts) > 5
    # The probe of a single optimiser step would read separate rows, so compare what the forwards counted.
    assert together.changed_N.tolist() == counts


# --- Sampler to learner ---


def altered(routes: Routes | None, experts: int, shift: int = 1) -> Routes:
    assert routes is not None
    assert routes.width == 1
    return replace(routes, experts=bytes((b + shift) % experts for b in routes.experts))


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


def drawn(engine: Any, prompts: list[Prompt], *, samples: int = 3, tokens: int = 12, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"seed": 1, "stream": "train/0", "version": 0, "routes": True, **changes}
    return engine.generate(prompts, samples=samples, sampling=Sampling(max_tokens=tokens), **arguments)


def unpacked(routes: Routes) -> Tensor:
    """From the definition in types.py, not by the code that packed it."""
    step = routes.width
    numbers = [int.from_bytes(routes.experts[i : i + step], "little") for i in range(0, len(routes.experts), step)]
    return torch.tensor(numbers).view(-1, routes.layers, routes.top_k)


def assert_routes(family: Family, model: Any, prompts: list[Prompt], groups: list[list[Completion]]) -> None:
    for prompt, group in zip(prompts, groups, strict=True):
        for reply in group:
            assert reply.routes is not None
            expected = plain_choices(family, model, (prompt.token_ids + reply.token_ids)[:-1])
            assert torch.equal(in_order(unpacked(reply.routes)), expected)


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
    # A third of the vocabulary ends a reply, so that many end at once and rows move while others go on.
    engine = engine_of(model, monkeypatch, cached=cached, stop_ids=tuple(range(0, 50, 6)), **options)
    prompts = prompts_of()
    groups = drawn(engine, prompts)
    lengths = {len(reply.token_ids) for group in groups for reply in group}
    assert 1 in lengths
    assert len(lengths) > 4
    assert_routes(family, model, prompts, groups)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "recomputed"])
def test_replies_longer_than_any_buffer_keep_their_experts(cached: bool, monkeypatch: Any) -> None:
    family = FAMILIES["qwen3-moe"]
    model = family.model(DOUBLE)
    length = 2 * rows_file.BLOCK + 7 if cached else rows_file.BLOCK + 7
    engine = engine_of(model, monkeypatch, cached=cached, stop_ids=(), slots=2)
    prompts = prompts_of([1, 6])
    groups = drawn(engine, prompts, samples=1, tokens=length)
    assert {len(reply.token_ids) for group in groups for reply in group} == {length}
    assert_routes(family, model, prompts, groups)


def test_only_one_token_prompts(monkeypatch: Any) -> None:
    """Nothing is computed before the first step: the routes begin with it."""
    family = FAMILIES["qwen3-moe"]
    model = family.model(DOUBLE)
    for cached in (True, False):
        engine = engine_of(model, monkeypatch, cached=cached, stop_ids=tuple(range(0, 50, 3)), slots=2)
        prompts = prompts_of([1, 1])
        assert_routes(family, model, prompts, drawn(engine, prompts))


def test_more_experts_than_a_byte_holds_reach_the_learner(monkeypatch: Any) -> None:
    family = replace(FAMILIES["qwen3-moe"], experts=300)
    model = family.model(DOUBLE, num_experts=300, moe_intermediate_size=4)
    prompts = prompts_of([2, 5])
    groups = drawn(engine_of(model, monkeypatch, cached=True, stop_ids=(0,)), prompts)
    replies = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    assert all(c.routes.width == 2 for _, c in replies)
    assert max(int(unpacked(c.routes).max()) for _, c in replies) > 255
    assert_routes(family, model, prompts, groups)
    plan = planned([TokenSequence(prompt_ids=p.token_ids, completion_ids=c.token_ids) for p, c in replies])
    routing = routing_of(model, plan, [c.routes for _, c in replies], replay="sampler")
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    for found, (_, c) in zip(by_row(plan, routing.old_ILK), replies, strict=True):
        assert torch.equal(found[:-1].long(), unpacked(c.routes))


def test_routes_are_given_when_asked_for_and_known(monkeypatch: Any) -> None:
    model = FAMILIES["qwen3-moe"].model()
    engine = engine_of(model, monkeypatch, cached=True, stop_ids=(0,))
    assert engine.reports_routes
    asked, silent = drawn(engine, prompts_of()), drawn(engine, prompts_of(), routes=False)
    assert all(c.routes is None for group in silent for c in group)
    assert [[c.token_ids for c in g] for g in asked] == [[c.token_ids for c in g] for g in silent]
    blind = local.build(EngineContext(model=model, tokenizer=Digits(), stop_ids=(0,)))
    assert not blind.reports_routes
    assert all(c.routes is None for group in drawn(blind, prompts_of()) for c in group)


# --- What an engine reports is checked ---


def reported(
    rows: Sequence[TokenSequence], *, layers: int = 2, top_k: int = 2, less: int = 1, expert: int = 3
) -> list[Routes]:
    counts = [(row.length - less) * layers * top_k for row in rows]
    numbers = [bytes((expert + i) % 8 if expert < 8 else expert for i in range(n)) for n in counts]
    return [Routes(experts=b, layers=layers, top_k=top_k, width=1) for b in numbers]


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
    made = route(None, plan, [None] * len(ROWS), replay="off", balance=0.0, device=CPU)
    assert type(made) is NoRouting
    micro = plan.updates[0][0]
    with made.old(micro) as nothing, made.learning(micro) as seen:
        assert nothing is None
        assert seen is None
    assert made.balance_loss(micro, None, 0) == 0.0
    assert made.outcome(None) is None


# --- Through learn() ---

MOE = ("model.build=tiny_moe", "learner.learning_rate=3e-2", "objective.name=gspo")


class GradientRecorder:
    """Stands in for the optimiser: keeps the gradient of every step and changes nothing."""

    def __init__(self, model: Any) -> None:
        self.model, self.updates = model, 0
        self.gradients: list[Tensor] = []

    def step(self, *, loss_finite: bool) -> Update:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        self.gradients.append(torch.cat([g.flatten() for g in grads]).clone())
        self.model.zero_grad()
        return Update(applied=True, grad_norm=float(self.gradients[-1].norm()), learning_rate=0.0)


class Photographer:
    """An optimiser that keeps a copy of the model after each of its steps."""

    def __init__(self, inner: Any, model: Any) -> None:
        self.inner, self.model = inner, model
        self.copies = [copy.deepcopy(model)]

    @property
    def updates(self) -> int:
        return int(self.inner.updates)

    def step(self, **arguments: Any) -> Update:
        done: Update = self.inner.step(**arguments)
        self.copies.append(copy.deepcopy(self.model))
        return done


Stepped = tuple[LearnResult, dict[str, Any]]


def stepped(
    parts: RunContext, change: Callable[[tuple[Group, ...]], Sequence[Group]] = lambda groups: groups
) -> Stepped:
    collected = collect(parts, step=1, cursor=0, clock=Clock())
    learned = learn(parts, change(collected.gathered.groups), step=1)
    assert learned is not None
    return learned, step_metrics(parts.objective, collected, learned)


def with_altered_routes(groups: Sequence[Group]) -> list[Group]:
    return [replace(g, completions=[replace(c, routes=altered(c.routes, 8)) for c in g.completions]) for g in groups]


def rows_learned(learned: LearnResult) -> list[TokenSequence]:
    return [
        TokenSequence(prompt_ids=c.prompt.token_ids, completion_ids=c.completion.token_ids) for c in learned.samples
    ]


TINY_MOE = Family(kind="", gate=None)
"""What `model.build = tiny_moe` gives: 2 layers of 8 experts, of which 2 are chosen by the best logits."""


@pytest.fixture
def double_parts(parts_of: Any) -> Callable[[Config], RunContext]:
    def build(config: Config) -> RunContext:
        parts = parts_of(config)
        parts.policy.model.double()
        parts.policy.model.set_experts_implementation("eager")
        return replace(parts, optimizer=GradientRecorder(parts.policy.model))

    return build


REPLAYS = {"off": (), "old": ("routing.replay=old",), "sampler": ("routing.replay=sampler",)}


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_step_says_what_flipped_and_starts_at_ratio_one(
    replay: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(*MOE, *REPLAYS[replay], "learner.mini_batches=4", "learner.micro_batch_tokens=60"))
    watched = Photographer(parts.optimizer, parts.policy.model)
    learned, metrics = stepped(replace(parts, optimizer=watched))
    routed, rows = learned.routed, rows_learned(learned)
    assert routed is not None
    first = routed.update_N == 0
    assert 0 < int(first.sum()) < len(first)
    assert set(routed.update_N.tolist()) == {0, 1, 2, 3}
    assert (learned.ratio_N[first] == 1.0).all()
    assert torch.equal(learned.tokens.logp_N[first], learned.tokens.logp_old_N[first])
    # Flips by hand: each row's learning forward came after `update` updates.
    lengths = [len(row.completion_ids) for row in rows]
    updates = [int(u[0]) for u in routed.update_N.split(lengths)]
    choices = {
        (r, u): plain_choices(TINY_MOE, watched.copies[u], rows[r].prompt_ids + rows[r].completion_ids)[
            reply_part(rows[r])
        ]
        for r, u in {*((r, 0) for r in range(len(rows))), *enumerate(updates)}
    }
    counted = [flips(choices[r, u], choices[r, 0]) for r, u in enumerate(updates)]
    by_hand = sum(sum(c) for c, u in zip(counted, updates, strict=True) if u) / (4 * int((~first).sum()))
    assert by_hand > 0.01
    assert metrics["routing/flip_fraction_sampler"] == 0.0 if replay == "sampler" else True
    if replay == "off":
        assert routed.flipped_N.tolist() == [n for c in counted for n in c]
        assert metrics["routing/flip_fraction"] == pytest.approx(by_hand)
        assert "routing/flip_fraction_native" not in metrics
    else:
        assert metrics["routing/flip_fraction"] == 0.0
        assert routed.flipped_N.sum() == 0
        assert metrics["routing/flip_fraction_native"] > 0.01
    by_update = [routed.native_N[routed.update_N == u].double().mean() / 4 for u in (1, 3)]
    assert metrics["routing/flip_fraction_first"] == pytest.approx(float(by_update[0]))
    assert metrics["routing/flip_fraction_last"] == pytest.approx(float(by_update[1]))


@pytest.mark.parametrize("replay", ["off", "sampler"])
def test_a_single_mini_batch_is_looked_at_again_after_its_update(
    replay: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    parts = parts_of(tiny(*MOE, *REPLAYS[replay], "learner.mini_batches=1", "learner.micro_batch_tokens=90"))
    watched = Photographer(parts.optimizer, parts.policy.model)
    learned, metrics = stepped(replace(parts, optimizer=watched))
    assert learned.routed is not None
    assert (learned.ratio_N == 1.0).all()
    assert set(learned.routed.update_N.tolist()) == {0, 1}
    if replay == "sampler":
        assert metrics["routing/flip_fraction"] == 0.0
        assert metrics["routing/flip_fraction_native"] > 0
        return
    rows, at = rows_learned(learned), 0
    for row in rows:
        n = len(row.completion_ids)
        part = slice(at, at + n)
        at += n
        if int(learned.routed.update_N[part][0]) == 1:
            both = [
                plain_choices(TINY_MOE, m, row.prompt_ids + row.completion_ids)[reply_part(row)] for m in watched.copies
            ]
            assert learned.routed.flipped_N[part].tolist() == flips(both[1], both[0])
        else:
            assert learned.routed.flipped_N[part].sum() == 0
    assert metrics["routing/flip_fraction"] > 0


def test_replay_of_the_old_choice_without_a_later_update_is_refused(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"routing\.replay"):
        tiny(*MOE, "routing.replay=old", "learner.mini_batches=1")


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_altered_routes_of_the_sampler_are_what_both_forwards_use(
    checkpointing: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    config = tiny(*MOE, "routing.replay=sampler", f"model.gradient_checkpointing={checkpointing}")
    parts = parts_of(config)
    pristine = copy.deepcopy(parts.policy.model)
    learned, metrics = stepped(parts, with_altered_routes)
    assert metrics["routing/flip_fraction"] == 0.0
    assert metrics["routing/flip_fraction_sampler"] == 0.0
    assert metrics["routing/flip_fraction_native"] > 0.3
    expected = []
    for row, c in zip(rows_learned(learned), learned.samples, strict=True):
        assert c.completion.routes is not None
        chosen = torch.cat([unpacked(c.completion.routes), torch.zeros(1, 2, 2, dtype=torch.long)])
        logits, _ = forced_alone(pristine, row, chosen, torch.arange(row.length) < row.length - 1)
        expected.append(reply_logp(row, logits))
    torch.testing.assert_close(learned.tokens.logp_old_N.double(), torch.cat(expected), rtol=0, atol=2e-5)
    assert learned.tokens.logp_sampler_N is not None
    assert (learned.tokens.logp_old_N - learned.tokens.logp_sampler_N).abs().max() > 1e-3
    assert metrics["mismatch/k3"] > 1e-6
    assert learned.routed is not None
    first = learned.routed.update_N == 0
    assert torch.equal(learned.tokens.logp_N[first], learned.tokens.logp_old_N[first])


@pytest.mark.parametrize("replay", ["off", "old"])
def test_altered_routes_are_only_counted_when_they_are_not_replayed(
    replay: str, tiny: Callable[..., Config], parts_of: Any
) -> None:
    plain, _ = stepped(parts_of(tiny(*MOE, *REPLAYS[replay])))
    learned, metrics = stepped(parts_of(tiny(*MOE, *REPLAYS[replay], run_dir="b")), with_altered_routes)
    assert torch.equal(learned.tokens.logp_old_N, plain.tokens.logp_old_N)
    assert torch.equal(learned.tokens.logp_N, plain.tokens.logp_N)
    # {a, b} against {a + 1, b + 1} modulo 8: one of two differs when a and b are neighbours, else both.
    expected = []
    for c in learned.samples:
        assert c.completion.routes is not None
        shifted = unpacked(c.completion.routes)[len(c.prompt.token_ids) - 1 :]
        expected += flips((shifted - 1) % 8, shifted)
    assert learned.routed is not None
    assert learned.routed.sampler_N.tolist() == expected
    assert metrics["routing/flip_fraction_sampler"] == pytest.approx(sum(expected) / len(expected) / 4)


@pytest.mark.parametrize("replay", ["old", "sampler"])
@pytest.mark.parametrize(
    "objective", [("objective.name=clip_cov", "objective.cov_low=0"), ("objective.name=kl_cov",)], ids=str
)
def test_tokens_are_singled_out_by_the_replayed_forward(
    objective: tuple[str, ...], replay: str, tiny: Callable[..., Config], parts_of: Any, monkeypatch: Any
) -> None:
    from gspo.learner import batch as update_file

    asked: list[Tensor] = []
    inner = update_file.select

    def select(row: Any, tokens: Any, seed: int) -> Any:
        asked.append(tokens.logp_N.clone())
        return inner(row, tokens, seed)

    monkeypatch.setattr(update_file, "select", select)
    options = (*MOE[:2], *objective, "objective.select_fraction=0.2", *REPLAYS[replay])
    learned, metrics = stepped(parts_of(tiny(*options)), with_altered_routes)
    assert learned.routed is not None
    assert metrics["routing/flip_fraction"] == 0.0
    assert metrics["routing/flip_fraction_native"] > 0.01
    assert len(asked) == 2
    for index, logp in enumerate(asked):
        assert torch.equal(logp, learned.tokens.logp_N[learned.routed.update_N == index])


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_reference_model_routes_by_itself(replay: str, tiny: Callable[..., Config], parts_of: Any) -> None:
    parts = parts_of(tiny(*MOE[:2], "objective.name=grpo", *REPLAYS[replay]))
    reference = copy.deepcopy(parts.policy.model).requires_grad_(False)
    disturb(reference)
    parts = replace(parts, reference=reference)
    pristine = copy.deepcopy(reference)
    learned, metrics = stepped(parts, with_altered_routes)
    expected = []
    for row in rows_learned(learned):
        with torch.no_grad():
            logits = pristine(torch.tensor([row.prompt_ids + row.completion_ids]), use_cache=False).logits[0]
        expected.append(reply_logp(row, logits))
    assert learned.tokens.logp_ref_N is not None
    torch.testing.assert_close(learned.tokens.logp_ref_N.double(), torch.cat(expected), rtol=0, atol=2e-5)
    assert metrics["kl/ref"] > 0
    for a, b in zip(reference.parameters(), pristine.parameters(), strict=True):
        assert torch.equal(a, b)


class DisturbingRecorder(GradientRecorder):
    """Moves the routers after each step, the same way each time."""

    def step(self, *, loss_finite: bool) -> Update:
        done = super().step(loss_finite=loss_finite)
        disturb(self.model, 0.1)
        return done


@pytest.mark.parametrize("balance", [0.0, 0.5])
@pytest.mark.parametrize("replay", REPLAYS)
def test_cutting_differently_changes_no_gradient(
    replay: str, balance: float, tiny: Callable[..., Config], double_parts: Any
) -> None:
    parts = double_parts(tiny(*MOE, *REPLAYS[replay], f"routing.balance_loss={balance}"))
    model, config = parts.policy.model, parts.config
    collected = collect(parts, step=1, cursor=0, clock=Clock())
    groups, weights = with_altered_routes(collected.gathered.groups), copy.deepcopy(model.state_dict())
    found = []
    for cut in (10**6, 1, 70):
        model.load_state_dict(weights)
        recorder = DisturbingRecorder(model)
        learner = replace(config.learner, micro_batch_tokens=cut)
        learned = learn(replace(parts, config=replace(config, learner=learner), optimizer=recorder), groups, step=1)
        assert learned is not None
        assert learned.routed is not None
        found.append((recorder.gradients, learned))
    gradients, learned = found[0]
    routed: Any = learned.routed
    assert len(gradients) == 2
    assert all(g.abs().max() > 1e-4 for g in gradients)
    assert routed.native_N.sum() > 5
    assert (routed.flipped_N.sum() == 0) == (replay != "off")
    other: Any
    for others, other in found[1:]:
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(other.tokens.logp_N, learned.tokens.logp_N, rtol=0, atol=1e-5)
        for name in ("flipped_N", "native_N", "sampler_N", "load_LE", "update_N"):
            assert torch.equal(getattr(routed, name), getattr(other.routed, name)), name
        assert other.routed.balance_losses == pytest.approx(routed.balance_losses, rel=1e-5)


@pytest.mark.parametrize("mini_batches", [2, 1])
@pytest.mark.parametrize("replay", ["off", "sampler"])
def test_memory_that_runs_out_changes_nothing_that_is_counted(
    replay: str, mini_batches: int, tiny: Callable[..., Config], double_parts: Any
) -> None:
    # One mini-batch: the forward that looks at the routing after a single update may run out of memory too.
    options = (*REPLAYS[replay], "routing.balance_loss=0.5", f"learner.mini_batches={mini_batches}")
    parts = double_parts(tiny(*MOE, *options))
    model, found = parts.policy.model, []
    collected = collect(parts, step=1, cursor=0, clock=Clock())
    groups, weights = with_altered_routes(collected.gathered.groups), copy.deepcopy(model.state_dict())

    def full(module: Any, args: Any) -> None:
        if args[0].numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for small in (False, True):
        model.load_state_dict(weights)
        handle = model.get_input_embeddings().register_forward_pre_hook(full) if small else None
        recorder = DisturbingRecorder(model)
        learned = learn(replace(parts, optimizer=recorder), groups, step=1)
        if handle:
            handle.remove()
        assert learned is not None
        assert (learned.halvings > 0) == small
        found.append((recorder.gradients, learned.routed))
    (gradients, routed), (others, other) = found
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
    names = ("sampler_N", "load_LE") if mini_batches == 1 else ("flipped_N", "native_N", "sampler_N", "load_LE", "update_N")  # fmt: skip
    for name in names:
        assert torch.equal(getattr(routed, name), getattr(other, name)), name
    assert routed is not None
    assert other is not None
    assert other.balance_losses == pytest.approx(routed.balance_losses, rel=1e-5)
    assert (other.update_N > 0).any()


# --- The balancing loss ---


def balance_by_hand(
    model: Any, rows: Sequence[TokenSequence], chosen: Sequence[Tensor | None], coefficient: float
) -> Tensor:
    """coefficient x E sum_e f_e P_e, mean over layers, over all tokens of the rows; each row by itself.

    `chosen`: experts to compute with. f is what the routers would have chosen, P the mean of their probabilities."""
    routers = find_routers(model)
    assert routers is not None
    logits: list[list[Tensor]] = [[] for _ in range(routers.layers)]
    blocks = blocks_of(model)
    handles = [
        router_of(b).register_forward_hook(lambda m, i, o, layer=layer: logits[layer].append(o[0]))
        for layer, b in enumerate(blocks)
    ]
    for row, experts in zip(rows, chosen, strict=True):
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        if experts is None:
            model(input_ids=ids, use_cache=False)
            continue
        padded = torch.cat([experts, torch.zeros(1, routers.layers, routers.top_k, dtype=torch.long)])
        forced = ForcedExperts(chosen_ILK=padded, known_I=torch.arange(row.length) < row.length - 1)
        with routers.watch(forced):
            model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    terms = []
    for layer in logits:
        logits_IE = torch.cat(layer)
        native = logits_IE.detach().argsort(-1, descending=True)[:, : routers.top_k]
        share = torch.stack([(native == e).double().mean() for e in range(routers.experts)])
        terms.append(routers.experts * (share * logits_IE.softmax(-1).mean(0)).sum())
    return coefficient * torch.stack(terms).mean()


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("replay", REPLAYS)
def test_the_balancing_loss_is_switch_on_native_routing(
    replay: str, checkpointing: str, tiny: Callable[..., Config], double_parts: Any
) -> None:
    """Value and gradient. The sampler's routes are altered, so replay of them is far from what the routers choose."""
    options = (*REPLAYS[replay], "routing.balance_loss=0.5", "learner.micro_batch_tokens=70")
    parts = double_parts(tiny(*MOE, *options, f"model.gradient_checkpointing={checkpointing}"))
    model, config = parts.policy.model, parts.config
    learned, metrics = stepped(parts, with_altered_routes)
    without = replace(parts, optimizer=GradientRecorder(model), config=replace(config, routing=replace(config.routing, balance_loss=0.0)))  # fmt: skip
    plain, plain_metrics = stepped(without, with_altered_routes)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            vars(module).pop("forward", None)  # what follows is by hand, with every activation stored
    assert learned.routed is not None
    assert plain.routed is not None
    assert plain.routed.balance_losses == ()
    assert "loss/balance" not in plain_metrics
    rows = rows_learned(learned)
    lengths = [len(row.completion_ids) for row in rows]
    step_of = [int(u[0]) for u in learned.routed.update_N.split(lengths)]
    for step in (0, 1):
        mine = [i for i, s in enumerate(step_of) if s == step]
        routes = [learned.samples[i].completion.routes for i in mine]
        forced = [unpacked(r) if replay == "sampler" and r else None for r in routes]
        loss = balance_by_hand(model, [rows[i] for i in mine], forced, 0.5)
        assert loss.item() > 0.5  # 0.5 would be even
        assert learned.routed.balance_losses[step] == pytest.approx(loss.item(), rel=1e-5)
        model.zero_grad()
        loss.backward()
        expected = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
        )
        model.zero_grad()
        added = parts.optimizer.gradients[step] - without.optimizer.gradients[step]  # type: ignore[attr-defined]
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(added, expected, rtol=1e-3, atol=2e-6)
        router = torch.cat([torch.full((p.numel(),), n.endswith("gate.weight")) for n, p in model.named_parameters()])
        assert added[router].abs().max() > 1e-3
    assert metrics["loss/balance"] == pytest.approx(sum(learned.routed.balance_losses) / 2)


def test_the_load_of_the_experts_is_summed_up_per_layer(tiny: Callable[..., Config], parts_of: Any) -> None:
    learned, metrics = stepped(parts_of(tiny(*MOE)))
    assert learned.routed is not None
    entropies, busiest = [], []
    for layer, counts in enumerate(learned.routed.load_LE.tolist()):
        shares = [n / sum(counts) for n in counts]
        entropies.append(-sum(p * math.log(p) for p in shares if p) / math.log(8))
        busiest.append(8 * max(shares))
        assert metrics[f"routing/load_entropy/{layer}"] == pytest.approx(entropies[-1])
        assert metrics[f"routing/load_max/{layer}"] == pytest.approx(busiest[-1])
    assert len(entropies) == 2
    assert metrics["routing/load_entropy"] == pytest.approx(sum(entropies) / 2)
    assert metrics["routing/load_max"] == pytest.approx(max(busiest))
    assert sum(learned.routed.load_LE[0].tolist()) == 2 * sum(row.length for row in rows_learned(learned))


# --- Whole runs ---

RUNS = {
    "replay old": ("model.build=tiny_moe", "routing.replay=old"),
    "replay sampler, recomputed and balanced": (
        *("model.build=tiny_moe", "routing.replay=sampler", "routing.balance_loss=0.01"),
        *("model.gradient_checkpointing=true", "learner.micro_batch_tokens=80"),
    ),
    "a range that adapts": ("objective.clip_low=auto:0.15", "objective.clip_high=auto:0.15"),
    "one side that adapts, with replay": (
        *("model.build=tiny_moe", "routing.replay=old", "objective.name=grpo"),
        *("objective.clip_low=0.01", "objective.clip_high=auto:0.1"),
    ),
}


def contents(run: Path) -> dict[str, Any]:
    """Everything that must be the same to the byte."""
    found: dict[str, Any] = {p.name: p.read_bytes() for p in sorted((run / "rollouts").iterdir())}
    found["metrics"] = (run / "metrics.jsonl").read_bytes()
    state = json.loads((run / "checkpoints/000004/trainer.json").read_text())
    found["trainer"] = {k: v for k, v in state.items() if k != "offsets"}  # lengths of files with times in them
    for name in ("model.safetensors", "trainer.tensors"):
        weights = load_file(run / "checkpoints/000004" / name)
        found[name] = {k: v.view(torch.uint8).numpy().tobytes() if v.dim() else v.item() for k, v in weights.items()}
    return found


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS.keys())
def test_a_resumed_run_is_the_uninterrupted_run_to_the_byte(
    overrides: tuple[str, ...], tiny: Callable[..., Config], display: Any
) -> None:
    whole = tiny(*overrides, "steps=4", "learner.learning_rate=1e-2", "eval.every=0", run_dir="whole")
    train(whole, display)
    run = Path(whole.run_dir).parent / "cut"
    shutil.copytree(whole.run_dir, run)
    for step in (3, 4):  # forget the end, as if killed during step 3
        shutil.rmtree(run / f"checkpoints/{step:06d}")
    assert resume(run, display, trust_run=True).step == 4
    assert contents(run) == contents(Path(whole.run_dir))
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    if "routing.replay=old" in overrides or "routing.replay=sampler" in overrides:
        assert all(row["routing/flip_fraction"] == 0.0 for row in rows)
        assert rows[-1]["routing/flip_fraction_native"] > 0
        replies = read_jsonl(run / "rollouts/000004.jsonl")
        assert all(set(r["flipped_experts"]) == {0} for r in replies if r["trained"])
        assert all(len(r["flipped_experts"]) == len(r["token_ids"]) for r in replies if r["trained"])


def test_an_engine_that_reports_no_experts_cannot_be_replayed(tiny: Callable[..., Config], parts_of: Any) -> None:
    options = ("model.build=tiny_moe", "rollout.engine=scripted")
    with pytest.raises(ConfigError, match="does not report the experts"):
        parts_of(tiny(*options, "routing.replay=sampler"))
    _, metrics = stepped(
        parts_of(tiny(*options, "routing.replay=old", "rollout.engine_options.default=1 2", run_dir="b"))
    )
    assert metrics["routing/flip_fraction"] == 0.0
    assert metrics["routing/flip_fraction_sampler"] != metrics["routing/flip_fraction_sampler"]  # not measured: NaN

"""Routing records follow their tokens through padding, micro-batches, order, packing and shared prompts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import FAMILIES, in_order, plain_choices
from replay_cases import (
    CPU,
    DOUBLE,
    ROUND,
    ROWS,
    by_row,
    disturb,
    flips,
    forced_alone,
    ids_of,
    planned,
    reply_logp,
    reply_part,
    routing_of,
)
from torch import Tensor

from gspo.learner.forward import plan_logprobs
from gspo.learner.plan import Plan
from gspo.model.micro_batch import MicroBatch, TokenSequence
from gspo.model.routing import find_routers


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
def test_flips_are_counted_per_completion_token_against_the_old_choice(budget: int) -> None:
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
    first = {r for micro in plan.updates[0] for r in micro.sequence_ids}
    assert done.update_N.tolist() == [0 if int(s) in first else 1 for s in plan.sequence_N]


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


class Layout:
    """Tokens of a plan in one long row: a micro-batch made by hand, with the mask and positions it needs."""

    def __init__(self, plan: Plan, *, share_prompt: bool) -> None:
        starts, reply_starts = plan.input_starts, [0]
        for row in plan.sequences:
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

        for r, row in enumerate(plan.sequences):
            inputs = range(starts[r], starts[r] + row.length)
            p = len(row.prompt_ids)
            if not share_prompt or r == 0:
                prompt_at = place(row.prompt_ids, inputs[:p], 0, ())
            assert not share_prompt or row.prompt_ids == plan.sequences[0].prompt_ids
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
            sequence_ids=tuple(range(len(plan.sequences))),
            owners=tuple(range(len(plan.sequences))),
            input_ids=torch.tensor([ids]),
            sequence_N=torch.zeros(len(out["at"]), dtype=torch.long),
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
@pytest.mark.parametrize("share", [False, True], ids=["packed", "one prompt for its completions"])
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
@pytest.mark.parametrize("share", [False, True], ids=["packed", "one prompt for its completions"])
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
    # The probe of a single optimizer step would read separate rows, so compare what the forwards counted.
    assert together.native_N.tolist() == counts

"""Sequences with branches: log-probs, gradients, experts and weights equal those of a plain forward of every branch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from branch_ids import branch_ids
from families import FAMILIES, in_order, plain_choices
from packing_cases import CPU, DOUBLE, ROUND, build_model, forward_backward
from replay_cases import by_row, disturb, forced_alone, routing_of
from torch import Tensor

from gspo.learner.forward import plan_logprobs
from gspo.learner.plan import Plan, make_plan
from gspo.model.micro_batch import TokenSequence
from gspo.model.packed_forward import run_forward, supports_packing
from gspo.types import Branch, Completion, Routes, StopReason

TREES: dict[str, tuple[int, int, tuple[Branch, ...]]] = {
    # (prompt, completion, branches)
    "one path": (5, 9, ()),
    "two": (5, 12, (Branch(start=0, parent=-1, shared=0), Branch(start=5, parent=0, shared=7))),
    "deep": (
        4,
        17,
        (
            Branch(start=0, parent=-1, shared=0),
            Branch(start=6, parent=0, shared=6),
            Branch(start=9, parent=1, shared=7),
            Branch(start=13, parent=0, shared=10),  # the whole of its parent
        ),
    ),
    "inside the prompt": (6, 8, (Branch(start=0, parent=-1, shared=0), Branch(start=3, parent=0, shared=2))),
    "nothing shared": (3, 9, (Branch(start=0, parent=-1, shared=0), Branch(start=4, parent=0, shared=0))),
}
PROMPT = tuple(random.Random(0).choices(range(2, 48), k=6))


def tree(name: str, seed: int) -> TokenSequence:
    """The first token of a branch is given, and one in four of the others."""
    prompt, tokens, branches = TREES[name]
    rng = random.Random(seed)
    starts = {branch.start for branch in branches[1:]}
    return TokenSequence(
        prompt_ids=PROMPT[:prompt],
        completion_ids=tuple(rng.choices(range(2, 48), k=tokens)),
        sampled=tuple(i not in starts and rng.random() > 0.25 for i in range(tokens)),
        branches=branches,
    )


# Some share their prompts, and some have no branches.
ROWS = [tree(name, seed) for seed, name in enumerate([*TREES, "two", "one path"])]


def plan_of(packed: bool, budget: int) -> Plan:
    groups = [len(row.prompt_ids) for row in ROWS]
    return make_plan(ROWS, groups, mini_batches=1, token_budget=budget, pad_id=0, seed="x", packed=packed)


def paths_of(row: TokenSequence) -> list[list[int]]:
    """What each branch reads, by its definition."""
    p = len(row.prompt_ids)
    found: list[list[int]] = []
    for i, branch in enumerate(row.branches or (Branch(start=0, parent=-1, shared=0),)):
        end = row.branches[i + 1].start if i + 1 < len(row.branches) else len(row.completion_ids)
        before = list(range(p)) if branch.parent < 0 else found[branch.parent][: branch.shared]
        found.append(before + list(range(p + branch.start, p + end)))
    return found


def plainly(model: Any) -> tuple[Tensor, Tensor]:
    """Log-probs and the gradient of the loss of `forward_backward`, by one forward per branch without a cache."""
    logp = []
    entropy = []
    for row in ROWS:
        ids = row.prompt_ids + row.completion_ids
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for path in paths_of(row):
            logits = model(input_ids=torch.tensor([[ids[i] for i in path]]), use_cache=False).logits[0] / 0.7
            log_TV = logits.log_softmax(-1)
            for at, i in enumerate(path):
                if i >= len(row.prompt_ids) and i not in found and at:
                    one = log_TV[at - 1]
                    found[i] = one[ids[i]], -(one.exp() * one).sum()
        own = [len(row.prompt_ids) + j for j, sampled in enumerate(row.sampled) if sampled]
        logp += [found[i][0] for i in own]
        entropy += [found[i][1] for i in own]
    logp_N, entropy_N = torch.stack(logp), torch.stack(entropy)
    (torch.linspace(-1, 1, len(logp_N)) * logp_N + 0.1 * entropy_N).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return logp_N.detach().float(), gradient


@pytest.mark.filterwarnings("ignore:log-probs are computed from all logits")
@pytest.mark.parametrize("name", ["dense", "sliding window", "moe"])
def test_values_and_gradients_equal_those_of_a_plain_forward_of_every_branch(name: str) -> None:
    model = {
        "dense": lambda: build_model("qwen3", head_dim=8),
        "sliding window": lambda: build_model("mistral", sliding_window=4),
        "moe": lambda: FAMILIES["qwen3-moe"].model(DOUBLE),
    }[name]()
    logp_N, gradient = plainly(model)
    assert supports_packing(model)
    for packed in (False, True):
        for budget in (10**6, 40, 1):
            found_N, _, found = forward_backward(model, plan_of(packed, budget))
            torch.testing.assert_close(found_N, logp_N, **ROUND)
            torch.testing.assert_close(found, gradient, **ROUND)


def test_a_packed_row_holds_what_branches_share_once() -> None:
    (micro,) = plan_of(True, 10**6).updates[0]
    prompts = {row.prompt_ids for row in ROWS}
    assert micro.input_ids.numel() == sum(map(len, prompts)) + sum(len(row.completion_ids) for row in ROWS)
    for packed in (False, True):
        # Every token of a sequence counts once, in statistics of the routing and in the balance loss.
        micros = plan_of(packed, 10**6).updates[0]
        assert sum(int(micro.times.sum()) for micro in micros) == sum(row.length for row in ROWS)


def test_the_tokens_of_every_branch() -> None:
    row = ROWS[2]
    done = Completion(
        prompt_id="p",
        sample=0,
        token_ids=row.completion_ids,
        text="",
        logp_sampler=(0.0,) * row.sampled_count,
        stop=StopReason.EOS,
        version=0,
        sampled=row.sampled,
        branches=row.branches,
    )
    ids = row.prompt_ids + row.completion_ids
    assert branch_ids(row.prompt_ids, done) == [tuple(ids[i] for i in path) for path in paths_of(row)]


@pytest.mark.parametrize("packed", [False, True])
def test_experts_follow_the_tokens_of_every_branch(packed: bool) -> None:
    family = FAMILIES["qwen3-moe"]
    model, plan = family.model(DOUBLE), plan_of(packed, 10**6)
    if packed:
        assert supports_packing(model)
    routing = routing_of(model, plan, replay="old")
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    seen = by_row(plan, routing.old_ILK)
    for row, found in zip(ROWS, seen, strict=True):
        ids = row.prompt_ids + row.completion_ids
        for path in paths_of(row):
            expected = plain_choices(family, model, [ids[i] for i in path])
            # The experts of a shared prompt are kept for the first of its sequences.
            own = torch.tensor([i >= len(row.prompt_ids) or not packed for i in path])
            assert torch.equal(in_order(found[torch.tensor(path)][own]), expected[own])
    # Training forwards replay them.
    disturb(model)
    for micro in plan.updates[0]:
        with torch.no_grad(), routing.learning(micro) as trace:
            run_forward(model, micro)
        real = micro.input_at.flatten() >= 0
        assert torch.equal(trace.used_ILK[real], routing.old_ILK[micro.input_at.flatten()[real]])
    outcome = routing.outcome(model)
    assert outcome is not None
    assert int(outcome.load_LE.sum()) == sum(row.length for row in ROWS) * family.layers * family.top_k


def test_tokens_that_no_forward_has_read_choose_their_own_experts() -> None:
    model = FAMILIES["qwen3-moe"].model(DOUBLE)
    row = ROWS[2]
    plan = make_plan([row], [0], mini_batches=1, token_budget=10**6, pad_id=0, seed="")
    chosen = bytes((3 * i) % 8 if i % 2 else (3 * i + 1) % 8 for i in range((row.length - 1) * 2 * 2))
    routing = routing_of(model, plan, [Routes(experts=chosen, layers=2, top_k=2, width=1)], replay="sampler")
    plan_logprobs(model, plan, 1.0, CPU, routed=routing.old)
    given_ILK = torch.tensor([*chosen, 0, 0, 0, 0]).view(-1, 2, 2)
    paths = paths_of(row)
    # The first branch was read to its end, because the last one continues it; the others end with a sampled token.
    unread = {path[-1] for path in paths[1:]}
    known = torch.tensor([i not in unread for i in range(row.length)])
    assert torch.equal(routing.known_I, known)
    for path in paths:
        at = torch.tensor(path)
        ids = row.prompt_ids + row.completion_ids
        alone = TokenSequence(prompt_ids=tuple(ids[i] for i in path), completion_ids=())
        _, used = forced_alone(model, alone, given_ILK[at], known[at])
        assert torch.equal(in_order(routing.old_ILK[at]), in_order(used))

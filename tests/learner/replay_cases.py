"""Plans, records and single steps for the tests of routing replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from fake_optimizer import FakeOptimizer
from families import blocks_of, router_of
from torch import Tensor

from gspo.clock import Clock
from gspo.learner.optimizer import Update
from gspo.learner.plan import Plan, make_plan
from gspo.learner.routing_replay import RecordedRouting
from gspo.model.micro_batch import TokenSequence
from gspo.model.routing import ForcedExperts, find_routers
from gspo.record.metrics import step_metrics
from gspo.reduction import combined
from gspo.rollout.gather import RolloutState
from gspo.step import LearnResult, RunContext, collect, learn
from gspo.types import Group, Routes

CPU = torch.device("cpu")
DOUBLE = torch.float64
ROUND: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
"""Norms and gates round to float32 inside a float64 model."""


def ids_of(length: int, start: int) -> tuple[int, ...]:
    return tuple((start * 11 + 3 * j + j * j) % 46 + 2 for j in range(length))


def row_of(prompt: int, completion: int, start: int) -> TokenSequence:
    return TokenSequence(prompt_ids=ids_of(prompt, start), completion_ids=ids_of(completion, start + 5))


ROWS = [row_of(1, 1, 0), row_of(9, 12, 1), row_of(3, 2, 2), row_of(20, 5, 3), row_of(2, 7, 4), row_of(1, 9, 5)]
"""Very different lengths, so that most of a padded matrix is padding."""


def planned(
    rows: Sequence[TokenSequence] = ROWS, *, budget: int = 10**9, steps: int = 1, pad: int = 0, seed: str = ""
) -> Plan:
    return make_plan(rows, list(range(len(rows))), mini_batches=steps, token_budget=budget, pad_id=pad, seed=seed)


def routing_of(
    model: Any, plan: Plan, sampled: Any = None, *, replay: str = "off", balance: float = 0.0
) -> RecordedRouting:
    routers = find_routers(model)
    assert routers is not None
    reported = sampled or [None] * len(plan.sequences)
    return RecordedRouting(routers, plan, reported, replay=replay, balance=balance, device=torch.device("cpu"))


def disturb(model: Any, amount: float = 0.3, seed: int = 1) -> None:
    """Move the routers, so that they choose otherwise by themselves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in blocks_of(model):
            weight = router_of(block).weight
            weight += amount * torch.randn(weight.shape, generator=generator).to(weight.dtype)


def by_row(plan: Plan, of_tokens: Tensor) -> list[Tensor]:
    """Values by input token of the plan, as one tensor per row."""
    return list(of_tokens.split([row.length for row in plan.sequences]))


def flips(a: Tensor, b: Tensor) -> list[int]:
    """Experts of each token in `a` but not in `b`, counted with sets."""
    return [
        sum(len(set(x) - set(y)) for x, y in zip(p, q, strict=True))
        for p, q in zip(a.long().tolist(), b.long().tolist(), strict=True)
    ]


def reply_part(row: TokenSequence) -> slice:
    """The positions whose outputs predict the completion."""
    return slice(len(row.prompt_ids) - 1, row.length - 1)


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


def altered(routes: Routes | None, experts: int, shift: int = 1) -> Routes:
    assert routes is not None
    assert routes.width == 1
    return replace(routes, experts=bytes((b + shift) % experts for b in routes.experts))


def unpacked(routes: Routes) -> Tensor:
    """From the definition in types.py, not by the code that packed it."""
    step = routes.width
    numbers = [int.from_bytes(routes.experts[i : i + step], "little") for i in range(0, len(routes.experts), step)]
    return torch.tensor(numbers).view(-1, routes.layers, routes.top_k)


def reported(
    rows: Sequence[TokenSequence], *, layers: int = 2, top_k: int = 2, less: int = 1, expert: int = 3
) -> list[Routes]:
    counts = [(row.length - less) * layers * top_k for row in rows]
    numbers = [bytes((expert + i) % 8 if expert < 8 else expert for i in range(n)) for n in counts]
    return [Routes(experts=b, layers=layers, top_k=top_k, width=1) for b in numbers]


MOE = ("model.build=tiny_moe", "learner.learning_rate=3e-2", "objective.name=gspo")


class GradientRecorder(FakeOptimizer):
    """Stands in for the optimizer: keeps the gradient of every step and changes nothing."""

    def __init__(self, model: Any) -> None:
        self.model, self.updates = model, 0
        self.gradients: list[Tensor] = []

    def step(self, *, loss_finite: bool, **weights: Any) -> Update:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        self.gradients.append(torch.cat([g.flatten() for g in grads]).clone())
        self.model.zero_grad()
        return Update(applied=True, grad_norm=float(self.gradients[-1].norm()), learning_rate=0.0)


Stepped = tuple[LearnResult, dict[str, Any]]


def stepped(
    parts: RunContext, change: Callable[[tuple[Group, ...]], Sequence[Group]] = lambda groups: groups
) -> Stepped:
    collected = collect(parts, RolloutState(), clock=Clock())
    learned = learn(parts, change(collected.rollouts.groups), step=1)
    assert learned is not None
    return learned, combined([step_metrics(parts.objective, collected, learned)])


def with_altered_routes(groups: Sequence[Group]) -> list[Group]:
    return [replace(g, completions=[replace(c, routes=altered(c.routes, 8)) for c in g.completions]) for g in groups]


def rows_learned(learned: LearnResult) -> list[TokenSequence]:
    return [
        TokenSequence(prompt_ids=c.prompt.token_ids, completion_ids=c.completion.token_ids) for c in learned.samples
    ]


REPLAYS = {"off": (), "old": ("routing.replay=old",), "sampler": ("routing.replay=sampler",)}

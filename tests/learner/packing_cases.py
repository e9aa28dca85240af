"""Sequences and models for the tests of sequence packing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from families import BASE
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.learner.forward import completion_logprobs
from gspo.learner.plan import Plan, make_plan
from gspo.model.micro_batch import MicroBatch, TokenSequence

CPU, DOUBLE = torch.device("cpu"), torch.float64
ROUND: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
"""Tolerance: norms and gates round to float32 even inside a float64 model."""


def rows_of(groups: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> tuple[list[TokenSequence], list[int]]:
    """Sequences and their groups, from (prompt length, completion lengths)."""
    rng = random.Random(seed)
    rows = []
    of = []
    for number, (prompt, completions) in enumerate(groups):
        ids = tuple(rng.randrange(2, 48) for _ in range(prompt))
        rows += [
            TokenSequence(prompt_ids=ids, completion_ids=tuple(rng.randrange(2, 48) for _ in range(n)))
            for n in completions
        ]
        of += [number] * len(completions)
    return rows, of


GROUPS = [(6, (3, 1, 8, 5)), (1, (2, 9)), (11, (4, 4, 1)), (3, (7,))]
ROWS, OF = rows_of(GROUPS)


def plan_of(
    packed: bool, *, budget: int = 10**6, steps: int = 1, seed: str = "x", rows: Sequence[TokenSequence] = ROWS
) -> Plan:
    return make_plan(rows, OF[: len(rows)], mini_batches=steps, token_budget=budget, pad_id=0, seed=seed, packed=packed)


def build_model(kind: str, dtype: torch.dtype = DOUBLE, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, **fields})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def forward_backward(model: Any, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and the gradient of a loss that weights every token differently."""
    weight_N = torch.linspace(-1, 1, plan.tokens)
    logp_N = torch.zeros(plan.tokens)
    entropy_N = torch.zeros(plan.tokens)
    for micro in plan.updates[0]:
        logp, entropy = completion_logprobs(model, micro.to(model.device), 0.7, entropy_gradient=True)
        (weight_N[micro.at_N].to(model.device) * logp + 0.1 * entropy).sum().backward()
        logp_N[micro.at_N] = logp.detach().to(CPU, torch.float32)
        entropy_N[micro.at_N] = entropy.detach().to(CPU, torch.float32)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return logp_N, entropy_N, gradient.to(CPU)


def long_micro_batch(seed: int) -> MicroBatch:
    rng = random.Random(seed)
    groups = [(rng.randrange(1, 90), [rng.randrange(1, 60) for _ in range(rng.randrange(1, 6))]) for _ in range(5)]
    rows, of = rows_of(groups, seed)
    plan = make_plan(rows, of, mini_batches=1, token_budget=10**6, pad_id=0, seed="", packed=True)
    return plan.updates[0][0]

"""Forward and backward of the learner on one GPU: padded and packed, plain and compiled, small and large models.

In: a CUDA device. Out: one table per model: milliseconds, tokens per second, MFU, peak memory, and the seconds of the
first pass, which compiles. Invariant: every variant of a table computes the same gradients, up to rounding.

MFU counts 2 operations per active parameter and token in the forward pass, 2 for the gradient of the input, and 2 for
the gradient of the weight where the weight is trained; attention likewise, over the pairs of tokens that attend;
recomputation does not count. It is relative to `PEAK`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_decode import CUDA, DENSE, LARGE, VOCABULARY, build_model
from gpu_measure import Cost, Variant, measure, show
from torch import Tensor

from gspo.config import LearnerConfig, LoraConfig
from gspo.learner.forward import _from_logits, completion_logprobs, plan_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.learner.plan import Plan, make_plan
from gspo.model.adapter import attach
from gspo.model.compiled_layers import request_compilation
from gspo.model.gradient_checkpointing import recompute_activations
from gspo.model.micro_batch import MicroBatch, TokenSequence
from gspo.model.packed_forward import supports_packing

PROMPT, COMPLETION, COMPLETIONS, GROUPS = 512, 512, 16, 4
"""Completions of uneven length, `COMPLETION` tokens on average."""
PEAK = 989e12
"""bf16 operations per second according to the data sheet of an H100 or H200."""


def uneven_rows() -> tuple[list[TokenSequence], list[int]]:
    """The sequences of the benchmark, and the group of each."""
    rng = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    rows: list[TokenSequence] = []
    for _ in range(GROUPS):
        prompt = ids(PROMPT)
        rows += [
            TokenSequence(prompt_ids=prompt, completion_ids=ids(rng.randrange(64, 2 * COMPLETION - 64)))
            for _ in range(COMPLETIONS)
        ]
    return rows, [i // COMPLETIONS for i in range(len(rows))]


def plan_of(budget: int, *, packed: bool) -> Plan:
    rows, groups = uneven_rows()
    return make_plan(rows, groups, mini_batches=1, token_budget=budget, pad_id=0, seed="", packed=packed)


def operations(model: Any, plan: Plan) -> float:
    """Floating-point operations of a forward and backward over the tokens of the plan, without padding."""
    config = model.config
    active = config.num_experts_per_tok / config.num_experts if getattr(config, "num_experts", 0) else 1.0
    forward = trained = 0.0
    for name, weight in model.named_parameters():
        if ".layers." in name and "lora_" not in name:
            size = weight.numel() * (active if ".experts." in name else 1.0)
            forward += size
            trained += size if weight.requires_grad else 0.0
    head = config.hidden_size * VOCABULARY
    tokens = sum(int((m.times > 0).sum()) for m in plan.updates[0])
    shared = sum(len(row.prompt_ids) ** 2 for row in plan.sequences) // 2
    if plan.packed:
        shared = sum(len(plan.sequences[o].prompt_ids) ** 2 for m in plan.updates[0] for o in set(m.owners)) // 2
    pairs = shared + sum(
        len(r.completion_ids) * (len(r.prompt_ids) + len(r.completion_ids) // 2) for r in plan.sequences
    )
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    head_trained = head if model.get_output_embeddings().weight.requires_grad else 0
    products = 2 * tokens * (2 * forward + trained) + 2 * plan.tokens * (2 * head + head_trained)
    return products + 3.0 * attention


def learn(model: Any, plan: Plan, logprobs: Callable[..., tuple[Tensor, Tensor]] = completion_logprobs) -> Variant:
    """A forward and backward over all micro-batches of the plan."""
    gain_N = torch.randn(plan.tokens, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0)) / plan.tokens

    def variant() -> None:
        for cpu_batch in plan.updates[0]:
            micro = cpu_batch.to(CUDA)
            (gain_N[micro.at_N] * logprobs(model, micro, 1.0)[0]).sum().backward()
        model.zero_grad()

    return variant


def first_pass(variant: Variant) -> float:
    """Seconds of the first pass, which compiles."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    variant()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def bench_learn_8b(repeats: int) -> None:
    _bench_large(repeats, "dense, Qwen3-8B shape", 16384)


def bench_learn_30b(repeats: int) -> None:
    _bench_large(repeats, "MoE, Qwen3-30B-A3B shape", 10240)


def bench_learn(repeats: int, budget: int = 20480) -> None:
    models = {name: build_model("qwen3", DENSE) for name in ("plain", "checkpointed", "compiled", "both")}
    for name in ("checkpointed", "both"):
        recompute_activations(models[name])
    for model in models.values():
        Optimizer(model, LearnerConfig(), 1)  # sets up float32 gradients, as in a run
    assert all(supports_packing(model) for model in models.values())
    for name in ("compiled", "both"):
        request_compilation(models[name], "on")
    padded, packed, wide = plan_of(budget, packed=False), plan_of(budget, packed=True), plan_of(2 * budget, packed=True)

    def all_logits(model: Any, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return _from_logits(model, micro, temperature, False)

    variants = {
        "padded, all logits": (learn(models["plain"], padded, all_logits), padded),
        "padded, fused_linear_logprobs": (learn(models["plain"], padded), padded),
        "packed, shared prompt, fused_linear_logprobs": (learn(models["plain"], packed), packed),
        "the same, gradient checkpointing": (learn(models["checkpointed"], packed), packed),
        "packed, compiled layers": (learn(models["compiled"], packed), packed),
        "the same, micro-batches twice as large": (learn(models["compiled"], wide), wide),
        "compiled layers, gradient checkpointing": (learn(models["both"], packed), packed),
    }
    first = {name: first_pass(variant) for name, (variant, _) in variants.items()}
    costs = measure({name: variant for name, (variant, _) in variants.items()}, repeats)
    _show(
        "Qwen3-0.6B shape, all weights",
        models["plain"],
        {name: plan for name, (_, plan) in variants.items()},
        costs,
        first,
    )
    model = models["plain"]
    found = {
        "padded": plan_logprobs(model, padded, 1.0, CUDA)[0],
        "packed": plan_logprobs(model, packed, 1.0, CUDA)[0],
        "compiled": plan_logprobs(models["compiled"], packed, 1.0, CUDA)[0],
    }
    exact = plan_logprobs(model.float(), padded, 1.0, CUDA)[0]
    for name, logp in found.items():
        difference = float((logp - exact).abs().mean())
        print(f"log-probs, {name} in bf16 against float32: mean |difference| {difference:.1e}")


def _bench_large(repeats: int, name: str, budget: int) -> None:
    """LoRA on every linear layer of attention and MLP (not on experts), all base weights frozen."""
    kind, fields = LARGE[name]
    model = build_model(kind, fields)
    attach(model, LoraConfig(rank=16), base="", seed=0)
    model.to(CUDA)
    assert supports_packing(model)
    plan = plan_of(budget, packed=True)
    plain = learn(model, plan)
    first = {"packed": first_pass(plain)}
    costs = measure({"packed": plain}, min(2, repeats))
    request_compilation(model, "on")
    compiled = learn(model, plan)
    first["packed, compiled layers"] = first_pass(compiled)
    costs |= measure({"packed, compiled layers": compiled}, repeats)
    _show(f"{name}, LoRA rank 16", model, dict.fromkeys(costs, plan), costs, first)


def _show(title: str, model: Any, plans: dict[str, Plan], costs: dict[str, Cost], first: dict[str, float]) -> None:
    real = sum(row.length for row in next(iter(plans.values())).sequences)
    slowest = next(iter(costs.values())).ms

    def note(name: str, cost: Cost) -> str:
        used = operations(model, plans[name]) / (cost.ms / 1e3) / PEAK
        return (
            f"{real / cost.ms:>6.1f}k tok/s, {slowest / cost.ms:.2f} x, MFU {used:.1%}, "
            f"first pass {first[name]:.1f} s, {len(plans[name].updates[0])} micro-batches"
        )

    show(
        f"Training, forward + backward: {title}, bf16, {GROUPS} prompts of {PROMPT} x {COMPLETIONS} completions of "
        f"{COMPLETION} on average, {real} tokens in sequences",
        costs,
        note,
    )

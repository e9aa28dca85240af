"""The learner's kernels on one GPU, compared with the methods they replace.

In: a CUDA device. Out: one table per part: milliseconds (median of `--repeats`, variants interleaved, after warm-ups),
peak memory beyond what was allocated before, and the error of the gradients against float64. Invariant: every variant
of a table gets the same input.

    python benchmarks/gpu.py [head] [decode] [large] [learn] [step] [--repeats 5]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from gpu_decode import CUDA, DENSE, VOCABULARY, bench_decode, bench_large, build_model
from gpu_peers import peer_heads
from gpu_step import bench_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gspo.config import LearnerConfig
from gspo.learner.forward import _from_logits, completion_logprobs, plan_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.learner.plan import Plan, make_plan
from gspo.model.kernels.fused_linear_logprobs import fused_linear_logprobs
from gspo.model.micro_batch import MicroBatch, TokenSequence
from gspo.model.packed_forward import supports_packing

ROWS, SIZE, SEQUENCES = 16 * 1024, 2048, 20
"""The LM head of Qwen3-30B-A3B on 16 x 1024 tokens; 20 sequences, so that 3 of them are 15 %."""
Variant = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and memory of one variant."""

    ms: float
    extra: float
    """Peak memory beyond what was allocated before, in bytes."""


def measure(variants: dict[str, Variant], repeats: int) -> dict[str, Cost]:
    """Time and memory of each variant.

    Repeats cycle through the variants, so that a card that warms up slows all equally. Each timed run follows an
    untimed run of the same variant, so that the power draw of the previous variant does not affect it.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in variants}
    extra: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, variant in variants.items():
            variant()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            variant()
            end.record()
            torch.cuda.synchronize()
            extra[name] = torch.cuda.max_memory_allocated() - before
            if repeat:
                times_ms[name].append(start.elapsed_time(end))
    return {name: Cost(ms=statistics.median(times), extra=extra[name]) for name, times in times_ms.items()}


def show(title: str, costs: dict[str, Cost], note: Callable[[str, Cost], str] = lambda name, cost: "") -> None:
    print(f"\n{title}")
    print(f"{'variant':<66} {'ms':>8} {'extra GiB':>10}")
    for name, cost in costs.items():
        print(f"{name:<66} {cost.ms:>8.1f} {cost.extra / 2**30:>10.2f}  {note(name, cost)}", flush=True)


# --- LM head log-probs ---


def float32_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def row_by_row(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """TRL's method: logits in bfloat16, log_softmax one sequence at a time."""
    logits = hidden @ weight.T
    parts = zip(logits.split(ROWS // 16), target.split(ROWS // 16), strict=True)
    return torch.cat([part.log_softmax(-1).gather(-1, t[:, None])[:, 0] for part, t in parts])


def checkpointed(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    parts = zip(hidden.split(1024), target.split(1024), strict=True)
    return torch.cat([checkpoint(float32_logits, h, weight, t, use_reentrant=False) for h, t in parts])  # type: ignore[misc]


def gain_of(rows: int, clipped: int) -> Tensor:
    """The gradient that a sequence-level objective gives each token, with `clipped` sequences at zero."""
    gain_B = torch.randn(SEQUENCES, device=CUDA)
    gain_B[:clipped] = 0
    return gain_B.repeat_interleave(-(-rows // SEQUENCES))[:rows] / rows


def ceilings(hidden: Tensor, weight: Tensor, repeats: int) -> dict[str, Cost]:
    """The matrix products alone, by cuBLAS, with all logits stored."""
    logits = torch.randn(ROWS, VOCABULARY, device=CUDA, dtype=torch.bfloat16)
    h, w = hidden.detach(), weight.detach()
    h_gradient, w_gradient = torch.empty_like(h), torch.empty_like(w)

    def products(count: int) -> Variant:
        def variant() -> None:
            for _ in range(count - 2):
                torch.mm(h, w.T, out=logits)
            torch.mm(logits, w, out=h_gradient)
            torch.mm(logits.T, h, out=w_gradient)

        return variant

    return measure(
        {"ceiling: 4 products by cuBLAS": products(4), "ceiling: 3 products, logits stored": products(3)}, repeats
    )


def bench_head(repeats: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, SIZE, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(VOCABULARY, SIZE, device=CUDA) * 0.05).bfloat16().requires_grad_()
    target = torch.randint(VOCABULARY, (ROWS,), device=CUDA)
    whole, clipped = gain_of(ROWS, 0), gain_of(ROWS, 3)
    # Gradients are allocated in advance for every variant, so that they do not count as extra memory.
    buffer = torch.zeros(VOCABULARY, SIZE, device=CUDA)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)

    def pytorch(head: Callable[..., Tensor]) -> Variant:
        def variant() -> None:
            hidden.grad, weight.grad = None, None
            (whole * head(hidden, weight, target)).sum().backward()

        return variant

    def fused(gain: Tensor) -> Variant:
        def variant() -> None:
            hidden.grad = None
            logp, _ = fused_linear_logprobs(hidden, weight, target, 1.0, weight_gradient=buffer)
            (gain * logp).sum().backward()

        return variant

    costs = ceilings(hidden, weight, repeats)
    variants = {
        "float32 logits, log_softmax, gather": pytorch(float32_logits),
        "bf16 logits, log_softmax row by row (TRL's method)": pytorch(row_by_row),
        "chunks of 1024 tokens under activation checkpointing": pytorch(checkpointed),
        "fused_linear_logprobs": fused(whole),
        "fused_linear_logprobs, 15 % of sequences clipped": fused(clipped),
    }
    variants |= peer_heads(hidden, weight, target, whole, 16)
    costs |= measure(variants, repeats)
    ceiling = costs["ceiling: 4 products by cuBLAS"].ms
    show(
        f"LM head, forward + backward: {ROWS} tokens, hidden {SIZE}, vocabulary {VOCABULARY}, bf16",
        costs,
        lambda name, cost: f"{cost.ms / ceiling:.2f} x ceiling",
    )
    head_errors()


def head_errors(rows: int = 1000) -> None:
    """Errors against float64, on fewer rows, with logits whose spread is like a trained model's."""
    hidden = torch.randn(rows, SIZE, device=CUDA, dtype=torch.bfloat16)
    weight = (torch.randn(VOCABULARY, SIZE, device=CUDA) * 0.05).bfloat16()
    target, gain = torch.randint(VOCABULARY, (rows,), device=CUDA), gain_of(rows, 3)
    heads: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
        "float64": (lambda h, w, t: (h @ w.T).log_softmax(-1).gather(-1, t[:, None])[:, 0], torch.float64),
        "bf16 logits (PyTorch)": (
            lambda h, w, t: (h @ w.T).log_softmax(-1).gather(-1, t[:, None])[:, 0],
            torch.bfloat16,
        ),
        "float32 logits": (float32_logits, torch.bfloat16),
        "fused_linear_logprobs": (lambda h, w, t: fused_linear_logprobs(h, w, t, 1.0)[0], torch.bfloat16),
    }
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, (head, dtype) in heads.items():
        h, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        logp = head(h, w, target)
        (gain * logp).sum().backward()
        assert h.grad is not None
        assert w.grad is not None
        found[name] = (logp.detach().double(), h.grad.double(), w.grad.double())
    print(f"\n{'error against float64, of norm':<40} {'logp':>9} {'d hidden':>9} {'d weight':>9}")
    exact = found.pop("float64")
    for name, parts in found.items():
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(parts, exact, strict=True)]
        print(f"{name:<40} " + " ".join(f"{e:>9.2e}" for e in errors), flush=True)


# --- the learning forward and backward ---


PROMPT, COMPLETION, COMPLETIONS, GROUPS = 512, 512, 16, 4
"""Completions of uneven length, `COMPLETION` tokens on average."""
PEAK = 989e12
"""bf16 operations per second according to the data sheet of an H100 or H200."""


def qwen3(checkpointing: bool = False) -> Any:
    """A model of Qwen3-0.6B's shape with random weights."""
    model = build_model("qwen3", DENSE)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return model


def uneven_rows() -> tuple[list[TokenSequence], list[int]]:
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


def operations(model: Any, plan: Plan) -> float:
    """Floating-point operations of a forward and backward over the tokens of the plan, without padding."""
    config = model.config
    body = sum(p.numel() for p in model.model.layers.parameters())
    tokens = sum(int((m.times > 0).sum()) for m in plan.updates[0])
    shared = sum(len(row.prompt_ids) ** 2 for row in plan.sequences) // 2
    if plan.packed:
        shared = sum(len(plan.sequences[o].prompt_ids) ** 2 for m in plan.updates[0] for o in set(m.owners)) // 2
    pairs = shared + sum(
        len(r.completion_ids) * (len(r.prompt_ids) + len(r.completion_ids) // 2) for r in plan.sequences
    )
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 3.0 * (2 * body * tokens + 2 * config.hidden_size * VOCABULARY * plan.tokens + attention)


def bench_learn(repeats: int, budget: int = 20480) -> None:
    rows, groups = uneven_rows()
    real = sum(row.length for row in rows)
    models = {"plain": qwen3(), "checkpointed": qwen3(checkpointing=True)}
    for model in models.values():
        Optimizer(model, LearnerConfig(), 1)  # sets up float32 gradients, as in a run
    assert all(supports_packing(model) for model in models.values())
    settings: dict[str, Any] = {"mini_batches": 1, "token_budget": budget, "pad_id": 0, "seed": ""}
    padded, packed = (make_plan(rows, groups, **settings, packed=packed) for packed in (False, True))
    gain_N = torch.randn(padded.tokens, device=CUDA) / padded.tokens

    def learn(name: str, plan: Plan, logprobs: Callable[..., tuple[Tensor, Tensor]]) -> Variant:
        def variant() -> None:
            for cpu_batch in plan.updates[0]:
                micro = cpu_batch.to(CUDA)
                (gain_N[micro.at_N] * logprobs(models[name], micro, 1.0)[0]).sum().backward()
            models[name].zero_grad()

        return variant

    def all_logits(model: Any, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return _from_logits(model, micro, temperature, False)

    variants = {
        "padded, all logits": (learn("plain", padded, all_logits), padded),
        "padded, fused_linear_logprobs": (learn("plain", padded, completion_logprobs), padded),
        "packed, shared prompt, fused_linear_logprobs": (learn("plain", packed, completion_logprobs), packed),
        "the same, gradient checkpointing": (learn("checkpointed", packed, completion_logprobs), packed),
    }
    costs = measure({name: variant for name, (variant, _) in variants.items()}, repeats)
    slowest = costs["padded, all logits"].ms

    def note(name: str, cost: Cost) -> str:
        used = operations(models["plain"], variants[name][1]) / (cost.ms / 1e3) / PEAK
        return f"{real / cost.ms:>6.1f}k tok/s, {slowest / cost.ms:.2f} x, MFU {used:.0%}"

    show(
        f"Training, forward + backward: Qwen3-0.6B shape, bf16, {GROUPS} prompts of {PROMPT} x {COMPLETIONS} "
        f"completions of {COMPLETION} on average, {real} tokens in sequences, "
        f"{packed.updates[0][0].input_ids.numel()} in the first packed micro-batch",
        costs,
        note,
    )
    model = models["plain"]
    found = {name: plan_logprobs(model, plan, 1.0, CUDA)[0] for name, plan in (("padded", padded), ("packed", packed))}
    exact = plan_logprobs(model.float(), padded, 1.0, CUDA)[0]
    for name, logp in found.items():
        difference = float((logp - exact).abs().mean())
        print(f"log-probs, {name} in bf16 against float32: mean |difference| {difference:.1e}")


PARTS = {"head": bench_head, "decode": bench_decode, "large": bench_large, "learn": bench_learn, "step": bench_step}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="parts to run (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu needs a CUDA device, and this machine has none")
        return 1
    import triton

    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {triton.__version__}, "
        f"transformers {transformers.__version__}"
    )
    for name in arguments.parts or PARTS:
        PARTS[name](arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())

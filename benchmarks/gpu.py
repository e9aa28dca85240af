"""The learner's kernels on one GPU, compared with the methods they replace.

In: a CUDA device. Out: one table per part: milliseconds (median of `--repeats`, variants interleaved, after warm-ups),
peak memory beyond what was allocated before, and the error of the gradients against float64. Invariant: every variant
of a table gets the same input.

    python benchmarks/gpu.py [head] [decode] [large] [learn] [learn8b] [learn30b] [step] [--repeats 5] [--vllm SITE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from gpu_decode import CUDA, VOCABULARY, bench_decode, bench_large
from gpu_learn import bench_learn, bench_learn_8b, bench_learn_30b
from gpu_measure import Cost, Variant, measure, show
from gpu_peers import peer_heads
from gpu_step import bench_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gspo.model.kernels.fused_linear_logprobs import fused_linear_logprobs

ROWS, SIZE, SEQUENCES = 16 * 1024, 2048, 20
"""The LM head of Qwen3-30B-A3B on 16 x 1024 tokens; 20 sequences, so that 3 of them are 15 %."""


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


PARTS: dict[str, Callable[..., None]] = {
    "head": bench_head,
    "decode": bench_decode,
    "large": bench_large,
    "learn": bench_learn,
    "learn8b": bench_learn_8b,
    "learn30b": bench_learn_30b,
    "step": bench_step,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="parts to run (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", type=Path, help="folder with vLLM: measures it next to the local engine")
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
        if name in ("decode", "large"):
            PARTS[name](arguments.repeats, arguments.vllm)
        else:
            PARTS[name](arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())

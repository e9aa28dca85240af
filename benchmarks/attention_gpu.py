"""The Triton kernels of packed attention on one GPU: errors, reproducibility, and the time of each tiling.

In: a CUDA device. Out, printed as it goes: relative errors against float32 attention over separate sequences; whether
five runs are bitwise identical; milliseconds of candidate tilings per kernel (median
after warm-ups) with registers, spills and shared memory; and a table of the best ones for three model shapes.
Invariant: a tiling that does not compile or run is reported and skipped. After `--seconds`, only the table follows.

    python benchmarks/attention_gpu.py [--seconds 90]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.learner.plan import make_plan
from gspo.model.kernels import packed_attention as attention
from gspo.model.micro_batch import Packing, TokenSequence

CUDA = torch.device("cuda")
SIZE = 128
SHAPES = {"0.6B, 16/8 heads": (16, 8, 20480), "8B, 32/8 heads": (32, 8, 16384), "30B-A3B, 32/4 heads": (32, 4, 10240)}
"""Query heads, kv heads and tokens per micro-batch."""
# Queries, keys, warps, stages; the most promising first.
CANDIDATES: dict[str, list[tuple[int, int, int, int]]] = {
    "forward": [
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (128, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 8, 2),
        (64, 64, 4, 2),
        (128, 128, 8, 3),
    ],
    "dq": [
        (128, 64, 8, 2),
        (64, 64, 4, 2),
        (128, 64, 8, 3),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
        (64, 128, 4, 2),
        (128, 128, 8, 1),
        (64, 32, 4, 3),
    ],
    "dkdv": [
        (64, 128, 8, 2),
        (64, 64, 4, 2),
        (32, 128, 8, 3),
        (64, 128, 8, 3),
        (128, 64, 8, 2),
        (32, 64, 4, 3),
        (32, 128, 8, 2),
        (64, 64, 4, 3),
    ],
}
MATMULS = {"forward": 2, "dq": 3, "dkdv": 4}
"""Matrix products per pair of query and key."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A packed row with inputs."""

    packing: Packing
    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    pairs: int
    """Pairs of query and key, per head."""

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    @property
    def by_rows(self) -> list[Tensor]:
        """Query, key and value as [I, heads, size]."""
        return [t[0].transpose(0, 1) for t in (self.query, self.key, self.value)]


def sequences(groups: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[TokenSequence], list[int]]:
    rows, of = [], []
    for number, (prompt, completions) in enumerate(groups):
        rows += [TokenSequence(prompt_ids=(number,) * prompt, completion_ids=(1,) * n) for n in completions]
        of += [number] * len(completions)
    return rows, of


def make_case(
    groups: Sequence[tuple[int, Sequence[int]]], budget: int, heads: tuple[int, int], size: int, dtype: torch.dtype
) -> Case:
    rows, of = sequences(groups)
    plan = make_plan(rows, of, mini_batches=1, token_budget=budget, pad_id=0, seed="", packed=True)
    micro = max(plan.updates[0], key=lambda m: m.input_ids.numel())
    assert micro.packing is not None
    length = micro.input_ids.numel()
    torch.manual_seed(length)
    # Views of [I, heads * size], as the projections of a layer.
    made = [torch.randn(length, h, size, device=CUDA).to(dtype) for h in (heads[0], heads[1], heads[1], heads[0])]
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in made[:3])
    pairs = sum(len(rows[o].prompt_ids) * (len(rows[o].prompt_ids) + 1) // 2 for o in set(micro.owners))
    for s in micro.sequence_ids:
        count = len(rows[s].completion_ids)
        pairs += count * (count + 1) // 2 + count * len(rows[s].prompt_ids)
    return Case(
        packing=micro.packing.to(CUDA), query=query, key=key, value=value, gradient=made[3].unsqueeze(0), pairs=pairs
    )


def uneven(heads: tuple[int, int], budget: int) -> Case:
    """The packed row of `benchmarks/gpu.py`: prompts of 512, 16 completions each of 64 to 960 tokens."""
    rng = random.Random(0)
    groups = [(512, [rng.randrange(64, 960) for _ in range(16)]) for _ in range(4)]
    return make_case(groups, budget, heads, SIZE, torch.bfloat16)


# --- errors and reproducibility ---


def ours(case: Case) -> Callable[..., Tensor]:
    return lambda q, k, v: attention.shared_prompt_attention(q, k, v, case.scale, case.packing.blocks)


def exact(case: Case) -> Callable[..., Tensor]:
    return lambda q, k, v: attention._as_rows(q, k, v, case.scale, case.packing)


def run(case: Case, function: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    given = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (case.query, case.key, case.value)]
    output = function(*given)
    return [output.detach(), *torch.autograd.grad(output, given, case.gradient.to(output.dtype))]


def check(label: str, case: Case) -> bool:
    """Errors of output, dq, dk and dv, and five runs."""
    expected = run(case, exact(case), torch.float32)

    def errors(found: list[Tensor]) -> list[float]:
        return [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]

    found = run(case, ours(case))
    wrong = errors(found)
    same = all(torch.equal(a, b) for _ in range(4) for a, b in zip(found, run(case, ours(case)), strict=True))
    # The rounding of the inputs alone gives two thirds of this in bfloat16.
    accurate = all(error <= (4e-3 if found[0].dtype == torch.bfloat16 else 5e-4) for error in wrong)
    print(
        f"{label:<44} {' '.join(f'{e:.1e}' for e in wrong)}  "
        f"{'ok' if accurate else 'LARGE ERROR'}, 5 runs {'bitwise identical' if same else 'DIFFER'}",
        flush=True,
    )
    return accurate and same


def random_case(seed: int, heads: tuple[int, int], size: int, dtype: torch.dtype) -> Case:
    rng = random.Random(seed)
    groups = [
        (rng.choice([1, 64, 128, rng.randrange(1, 700)]), [rng.randrange(1, 500) for _ in range(rng.randrange(1, 9))])
        for _ in range(3)
    ]
    return make_case(groups, 10**6, heads, size, dtype)


def check_window(window: int = 100) -> bool:
    """Against float32 attention with a dense mask."""
    case = random_case(5, (4, 2), SIZE, torch.bfloat16)
    rows = len(case.packing.place_I)
    visible = torch.zeros(rows, rows, dtype=torch.bool, device=CUDA)
    for row in case.packing.rows_RT:
        # Padding is 0, which otherwise is only the first token of the first prompt.
        length = int((row != 0).sum()) + int(row[0] == 0)
        at = row[:length]
        distance = torch.arange(length, device=CUDA)
        distance = distance[:, None] - distance
        visible[at[:, None], at] = (distance >= 0) & (distance < window)

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=case.scale, enable_gqa=True
        )
        return output.transpose(1, 2)

    expected = run(case, dense, torch.float32)
    found = run(
        case, lambda q, k, v: attention.shared_prompt_attention(q, k, v, case.scale, case.packing.blocks, window)
    )
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    good = max(errors) < 1e-2
    print(f"window {window:<37} ours {' '.join(f'{e:.1e}' for e in errors)}  {'ok' if good else 'LARGE ERROR'}")
    return good


# --- times ---


def milliseconds(function: Callable[[], Any], repeats: int = 9) -> float:
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


@contextmanager
def tiled(**tiles: Any) -> Iterator[None]:
    """Other tiles for the head size of the benchmark."""
    from gspo.model.kernels import packed_attention_triton as kernels

    before = dict(kernels.LARGE), dict(kernels.SMALL)
    for tilings in (kernels.LARGE, kernels.SMALL):
        tilings[SIZE] = replace(tilings[SIZE], **tiles)
    try:
        yield
    finally:
        kernels.LARGE.update(before[0])
        kernels.SMALL.update(before[1])


def parts_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Each kernel alone, on the results of the others."""
    from gspo.model.kernels import packed_attention_triton as kernels

    blocks = case.packing.blocks
    rest = (case.scale, 0, blocks.entries, blocks.layout)
    gradient = case.gradient[0]
    output, log_sum = kernels.forward(*case.by_rows, *rest)
    _, delta = kernels.query_gradient(gradient, *case.by_rows, output, log_sum, *rest)
    return {
        "forward": lambda: kernels.forward(*case.by_rows, *rest),
        "dq": lambda: kernels.query_gradient(gradient, *case.by_rows, output, log_sum, *rest),
        "dkdv": lambda: kernels.key_gradients(gradient, *case.by_rows, delta, log_sum, *rest),
    }


def watch_compiled() -> dict[str, str]:
    """Registers, spills and shared memory of the kernel that ran last, by part."""
    from gspo.model.kernels import packed_attention_triton as kernels

    seen: dict[str, str] = {}

    def watch(part: str, kernel: Any) -> None:
        original = kernel.run

        def run_and_note(*args: Any, **options: Any) -> Any:
            compiled = original(*args, **options)
            registers, spills = getattr(compiled, "n_regs", "?"), getattr(compiled, "n_spills", "?")
            shared = getattr(getattr(compiled, "metadata", None), "shared", 0) / 1024
            seen[part] = f"{registers} registers, {spills} spilled, {shared:.0f} KiB shared"
            return compiled

        kernel.run = run_and_note

    watch("forward", kernels._forward)
    watch("dq", kernels._query_gradient)
    watch("dkdv", kernels._key_gradients)
    return seen


def describe(tile: Any) -> str:
    return f"{tile.queries}x{tile.keys}, {tile.warps} warps, {tile.stages} stages"


def compare_tilings(case: Case, deadline: float) -> dict[str, Any]:
    """The fastest tile of each kernel; candidates of the kernels take turns."""
    from gspo.model.kernels import packed_attention_triton as kernels

    seen = watch_compiled()
    parts = parts_of(case)
    best: dict[str, tuple[float, Any]] = {}
    heads, size = case.query.shape[1], case.query.shape[3]
    for number in range(max(map(len, CANDIDATES.values()))):
        for part, candidates in CANDIDATES.items():
            if number >= len(candidates) or time.monotonic() > deadline:
                continue
            queries, keys, warps, stages = candidates[number]
            tile = kernels.Tile(queries=queries, keys=keys, warps=warps, stages=stages)
            start = time.monotonic()
            try:
                with tiled(**{part: tile}):
                    ms = milliseconds(parts[part])
            except Exception as problem:  # out of shared memory, or whatever the compiler raises
                message = f"{type(problem).__name__}: {problem}".splitlines()[0]
                print(f"{part:<8} {describe(tile):<32} failed: {message[:110]}", flush=True)
                continue
            rate = MATMULS[part] * 2 * size * heads * case.pairs / ms / 1e9
            took = time.monotonic() - start
            print(
                f"{part:<8} {describe(tile):<32} {ms:>7.3f} ms {rate:>5.0f} TFLOP/s  {seen.get(part, '')} "
                f"(took {took:.1f} s)",
                flush=True,
            )
            if part not in best or ms < best[part][0]:
                best[part] = (ms, tile)
    return {part: tile for part, (_, tile) in best.items()}


def whole(case: Case, function: Callable[..., Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and backward, through autograd."""
    given = [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]
    forward = milliseconds(lambda: function(*given))
    output = function(*given)
    backward = milliseconds(lambda: torch.autograd.grad(output, given, case.gradient, retain_graph=True))
    return forward, backward


def show_table(cases: dict[str, Case], best: dict[str, Any]) -> None:
    print(f"\n{'ms':<44} {'forward':>8} {'dq':>7} {'dkdv':>7}   {'forward':>8} {'backward':>9}")
    print(f"{'':<44} {'kernels alone':^24}   {'with autograd':^18}")
    for label, case in cases.items():
        tokens = len(case.packing.place_I)
        print(f"{label}, {tokens} tokens")
        variants = {"default tiles": {}, "best tiles": best}
        for name, tiles in variants.items():
            with tiled(**tiles):
                alone = [milliseconds(part) for part in parts_of(case).values()]
                forward, backward = whole(case, ours(case))
            print(
                f"{f'{label}: {name}':<44} {alone[0]:>8.3f} {alone[1]:>7.3f} {alone[2]:>7.3f}   "
                f"{forward:>8.2f} {backward:>9.2f}",
                flush=True,
            )
    for part, tile in best.items():
        print(f"best {part}: {describe(tile)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and this machine has none")
        return 1
    import triton

    begin = time.monotonic()
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {triton.__version__}")
    print("relative errors of output, dq, dk, dv against float32:")
    good = [check("16/8 heads of 128, bf16, packing 0", random_case(0, (16, 8), SIZE, torch.bfloat16))]
    good += [
        check(f"32/4 heads of 128, bf16, packing {s}", random_case(s, (32, 4), SIZE, torch.bfloat16)) for s in (1, 2)
    ]
    cases = {label: uneven((q, kv), budget) for label, (q, kv, budget) in SHAPES.items()}
    first = next(iter(cases))
    print(f"\ntiles (queries x keys) for {first}, {len(cases[first].packing.place_I)} tokens:")
    # The rest of the time is for the table and for other head sizes.
    best = compare_tilings(cases[first], begin + 0.7 * arguments.seconds)
    show_table(cases, best)
    print()
    others: list[tuple[str, Callable[[], bool]]] = [
        ("4/1 heads of 64", lambda: check("4/1 heads of 64, bf16", random_case(3, (4, 1), 64, torch.bfloat16))),
        ("4/2 heads of 128", lambda: check("4/2 heads of 128, fp16", random_case(4, (4, 2), SIZE, torch.float16))),
        ("window", check_window),
        ("4/2 heads of 96", lambda: check("4/2 heads of 96, bf16", random_case(6, (4, 2), 96, torch.bfloat16))),
        ("2/1 heads of 256", lambda: check("2/1 heads of 256, bf16", random_case(7, (2, 1), 256, torch.bfloat16))),
    ]
    for label, other in others:
        if time.monotonic() - begin > arguments.seconds:
            print(f"{label}: not checked, no time left")
            continue
        try:
            good.append(other())
        except Exception as problem:  # a tiling that does not fit into this card
            print(f"{label}: failed: {type(problem).__name__}: {problem}"[:200], flush=True)
            good.append(False)
    print(f"took {time.monotonic() - begin:.0f} s; {'all checks passed' if all(good) else 'A CHECK FAILED'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

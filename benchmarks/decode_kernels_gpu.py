"""The products of a decoding step on one GPU: fused projections, LoRA, experts and routers, next to what they replace.

In: a CUDA device. Out: microseconds per call for the shapes of Qwen3-8B and Qwen3-30B-A3B with 256 rows, after each
result was compared with float32. Invariant: weights are read from memory, not from the L2 cache: calls rotate among
copies. It ends within `SECONDS`; a configuration that does not compile is reported and skipped. The tables `GATE_UP`
and `DOWN` of `kernels_experts_triton.py` hold the configurations in use.

    python benchmarks/decode_kernels_gpu.py [projections] [router] [experts]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, silu

from gspo.rollout.local import kernels_experts_triton as experts_kernels
from gspo.rollout.local import kernels_triton, projections
from gspo.rollout.local.kernels_experts_triton import Tiles, choose_experts, gated_product, product
from gspo.rollout.local.projections import DOWN, GATE_UP, OUTPUT, QKV, Projections

SECONDS = 85
ROWS, RANK = 256, 16
CUDA = torch.device("cuda")
HIDDEN, INNER, QUERY, KEY = 4096, 12288, 4096, 1024
EXPERTS, CHOSEN, MOE_HIDDEN, WIDTH = 128, 8, 2048, 768
STARTED = time.monotonic()

GATE_UP_TILES = [
    Tiles(tokens=32, outputs=64, inputs=64, stages=5),
    Tiles(tokens=32, outputs=64, inputs=64, stages=5, tma=True),
    Tiles(tokens=32, outputs=64, inputs=64, stages=3),
    Tiles(tokens=32, outputs=64, inputs=128, stages=4, tma=True),
    Tiles(tokens=32, outputs=64, inputs=128, stages=3),
    Tiles(tokens=32, outputs=32, inputs=128, stages=4, swap=False),
    Tiles(tokens=32, outputs=64, inputs=64, stages=5, shares=1),
    Tiles(tokens=16, outputs=64, inputs=64, stages=5),
    Tiles(tokens=32, outputs=128, inputs=64, stages=4, warps=8, tma=True),
    Tiles(tokens=64, outputs=64, inputs=64, stages=4),
    Tiles(tokens=32, outputs=64, inputs=64, stages=4, swap=False),
    Tiles(tokens=16, outputs=32, inputs=128, stages=4, swap=False),
]
DOWN_TILES = [
    Tiles(tokens=32, outputs=64, inputs=128, stages=4),
    Tiles(tokens=32, outputs=64, inputs=128, stages=4, tma=True),
    Tiles(tokens=32, outputs=64, inputs=64, stages=6),
    Tiles(tokens=32, outputs=128, inputs=64, stages=5, tma=True),
    Tiles(tokens=32, outputs=128, inputs=64, stages=5),
    Tiles(tokens=32, outputs=64, inputs=256, stages=3, tma=True),
    Tiles(tokens=32, outputs=32, inputs=128, stages=6, swap=False),
    Tiles(tokens=32, outputs=64, inputs=128, stages=3, shares=1),
    Tiles(tokens=16, outputs=64, inputs=128, stages=4),
    Tiles(tokens=64, outputs=64, inputs=128, stages=3),
]


def main() -> None:
    """Run the parts that are named, or all."""
    parts = {"projections": time_projections, "router": time_router, "experts": time_experts}
    table: list[str] = []
    with torch.no_grad():
        for name in sys.argv[1:] or parts:
            table += parts[name]()
    print("\n== summary: us per call")
    print("\n".join(table))
    print(f"{time.monotonic() - STARTED:.0f} s")


# --- Projections of the 8B shape ---


def time_projections() -> list[str]:
    """Each group of layers as modules and as one product, without and with LoRA."""
    groups = {QKV: (HIDDEN, (QUERY, KEY, KEY)), OUTPUT: (QUERY, (HIDDEN,)), GATE_UP: (HIDDEN, (INNER, INNER))}
    table = []
    for names, (size, outputs) in {**groups, DOWN: (INNER, (HIDDEN,))}.items():
        for rank in (0, RANK):
            if not rank and len(names) == 1:
                continue
            table += _time_group(names, size, outputs, rank)
            torch.cuda.empty_cache()
    return table


def _time_group(names: tuple[str, ...], size: int, outputs: Sequence[int], rank: int) -> list[str]:
    holders = [_holder(names, size, outputs, rank) for _ in range(3)]
    x = torch.randn(ROWS, size, device=CUDA).bfloat16()
    label = f"{'+'.join(n.removesuffix('_proj') for n in names)}{f', LoRA {rank}' if rank else ''}"

    def as_modules(holder: Any) -> Tensor:
        parts = [getattr(holder, name)(x) for name in names]
        return kernels_triton.silu_mul(*parts) if names == GATE_UP else torch.cat(parts, -1) if check else parts[0]

    check = True
    expected = torch.cat([_exact(getattr(holders[0], name), x) for name in names], -1)
    if names == GATE_UP:
        gate, up = expected.chunk(2, -1)
        expected = silu(gate) * up
    results = {"modules": (error(as_modules(holders[0]), expected), 0.0)}
    check = False
    results["modules"] = (results["modules"][0], microseconds([partial(as_modules, h) for h in holders]))
    for alignment in (16, 64) if rank else (16,):
        projections.ALIGNMENT = alignment
        made = [Projections(h, [(h, names)], ROWS).get(h, names) for h in holders]
        run = [_as_one(p, x, gated=names == GATE_UP) for p in made]
        name = f"one product, padded to {alignment}" if rank else "one product"
        results[name] = (error(run[0](), expected), microseconds(run))
    projections.ALIGNMENT = 16
    lines = [f"{label:28} {how:28} {us:7.1f}   error {off:.1e}" for how, (off, us) in results.items()]
    print("\n".join(lines), flush=True)
    return lines


def _as_one(held: Any, x: Tensor, *, gated: bool) -> Callable[[], Tensor]:
    # As in decoding: the kernel before it has written the input into the buffer.
    given = held.input(ROWS)
    given = x if given is None else given.copy_(x)
    return (lambda: kernels_triton.silu_mul_halves(held(given))) if gated else (lambda: held(given))


def _holder(names: Sequence[str], size: int, outputs: Sequence[int], rank: int) -> nn.Module:
    holder = nn.Module()
    for name, count in zip(names, outputs, strict=True):
        setattr(holder, name, nn.Linear(size, count, bias=False, device=CUDA, dtype=torch.bfloat16))
    if rank:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(names)), holder, "default")
        for name in names:
            nn.init.normal_(getattr(holder, name).lora_B["default"].weight, std=0.02)
    return holder.to(CUDA, torch.bfloat16).eval()


def _exact(layer: Any, x: Tensor) -> Tensor:
    result = linear(x.float(), layer.weight.float())
    if hasattr(layer, "lora_A"):
        a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
        result += layer.scaling["default"] * x.float() @ a.T @ b.T
    return result


# --- Router and experts of the 30B-A3B shape ---


def time_router() -> list[str]:
    """Softmax, top-k and normalization."""
    logits = torch.randn(ROWS, EXPERTS, device=CUDA).bfloat16()

    def plain() -> tuple[Tensor, Tensor]:
        value, index = logits.softmax(-1, dtype=torch.float).topk(CHOSEN)
        return (value / value.sum(-1, keepdim=True)).to(logits.dtype), index

    weight, index = choose_experts(logits, CHOSEN, normalize=True)
    expected, theirs = plain()
    same = float((index.sort(-1).values == theirs.sort(-1).values).all(-1).float().mean())
    lines = [
        f"{'router':28} {'softmax, topk, divide, cast':28} {microseconds([plain]):7.1f}",
        f"{'router':28} {'one kernel':28} "
        f"{microseconds([lambda: choose_experts(logits, CHOSEN, normalize=True)]):7.1f}   error "
        f"{error(weight, expected):.1e}, same experts {same:.1%}",
    ]
    print("\n".join(lines), flush=True)
    return lines


def time_experts() -> list[str]:
    """Both products of the experts, for all configurations."""
    gate_up = 0.02 * torch.randn(EXPERTS, 2 * WIDTH, MOE_HIDDEN, device=CUDA).bfloat16()
    down = 0.02 * torch.randn(EXPERTS, MOE_HIDDEN, WIDTH, device=CUDA).bfloat16()
    x, row, ends = _routed(ROWS)
    hidden = kernels_triton.silu_mul_halves(grouped_mm(x[row], gate_up.transpose(1, 2), offs=ends))
    first = microseconds(
        [lambda: kernels_triton.silu_mul_halves(grouped_mm(x[row], gate_up.transpose(1, 2), offs=ends))]
    )
    second = microseconds([lambda: grouped_mm(hidden, down.transpose(1, 2), offs=ends)])
    print(f"gather, grouped_mm, gate {first:.1f}; grouped_mm {second:.1f}", flush=True)
    print(f"reading the weights at 4.3 TB/s: {gate_up.nbytes / 4.3e6:.1f}; {down.nbytes / 4.3e6:.1f}")
    gate_up_best = _try_all(
        "gate_up", GATE_UP_TILES, lambda t: gated_product(x, row, ends, gate_up, t), _exact_gated(x, row, ends, gate_up)
    )
    down_best = _try_all(
        "down", DOWN_TILES, lambda t: product(hidden, ends, down, t), _exact_product(hidden, ends, down)
    )
    lines = [f"{'gate_up':28} {'gather, grouped_mm, gate':28} {first:7.1f}", *gate_up_best]
    lines += [f"{'down':28} {'grouped_mm':28} {second:7.1f}", *down_best]
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (8, 64, 128, 256, 512):
            if time.monotonic() - STARTED > SECONDS:
                break
            lines.append(_time_both(rows, gate_up.to(dtype), down.to(dtype)))
    return lines


def _time_both(rows: int, gate_up: Tensor, down: Tensor) -> str:
    x, row, ends = _routed(rows, gate_up.dtype)
    ours = microseconds([lambda: experts_kernels.expert_mlp(x, row, ends, gate_up, down)])
    line = f"{f'experts, {rows} rows, {gate_up.dtype}'[:40]:40} table of this repository {ours:7.1f}"
    if gate_up.dtype == torch.bfloat16:

        def grouped() -> Tensor:
            both = grouped_mm(x[row], gate_up.transpose(1, 2), offs=ends)
            return grouped_mm(kernels_triton.silu_mul_halves(both), down.transpose(1, 2), offs=ends)

        line += f", grouped_mm {microseconds([grouped]):7.1f}"
    print(line, flush=True)
    return line


def _try_all(name: str, tiles: Sequence[Tiles], run: Callable[[Tiles], Tensor], expected: Tensor) -> list[str]:
    """Time every configuration; lines for the best three and for the first, which is printed as a reference."""
    found: list[tuple[float, str]] = []
    for index, t in enumerate(tiles):
        # Half of the time for each of the two products.
        if time.monotonic() - STARTED > SECONDS * (0.55 if name == "gate_up" else 0.9):
            print(f"{name}: no time for the last {len(tiles) - index} configurations")
            break
        what = f"{t.tokens}x{t.outputs}x{t.inputs} stages {t.stages} warps {t.warps} shares {t.shares}"
        what += f"{' swap' if t.swap else ''}{' tma' if t.tma else ''}"
        try:
            off = error(run(t), expected)
            us = microseconds([partial(run, t)])
        except Exception as problem:  # whatever the compiler says: the next configuration may work
            print(f"{name:10} {what}: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}", flush=True)
            continue
        line = f"{name:10} {what:52} {us:7.1f}   error {off:.1e}{'' if off < 1e-2 else ' WRONG'}"
        print(line, flush=True)
        found.append((us, line))
    return [line for _, line in sorted(found)[:3]]


def _routed(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, MOE_HIDDEN, device=CUDA).to(dtype)
    chosen = torch.randn(rows, EXPERTS, device=CUDA).topk(CHOSEN).indices
    row, _, ends = kernels_triton.group_by_expert(chosen, EXPERTS)
    return x, row, ends


def _exact_product(x: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b].float() @ w.float().T for a, b, w in zip(starts, starts[1:], weight, strict=False)])


def _exact_gated(x: Tensor, row: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    gate, up = _exact_product(x[row], ends, weight).chunk(2, -1)
    return silu(gate) * up


# --- Measuring ---


def error(ours: Tensor, expected: Tensor) -> float:
    """Relative to the norm of the result."""
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


def microseconds(calls: Sequence[Callable[[], Any]], repeats: int = 24) -> float:
    """Median time of a call in a CUDA graph that cycles through `calls`."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            calls[i % len(calls)]()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()

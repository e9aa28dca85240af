"""8-bit linear layers on one Hopper GPU: are they right, are they fast, and what do they do to sampling and learning?

In: nothing but the GPU. Out: tables in markdown, and everything as JSON in `--out`. The parts:

    right     the GPU's product and quantisation beside the emulation, on the shapes of Qwen3-0.6B and Qwen2.5-1.5B
    fast      each linear layer of the two, bf16 and 8 bits (captured in a CUDA graph), and all layers of a block together
    mismatch  engine against learner: bf16 both, 8 bits both, and bf16 learner with an 8-bit engine
    learn     the same three on the demo's task, from one cold start

    python benchmarks/fp8.py [right] [fast] [mismatch] [learn] [--out DIR] [--model PATH] [--steps 30] [--seeds 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gspo import loop
from gspo.config import Config, ModelConfig, find_recipe, override, read_toml
from gspo.objective.sequences import Sequences
from gspo.observe.run_dir import read_jsonl
from gspo.policy import fp8
from gspo.policy.batch import Row, make_plan
from gspo.policy.kernels import blocks
from gspo.policy.kernels.blocks import emulated, product, quantised_rows, quantised_weight
from gspo.policy.logprobs import planned_logprobs
from gspo.policy.model import Policy, load_policy, load_tokenizer
from gspo.rollout.engine import EngineContext, build_engine
from gspo.train import train
from gspo.types import Prompt, Sampling

CUDA = torch.device("cuda")
SHAPES = {
    "Qwen3-0.6B": {"q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 2048), "gate": (3072, 1024), "up": (3072, 1024), "down": (1024, 3072)},
    "Qwen2.5-1.5B": {"q": (1536, 1536), "k": (256, 1536), "v": (256, 1536), "o": (1536, 1536), "gate": (8960, 1536), "up": (8960, 1536), "down": (1536, 8960)},
}  # fmt: skip
"""(outputs, inputs) of the linear layers of a block."""
SHARED = {"k": "q", "v": "q", "up": "gate"}
"""Layers whose rows were already quantised for another one."""
ROWS = (256, 2048, 16384)
SMALL = "model.build_options={hidden_size = 256, intermediate_size = 512, num_hidden_layers = 4, num_attention_heads = 4, num_key_value_heads = 2, head_dim = 64}"
ARMS = ("bf16 both", "8 bits both", "bf16 learner, 8-bit engine")


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as markdown."""
    print(f"\n### {title}\n")
    if not rows:
        return
    names = list(rows[0])
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in rows:
        print(
            "| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |", flush=True
        )


# --- right ---


def right() -> list[dict[str, Any]]:
    found = []
    for model, shapes in SHAPES.items():
        for outputs, inputs in sorted(set(shapes.values())):
            for rows in (1, 37, 256, 2048):
                x = (torch.randn(rows, inputs, device=CUDA) * torch.randn(rows, inputs, device=CUDA).exp()).bfloat16()
                weight = (0.02 * torch.randn(outputs, inputs, device=CUDA)).bfloat16()
                made, held, on_cpu = quantised_rows(x), quantised_weight(weight), quantised_rows(x.cpu())
                same = torch.equal(made.values[:rows].view(torch.uint8).cpu(), on_cpu.values.view(torch.uint8))
                exact = emulated(made, held, torch.float32)
                off = product(made, held, torch.bfloat16).float() - exact
                plain = F.linear(x, weight).float()
                found.append({
                    "model": model, "rows": rows, "outputs": outputs, "inputs": inputs, "quantised to the bit": same and torch.equal(made.scale[:rows].cpu(), on_cpu.scale),
                    "error of the product": float(off.norm() / exact.norm()), "error of bf16 rounding": float((exact.bfloat16().float() - exact).norm() / exact.norm()),
                    "8 bits from bf16": float((exact - plain).norm() / plain.norm()),
                })  # fmt: skip
    return found


# --- fast ---


def timed(way: Callable[[], Any], repeats: int = 7, inner: int = 20) -> float:
    """Microseconds of one call, of `inner` captured in a graph; the median of `repeats`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            way()
    seen = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seen.append(1000 * start.elapsed_time(end) / inner)
    return statistics.median(seen[2:])


def fast() -> list[dict[str, Any]]:
    found = []
    for model, shapes in SHAPES.items():
        for rows in ROWS:
            whole = {"bf16": 0.0, "product": 0.0, "with quantising": 0.0}
            for name, (outputs, inputs) in shapes.items():
                x = torch.randn(rows, inputs, device=CUDA, dtype=torch.bfloat16)
                weight = 0.02 * torch.randn(outputs, inputs, device=CUDA, dtype=torch.bfloat16)
                made, held = quantised_rows(x), quantised_weight(weight)
                full, eight, rounding = (
                    timed(lambda x=x, weight=weight: F.linear(x, weight)),
                    timed(lambda made=made, held=held: product(made, held, torch.bfloat16)),
                    timed(lambda x=x: quantised_rows(x)),
                )
                rounding = 0.0 if name in SHARED else rounding
                for key, us in zip(whole, (full, eight, eight + rounding), strict=True):
                    whole[key] += us
                found.append(_speed(model, rows, f"{name} {outputs} x {inputs}", full, eight, eight + rounding))
            found.append(_speed(model, rows, "all of a block", *whole.values()))
    return found


def _speed(model: str, rows: int, layer: str, full: float, eight: float, both: float) -> dict[str, Any]:
    return {
        "model": model, "rows": rows, "layer": layer, "bf16 us": full, "8-bit product us": eight,
        "with quantising us": both, "times as fast": full / both,
    }  # fmt: skip


def learning_speed() -> list[dict[str, Any]]:
    """Forward and backward of the layers of a block, as learning calls them."""
    found = []
    for model, shapes in SHAPES.items():
        took = {}
        for eight in (False, True):
            torch.manual_seed(0)
            layers = torch.nn.ModuleDict({n: torch.nn.Linear(i, o, bias=False, dtype=torch.bfloat16, device=CUDA) for n, (o, i) in shapes.items()})  # fmt: skip
            if eight:
                layers.get_output_embeddings = lambda: None  # type: ignore[assignment]
                fp8.convert(layers)
            given = {n: torch.randn(16384, i, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for n, (_, i) in shapes.items() if n not in SHARED}  # fmt: skip

            def run(layers: Any = layers, given: Any = given) -> None:
                for name, layer in layers.items():
                    out = layer(given[SHARED.get(name, name)])
                    out.backward(out.detach())

            took[eight] = _eager(run)
        found.append({"model": model, "rows": 16384, "bf16 ms": took[False], "8-bit ms": took[True], "times as fast": took[False] / took[True]})  # fmt: skip
    return found


def _eager(way: Callable[[], Any]) -> float:
    seen = []
    for repeat in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        way()
        torch.cuda.synchronize()
        if repeat > 1:
            seen.append(1000 * (time.perf_counter() - start))
    return statistics.median(seen)


# --- mismatch ---


def prompts_for(tokenizer: Any) -> list[Prompt]:
    texts = [f"What is {137 * i % 991} + {311 * i % 977}?" for i in range(32)]
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return [Prompt(id=str(i), content=t, text=t, token_ids=x) for i, (t, x) in enumerate(zip(texts, ids, strict=True))]


def compare(policy: Policy, name: str, tokens: int) -> list[dict[str, Any]]:
    """`policy` is converted; each arm samples anew with an engine of its own."""
    found = []
    prompts = prompts_for(policy.tokenizer)
    for arm in ARMS:
        engine = build_engine("local", EngineContext(model=policy.model, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids), {})  # fmt: skip
        with fp8.in_full(policy.model) if arm == ARMS[0] else nullcontext():
            torch.cuda.synchronize()
            started = time.perf_counter()
            groups = engine.generate(prompts, samples=8, sampling=Sampling(max_tokens=tokens), seed=0, stream="m", version=0)  # fmt: skip
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        engine.close()
        replies = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
        rows = [Row(prompt_ids=p.token_ids, reply_ids=c.token_ids) for p, c in replies]
        plan = make_plan(rows, [i // 8 for i in range(len(rows))], mini_batches=1, token_budget=16384, pad_id=policy.pad_id, seed="", packed=True)  # fmt: skip
        with fp8.in_full(policy.model) if arm != ARMS[1] else nullcontext():
            logp_N = planned_logprobs(policy.model, plan, 1.0, policy.device)[0]
        sampler_N = torch.tensor([x for _, c in replies for x in c.logp_sampler], device=policy.device)
        log_N = (logp_N - sampler_N).double()
        reply_B = Sequences(plan.sequence_N.to(policy.device), len(rows)).mean(log_N)
        found.append({
            "model": name, "arm": arm, "tokens": len(log_N), "mean |dlogp|": float(log_N.abs().mean()), "k3": float((log_N.expm1() - log_N).mean()),
            "per reply (root mean square)": float(reply_B.square().mean().sqrt()), "tokens/s": len(log_N) / seconds,
        })  # fmt: skip
    return found


def mismatch(given: str, cold: Path) -> list[dict[str, Any]]:
    """A small model that has learned, a large shape with random weights, and a model of one's own."""
    found = []
    for name, path in (("small, cold-started", str(cold)), ("given", given)):
        if path:
            config = ModelConfig(path=path, dtype="bfloat16", device="cuda", fp8=True)
            found += compare(load_policy(config, load_tokenizer(config), seed=0), name, 48 if path == str(cold) else 128)  # fmt: skip
            torch.cuda.empty_cache()
    large = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
    config = ModelConfig(build="tiny_dense", build_options=large, dtype="bfloat16", device="cuda", fp8=True)
    tokenizer = load_tokenizer(config)
    return found + compare(load_policy(config, tokenizer, seed=0), "Qwen3-0.6B shape, random weights", 64)


# --- learn ---


class Quiet:
    """A display that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **options: None


def demo(folder: Path, *overrides: str) -> Config:
    tree = read_toml(find_recipe("demo"))
    common = ("model.dtype=bfloat16", "eval.every=1000", "checkpoint.every=1000", "log.rollouts=false", f"run_dir={folder}")  # fmt: skip
    return override(tree, [*common, *overrides], where="demo")


def cold_start(folder: Path) -> Path:
    """A model that solves some problems; where it lies."""
    made = folder / "cold"
    if not made.exists():
        train(demo(made, "model.build=tiny_dense", SMALL, "steps=0", "seed=1"), Quiet())  # type: ignore[arg-type]
    (start,) = (made / "checkpoints").iterdir()
    return start


@contextmanager
def learner_in_full(wanted: bool) -> Iterator[None]:
    """Let the steps of a run learn in bf16 while its engine samples in 8 bits."""
    plain = loop.learn

    def learn(parts: Any, *given: Any, **options: Any) -> Any:
        with fp8.in_full(parts.policy.model):
            return plain(parts, *given, **options)

    loop.learn = learn if wanted else plain  # type: ignore[assignment]
    try:
        yield
    finally:
        loop.learn = plain


def learn(folder: Path, cold: Path, steps: int, seeds: int) -> list[dict[str, Any]]:
    found = []
    for seed in range(seeds):
        for number, arm in enumerate(ARMS):
            run = folder / f"arm{number}-seed{seed}"
            changed = (f"model.path={cold}", "model.build=", "cold_start.steps=0", f"steps={steps}", f"seed={seed}", f"model.fp8={'false' if number == 0 else 'true'}")  # fmt: skip
            started = time.monotonic()
            with learner_in_full(number == 2):
                train(demo(run, *changed), Quiet())  # type: ignore[arg-type]
            rows, times = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "timings.jsonl")
            late = rows[-max(1, steps // 4) :]

            def mean(key: str, of: Sequence[Mapping[str, Any]] = late) -> float:
                return statistics.fmean(float(r[key]) for r in of if r.get(key) is not None)

            found.append({
                "arm": arm, "seed": seed, "held-out before": rows[0]["eval/accuracy"], "after": rows[-1]["eval/accuracy"],
                "training reward, last quarter": mean("reward/mean"), "k3": mean("mismatch/k3", rows[1:]), "clipped": mean("clip/fraction_sequences", rows[1:]),
                "noise/beyond_clip": mean("noise/beyond_clip", rows[1:]),
                "sampling s": mean("time/rollout_s", times), "learning s": mean("time/learn_s", times), "run s": time.monotonic() - started,
            })  # fmt: skip
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["right", "fast", "mismatch", "learn"])
    parser.add_argument("--out", default="")
    parser.add_argument("--model", default="", help="a model of one's own for the mismatch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    chosen = parser.parse_args(arguments)
    why = fp8.obstacle(CUDA)
    if why is not None:
        print(f"nothing to measure: {why}", file=sys.stderr)
        return 1
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__} (CUDA {torch.version.cuda}), blocks of {blocks.BLOCK}"
    )
    out = Path(chosen.out or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp())
    steps: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "right": right, "fast": fast, "learning speed": learning_speed,
        "mismatch": lambda: mismatch(chosen.model, cold_start(work)),
        "learn": lambda: learn(work, cold_start(work), chosen.steps, chosen.seeds),
    }  # fmt: skip
    for name, measure in steps.items():
        if name not in chosen.parts and not (name == "learning speed" and "fast" in chosen.parts):
            continue
        started = time.monotonic()
        rows = measure()
        table(f"{name} ({time.monotonic() - started:.0f} s)", rows)
        (out / f"fp8-{name.replace(' ', '-')}.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

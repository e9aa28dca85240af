"""What a decoding step costs with few live rows, and what CUDA graphs cost in every call.

In: a CUDA device, or a CPU for a test of the script. Out: for each number of rows the time of a step, how often a call
captured a CUDA graph and for how long, and the operations that take the most time. Invariant: two calls that differ
only in their number of tokens; the difference of their times has no prefill and no capture in it.

    python benchmarks/live_rows_gpu.py                                # on one GPU
    python benchmarks/live_rows_gpu.py --device cpu --shape tiny      # tests the script, not the numbers

Calls with completions of mixed length end with few live rows (docs/log.md, 2026-11-19), so this is the part of them
that no equal lengths show.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import transformers
from gpu_decode import DENSE, LARGE, NoText
from torch.profiler import ProfilerActivity, profile

from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines.local import LocalEngine, build
from gspo.rollout.local.cuda_graphs import CudaGraphs
from gspo.types import Prompt, Sampling

TINY = {
    **DENSE,
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SHAPES = {"0.6b": DENSE, "8b": LARGE["dense, Qwen3-8B shape"][1], "tiny": TINY}


class Captures:
    """Counts and times the captures of CUDA graphs."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        capture = CudaGraphs._capture

        def timed(graphs: CudaGraphs, rows: int) -> None:
            start = time.perf_counter()
            capture(graphs, rows)
            self.seconds.append(time.perf_counter() - start)

        CudaGraphs._capture = timed  # type: ignore[assignment, method-assign]

    def take(self) -> list[float]:
        taken, self.seconds = self.seconds, []
        return taken


def generate(engine: LocalEngine, rows: int, prompt: int, new: int) -> float:
    """Seconds of a call."""
    assert engine.context is not None
    model: Any = engine.context.model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (rows, prompt), generator=generator).tolist()
    prompts = [Prompt(id=f"p/{i}", content="", text="", token_ids=tuple(row)) for i, row in enumerate(ids)]
    options = GenerateOptions(samples=1, sampling=Sampling(max_tokens=new), seed=0, stream="bench", version=0)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(prompts, options)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def operations(engine: LocalEngine, rows: int, prompt: int, new: int) -> str:
    """The operations of a call by their own time on the device."""
    assert engine.context is not None
    cuda = engine.context.model.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as profiled:
        generate(engine, rows, prompt, new)
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    return str(profiled.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=70))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the first step")
    parser.add_argument("--new", type=int, default=64, help="steps that are timed")
    parser.add_argument("--profile", type=int, nargs="*", default=[8, 64], help="numbers of rows to profile")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("this needs a CUDA device, and this machine has none")
        return 1
    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    with torch.device(arguments.device):
        config = transformers.AutoConfig.for_model("qwen3", **SHAPES[arguments.shape])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    captures = Captures()
    print(f"{arguments.shape}: {arguments.prompt}-token prompts, {arguments.new} steps")
    print(f"{'live rows':>9} {'ms/step':>8} {'tok/s':>8} {'captures':>9} {'s':>6} {'s of a call':>12}")
    for rows in arguments.rows:
        context = EngineContext(model=model, tokenizer=NoText(), stop_ids=())
        engine = build(context, slots=rows)
        short, long = arguments.new // 2, arguments.new // 2 + arguments.new
        generate(engine, rows, arguments.prompt, short)  # compiles kernels
        captures.take()
        took = {new: min(generate(engine, rows, arguments.prompt, new) for _ in range(2)) for new in (short, long)}
        step, captured = (took[long] - took[short]) / arguments.new, captures.take()
        print(
            f"{rows:>9} {1e3 * step:>8.2f} {rows / step:>8.0f} {len(captured) / 4:>9.1f} {sum(captured) / 4:>6.2f} "
            f"{took[long]:>12.2f}",
            flush=True,
        )
        if rows in arguments.profile:
            print(operations(engine, rows, arguments.prompt, short), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

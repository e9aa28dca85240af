"""The turns of conversations on one CPU thread, with and without their KV cache kept in between.

In: random weights, conversations whose turns and observations have fixed lengths, the local engine with
`keep_gb = 0` and with its default. Out: a table with the prompt tokens that prefill computes and the CPU time of
sampling, and its ratio. Invariant: both sample the same tokens, and repeats are interleaved. The time is that of the
thread, not of the clock on the wall, so that other load matters less; the ratio is that of the medians.

    OMP_NUM_THREADS=1 python benchmarks/prefixes_cpu.py [--repeats 3] [--wide] [--runs DIR ...]

The model is a Qwen3 with 82K parameters, about that of the recipes (`tiny_dense`); with `--wide`, one with 25M.
With `--runs`, the conversations are those of runs with an environment: their last checkpoint plays the held-out
problems, 8 times each, and what the environment takes does not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo.rollout.engine import DecodeStats, EngineContext, GenerateOptions
from gspo.rollout.engines.local import KEEP_GB, LocalEngine
from gspo.types import Prompt, Sampling

VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What conversations look like."""

    name: str
    conversations: int
    prompt: int
    turn: int
    observation: int
    turns: int


SHORT = (
    Shape(name="calculator-tool", conversations=256, prompt=8, turn=8, observation=8, turns=2),
    Shape(name="guess-number", conversations=256, prompt=16, turn=4, observation=12, turns=4),
    Shape(name="8 turns", conversations=64, prompt=64, turn=16, observation=48, turns=8),
    Shape(name="16 turns", conversations=64, prompt=64, turn=16, observation=48, turns=16),
)
WIDE = (
    Shape(name="2 turns", conversations=16, prompt=64, turn=16, observation=48, turns=2),
    Shape(name="8 turns", conversations=16, prompt=64, turn=16, observation=48, turns=8),
)


class NoText:
    """A tokenizer that decodes to empty strings."""

    def batch_decode(self, ids: list[list[int]], **_: object) -> list[str]:
        return [""] * len(ids)


def model_of(*, wide: bool) -> Any:
    torch.manual_seed(0)
    sizes = (512, 8, 8, 64, 1536) if wide else (64, 2, 4, 16, 128)
    hidden, layers, heads, size, mlp = sizes
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=size,
        intermediate_size=mlp,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).eval()


def converse(model: Any, shape: Shape, keep_gb: float) -> tuple[list[tuple[int, ...]], DecodeStats, float]:
    """The tokens of all conversations, what decoding cost, and the seconds of CPU time."""
    context = EngineContext(model=model, tokenizer=NoText(), stop_ids=())
    engine = LocalEngine(context, slots=256, prefill_tokens=8192, keep_gb=keep_gb)
    _ = engine.keeps  # a trial, once for each engine
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    ids = [tokens(shape.prompt) for _ in range(shape.conversations)]
    sampling = Sampling(max_tokens=shape.turn)
    options = GenerateOptions(samples=1, sampling=sampling, seed=0, stream="train/1", version=1)
    seconds = 0.0
    for turn in range(shape.turns):
        prompts = [
            Prompt(id=f"{i}/{turn}", content="", text="", token_ids=read, conversation=str(i))
            for i, read in enumerate(ids)
        ]
        start = time.thread_time()
        groups = engine.generate(prompts, options)
        seconds += time.thread_time() - start
        ids = [read + done.token_ids + tokens(shape.observation) for read, (done,) in zip(ids, groups, strict=True)]
    start = time.thread_time()
    engine.end_conversations(list(map(str, range(shape.conversations))))
    return ids, engine.decoded, seconds + time.thread_time() - start


def play(run: Path, keep_gb: float) -> tuple[list[tuple[int, ...]], DecodeStats, float]:
    """The same for the conversations of a run with an environment."""
    import agents  # next to this file

    engines: list[LocalEngine] = []
    seconds = [0.0]
    generate, build = LocalEngine.generate, agents.engine_for

    def timed(self: LocalEngine, prompts: Any, options: GenerateOptions) -> Any:
        start = time.thread_time()
        try:
            return generate(self, prompts, options)
        finally:
            seconds[0] += time.thread_time() - start

    def built(config: Any, policy: Any) -> Any:
        engines.append(build(override(config, keep_gb), policy))
        _ = engines[-1].keeps  # a trial, once for each engine
        return engines[-1]

    LocalEngine.generate, agents.engine_for = timed, built  # type: ignore[method-assign]
    try:
        done = agents.measured(run, max((run / "checkpoints").glob("[0-9]*")), "", 8)
    finally:
        LocalEngine.generate, agents.engine_for = generate, build  # type: ignore[method-assign]
    ids = [completion.token_ids for group in done.groups for completion in group.completions]
    return ids, engines[0].decoded, seconds[0]


def override(config: Any, keep_gb: float) -> Any:
    """The settings of a run with another limit of what is kept."""
    return replace(config, rollout=replace(config.rollout, engine_options={"keep_gb": keep_gb}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--runs", type=Path, nargs="+", default=[])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[float], tuple[list[tuple[int, ...]], DecodeStats, float]]] = {}
    if chosen.runs:
        cases = {run.name: partial(play, run) for run in chosen.runs}
    else:
        model = model_of(wide=chosen.wide)
        for shape in WIDE if chosen.wide else SHORT:
            name = f"{shape.name}: {shape.conversations} x {shape.turns} turns of {shape.turn} + {shape.observation}"
            cases[name] = partial(converse, model, shape)
    print("| conversations | prefilled, without | with | CPU time, without | with | ratio |")
    print("|---|---|---|---|---|---|")
    for name, case in cases.items():
        runs: dict[float, list[float]] = {0.0: [], KEEP_GB: []}
        found = {}
        case(KEEP_GB)  # what happens once in a process counts for neither
        for _ in range(chosen.repeats):
            for keep_gb, seconds in runs.items():
                ids, cost, taken = case(keep_gb)
                found[keep_gb] = (ids, cost)
                seconds.append(taken)
        assert found[0.0][0] == found[KEEP_GB][0], "they sample the same tokens"
        without, kept = (statistics.median(seconds) for seconds in runs.values())
        counts = f"{found[0.0][1].prefilled:,} | {found[KEEP_GB][1].prefilled:,}"
        print(f"| {name} | {counts} | {without:.2f} s | {kept:.2f} s | {without / kept:.2f} |", flush=True)


if __name__ == "__main__":
    main()

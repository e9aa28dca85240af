"""The local engine and `model.generate` on one CPU thread.

In: the demo's model (a random Qwen3-MoE of 0.2M parameters), 64 prompts x 8 completions, the same sampling settings for
both. Out: one table, and exit code 1 if the engine is less than 1.5 times as fast on completions of mixed length.
`generate` gets its best batching: all sequences at once, or in batches of `SLOTS`. Only tokens up to and including the
EOS token count. Invariant: repeats are interleaved and the median counts, so that other load slows both equally.
`--wide` uses the shape of SmolLM2-135M with random weights, 8 prompts of 200 tokens x 8 completions of 32.

    OMP_NUM_THREADS=1 python benchmarks/rollout_cpu.py [--repeats 3] [--wide] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.model.packed_forward import supports_packing
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines import local
from gspo.types import Prompt, Sampling

VOCABULARY, PAD, EOS = 40, 0, 1
PROMPTS, SAMPLES, SLOTS = 64, 8, 256
Run = Callable[[int], int]
"""Takes a seed, returns the number of tokens without padding."""


class NoText:
    """A tokenizer that decodes to empty strings: detokenization counts for neither side."""

    def batch_decode(self, ids: list[list[int]], **_: object) -> list[str]:
        return [""] * len(ids)


def demo_model(mean_length: float) -> Qwen3MoeForCausalLM:
    """The demo's shape. The bias of its LM head makes EOS appear once in `mean_length` tokens on average."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        initializer_range=0.05,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    weight = model.lm_head.weight
    model.lm_head = torch.nn.Linear(*reversed(weight.shape))
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
        model.lm_head.weight[EOS] = 0
        model.lm_head.bias.zero_()
        # The other logits have a standard deviation of about 0.4, so their exponentials average about 1.08.
        model.lm_head.bias[EOS] = torch.tensor(1.08 * (VOCABULARY - 1) / (mean_length - 1)).log()
    return model


def wide_model() -> LlamaForCausalLM:
    """The shape of SmolLM2-135M: nine query heads on three key-value heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def prompts(count: int = PROMPTS, lengths: tuple[int, int] = (8, 17)) -> list[Prompt]:
    rng = random.Random(0)
    ids = [tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(*lengths))) for _ in range(count)]
    return [Prompt(id=f"bench/{i}", content="", text="", token_ids=t) for i, t in enumerate(ids)]


def engine_run(model: Any, given: list[Prompt], max_tokens: int, stop_ids: tuple[int, ...], slots: int) -> Run:
    supports_packing(model)  # selects the attention implementation, as in a run
    engine = local.build(EngineContext(model=model, tokenizer=NoText(), stop_ids=stop_ids), slots=slots)
    sampling = Sampling(max_tokens=max_tokens)

    def run(seed: int) -> int:
        options = GenerateOptions(samples=SAMPLES, sampling=sampling, seed=seed, stream="bench", version=0)
        groups = engine.generate(given, options)
        return sum(len(completion.token_ids) for group in groups for completion in group)

    return run


def generate_run(model: Any, given: list[Prompt], max_tokens: int, stop_ids: tuple[int, ...], rows: int) -> Run:
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=max_tokens,
        use_cache=True,
        pad_token_id=PAD,
        eos_token_id=list(stop_ids) or None,
    )
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    tokens = [prompt.token_ids for prompt in given for _ in range(SAMPLES)]
    width = max(map(len, tokens))
    ids = torch.tensor([(PAD,) * (width - len(t)) + t for t in tokens])
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in tokens])

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        count = 0
        for ids_part, mask_part in zip(ids.split(rows), mask.split(rows), strict=True):
            out = model.generate(ids_part, attention_mask=mask_part, generation_config=settings)[:, width:]
            is_end = torch.isin(out, torch.tensor(stop_ids, dtype=torch.int64))
            count += int((is_end.cumsum(1) - is_end.long() == 0).sum())
        return count

    return run


def speeds(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Median tokens per second of each, over interleaved repeats. The first round is a warm-up and does not count."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            count = run(repeat)
            rates[name].append(count / (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def compare(
    make: Callable[[], Any],
    given: list[Prompt],
    label: str,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    slots: int,
    repeats: int,
) -> float:
    """Print one line of the table. Returns how many times as fast the engine is."""
    completions = len(given) * SAMPLES
    engine = engine_run(make(), given, max_tokens, stop_ids, slots)
    mean = engine(0) / completions
    whole, split = (generate_run(make(), given, max_tokens, stop_ids, rows) for rows in (completions, SLOTS))
    speed = speeds({"engine": engine, "whole": whole, "split": split}, repeats)
    ratio = speed["engine"] / max(speed["whole"], speed["split"])
    cells = f"{speed['engine']:>9.0f} {speed['whole']:>14.0f} {speed['split']:>14.0f} {ratio:>7.2f}"
    print(f"{label:<10} {mean:>11.1f} {max_tokens:>4} {slots:>5} {cells}", flush=True)
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wide", action="store_true", help="use the shape and prompt length of a real model")
    parser.add_argument("--profile", action="store_true", help="profile the engine on mixed lengths")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        run = engine_run(demo_model(mean_length=40), prompts(), 256, (EOS,), SLOTS)
        run(0)
        profile = cProfile.Profile()
        profile.runcall(run, 1)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return 0
    given = prompts(8, (200, 201)) if arguments.wide else prompts()
    print(f"{len(given)} prompts x {SAMPLES} completions; tokens per second, median of {arguments.repeats}")
    header = f"{'engine':>9} {f'generate({len(given) * SAMPLES})':>14} {f'generate({SLOTS})':>14} {'ratio':>7}"
    print(f"{'lengths':<10} {'mean tokens':>11} {'max':>4} {'slots':>5} {header}")
    if arguments.wide:
        compare(wide_model, given, "uniform", 32, (), 64, arguments.repeats)
        return 0
    demo = partial(demo_model, 40)
    mixed = compare(demo, given, "mixed", 256, (EOS,), SLOTS, arguments.repeats)
    compare(demo, given, "uniform", 40, (), SLOTS, arguments.repeats)
    compare(demo, given, "uniform", 40, (), PROMPTS * SAMPLES, arguments.repeats)
    return 0 if mixed >= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())

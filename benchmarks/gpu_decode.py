"""Decoding on one GPU: the local engine, `generate`, vLLM, and the ceiling set by memory bandwidth.

In: a CUDA device. Out: tokens per second over the whole call (including prefill, CUDA graph capture and collection),
the time of a decoding step, peak memory, and the difference of the log-probs from the learner's. Invariant: all
methods decode equally many sequences with the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_vllm import Peer
from torch import Tensor

from gspo.config import LoraConfig
from gspo.learner.forward import plan_logprobs
from gspo.learner.plan import make_plan
from gspo.model.adapter import attach
from gspo.model.micro_batch import TokenSequence
from gspo.model.packed_forward import supports_packing
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines.local import LocalEngine, build
from gspo.types import Completion, Prompt, Sampling

VOCABULARY, SEQUENCES, PROMPT, NEW = 151_936, 256, 64, 256
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
CUDA = torch.device("cuda")
DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    "num_hidden_layers": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
SHAPES = {
    "dense, Qwen3-0.6B shape": ("qwen3", DENSE),
    "MoE, 16 layers, 64 experts, top 8": ("qwen3_moe", {**DENSE, **EXPERTS}),
}
LARGE = {
    "dense, Qwen3-8B shape": (
        "qwen3",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
        },
    ),
    "MoE, Qwen3-30B-A3B shape": (
        "qwen3_moe",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
        },
    ),
}
"""Models too large for a second copy in float32."""


class NoText:
    """A tokenizer that decodes to empty strings, so that detokenization costs no time."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [""] * len(ids)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed and memory of one way of decoding."""

    tokens: int
    seconds: float
    extra: float
    """Peak memory beyond what was allocated before, in bytes."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def build_model(kind: str, fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    with torch.device(CUDA):
        config = transformers.AutoConfig.for_model(kind, **fields)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompts_of(count: int) -> list[Prompt]:
    ids = torch.randint(VOCABULARY, (count, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    return [Prompt(id=f"p/{i}", content="", text="", token_ids=tuple(row)) for i, row in enumerate(ids)]


def engine_of(model: Any, stop_ids: tuple[int, ...] = (), slots: int = SEQUENCES) -> LocalEngine:
    return build(EngineContext(model=model, tokenizer=NoText(), stop_ids=stop_ids), slots=slots)


def time_generate(
    engine: LocalEngine, prompts: list[Prompt], samples: int, new: int, seed: int = 0
) -> tuple[Speed, list[list[Completion]]]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    options = GenerateOptions(samples=samples, sampling=Sampling(max_tokens=new), seed=seed, stream="bench", version=0)
    groups = engine.generate(prompts, options)
    torch.cuda.synchronize()
    seconds, extra = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    return Speed(tokens=sum(len(c.token_ids) for g in groups for c in g), seconds=seconds, extra=extra), groups


def generate_step(model: Any, new: int = 12) -> float:
    """Seconds per decoding step of transformers' `generate`, without prefill."""
    ids = torch.randint(VOCABULARY, (SEQUENCES, PROMPT), device=CUDA)
    took = []
    # The first call warms up. The difference of the other two cancels prefill and fixed costs.
    for tokens in (2, 2, 2 + new):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return (took[2] - took[1]) / new


def bandwidth() -> float:
    """Bytes per second of a large copy, counting reads and writes."""
    a = torch.empty(2**31, dtype=torch.uint8, device=CUDA)
    b = torch.empty_like(a)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    b.copy_(a)
    start.record()
    for _ in range(10):
        b.copy_(a)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * a.numel() / (start.elapsed_time(end) / 1e3)


def ceiling_step(model: Any, rate: float) -> float:
    """Seconds to read all weights and the half-filled KV cache once."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return (weights + SEQUENCES * (PROMPT + NEW / 2) * token) / rate


def learner_logp(model: Any, prompts: list[Prompt], groups: list[list[Completion]]) -> Tensor:
    samples = [(p, c, g) for g, (p, group) in enumerate(zip(prompts, groups, strict=True)) for c in group]
    rows = [TokenSequence(prompt_ids=p.token_ids, completion_ids=c.token_ids) for p, c, _ in samples]
    plan = make_plan(
        rows,
        [g for _, _, g in samples],
        mini_batches=1,
        token_budget=20480,
        pad_id=0,
        seed="",
        packed=supports_packing(model),
    )
    return plan_logprobs(model, plan, 1.0, CUDA)[0]


def compare(model: Any, engine: LocalEngine, prompts: list[Prompt], new: int) -> None:
    """Print how far the log-probs of the engine and of the learner differ from each other and from float32."""
    groups = time_generate(engine, prompts, 8, new)[1]
    sampled = torch.tensor([x for group in groups for c in group for x in c.logp_sampler], device=CUDA)
    learner = learner_logp(model, prompts, groups)
    kind = str(model.dtype).removeprefix("torch.")
    difference = (learner - sampled).abs()
    text = (
        f"  |log-prob - learner's|, {kind}: mean {float(difference.mean()):.1e}, largest {float(difference.max()):.1e}"
    )
    if model.dtype != torch.float32:
        exact = learner_logp(model.float(), prompts, groups)
        learner_off = float((learner - exact).abs().mean())
        engine_off = float((sampled - exact).abs().mean())
        text += f"; against float32 the learner is off by {learner_off:.1e}, the engine by {engine_off:.1e}"
    print(text, flush=True)


def bench_decode(repeats: int, vllm: Path | None = None) -> None:
    rate = bandwidth()
    print(f"\nDecoding: {SEQUENCES} sequences, {PROMPT}-token prompts in groups of 8, bf16")
    print(f"copies at {rate / 1e12:.1f} TB/s")
    print(f"{'variant':<66} {'ms/step':>8} {'tok/s':>8} {'extra GiB':>10}")
    peers = start_peers(SHAPES, vllm)
    for name, (kind, fields) in SHAPES.items():
        model = build_model(kind, fields)
        plain, least = generate_step(model), ceiling_step(model, rate)
        print(f"{name + ': generate':<66} {1e3 * plain:>8.2f} {SEQUENCES / plain:>8.0f}")
        print(f"{name + ': ceiling, weights and KV cache read once':<66} {1e3 * least:>8.2f} {SEQUENCES / least:>8.0f}")
        del model
        model, engine = _bench_workloads(name, kind, fields, peers.get(name, []))
        compare(model, engine, prompts_of(8), 128)
        del model, engine
        model = build_model(kind, fields, torch.float32)
        compare(model, engine_of(model), prompts_of(8), 64)
        del model


def bench_large(repeats: int, vllm: Path | None = None) -> None:
    """The same call for larger models, without and with adapters on every linear layer of attention and MLP."""
    print(f"\nDecoding large models: {PROMPT}-token prompts in groups of 8, bf16")
    print(f"{'variant':<66} {'ms/step':>8} {'tok/s':>8} {'extra GiB':>10}")
    peers = start_peers(LARGE, vllm)
    for name, (kind, fields) in LARGE.items():
        model, engine = _bench_workloads(name, kind, fields, peers.get(name, []))
        base = _equal_lengths(engine, repeats).rate
        del engine
        attach(model, LoraConfig(rank=16), base="", seed=0)
        model.to(CUDA)
        adapted = _equal_lengths(engine_of(model), repeats)
        print_line(
            f"{name}, LoRA rank 16: {SEQUENCES} x {NEW} tokens", adapted, f"{adapted.rate / base:.0%} of the base"
        )
        del model


def workloads_of(fields: dict[str, Any]) -> list[dict[str, int]]:
    """Equal lengths, long completions and mixed lengths; fewer and shorter ones for large models, which are slow."""
    small = fields["hidden_size"] < 2048
    mixed, mean = (1024, NEW) if small else (768, NEW // 2)
    return [
        {"prompts": SEQUENCES // 8, "samples": 8, "new": NEW, "stops": 0, "repeats": 2},
        {"prompts": SEQUENCES // 16, "samples": 8, "new": 2048 if small else 1024, "stops": 0, "repeats": 1},
        # About one token in `mean` is a stop token, so lengths are geometric.
        # Two calls, because a call lasts as long as its longest completion, which is a matter of luck.
        {"prompts": mixed // 8, "samples": 8, "new": 8 * mean, "stops": mean, "repeats": 2},
    ]


Shapes = dict[str, tuple[str, dict[str, Any]]]


def start_peers(shapes: Shapes, vllm: Path | None) -> dict[str, list[dict[str, float]]]:
    """What vLLM does on the workloads of each shape. Empty without it."""
    if vllm is None:
        return {}
    torch.cuda.empty_cache()
    peers = {
        name: Peer(
            vllm,
            transformers.AutoConfig.for_model(kind, architectures=[ARCHITECTURES[kind]], **fields),
            workloads_of(fields),
            cache_gib(fields),
        )
        for name, (kind, fields) in shapes.items()
    }
    for name, peer in peers.items():
        print(f"  {name}: {peer.ready()}", flush=True)
    return {name: peer.speeds() for name, peer in peers.items()}


def cache_gib(fields: dict[str, Any]) -> float:
    """GiB of a KV cache that holds the longest workload, so that vLLM preempts nothing."""
    tokens = max(8 * min(w["prompts"], 32) * (PROMPT + (w["stops"] or w["new"])) for w in workloads_of(fields))
    per_token = 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * fields["head_dim"] * 2
    return 1.1 * tokens * per_token / 2**30


def _bench_workloads(
    name: str, kind: str, fields: dict[str, Any], peers: list[dict[str, float]]
) -> tuple[Any, LocalEngine]:
    workloads = workloads_of(fields)
    torch.cuda.empty_cache()
    model = build_model(kind, fields)
    engine = engine_of(model)
    equal = 0.0
    for at, work in enumerate(workloads):
        stops = tuple(range(0, VOCABULARY, work["stops"])) if work["stops"] else ()
        one = engine_of(model, stops) if stops else engine
        prompts = prompts_of(work["prompts"])
        # Compiles the kernels of all batch sizes, which vLLM does when it starts.
        time_generate(one, prompts, 8, work["new"] if stops else 8, seed=99)
        calls = [time_generate(one, prompts, 8, work["new"], seed)[0] for seed in range(work["repeats"])]
        best = _together(calls) if stops else max(calls, key=lambda s: s.rate)
        equal = equal or best.rate
        count = 8 * work["prompts"]
        mean = best.tokens / count / len(calls)
        what = f"{count} of mixed length, mean {mean:.0f}" if stops else f"{count} x {work['new']} tokens"
        note = f"{best.rate / equal:.0%} of equal lengths" if stops else ("paged" if one.paged else "NOT paged")
        if peers:
            peer = peers[at]["tokens"] / peers[at]["seconds"]
            note += f", {best.rate / peer:.2f} x vLLM's {peer:.0f}"
        print_line(f"{name}: {what}", best, note, sequences=min(count, SEQUENCES))
    return model, engine


def _together(calls: Sequence[Speed]) -> Speed:
    return Speed(
        tokens=sum(c.tokens for c in calls),
        seconds=sum(c.seconds for c in calls),
        extra=max(c.extra for c in calls),
    )


def _equal_lengths(engine: LocalEngine, repeats: int) -> Speed:
    prompts = prompts_of(SEQUENCES // 8)
    time_generate(engine, prompts, 8, 8)
    return max((time_generate(engine, prompts, 8, NEW)[0] for _ in range(repeats)), key=lambda s: s.rate)


def print_line(name: str, speed: Speed, note: str, sequences: int = SEQUENCES) -> None:
    step = 1e3 * sequences / speed.rate
    print(f"{name:<66} {step:>8.2f} {speed.rate:>8.0f} {speed.extra / 2**30:>10.2f}  {note}", flush=True)

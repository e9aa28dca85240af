"""Measurements on one H200 that the constants of `gspo plan` are fitted to, and others that check them.

Out: `MEASURED`. Invariant: which of them are fitted was decided before any error was computed. All are of random
weights in bfloat16, under torch 2.11.0, transformers 5.17.0 and triton 3.6.0. `gpu.py` measures single phases and no
whole steps, so a measurement has the phases that were timed, and the memory beyond what was held.

The commands, 2026-11-18 unless noted otherwise:

- sampling of 0.6B: `python benchmarks/gpu.py decode --vllm SITE`; of 8B and 30B-A3B: `python benchmarks/gpu.py large`
- training passes of 0.6B: `gpu.py learn`
- training passes of 8B and 30B-A3B: `gpu.py learn`, 2026-11-16, the former with a prototype of today's attention
- the steps of 0.6B: `gpu.py step`, once with compiled layers and once without
- the step of 30B-A3B: step 2 of `gspo train recipes/qwen3-30b-a3b-lora.toml`, with rewards that flip a coin
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plan_cases import Case

GIB = 2.0**30
MEAN = (63948 - 64 * 512) // 64
"""Mean tokens of a completion in `gpu_learn.py`: 64 sequences have 63,948 tokens, with a prompt each."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds and memory of some phases of a case."""

    name: str
    case: Case
    mean: float
    """Mean tokens of the completions."""
    seconds: Mapping[str, float]
    """By phase; several phases that were timed together are joined by `+`."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Peak bytes of a phase beyond what is held for the whole run."""
    peak: float = 0.0
    """Peak bytes of the step; 0 if unknown."""
    computed: float = 1.0
    """Share of the tokens that training computes: not those of groups with equal rewards."""
    fitted: bool = False


def _sampled(
    model: str,
    prompts: int,
    tokens: int,
    rate: float,
    gib: float,
    *,
    mean: float = 0,
    lora: int = 0,
    fitted: bool = False,
) -> Measurement:
    """Sampling of 8 completions for each prompt of 64 tokens, at so many tokens per second."""
    case = Case(
        model=model,
        prompts=prompts,
        group_size=8,
        prompt_tokens=64,
        max_tokens=tokens,
        mini_batches=1,
        lora_rank=lora,
    )
    mean = mean or tokens
    lengths = f"mean {mean:.0f}" if mean < tokens else f"{tokens}"
    return Measurement(
        name=f"sampling {model}{f' LoRA {lora}' if lora else ''}, {8 * prompts} x {lengths}",
        case=case,
        mean=mean,
        seconds={"sampling": 8 * prompts * mean / rate},
        extra={"sampling": gib * GIB},
        fitted=fitted,
    )


def _trained(
    model: str,
    budget: int,
    ms: float,
    gib: float,
    *,
    lora: int = 0,
    compiled: bool = True,
    checkpointing: bool = False,
    fitted: bool = False,
) -> Measurement:
    """A forward and backward pass over 4 prompts of 512 tokens with 16 completions of 64 to 959 tokens each.

    They count as if all had the mean length: the micro-batches are then as large as those that were measured."""
    case = Case(
        model=model,
        prompts=4,
        group_size=16,
        prompt_tokens=512,
        max_tokens=MEAN,
        mini_batches=1,
        micro_batch_tokens=budget,
        lora_rank=lora,
        checkpointing=checkpointing,
        compiled=compiled,
    )
    way = f" LoRA {lora}" if lora else ""
    way += ", checkpointing" * checkpointing + ", not compiled" * (not compiled)
    return Measurement(
        name=f"training {model}{way}, micro-batches of {budget}",
        case=case,
        mean=MEAN,
        seconds={"training": ms / 1e3},
        extra={"training": gib * GIB},
        fitted=fitted,
    )


_STEP = Case(
    model="0.6B",
    prompts=32,
    group_size=8,
    prompt_tokens=64,
    max_tokens=256,
    mini_batches=4,
    micro_batch_tokens=32768,
)
_PLAIN_STEP = Case(**{**vars(_STEP), "compiled": False})
_R30 = Case(
    model="A3B",
    prompts=32,
    group_size=8,
    prompt_tokens=330,
    max_tokens=1024,
    mini_batches=4,
    micro_batch_tokens=10240,
    lora_rank=16,
)
MEASURED = (
    _sampled("0.6B", 32, 256, 76_738, 11.32, fitted=True),
    _sampled("0.6B", 16, 2048, 23_513, 31.72),
    _sampled("0.6B", 128, 2048, 34_973, 61.16, mean=253, fitted=True),
    _sampled("8B", 32, 256, 25_479, 22.42, fitted=True),
    _sampled("8B", 16, 1024, 15_729, 30.30),
    _sampled("8B", 96, 1024, 10_630, 50.27, mean=124),
    _sampled("8B", 32, 256, 21_757, 27.28, lora=16, fitted=True),
    _sampled("A3B", 32, 256, 14_028, 10.39, fitted=True),
    _sampled("A3B", 16, 1024, 7_742, 15.59),
    _sampled("A3B", 96, 1024, 6_386, 29.27, mean=118),
    _sampled("A3B", 32, 256, 13_099, 11.21, lora=16),
    _trained("0.6B", 20480, 343.1, 24.81, fitted=True),
    _trained("0.6B", 40960, 323.3, 40.56),
    _trained("0.6B", 20480, 450.5, 3.63, checkpointing=True, fitted=True),
    _trained("0.6B", 20480, 652.7, 38.71, compiled=False, fitted=True),
    _trained("0.6B", 20480, 826.2, 4.06, compiled=False, checkpointing=True),
    _trained("8B", 8192, 2426, 56.0, lora=16, fitted=True),
    _trained("8B", 16384, 2282, 95.6, lora=16),
    _trained("A3B", 10240, 1575, 44.7, lora=16, fitted=True),
    Measurement(
        name="step 0.6B, 32x8, 64+256, 4 updates",
        case=_STEP,
        mean=256,
        seconds={"sampling": 0.90, "log-probs+training+optimizer": 0.84},
        peak=29.2 * GIB,
    ),
    Measurement(
        name="step 0.6B, 32x8, 64+256, 4 updates, not compiled",
        case=_PLAIN_STEP,
        mean=256,
        # Sampling is that of the step before.
        seconds={"log-probs": 0.32, "training+optimizer": 1.28},
        peak=40.8 * GIB,
        fitted=True,
    ),
    Measurement(
        name="step A3B LoRA 16, 32x8, 330+1024, 4 updates",
        case=_R30,
        mean=1020,
        seconds={"sampling": 17.68, "log-probs+training+optimizer": 14.80},
        peak=110.13e9,
        computed=1 - 0.1858,
    ),
)

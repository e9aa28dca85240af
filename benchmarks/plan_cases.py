"""The shapes that `plan_gpu.py` measures: which ones the constants are fitted to, and which ones check the fit.

Out: `CASES`, and `TINY` for CPUs. Invariant: no case of one set has the model, the way of training and the lengths of
a case of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LARGE_VOCABULARY = 151_936
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": LARGE_VOCABULARY,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "135M": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # One layer in four, or in two, of Qwen3-30B-A3B.
    "A3B, 12 layers": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "MoE 64x512": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}
MODELS["A3B"] = MODELS["A3B, 12 layers"] | {"num_hidden_layers": 48}
MODELS["A3B, 24 layers"] = MODELS["A3B, 12 layers"] | {"num_hidden_layers": 24}
MODELS["tiny MoE"] = MODELS["tiny"] | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step to measure."""

    model: str
    prompts: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    mini_batches: int
    micro_batch_tokens: int = 16384
    lora_rank: int = 0
    checkpointing: bool = False
    compiled: bool = True
    kl: float = 0.0
    mean_tokens: int = 0
    """About one token in `mean_tokens` ends a completion; 0: all completions have `max_tokens`."""
    fitted: bool = False
    """Whether the constants may be fitted to it."""

    @property
    def name(self) -> str:
        way = f"LoRA {self.lora_rank}" if self.lora_rank else "full"
        lengths = f"{self.prompt_tokens}+{self.max_tokens}"
        mean = f" (mean {self.mean_tokens})" if self.mean_tokens else ""
        more = ", checkpointed" * self.checkpointing + ", KL" * bool(self.kl) + ", not compiled" * (not self.compiled)
        return f"{self.model}, {way}{more}: {self.prompts}x{self.group_size}, {lengths}{mean}, {self.mini_batches} upd."

    @property
    def worker(self) -> tuple[str, bool]:
        """Cases with the same one are measured in one process."""
        return self.model.partition(",")[0], bool(self.lora_rank)


FITTED = (
    Case(model="0.6B", prompts=32, group_size=8, prompt_tokens=64, max_tokens=256, mini_batches=4),
    Case(model="0.6B", prompts=4, group_size=16, prompt_tokens=512, max_tokens=1024, mini_batches=2),
    Case(model="0.6B", prompts=8, group_size=8, prompt_tokens=256, max_tokens=512, mini_batches=2, compiled=False),
    Case(model="135M", prompts=32, group_size=8, prompt_tokens=128, max_tokens=256, mini_batches=4),
    Case(
        model="1.7B",
        prompts=16,
        group_size=8,
        prompt_tokens=256,
        max_tokens=512,
        mini_batches=4,
        micro_batch_tokens=8192,
        checkpointing=True,
    ),
    Case(
        model="8B",
        prompts=16,
        group_size=8,
        prompt_tokens=128,
        max_tokens=256,
        mini_batches=2,
        micro_batch_tokens=8192,
        lora_rank=16,
    ),
    Case(
        model="A3B, 12 layers",
        prompts=16,
        group_size=8,
        prompt_tokens=128,
        max_tokens=256,
        mini_batches=2,
        lora_rank=16,
    ),
    Case(model="MoE 64x512", prompts=32, group_size=8, prompt_tokens=64, max_tokens=256, mini_batches=2),
)
HELD_OUT = (
    Case(model="1.7B", prompts=16, group_size=8, prompt_tokens=64, max_tokens=256, mini_batches=2),
    Case(
        model="4B",
        prompts=8,
        group_size=8,
        prompt_tokens=256,
        max_tokens=384,
        mini_batches=2,
        micro_batch_tokens=8192,
        checkpointing=True,
    ),
    Case(
        model="8B",
        prompts=4,
        group_size=16,
        prompt_tokens=512,
        max_tokens=512,
        mini_batches=1,
        micro_batch_tokens=20480,
        lora_rank=16,
        checkpointing=True,
    ),
    Case(model="0.6B", prompts=8, group_size=8, prompt_tokens=128, max_tokens=1536, mini_batches=2),
    Case(model="0.6B", prompts=64, group_size=8, prompt_tokens=64, max_tokens=128, mini_batches=4, lora_rank=32),
    Case(model="0.6B", prompts=64, group_size=8, prompt_tokens=64, max_tokens=768, mean_tokens=128, mini_batches=4),
    Case(model="135M", prompts=16, group_size=16, prompt_tokens=256, max_tokens=512, mini_batches=1),
    Case(
        model="A3B, 24 layers",
        prompts=8,
        group_size=8,
        prompt_tokens=256,
        max_tokens=384,
        mini_batches=2,
        lora_rank=16,
        checkpointing=True,
        kl=0.01,
    ),
    Case(
        model="MoE 64x512",
        prompts=8,
        group_size=16,
        prompt_tokens=256,
        max_tokens=384,
        mini_batches=4,
        micro_batch_tokens=8192,
        checkpointing=True,
    ),
)
CASES = tuple(replace(case, fitted=True) for case in FITTED) + HELD_OUT
_TINY = Case(model="tiny", prompts=2, group_size=2, prompt_tokens=8, max_tokens=16, mini_batches=2)
TINY = (
    replace(_TINY, fitted=True),
    replace(_TINY, model="tiny MoE", checkpointing=True, mini_batches=1),
    replace(_TINY, model="tiny", lora_rank=2, kl=0.01, mean_tokens=8),
)

"""Tiny MoE models of many families, and an independent formula of each family's layer from its paper.

`Family.gate` and `Family.choose` are formulas on router logits, independent of the code under test and of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BASE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family and the expected properties of its models."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    gate: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    """(router, logits_IE, chosen_IK) -> the gate weight of each selected expert."""
    choose: Callable[[Any, Tensor, int], Tensor] = lambda router, logits, k: best(logits, k)
    """(router, logits_IE, top_k) -> the experts that a router of this family selects."""

    def model(self, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.manual_seed(seed)
        config = AutoConfig.for_model(self.kind, **{**BASE, **self.fields, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if dtype == torch.float64:  # the grouped kernel does not support float64
            model.set_experts_implementation("eager")
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            blank = p.is_floating_point() and not bool(p.float().abs().sum().isfinite() and p.float().abs().sum() > 0)
            if blank and "inv_freq" not in name:  # biases and corrections start at 0, which would hide errors in them
                torch.nn.init.normal_(p, 0, 0.2)
        return model


def best(score_IE: Tensor, k: int) -> Tensor:
    return score_IE.argsort(dim=-1, descending=True)[:, :k]


def chosen_softmax(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """g_i = I_i exp(s_i) / sum_j I_j exp(s_j): softmax over the selected experts."""
    mask = torch.zeros_like(logits).scatter(1, chosen, 1.0)
    weight = mask * logits.exp()
    return (weight / weight.sum(-1, keepdim=True)).gather(1, chosen)


def plain_softmax(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Without norm_topk_prob: softmax over all experts."""
    return (logits.exp() / logits.exp().sum(-1, keepdim=True)).gather(1, chosen)


def normed_sigmoid(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """DeepSeek-V3: sigmoid scores of the selected experts over their sum, times a constant. The correction bias
    affects only the selection."""
    score = (1 / (1 + (-logits).exp())).gather(1, chosen)
    return router.routed_scaling_factor * score / score.sum(-1, keepdim=True)


def best_in_best_groups(router: Any, logits: Tensor, k: int) -> Tensor:
    """DeepSeek-V3: the best experts within the groups with the highest sums of their two best corrected scores."""
    score = torch.sigmoid(logits) + router.e_score_correction_bias
    rows = []
    for row in score.tolist():
        size = len(row) // router.num_group
        groups = [range(g * size, (g + 1) * size) for g in range(router.num_group)]
        groups.sort(key=lambda g: -sum(sorted((row[e] for e in g), reverse=True)[:2]))
        allowed = [e for g in groups[: router.topk_group] for e in g]
        rows.append(sorted(allowed, key=lambda e: -row[e])[:k])
    return torch.tensor(rows)


FAMILIES = {
    "qwen3-moe": Family(
        kind="qwen3_moe",
        fields={**EXPERTS, "head_dim": 8, "num_experts": 8, "norm_topk_prob": True},
        gate=chosen_softmax,
    ),
    "qwen3-moe, some layers dense": Family(
        kind="qwen3_moe",
        fields={
            **{**EXPERTS, "head_dim": 8, "num_experts": 8, "norm_topk_prob": True},
            **{"num_hidden_layers": 4, "mlp_only_layers": [0, 2]},
        },
        gate=chosen_softmax,
    ),
    "qwen2-moe": Family(
        kind="qwen2_moe",
        fields={
            **{**EXPERTS, "num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 16},
            **{"decoder_sparse_step": 1, "norm_topk_prob": False},
        },
        experts=6,
        top_k=3,
        gate=plain_softmax,
    ),
    "mixtral": Family(
        kind="mixtral", fields={"num_local_experts": 4, "num_experts_per_tok": 2}, experts=4, gate=chosen_softmax
    ),
    "olmoe": Family(
        kind="olmoe",
        fields={"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
        gate=plain_softmax,
    ),
    "deepseek-v3": Family(
        kind="deepseek_v3",
        fields={**GROUPED, **LATENT, "num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        gate=normed_sigmoid,
        choose=best_in_best_groups,
    ),
    "gpt-oss": Family(
        kind="gpt_oss",
        fields={"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
        gate=chosen_softmax,
    ),
}
"""Families that are tested in detail."""

SMOKE = {
    "granitemoe": Family(kind="granitemoe", fields={"num_local_experts": 8, "num_experts_per_tok": 2}),
    "glm4-moe": Family(kind="glm4_moe", fields={**GROUPED, "n_group": 1, "topk_group": 1}, layers=1),
    "llama4": Family(
        kind="llama4_text",
        fields={"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24, "head_dim": 8},
        experts=4,
        top_k=1,
    ),
    "ernie4.5": Family(
        kind="ernie4_5_moe", fields={"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16}, layers=1
    ),
    "hunyuan": Family(kind="hunyuan_v1_moe", fields={"num_experts": 8, "moe_topk": 2, "head_dim": 8}),
    "minimax-m2": Family(kind="minimax_m2", fields={"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-next": Family(
        kind="qwen3_next",
        fields={
            **{**EXPERTS, "head_dim": 8, "num_experts": 8, "shared_expert_intermediate_size": 16},
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "deepseek-v2": Family(kind="deepseek_v2", fields={**GROUPED, **LATENT, "topk_method": "greedy"}, layers=1),
    "deepseek-v2, grouped": Family(
        kind="deepseek_v2",
        fields={**GROUPED, **LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        layers=1,
    ),
}
"""Further families that work."""

WINDOW = {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 4}
GEMMA4 = {
    **{**WINDOW, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50, "num_kv_shared_layers": 0},
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [8.0] * 4}
ATTENTION = {
    "llama": Family(kind="llama"),
    "llama, dynamic rotary embedding": Family(
        kind="llama", fields={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    ),
    "qwen3, some windows": Family(
        kind="qwen3",
        fields={**WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "mistral, window": Family(kind="mistral", fields={**WINDOW}),
    "ministral3": Family(kind="ministral3", fields={"head_dim": 8}),
    "mixtral, window": Family(kind="mixtral", fields={"num_local_experts": 4, "sliding_window": 8}),
    "gemma2": Family(kind="gemma2", fields={**WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": Family(kind="gemma3_text", fields={**WINDOW, "sliding_window_pattern": 2}),
    "gemma3n": Family(
        kind="gemma3n_text",
        fields={**GEMMA4, "num_kv_shared_layers": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4": Family(kind="gemma4_text", fields=GEMMA4),
    "gemma4, shared KV cache": Family(kind="gemma4_text", fields={**GEMMA4, "num_kv_shared_layers": 2}),
    "olmo2": Family(kind="olmo2"),
    "olmo3": Family(kind="olmo3", fields={"sliding_window": 8, "num_hidden_layers": 4}),
    "cohere2": Family(kind="cohere2", fields={"sliding_window": 8, "num_hidden_layers": 4}),
    "phi3": Family(kind="phi3"),
    "phi3, window": Family(kind="phi3", fields={"sliding_window": 8}),
    "phi3, longrope": Family(
        kind="phi3",
        fields={
            **{"max_position_embeddings": 512, "original_max_position_embeddings": 256},
            **{"rope_parameters": {**LONG, "original_max_position_embeddings": 256, "partial_rotary_factor": 1.0}},
        },
    ),
    "granite": Family(kind="granite", fields={"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "glm4": Family(kind="glm4", fields={"head_dim": 8}),
    "smollm3": Family(kind="smollm3", fields={"num_hidden_layers": 4}),
    "gpt2": Family(kind="gpt2", fields={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
}
"""Families by their attention: windows, soft caps, a KV cache shared by layers, rotary embeddings. Attention sinks
(GPT-OSS) and values of another size than keys (DeepSeek) are above."""


def blocks_of(model: Any) -> list[Any]:
    """The MoE layers, in order."""
    return [m for m in model.modules() if hasattr(m, "experts") and (hasattr(m, "gate") or hasattr(m, "router"))]


def router_of(block: Any) -> Any:
    return block.gate if hasattr(block, "gate") else block.router


def router_logits(router: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
    weight = router.weight if weight is None else weight
    bias = getattr(router, "bias", None)
    return x @ weight.T + (0 if bias is None else bias)


def expert_output(block: Any, expert: int, x: Tensor) -> Tensor:
    """The output of one expert, from its weights."""
    e = block.experts
    if hasattr(e, "gate_up_proj_bias"):  # GPT-OSS
        both = x @ e.gate_up_proj[expert] + e.gate_up_proj_bias[expert]
        gate, up = both[..., ::2].clamp(max=e.limit), both[..., 1::2].clamp(-e.limit, e.limit)
        return ((up + 1) * gate * torch.sigmoid(e.alpha * gate)) @ e.down_proj[expert] + e.down_proj_bias[expert]
    gate, up = (x @ e.gate_up_proj[expert].T).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ e.down_proj[expert].T


def shared_output(block: Any, x: Tensor) -> Tensor | float:
    """The output of the shared experts, which every token gets."""
    if hasattr(block, "shared_expert"):
        return torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return block.shared_experts(x) if hasattr(block, "shared_experts") else 0.0


def layer_output(family: Family, block: Any, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """y = sum_i g_i E_i(x) with the given experts and router weight `weight`."""
    assert family.gate is not None
    gate = family.gate(router_of(block), router_logits(router_of(block), x, weight), chosen)
    rows = [
        sum(g * expert_output(block, int(e), row) for g, e in zip(gates, experts, strict=True))
        for row, gates, experts in zip(x, gate, chosen, strict=True)
    ]
    return torch.stack(rows) + shared_output(block, x)


class Spy:
    """Inputs and outputs of the MoE layers in one forward, recorded by hooks; `gradients` after a backward pass."""

    def __init__(self, model: Any) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self.calls = 0
        """Number of router calls, including recomputation."""
        self.blocks = blocks_of(model)
        self.handles = [b.register_forward_hook(self._record(i)) for i, b in enumerate(self.blocks)]
        self.handles += [router_of(b).register_forward_pre_hook(self._count) for b in self.blocks]

    def _count(self, module: Any, inputs: Any) -> None:
        self.calls += 1

    def _record(self, index: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if len(self.inputs) > index:  # recomputed in the backward pass
                return
            y = output[0] if isinstance(output, tuple) else output
            self.inputs.append(inputs[0].detach().flatten(0, -2))
            self.outputs.append(y.detach().flatten(0, -2))
            if y.requires_grad:
                y.register_hook(lambda g: self.gradients.__setitem__(index, g.detach().flatten(0, -2)))

        return hook

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def chosen_ILK(self, family: Family) -> Tensor:
        """The experts of every token, from the inputs of the routers and the family's rule."""
        chosen = [
            family.choose(router_of(b), router_logits(router_of(b), x).detach(), family.top_k)
            for b, x in zip(self.blocks, self.inputs, strict=True)
        ]
        return torch.stack(chosen, dim=1)


@torch.no_grad()
def plain_choices(family: Family, model: Any, ids: tuple[int, ...]) -> Tensor:
    """The experts of a single sequence, [tokens, L, K], sorted."""
    with Spy(model) as spy:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return spy.chosen_ILK(family).sort().values


def some_ids(rows: int = 2, length: int = 5, vocabulary: int = 50) -> Tensor:
    return (7 * torch.arange(rows)[:, None] + 3 * torch.arange(length)[None] + 2) % vocabulary


def in_order(chosen_ILK: Tensor) -> Tensor:
    """The experts in ascending order."""
    return chosen_ILK.long().sort().values


class Digits:
    """A minimal tokenizer for an engine: it writes out the token ids."""

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(map(str, row)) for row in ids]

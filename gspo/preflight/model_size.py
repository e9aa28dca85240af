"""The sizes of a model that memory and time depend on.

In: a model, on any device. Out: its `Shape`, from its config, and its `Weights`, counted. Invariant: nothing is
computed with the weights, so the meta device is enough. Counted on Llama, Qwen2, Qwen3 and Qwen3-MoE. Other families
have the same parts under other names, or differ by little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo.model.quantization import BITS, linear_layers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    inner: int
    """Width of the dense feed-forward; 0 in a layer of experts."""
    queries: int
    keys: int
    heads: int
    vocabulary: int
    chosen: int
    """Experts per token; 0 for a dense model."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    expert: int
    """Width of an expert."""
    eager: bool
    """Whether attention stores its weights, one per pair of tokens."""


def shape_of(model: Any) -> Shape:
    """Read the shape from the config. Its attribute names differ slightly between model families."""
    config = model.config.get_text_config(decoder=True)

    def first(*names: str, default: int = 0) -> int:
        return next((int(v) for n in names if isinstance(v := getattr(config, n, None), int) and v), default)

    hidden, heads = first("hidden_size"), first("num_attention_heads", default=1)
    head = first("head_dim", default=hidden // heads)
    chosen = first("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    inner = first("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    expert = first("moe_intermediate_size", default=inner)
    shared = first("shared_expert_intermediate_size") or first("n_shared_experts") * expert
    return Shape(
        layers=first("num_hidden_layers"),
        hidden=hidden,
        inner=shared if chosen else inner,
        queries=heads * head,
        keys=first("num_key_value_heads", default=heads) * head,
        heads=heads,
        vocabulary=model.get_input_embeddings().num_embeddings,
        chosen=chosen,
        experts=first("num_experts", "num_local_experts", "n_routed_experts") if chosen else 0,
        expert=expert,
        eager=getattr(config, "_attn_implementation", "sdpa") == "eager",
    )


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of weights, by what a token does with them."""

    total: int
    trained: int
    size: int
    """Bytes of a weight that is not quantized."""
    bytes: float
    """Of all of them; quantized weights count with their 4-bit size."""
    quantized_bytes: float
    """Of those that are quantized."""
    dense: int
    """Weights of matrices in the layers that every token is multiplied with: attention, feed-forward, routers."""
    dense_trained: int
    experts: int
    """Weights of experts, of which a token uses `chosen / experts`."""
    experts_trained: int
    adapters: int
    adapter_widths: int
    """Inputs and outputs of all adapted layers: numbers per token that adapters read or write."""
    head: int
    head_trained: bool
    root: int
    """Weights outside of the layers, which stay whole during an update if the model is sharded."""

    def active(self, shape: Shape) -> float:
        """Weights of the layers that a token uses."""
        share = shape.chosen / shape.experts if shape.experts else 0.0
        return self.dense + self.adapters + share * self.experts


def weights_of(model: Any, quantize: str) -> Weights:
    """Count the weights of a model."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    head_weight = embedding if head is None else head.weight
    named = list(model.named_parameters())
    adapters = {name for name, _ in named if "lora_" in name}
    outside = {id(embedding), id(head_weight)}
    matrices = [(n, p) for n, p in named if id(p) not in outside and p.dim() > 1 and n not in adapters]
    experts = {name for name, _ in matrices if ".experts." in name}

    def count(chosen: Callable[[str], bool], *, trained: bool = False) -> int:
        return sum(p.numel() for n, p in matrices if chosen(n) and (p.requires_grad or not trained))

    return Weights(
        total=sum(p.numel() for _, p in named),
        trained=sum(p.numel() for _, p in named if p.requires_grad),
        size=next(model.parameters()).element_size(),
        bytes=weight_bytes(model, quantize),
        quantized_bytes=sum(w.numel() for w in _quantized(model, quantize)) * BITS / 8,
        dense=count(lambda n: n not in experts),
        dense_trained=count(lambda n: n not in experts, trained=True),
        experts=count(lambda n: n in experts),
        experts_trained=count(lambda n: n in experts, trained=True),
        adapters=sum(p.numel() for n, p in named if n in adapters),
        # A has a column for each input, and B a row for each output.
        adapter_widths=sum(p.shape[-1] if "lora_A" in n else p.shape[0] for n, p in named if n in adapters),
        head=head_weight.numel(),
        head_trained=head_weight.requires_grad,
        root=sum({id(p): p.numel() for p in (embedding, head_weight)}.values()),
    )


def weight_bytes(model: Any, quantize: str) -> float:
    """Bytes of the weights; quantized weights count with their 4-bit size."""
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return whole - sum(w.numel() * (w.element_size() - BITS / 8) for w in _quantized(model, quantize))


def _quantized(model: Any, quantize: str) -> list[Any]:
    """The weights that are stored in 4 bits."""
    return [m.weight for _, m in linear_layers(model) if not m.weight.requires_grad] if quantize else []

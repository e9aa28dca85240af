"""4-bit weights (NF4 with double quantization, QLoRA, arXiv:2305.14314) with `bitsandbytes`, for a frozen base model.

In: a loaded model. Out: the same model with its linear layers quantized, except for the LM head and routers. Invariant:
the layers compute with exactly the weights that `dequantize` gives back, so an adapter that was trained on them can be
merged into them. They do so on every CPU, with gradients.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gspo.errors import ConfigError

# On a CPU with bfloat16 instructions, bitsandbytes warns at import that a kernel from the hub is missing. That kernel
# is never used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

BITS = 4.127
"""Bits per weight: 4, plus the scales of blocks of 64 weights, stored in 8 bits with a float32 scale per 256 of
them."""


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer by path, except the LM head, from whose plain weight log-probs are computed, and the routers
    of an MoE model."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        # A router's choice is discrete: an error of 4-bit weights would send tokens to other experts.
        routes = any(part in ("gate", "router") or part.endswith("_gate") for part in path.split("."))
        if isinstance(module, nn.Linear) and module is not head and not routes:
            yield path, module


def quantize(model: Any, device: torch.device) -> None:
    """Replace the linear layers with 4-bit ones on the device, one at a time."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.quantize: 4-bit weights need the bitsandbytes package; run: pip install bitsandbytes, or set it "
            'to ""'
        )
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, layer in list(linear_layers(model)):
        quantized = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=layer.weight.dtype,
            compress_statistics=True,
            quant_type="nf4",
            # The weights follow below; allocating them twice would double the peak memory.
            device="meta",
        )
        quantized.weight = Params4bit(
            layer.weight.data.contiguous(), requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        quantized.bias = layer.bias
        # On a CPU with bfloat16 instructions, the layer would repack its weights permanently at the first forward
        # without gradient. The kernel for that layout rounds inputs to bfloat16 and has no gradient, and
        # `dequantize_4bit` cannot read the layout.
        quantized.support_avx512bf16_for_cpu = False
        _set_module(model, path, quantized.to(device))


@torch.no_grad()
def dequantize_layer(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """A 4-bit layer with dequantized weights."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(dtype)
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    linear.bias = layer.bias
    return linear


def parameter_count(weight: Any) -> int:
    """The number of weights in a parameter. A 4-bit parameter stores two per byte."""
    state = getattr(weight, "quant_state", None)
    return int(weight.numel()) if state is None else math.prod(state.shape)


def is_quantized(layer: Any) -> bool:
    """Whether a layer has 4-bit weights."""
    return type(layer).__name__ == "Linear4bit"


def dequantize(model: Any) -> None:
    """Dequantize all layers, to the model's dtype."""
    for path, module in list(model.named_modules()):
        if is_quantized(module):
            _set_module(model, path, dequantize_layer(module, model.dtype))


def _set_module(model: Any, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)

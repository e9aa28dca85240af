"""Weights in 4 bits (NF4 with double quantisation, QLoRA, arXiv:2305.14314) through `bitsandbytes`, for a model whose own
weights stay as they are.

In: a loaded model. Out: the same model with its linear layers replaced, all but the output layer and routers. Invariant: the
layers compute with the weights that `restore` gives back, so what was trained beside them can be added to just these; they do so
on every CPU, with gradients.
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

# It complains at import that a kernel of the hub is missing on a CPU with bfloat16 instructions. That kernel is never used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

BITS = 4.127
"""Per weight: 4, and the scales of blocks of 64, themselves in 8 bits with a float32 scale per 256 of them."""


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer by its path, but not the output layer, whose plain weight log-probabilities are computed from, and
    not what a mixture of experts routes by."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        routes = any(part in ("gate", "router") or part.endswith("_gate") for part in path.split("."))
        if isinstance(module, nn.Linear) and module is not head and not routes:
            yield path, module


def quantize(model: Any, device: torch.device) -> None:
    """Replace the linear layers by 4-bit ones on the device, one at a time."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            'model.quantize: 4-bit weights need the bitsandbytes package; run: pip install bitsandbytes, or set it to ""'
        )
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, layer in list(linear_layers(model)):
        kind = layer.weight.dtype
        small = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=kind,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        small.weight = Params4bit(
            layer.weight.data.contiguous(), requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        small.bias = layer.bias
        # On a CPU with bfloat16 instructions the layer would repack its weights at the first forward without gradient, for good.
        # The kernel for that layout rounds inputs to bfloat16 and has no gradient, and `dequantize_4bit` cannot read the layout.
        small.support_avx512bf16_for_cpu = False
        _put(model, path, small.to(device))


@torch.no_grad()
def plain(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """A 4-bit layer with its weights written out."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(dtype)
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight, made.bias = nn.Parameter(weight), layer.bias
    return made


def numbers_in(weight: Any) -> int:
    """How many numbers a parameter holds: two to a byte if it is in 4 bits."""
    state = getattr(weight, "quant_state", None)
    return int(weight.numel()) if state is None else math.prod(state.shape)


def is_small(layer: Any) -> bool:
    """Whether a layer's weights are in 4 bits."""
    return type(layer).__name__ == "Linear4bit"


def restore(model: Any) -> None:
    """All layers with their weights written out, in the model's precision."""
    for path, module in list(model.named_modules()):
        if is_small(module):
            _put(model, path, plain(module, model.dtype))


def _put(model: Any, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)

"""The experts of a completion, as vLLM itself returns them on GPUs.

In: an array [tokens, layers, top_k] over all layers, including dense ones. Out: the bytes of the MoE layers alone, as
in `RequestOutput`. Invariant: layers keep the order of the model.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo.model.routing import Routers


def moe_layers(model: Any, routers: Routers) -> list[int]:
    """The indices of the layers that have a router, from the names of the routers."""
    names = {id(module): name for name, module in model.named_modules()}
    found = [re.findall(r"\.(\d+)\.", f".{names[id(module)]}.") for module in routers.modules]
    return [int(numbers[0]) for numbers in found]


def vllm_returns_experts(model: Any) -> bool:
    """Whether vLLM can return the experts itself on this model's device. That needs Triton, hence a GPU."""
    return bool(model.device.type != "cpu")


def pack_experts(array: Any, layers: Sequence[int]) -> bytes:
    """The MoE layers of vLLM's array, as bytes."""
    return np.ascontiguousarray(np.asarray(array)[:, list(layers)]).astype(np.int16).tobytes()


def pack_served_experts(text: str, layers: Sequence[int]) -> bytes:
    """The same for the response of a server: base64 of a .npy file."""
    # No pickle: a server may be any machine, and a pickle executes code.
    return pack_experts(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False), layers)

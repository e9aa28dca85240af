"""The experts of a reply, as vLLM itself returns them where it can (on GPUs).

In: an array [tokens, layers, top_k] over all layers, dense ones too. Out: bytes over the MoE layers alone, as `Reply` has them.
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
    """The numbers of the layers that have a router, from the names of the routers."""
    names = {id(module): name for name, module in model.named_modules()}
    found = [re.findall(r"\.(\d+)\.", f".{names[id(module)]}.") for module in routers.modules]
    return [int(numbers[0]) for numbers in found]


def sees_itself(model: Any) -> bool:
    """Whether vLLM returns experts by itself where this model is: its own way needs Triton, hence a GPU."""
    return bool(model.device.type != "cpu")


def native(array: Any, layers: Sequence[int]) -> bytes:
    """The bytes of what vLLM returned."""
    return np.ascontiguousarray(np.asarray(array)[:, list(layers)]).astype(np.int16).tobytes()


def from_text(text: str, layers: Sequence[int]) -> bytes:
    """The same for the answer of a server: base64 of a .npy file."""
    return native(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False), layers)

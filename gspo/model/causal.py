"""A check that a model is causal and deterministic, as all code here assumes.

In: a model that is ready to use. Out: nothing, or a `ConfigError`. Invariant: the check runs the model once.
`AutoModelForCausalLM` also loads encoders (BERT and relatives), in which the probabilities of a token depend on the
tokens after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.errors import ConfigError

LENGTH = 8
CHANGED_FROM = (8, 2, 4, 7)
"""The position from which each row differs from the first. The first of these is an identical copy: it detects
noise."""
MOST = 0.1
"""Share of positions that may differ: in an MoE model a near-tie in a router may send a single token elsewhere."""


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Refuse a model whose logits depend on later tokens, are not deterministic, or overflow float16."""
    logits = _trial_logits(model)
    # In other precisions the model itself is at fault, and the first sampled token shows that.
    if model.dtype == torch.float16 and not bool(logits.isfinite().all()):
        raise ConfigError(
            f"model.dtype: the activations of {type(model).__name__} exceed 65504, the largest number of float16; "
            'set model.dtype = "bfloat16" or "float32"'
        )
    difference_RT = _differences(logits)
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    name = type(model).__name__
    if float((difference_RT[0] > tolerance).float().mean()) > MOST:
        raise ConfigError(
            f"model.path: {name} gives other probabilities for the same tokens in the same batch, so importance ratios "
            "would be meaningless; it adds noise in its forward pass: use a model without noise"
        )
    before = torch.arange(LENGTH) < torch.tensor(CHANGED_FROM[1:])[:, None]
    if float((difference_RT[1:][before] > tolerance).float().mean()) > MOST:
        raise ConfigError(
            f"model.path: {name} is not a causal language model: later tokens change its probabilities of earlier ones "
            "(an encoder, or is_decoder = false in its config.json); give a decoder"
        )


def _trial_logits(model: Any) -> Tensor:
    """Logits of a row and of changed copies of it."""
    vocabulary = model.get_input_embeddings().num_embeddings
    row = torch.arange(1, LENGTH + 1) % vocabulary
    other = (row + 1 + vocabulary // 2) % vocabulary
    rows = [row, *(torch.where(torch.arange(LENGTH) < at, row, other) for at in CHANGED_FROM)]
    logits: Tensor = model(input_ids=torch.stack(rows).to(model.device), use_cache=False).logits.float()
    return logits


def _differences(logits: Tensor) -> Tensor:
    """The root-mean-square difference of each changed row to the first, by position, relative to the spread of the
    logits. NaN counts as no difference."""
    difference_RT = (logits[1:] - logits[:1]).square().mean(-1).sqrt() / logits[:1].std(-1).clamp_min(1e-12)
    return difference_RT.nan_to_num(0.0).cpu()

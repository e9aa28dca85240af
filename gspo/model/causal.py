"""Whether a model is what everything here takes it for: causal, and without noise.

In: a model that is ready to use. Out: nothing, or a `ConfigError`. Invariant: this is found by running the model once.
`AutoModelForCausalLM` also loads encoders (BERT and its kin), whose probabilities of a token depend on the tokens after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.errors import ConfigError

LENGTH, CHANGED_FROM = 8, (8, 2, 4, 7)
"""Rows that are alike up to a position; the first two rows are alike to the end."""
MOST = 0.1
"""Share of positions that may differ: in a mixture of experts a near-tie in a router may send a single token elsewhere."""


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Refuse a model whose logits depend on later tokens, or are not the same twice."""
    apart_RT = _differences(model)
    far = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    name = type(model).__name__
    if float((apart_RT[0] > far).float().mean()) > MOST:
        raise ConfigError(
            f"model.path: {name} gives other probabilities for the same tokens in the same batch, so ratios would mean nothing; it adds noise to its forward: use a model without it"
        )
    before = torch.arange(LENGTH) < torch.tensor(CHANGED_FROM[1:])[:, None]
    if float((apart_RT[1:][before] > far).float().mean()) > MOST:
        raise ConfigError(
            f"model.path: {name} is not a causal language model: later tokens change its probabilities of earlier ones (an encoder, or is_decoder = false in its config.json); give a decoder"
        )


def _differences(model: Any) -> Tensor:
    """Of each changed row to the first, by position: root-mean-square, of the spread of the logits. NaN counts as none."""
    vocabulary = model.get_input_embeddings().num_embeddings
    row = torch.arange(1, LENGTH + 1) % vocabulary
    other = (row + 1 + vocabulary // 2) % vocabulary
    rows = [row, *(torch.where(torch.arange(LENGTH) < at, row, other) for at in CHANGED_FROM)]
    logits: Tensor = model(input_ids=torch.stack(rows).to(model.device), use_cache=False).logits.float()
    apart_RT = (logits[1:] - logits[:1]).square().mean(-1).sqrt() / logits[:1].std(-1).clamp_min(1e-12)
    return apart_RT.nan_to_num(0.0).cpu()

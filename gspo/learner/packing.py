"""Which models can read packed rows, and the forward of a micro-batch, packed or padded.

In: a transformers causal language model. Out: whether it reads packed rows (not so with sliding windows, recurrent layers,
or attention code of the model's own). Invariant: that is found by a trial, once per model; a model that fails it reads
padded rows, with a message, and is never computed wrongly.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gspo.learner.plan import MicroBatch, TokenSequence, make_plan
from gspo.model.attention import attention_kinds

_found: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def reads_packed(model: Any) -> bool:
    """Whether this model reads packed rows, its attention being replaced. Tried once per model."""
    if model not in _found:
        obstacle = obstacle_to_packing(model)
        if obstacle is not None:
            warnings.warn(f"learning pads its rows and computes a prompt once per reply: {obstacle}", RuntimeWarning, stacklevel=2)  # fmt: skip
        _found[model] = obstacle is None
    return _found[model]


def read(model: Any, batch: MicroBatch, **options: Any) -> Tensor:
    """The model's outputs for a micro-batch: [rows, tokens, ...] of `input_ids`."""
    if batch.packing is None:
        outputs: Tensor = model(input_ids=batch.input_ids, use_cache=False, **options).logits
        return outputs
    if hasattr(model.config, "output_router_logits"):
        options["output_router_logits"] = False
    # A prepared mask stops the model from making one; packed attention looks at the packing alone.
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
    packed: Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=nothing,
        packing=batch.packing,
        use_cache=False,
        **options,
    ).logits
    return packed


def obstacle_to_packing(model: Any) -> str | None:
    """Why packed rows would be wrong for this model, or None; if None, its attention has been replaced."""
    from gspo.model.kernels.packed_attention import NAME

    name, kinds, own = type(model).__name__, attention_kinds(model.config), model.config._attn_implementation
    if kinds is None or set(kinds.values()) != {None}:
        return f"{name} has layers other than full attention"
    if not getattr(model, "_supports_attention_backend", False):
        return f"the attention of {name} cannot be replaced"
    if own not in ("sdpa", NAME):
        return f"attention {own!r} was asked for; 'sdpa' can be replaced"
    try:
        model.set_attn_implementation(NAME)
        error = _trial(model)
    except Exception as problem:  # any failure inside foreign model code means the same: do not pack
        model.set_attn_implementation(own)
        return f"{name} cannot read packed rows ({type(problem).__name__}: {problem})".splitlines()[0]
    if not error <= (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):
        model.set_attn_implementation(own)
        return f"{name} gives other logits for packed rows (off by {error:.2g} of their spread)"
    return None


def _trial(model: Any) -> float:
    """The difference between packed and padded rows, root-mean-square, of the spread of the logits: the third quartile over tokens,
    since in a mixture of experts a near-tie in the router may send a single one elsewhere. Where there is something to learn, the gradient must exist."""
    vocabulary = model.get_input_embeddings().num_embeddings
    lengths = ((5, 4), (5, 2), (5, 3), (3, 5))
    rows = [
        TokenSequence(
            prompt_ids=tuple((3 * j + p) % vocabulary for j in range(p)),
            completion_ids=tuple((7 * i + 5 * j + 1) % vocabulary for j in range(r)),
        )
        for i, (p, r) in enumerate(lengths)
    ]
    norm = next((p for p in model.parameters() if p.dim() == 1 and p.requires_grad), None)
    found = []
    for packed in (False, True):
        plan = make_plan(rows, range(len(rows)), mini_batches=1, token_budget=10**6, pad_id=0, seed="", packed=packed)
        micro = plan.updates[0][0].to(model.device)
        with torch.set_grad_enabled(norm is not None):
            logits_NV = read(model, micro).flatten(0, 1)[micro.output_N].float()
            if norm is not None and not torch.autograd.grad(logits_NV.square().sum(), norm)[0].isfinite().all():
                raise ArithmeticError("the gradient is not finite")
        found.append(logits_NV.detach()[micro.at_N.argsort()])
    padded_NV, packed_NV = found
    return float(((packed_NV - padded_NV).square().mean(-1).sqrt() / padded_NV.std(-1)).quantile(0.75))

"""Which models support packed sequences, and the forward pass of a micro-batch, packed or padded.

In: a transformers causal language model. Out: whether it supports packed sequences. Models with recurrent layers or
their own attention code do not. Invariant: a trial against a padded forward with the model's own attention decides,
once per model. It is shorter than most sliding windows, so it also compares the window that each layer asks for with
that of the model's own masks. A model that fails gets padded sequences, with a warning, and never wrong results.
"""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gspo.model.kernel_bugs import warn_of_kernel_bug
from gspo.model.kernels.attention_probe import UNKNOWN, ObservedLayers, observe_layers
from gspo.model.kernels.packed_attention import NAME, attention_kinds
from gspo.model.micro_batch import MicroBatch, TokenSequence, micro_batch

_supported: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def supports_packing(model: Any) -> bool:
    """Whether this model supports packed sequences. Replaces its attention if so. The trial runs once per model."""
    if model not in _supported:
        obstacle = obstacle_to_packing(model)
        if obstacle is not None:
            warnings.warn(
                f"training pads sequences and computes the prompt once per completion: {obstacle}",
                RuntimeWarning,
                stacklevel=2,
            )
        _supported[model] = obstacle is None
    return _supported[model]


def run_forward(model: Any, batch: MicroBatch, **options: Any) -> Tensor:
    """The model's outputs for a micro-batch: [rows, tokens, ...] of `input_ids`."""
    if batch.packing is None:
        outputs: Tensor = model(input_ids=batch.input_ids, use_cache=False, **options).logits
        return outputs
    if hasattr(model.config, "output_router_logits"):
        options["output_router_logits"] = False
    # With a 4D mask the model does not build a causal mask over the packed row. Packed attention ignores the mask.
    no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
    packed: Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=no_mask,
        packing=batch.packing,
        use_cache=False,
        **options,
    ).logits
    return packed


def obstacle_to_packing(model: Any) -> str | None:
    """Why packed sequences would be wrong for this model. If None, its attention has been replaced."""
    name = type(model).__name__
    kinds = attention_kinds(model.config)
    own = model.config._attn_implementation
    if kinds is None:
        return f"{name} has layers other than full and sliding-window attention"
    # Not every config says so (RecurrentGemma), and in 16 bits the trial may take such an error for rounding.
    if getattr(model, "_is_stateful", False):
        return f"{name} has recurrent layers, whose states would pass from one sequence to the next"
    if not getattr(model, "_supports_attention_backend", False):
        return f"the attention of {name} cannot be replaced"
    if own not in ("eager", "sdpa", NAME):
        return f"the model uses attention {own!r}; only 'eager' and 'sdpa' can be replaced"
    try:
        error, layers = _trial(model)
    except Exception as problem:  # whatever fails inside foreign model code, the model cannot be packed
        model.set_attn_implementation(own)
        warn_of_kernel_bug(problem, model, "packed sequences")
        return f"{name} cannot process packed sequences ({type(problem).__name__}: {problem})".splitlines()[0]
    # Lower precision rounds differently in another order of operations.
    if error > (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):
        model.set_attn_implementation(own)
        return f"{name} gives other logits for packed sequences (off by {error:.2g} of their spread)"
    if not _windows_agree(layers, set(kinds.values())):
        model.set_attn_implementation(own)
        return f"{name} has layers whose attention mask differs from the sliding window in its config"
    return None


def _windows_agree(layers: ObservedLayers, known: set[int | None]) -> bool:
    """Whether each layer asks for the window of the mask that it gets from the model, and the config has it."""
    windows = [(window, layers.by_option.get(layer, UNKNOWN)) for layer, window in layers.by_mask.items()]
    # A model without windows may have masks of its own, which the trial has tested.
    return all(
        option in known and (option == mask or (mask == UNKNOWN and known == {None})) for mask, option in windows
    )


def _trial(model: Any) -> tuple[float, ObservedLayers]:
    """The error of our attention, packed and padded: the root-mean-square difference of logits from those of the
    model's own attention, relative to their spread, as the third quartile over tokens; and what its layers were given.
    With trainable parameters the gradient must be finite too."""
    # Not the maximum: a near-tie in an MoE router may send a single token to another expert.
    rows = trial_sequences(model)
    # The shortest completion of the shared prompt comes first: then most tokens have other positions than padded.
    padded, packed = (micro_batch(rows, (1, 0, 2, 3), 0, packed).to(model.device) for packed in (False, True))
    # Eager attention is what the model defines: `sdpa` ignores attention sinks and soft caps.
    expected = [_own_logits(model, padded, "eager")]
    model.set_attn_implementation(NAME)
    with observe_layers() as layers:
        with torch.no_grad():
            padded_NV = _logits(model, padded)
        norms = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
        with torch.set_grad_enabled(bool(norms)):
            packed_NV = _logits(model, packed)
        if norms:
            # The mean, because the gradient of a sum over the vocabulary would overflow float16. Norms of a vision
            # tower are unused.
            gradients = torch.autograd.grad(packed_NV.square().mean(), norms, allow_unused=True)
            if not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
                raise ArithmeticError("the gradient is not finite")
    if layers.plain_scores and model._supports_sdpa:
        # `sdpa` computes the same, with less rounding. Eager scores of Qwen2 overflow in float16, and in bfloat16 their
        # rounding moves the logits by a fifth of their spread.
        expected.append(_own_logits(model, padded, "sdpa"))
        model.set_attn_implementation(NAME)
    found = (padded_NV, packed_NV.detach())
    return min(max(_error(found_NV, expected_NV) for found_NV in found) for expected_NV in expected), layers


def _own_logits(model: Any, micro: MicroBatch, attention: str) -> Tensor:
    """The logits of a trial with an attention that transformers has."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return _logits(model, micro)


def _error(found_NV: Tensor, expected_NV: Tensor) -> float:
    """The difference of logits, relative to their spread: the third quartile over tokens. Infinite if one is NaN."""
    error_N = (found_NV - expected_NV).square().mean(-1).sqrt() / expected_NV.std(-1)
    error = float(error_N.quantile(0.75))
    return math.inf if math.isnan(error) else error


def _logits(model: Any, micro: MicroBatch) -> Tensor:
    """The logits that predict the tokens of the trial, in their order."""
    return run_forward(model, micro).flatten(0, 1)[micro.output_N].float()[micro.at_N.argsort()]


def trial_sequences(model: Any) -> list[TokenSequence]:
    """A few short sequences for trial forwards; three of them share a prompt."""
    vocabulary = model.get_input_embeddings().num_embeddings
    lengths = ((5, 4), (5, 2), (5, 3), (3, 5))
    return [
        TokenSequence(
            prompt_ids=tuple((3 * j + p) % vocabulary for j in range(p)),
            completion_ids=tuple((7 * i + 5 * j + 1) % vocabulary for j in range(r)),
        )
        for i, (p, r) in enumerate(lengths)
    ]

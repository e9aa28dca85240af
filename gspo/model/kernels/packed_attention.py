"""Attention over packed rows: the completions of a group attend to one shared copy of their prompt.

In: queries, keys and values of one packed row (`micro_batch.Packing`). Out: the attention of every token over its own
sequence. Invariant: mathematically the attention of separate sequences. On a GPU, in half precision, Triton kernels
read the packed row as it is (`packed_attention_triton.py`). Elsewhere keys and values are expanded to separate
sequences for this one operation.

An attention sink is one more logit per head in the denominator of the softmax: it multiplies the output by
sigmoid(L - sink). Soft caps (Gemma 2) need all scores, because the kernels do not support them.

It is registered with transformers under `NAME`. For forwards that are not packed it is `sdpa`, except that decoding
on a CPU does not copy keys and values for every head that shares them, that padded rows on a GPU get inputs that its
kernels support, and that sinks and soft caps are applied, which `sdpa` ignores. `attention_kinds` says which attention
the layers of a model have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gspo.model.attention_blocks import AttentionBlocks
from gspo.model.kernels.attention_probe import observe_layer, probed_mask
from gspo.model.micro_batch import Packing

NAME = "gspo_packed"
HARMLESS = ("position_ids", "use_cache", "output_router_logits")
"""Options that reach the attention of some families and do not affect it."""
ALIGNMENT = 16
"""Elements to which the rows of a mask are aligned."""
SCORES = 2**26
"""The number of attention scores that are in memory at a time, if they cannot be avoided."""


def attention_kinds(config: Any) -> dict[str, int | None] | None:
    """The window of each kind of attention layer (None if unlimited); None if some layer is of another kind."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) or None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: [1, heads, I, size] in, [1, I, heads, size] out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain_scores = softcap is None and s_aux is None
    observe_layer(module, attention_mask, sliding_window, plain_scores=plain_scores, packed=packing is not None)
    if packing is None:
        if not plain_scores:
            _refuse_unknown(options)
            return _with_scores(query, key, value, _seen(query, key, attention_mask), scale, softcap, s_aux), None
        if _is_decoding(query, key, attention_mask, options):
            return _grouped(query, key, value, attention_mask, scaling), None
        if _needs_plain_inputs(module, query, value, attention_mask, options):
            return _plain_inputs(query, key, value, attention_mask, scale).transpose(1, 2), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)  # type: ignore[no-any-return]
    _refuse_unknown(options)
    longest = packing.rows_RT.shape[1]
    window = None if sliding_window is None or sliding_window >= longest else sliding_window

    def attend(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        if softcap is None and packing.blocks is not None and _kernels_support(query, value):
            return shared_prompt_attention(query, key, value, scale, packing.blocks, window or 0, sink)
        return _as_rows(query, key, value, scale, packing, window, softcap, sink)

    if packing.exchange is not None:  # context parallelism: only a part of the row is here
        return packing.exchange(attend, query, key, value, s_aux), None
    return attend(query, key, value, s_aux), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, probed_mask)


def _kernels_support(query: Tensor, value: Tensor) -> bool:
    """What the Triton kernels support, and the flash attention of torch."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] <= 256
    )


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuse options that are not implemented, because ignoring them would silently compute another model."""
    if unknown := _unknown(options):
        raise NotImplementedError(f"packed attention does not support {', '.join(unknown)}")


def _unknown(options: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in options.items()
        if name not in HARMLESS and (isinstance(value, Tensor) or value not in (None, False, 0.0))
    ]


def _is_decoding(query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether each row has one new token with shared key-value heads, and a mask that says what it attends to."""
    shares = query.shape[2] == 1 < query.shape[1] // key.shape[1] and not query.is_cuda
    return shares and mask is not None and not any(options.get(name) for name in ("dropout", "position_bias"))


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Treat the heads that share keys and values as several queries of one head, so that nothing is copied."""
    rows, heads, _, size = query.shape
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], -1, size), key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, -1)


def _needs_plain_inputs(
    module: Any, query: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> bool:
    """Whether padded rows on a GPU are for the memory-efficient kernel: flash attention supports no masks."""
    padded = query.is_cuda and query.shape[2] > 1 and getattr(module, "is_causal", True) and not _unknown(options)
    return padded and (mask is not None or not _kernels_support(query, value))


def _plain_inputs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention with inputs as the memory-efficient kernel needs them; causal without a mask. For shared key-value
    heads torch would compute all scores instead, and for a mask whose rows are not aligned it can fail with "(*bias):
    last dimension must be contiguous"."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else _aligned(mask, query.dtype),
        is_causal=mask is None,
        scale=scale,
    )


def _aligned(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as an additive one whose rows start at multiples of `ALIGNMENT` elements."""
    # A mask that is the same for all rows of the batch stays one mask.
    mask = mask[:1] if mask.dim() == 4 and mask.stride(0) == 0 else mask
    width = mask.shape[-1]
    added = torch.zeros(*mask.shape[:-1], -(-width // ALIGNMENT) * ALIGNMENT, dtype=dtype, device=mask.device)
    added = added[..., :width]
    return added.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else added.copy_(mask)


def _seen(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask of a forward that is not packed. As for `sdpa`, no mask means causal attention."""
    if mask is not None or query.shape[2] == 1:
        return mask
    return _causal(key.shape[2], None, key.device)[: query.shape[2]]


def _causal(width: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys (columns) each query (row) attends to."""
    seen = torch.ones(width, width, dtype=torch.bool, device=device).tril_()
    return seen if window is None else seen.triu_(1 - window)


def _as_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    packing: Packing,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Expand to separate sequences, padded on the right. For a prompt that occurs in several, one output is used."""
    rows, width = packing.rows_RT.shape
    at = packing.rows_RT.flatten()
    # On a GPU, the backward of `index_select` sums in any order; that of indexing is deterministic.
    expanded = (t[0][:, at] if t.is_cuda else t[0].index_select(1, at) for t in (query, key, value))
    query, key, value = (t.unflatten(1, (rows, width)).transpose(0, 1) for t in expanded)
    if softcap is not None or sink is not None:
        seen = _causal(width, window, query.device)
        output = _with_scores(query, key, value, seen, scale, softcap, sink)
    elif query.is_cuda:
        mask = None if window is None else _causal(width, window, query.device)
        output = _plain_inputs(query, key, value, mask, scale).transpose(1, 2)
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if window is None else _causal(width, window, query.device),
            is_causal=window is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
    return output.flatten(0, 1).index_select(0, packing.place_I).unsqueeze(0)


def _with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Attention as its formula, for soft caps and sinks; [rows, T, heads, size]. A few rows at a time, and the backward
    pass computes the scores again, so that memory does not grow with their number."""
    count = max(1, SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    shared = mask is None or mask.dim() < 4 or len(mask) == 1
    recompute = torch.is_grad_enabled() and (query.requires_grad or (sink is not None and sink.requires_grad))
    outputs = []
    for i in range(0, len(query), count):
        part = slice(i, i + count)
        seen = mask if shared or mask is None else mask[part]
        arguments = (query[part], key[part], value[part], seen, scale, softcap, sink)
        outputs.append(
            checkpoint(_scored, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _scored(*arguments)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    rows, heads, length, size = query.shape
    # Heads that share keys and values are several queries of one head.
    score = query.reshape(rows, key.shape[1], -1, size) @ key.transpose(2, 3)
    exact = torch.promote_types(score.dtype, torch.float32)
    score = scale * score.view(rows, heads, length, -1).to(exact)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if mask is not None and mask.dtype == torch.bool:
        score = score.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        score = score + mask
    if sink is not None:
        logit = sink.to(exact).view(1, heads, 1, 1).expand(rows, heads, length, 1)
        share = torch.cat([score, logit], dim=-1).softmax(-1)[..., :-1]
    else:
        share = score.softmax(-1)
    output = share.to(value.dtype).view(rows, key.shape[1], -1, key.shape[2]) @ value
    return output.view(rows, heads, length, -1).transpose(1, 2)


def _with_sink(output: Tensor, log_sum: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the sink to the denominator: a key with the logit `sink` and the value 0. Log-sums have base 2."""
    if sink is None:
        return output, log_sum
    total = torch.logaddexp2(log_sum, _base_2(sink))
    share = (log_sum - total).exp2().T.unsqueeze(-1)
    return (output.to(log_sum.dtype) * share).to(output.dtype), total


def _sink_gradient(gradient: Tensor, output: Tensor, log_sum: Tensor, sink: Tensor | None) -> Tensor | None:
    """The gradient of a softmax logit whose value is 0: -p_sink (gradient . output), summed over all queries."""
    if sink is None:
        return None
    along = (gradient.to(log_sum.dtype) * output.to(log_sum.dtype)).sum(-1).T
    share = (_base_2(sink) - log_sum).exp2()
    return -(share * along).sum(-1).to(sink.dtype)


def _base_2(sink: Tensor) -> Tensor:
    return sink.float().unsqueeze(-1) * math.log2(math.e)


def shared_prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    blocks: AttentionBlocks,
    window: int = 0,
    sink: Tensor | None = None,
) -> Tensor:
    """The Triton kernels: [1, heads, I, size] in, [1, I, heads, size] out. `window` limits the distance between a query
    and its keys; 0 disables it. `sink` is one more logit per head."""
    size = query.shape[-1]
    padded = max(16, 1 << (size - 1).bit_length())
    # Zeros change neither scores nor outputs. Only head sizes that are not a power of two are copied.
    parts = [torch.nn.functional.pad(t, (0, padded - size)) if padded > size else t for t in (query, key, value)]
    query, key, value = (t[0].transpose(0, 1) for t in parts)
    output, _ = _attend(query, key, value, sink, scale, window, blocks.entries, blocks.layout)
    return output[..., :size].unsqueeze(0)


# Custom operations, so that `torch.compile` keeps a decoder layer in one graph: it does not look inside.
@torch.library.custom_op("gspo::packed_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scale: float,
    window: int,
    entries: Tensor,
    layout: Tensor,
) -> tuple[Tensor, Tensor]:
    from gspo.model.kernels import packed_attention_triton

    _check(query, key, value)
    query, key, value = (_copied_if_unaligned(t) for t in (query, key, value))
    return _with_sink(*packed_attention_triton.forward(query, key, value, scale, window, entries, layout), sink)


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scale: float,
    window: int,
    entries: Tensor,
    layout: Tensor,
) -> tuple[Tensor, Tensor]:
    rows, heads, size = query.shape
    return query.new_empty(rows, heads, size), query.new_empty(heads, rows, dtype=torch.float32)


@torch.library.custom_op("gspo::packed_attention_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    scale: float,
    window: int,
    entries: Tensor,
    layout: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from gspo.model.kernels import packed_attention_triton

    gradient, query, key, value = (_copied_if_unaligned(t) for t in (gradient, query, key, value))
    return packed_attention_triton.backward(
        gradient, query, key, value, output, log_sum, scale, window, entries, layout
    )


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    scale: float,
    window: int,
    entries: Tensor,
    layout: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sink, ctx.scale, ctx.window, entries, layout = inputs
    ctx.save_for_backward(query, key, value, sink, *output, entries, layout)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, sink, output, log_sum, entries, layout = ctx.saved_tensors
    # With the sink in output and log-sum, the backward pass without it weights its softmax correctly.
    found = _attend_backward(gradient, query, key, value, output, log_sum, ctx.scale, ctx.window, entries, layout)
    return *found, _sink_gradient(gradient, output, log_sum, sink), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_save)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"queries are {query.dtype}, keys {key.dtype} and values {value.dtype}: they must be the same")
    if query.shape[1] % key.shape[1] or key.shape != value.shape:
        raise ValueError(f"cannot attend with {list(query.shape)} queries to {list(key.shape)}, {list(value.shape)}")


def _copied_if_unaligned(tensor: Tensor) -> Tensor:
    """Kernels read 16 bytes at a time. Views of projections allow that; a copy is made of anything else."""
    step = 16 // tensor.element_size()
    aligned = tensor.stride(2) == 1 and all(stride % step == 0 for stride in tensor.stride()[:2])
    return tensor if aligned and tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.contiguous_format)

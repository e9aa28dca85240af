"""Attention over packed rows: the completions of a group attend to one shared copy of their prompt.

In: queries, keys and values of one packed row (`micro_batch.Packing`). Out: the attention of every token over its own
sequence. Invariant: mathematically the attention of separate sequences. On a GPU, in half precision, Triton kernels
read the packed row as it is (`packed_attention_triton.py`). Elsewhere keys and values are expanded to separate
sequences for this one operation.

`_Shared` is the same by two calls of flash attention, to compare with (`benchmarks/attention_gpu.py`): a completion
attends to itself (causally) and to its prompt, for which all completions of the group form one long query; with the
log-sums L of the two,

    output = (exp(L_own) output_own + exp(L_prompt) output_prompt) / (exp(L_own) + exp(L_prompt)),

and the backward pass of each part is that of flash attention, given the combined output and the combined log-sum.

It is registered with transformers under `NAME`. For forwards that are not packed it is `sdpa`, except that decoding
on a CPU does not copy keys and values for every head that shares them. `attention_kinds` says which attention the
layers of a model have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gspo.model.attention_blocks import AttentionBlocks
from gspo.model.micro_batch import Packing, Span

NAME = "gspo_packed"
UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Options of some families that packed attention does not support."""


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
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: [1, heads, I, size] in, [1, I, heads, size] out."""
    if packing is None and _is_decoding(query, key, attention_mask, options):
        return _grouped(query, key, value, attention_mask, scaling), None
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)  # type: ignore[no-any-return]
    # Refused, because ignoring them would silently compute another model.
    unknown = [name for name in UNKNOWN if options.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"packed attention does not support {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # What the Triton kernels support.
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and key.shape[-1] == value.shape[-1] <= 256:
        return shared_prompt_attention(query, key, value, scale, packing.blocks), None
    return _as_rows(query, key, value, scale, packing), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _is_decoding(query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether each row has one new token with shared key-value heads, and a mask that says what it attends to."""
    shares = query.shape[2] == 1 < query.shape[1] // key.shape[1] and not query.is_cuda
    return (
        shares and mask is not None and not any(options.get(name) for name in ("dropout", "softcap", "position_bias"))
    )


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Treat the heads that share keys and values as several queries of one head, so that nothing is copied."""
    rows, heads, _, size = query.shape
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], -1, size), key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, -1)


def _as_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, packing: Packing) -> Tensor:
    """Expand to separate sequences, padded on the right. For a prompt that occurs in several, one output is used."""
    rows, width = packing.rows_RT.shape
    at = packing.rows_RT.flatten()
    # On a GPU, the backward of `index_select` sums in any order; that of indexing is deterministic.
    expanded = (t[0][:, at] if t.is_cuda else t[0].index_select(1, at) for t in (query, key, value))
    query, key, value = (t.unflatten(1, (rows, width)).transpose(0, 1) for t in expanded)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1).index_select(0, packing.place_I).unsqueeze(0)


def shared_prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: AttentionBlocks, window: int = 0
) -> Tensor:
    """The Triton kernels: [1, heads, I, size] in, [1, I, heads, size] out. `window` limits the distance between a query
    and its keys; 0 disables it."""
    size = query.shape[-1]
    padded = max(16, 1 << (size - 1).bit_length())
    # Zeros change neither scores nor outputs. Only head sizes that are not a power of two are copied.
    parts = [torch.nn.functional.pad(t, (0, padded - size)) if padded > size else t for t in (query, key, value)]
    query, key, value = (t[0].transpose(0, 1) for t in parts)
    output, _ = _attend(query, key, value, scale, window, blocks.entries, blocks.layout)
    return output[..., :size].unsqueeze(0)


# Custom operations, so that `torch.compile` keeps a decoder layer in one graph: it does not look inside.
@torch.library.custom_op("gspo::packed_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, entries: Tensor, layout: Tensor
) -> tuple[Tensor, Tensor]:
    from gspo.model.kernels import packed_attention_triton

    _check(query, key, value)
    query, key, value = (_aligned(t) for t in (query, key, value))
    return packed_attention_triton.forward(query, key, value, scale, window, entries, layout)


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, entries: Tensor, layout: Tensor
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

    gradient, query, key, value = (_aligned(t) for t in (gradient, query, key, value))
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
    query, key, value, ctx.scale, ctx.window, entries, layout = inputs
    ctx.save_for_backward(query, key, value, *output, entries, layout)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, output, log_sum, entries, layout = ctx.saved_tensors
    found = _attend_backward(gradient, query, key, value, output, log_sum, ctx.scale, ctx.window, entries, layout)
    return *found, None, None, None, None


_attend.register_autograd(_gradients, setup_context=_save)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"queries are {query.dtype}, keys {key.dtype} and values {value.dtype}: they must be the same")
    if query.shape[1] % key.shape[1] or key.shape != value.shape:
        raise ValueError(f"cannot attend with {list(query.shape)} queries to {list(key.shape)}, {list(value.shape)}")


def _aligned(tensor: Tensor) -> Tensor:
    """Kernels read 16 bytes at a time. Views of projections allow that; a copy is made of anything else."""
    step = 16 // tensor.element_size()
    aligned = tensor.stride(2) == 1 and all(stride % step == 0 for stride in tensor.stride()[:2])
    return tensor if aligned and tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.contiguous_format)


class _Shared(torch.autograd.Function):
    """Attention with a shared prompt by two flash attention calls; [I, heads, size] in and out."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, packing: Packing) -> Tensor:
        completions = packing.completions
        prompts = packing.prompts
        output, log_sum = _flash(query, key, value, packing.parts, packing.parts, scale, causal=True)
        prompt_output, log_prompt = _flash(
            query[completions.at], key[prompts.at], value[prompts.at], completions, prompts, scale, causal=False
        )
        log_own = log_sum[:, completions.at]
        # In the log domain: the exponentials themselves overflow.
        log_both = torch.logaddexp(log_own, log_prompt)
        share = (log_prompt - log_both).exp().T.unsqueeze(-1)
        # float32, so that combining the two parts rounds only once.
        exact = log_sum.dtype
        output[completions.at] = torch.lerp(output[completions.at].to(exact), prompt_output.to(exact), share).to(
            output.dtype
        )
        # With the combined log-sum, each part's backward pass weights its own softmax correctly.
        log_sum[:, completions.at] = log_both
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.scale = scale
        ctx.packing = packing
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        completions = ctx.packing.completions
        prompts = ctx.packing.prompts
        parts = ctx.packing.parts
        gradient = gradient.contiguous()
        dq, dk, dv = _flash_backward(gradient, query, key, value, output, log_sum, parts, parts, ctx.scale, causal=True)
        more_q, more_k, more_v = _flash_backward(
            gradient[completions.at],
            query[completions.at],
            key[prompts.at],
            value[prompts.at],
            output[completions.at],
            log_sum[:, completions.at].contiguous(),
            completions,
            prompts,
            ctx.scale,
            causal=False,
        )
        # Plain indexing: the entries are distinct, so that the order of the sums is fixed.
        dq[completions.at] += more_q
        dk[prompts.at] += more_k
        dv[prompts.at] += more_v
        return dq, dk, dv, None, None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, of_query: Span, of_key: Span, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of each query sequence over its key sequence: output [I, heads, size] and log-sum [heads, I]."""
    output, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        of_query.starts,
        of_key.starts,
        of_query.longest,
        of_key.longest,
        0.0,
        causal,
        False,
        scale=scale,
    )
    return output, log_sum


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    of_query: Span,
    of_key: Span,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of dropout, which is disabled
    with _deterministic():
        return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
            gradient,
            query,
            key,
            value,
            output,
            log_sum,
            of_query.starts,
            of_key.starts,
            of_query.longest,
            of_key.longest,
            0.0,
            causal,
            unused,
            unused,
            scale=scale,
        )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Flash attention accumulates gradients in a fixed order only in this mode. A resumed run must be bitwise
    identical."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

"""Attention over packed rows: replies of a group read one shared copy of their prompt.

In: queries, keys and values of one long row (`packing.Packing`). Out: for every token what attention over its own row gives.
Invariant: mathematically the attention of separate rows. On a GPU a reply's attention is that to itself, causal, and that
to its prompt, which all replies of the group have together as one long query; with log-sums L of the two,

    answer = (exp(L_own) answer_own + exp(L_prompt) answer_prompt) / (exp(L_own) + exp(L_prompt)),

and the backward pass of each part is flash attention's, given the whole answer and the whole log-sum. Elsewhere keys and
values are laid out as separate rows again, for this one operation.

It is registered with transformers under `NAME` and is its `sdpa` for forwards that are not packed, but that decoding on a
CPU does not copy keys and values for every head that shares them.
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

from gspo.model.packing import Packing, Span

NAME = "gspo_packed"
UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What some families add to attention, and this does not do."""


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
    """The interface of transformers: [1, heads, I, size] in, [1, I, heads, size] out."""
    if packing is None and _is_decoding(query, key, attention_mask, options):
        return _grouped(query, key, value, attention_mask, scaling), None
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)  # type: ignore[no-any-return]
    unknown = [name for name in UNKNOWN if options.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"packed rows do not know {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and key.shape[-1] == value.shape[-1] <= 256:
        query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
        return _Shared.apply(query, key, value, scale, packing).unsqueeze(0), None
    return _as_rows(query, key, value, scale, packing), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _is_decoding(query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether each row has one new token, whose heads share keys and values, and a mask that says all the rest."""
    shares = query.shape[2] == 1 < query.shape[1] // key.shape[1] and not query.is_cuda
    return (
        shares and mask is not None and not any(options.get(name) for name in ("dropout", "softcap", "position_bias"))
    )


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """The heads that share keys and values as queries of one head, so that nothing is copied for each of them."""
    rows, heads, _, size = query.shape
    answer = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], -1, size), key, value, attn_mask=mask, scale=scaling
    )
    return answer.reshape(rows, 1, heads, -1)


def _as_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, packing: Packing) -> Tensor:
    """Separate rows, padded on the right; of a prompt that stands in several, one answer is taken."""
    rows, width = packing.rows_RT.shape
    at = packing.rows_RT.flatten()
    # On a GPU the gradient of index_select is added up in any order, that of indexing always in the same.
    taken = (t[0][:, at] if t.is_cuda else t[0].index_select(1, at) for t in (query, key, value))
    query, key, value = (t.unflatten(1, (rows, width)).transpose(0, 1) for t in taken)
    answer = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return answer.transpose(1, 2).flatten(0, 1).index_select(0, packing.place_I).unsqueeze(0)


class _Shared(torch.autograd.Function):
    """[I, heads, size] in and out."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, packing: Packing) -> Tensor:
        replies, prompts = packing.replies, packing.prompts
        answer, log_sum = _flash(query, key, value, packing.parts, packing.parts, scale, causal=True)
        of_prompt, log_prompt = _flash(
            query[replies.at], key[prompts.at], value[prompts.at], replies, prompts, scale, causal=False
        )
        log_own = log_sum[:, replies.at]
        log_both = torch.logaddexp(log_own, log_prompt)
        share = (log_prompt - log_both).exp().T.unsqueeze(-1)
        exact = log_sum.dtype
        answer[replies.at] = torch.lerp(answer[replies.at].to(exact), of_prompt.to(exact), share).to(answer.dtype)
        log_sum[:, replies.at] = log_both
        ctx.save_for_backward(query, key, value, answer, log_sum)
        ctx.scale, ctx.packing = scale, packing
        return answer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, answer, log_sum = ctx.saved_tensors
        replies, prompts, parts = ctx.packing.replies, ctx.packing.prompts, ctx.packing.parts
        gradient = gradient.contiguous()
        dq, dk, dv = _flash_backward(gradient, query, key, value, answer, log_sum, parts, parts, ctx.scale, causal=True)
        more_q, more_k, more_v = _flash_backward(
            gradient[replies.at],
            query[replies.at],
            key[prompts.at],
            value[prompts.at],
            answer[replies.at],
            log_sum[:, replies.at].contiguous(),
            replies,
            prompts,
            ctx.scale,
            causal=False,
        )
        dq[replies.at] += more_q
        dk[prompts.at] += more_k
        dv[prompts.at] += more_v
        return dq, dk, dv, None, None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, of_query: Span, of_key: Span, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Each sequence of queries over its own of keys: answer [I, heads, size] and log-sum [heads, I]."""
    answer, log_sum, *_ = torch.ops.aten._flash_attention_forward(
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
    return answer, log_sum


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    answer: Tensor,
    log_sum: Tensor,
    of_query: Span,
    of_key: Span,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of a dropout that there is not
    with _in_order():
        return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
            gradient,
            query,
            key,
            value,
            answer,
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
def _in_order() -> Iterator[None]:
    """Flash attention adds gradients up in a fixed order only if asked; a resumed run must repeat them to the bit."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

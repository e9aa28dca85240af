"""The small operations of a decoding step in plain PyTorch. `kernels_triton.py` has a fused Triton kernel for each.

In: activations of `R` rows with one token each, and their `Slots`. Out: the results of the model's own code, rounded
at the same places. Invariant: a row attends to its own KV cache blocks up to its position, and a row that is not live
writes to no block but block 0.

Shape suffixes: `R` rows, `H` heads, `D` head dimension, `E` head dimension of values where it may differ, `C` columns
(tokens of a row).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from gspo.rollout.local.blocks import BLOCK_SIZE
from gspo.rollout.local.sampling import sample_from_logits, uniform, with_greedy
from gspo.rollout.local.slots import INPUT, KEY, LIVE, POSITION, SAMPLED, Slots
from gspo.types import Sampling


def kernels_for(device: torch.device) -> ModuleType:
    """The module with the kernels for this device."""
    if device.type == "cuda":
        from gspo.rollout.local import kernels_triton

        return kernels_triton
    import gspo.rollout.local.kernels

    return gspo.rollout.local.kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension, computed in float32 and rounded before the multiplication, as in Llama. `out`
    may be a part of wider rows."""
    wide = x.float()
    result = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return result if out is None else out.copy_(result)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + y, and its RMSNorm."""
    total = x + y
    return total, rms_norm(total, weight, eps, out=out)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return functional.silu(gate) * up


def group_by_expert(expert_RK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group the choices of experts by expert: the row at each place, the place of each choice, and where each expert's
    places end."""
    # Stable, so that the rows of an expert stay in order.
    order = expert_RK.flatten().argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    ends_E = (expert_RK.flatten() <= torch.arange(experts, device=order.device)[:, None]).sum(1)
    return order // expert_RK.shape[1], place.view_as(expert_RK), ends_E.to(torch.int32)


def silu_mul_halves(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(first half) * second half. `out` may be a part of wider rows."""
    result = silu_mul(*x.chunk(2, dim=-1))
    return result if out is None else out.copy_(result)


def combine_experts(x_IH: Tensor, place_RK: Tensor, weight_RK: Tensor) -> Tensor:
    """The weighted sum over the experts of each row."""
    return (x_IH[place_RK] * weight_RK.unsqueeze(-1)).sum(1)


def rope_and_store(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Apply the norm per head (if any) and rotary embedding, and store keys and values in the row's block; `query_RHD`.

    `query`, `key`, `value`: [R, H * D]; `rope`: cosine and sine, [R, D]; `cache`: keys and values,
    [blocks, H, BLOCK_SIZE, D]."""
    heads, size = cache[0].shape[1], cache[0].shape[3]
    assert rope[0].shape[-1] == size, "rotary embedding must cover the whole head"
    query_RHD, key_RHD, value_RHD = (t.unflatten(-1, (-1, size)) for t in (query, key, value))
    if norms is not None:
        query_RHD, key_RHD = rms_norm(query_RHD, norms[0], eps), rms_norm(key_RHD, norms[1], eps)
    query_RHD, key_RHD = _rotate(query_RHD, *rope), _rotate(key_RHD, *rope)
    assert key_RHD.shape[1] == heads
    store(slots, key_RHD, value_RHD, cache)
    return query_RHD


def store(slots: Slots, key_RHD: Tensor, value_RHE: Tensor, cache: tuple[Tensor, Tensor]) -> None:
    """Store the key and the value of every row at its position."""
    position_R = slots.state[POSITION]
    block_R = slots.table_SW.gather(1, (position_R // BLOCK_SIZE)[:, None]).squeeze(1)
    block_R = torch.where(slots.state[LIVE] > 0, block_R, 0)  # an idle row must not write to blocks it no longer owns
    for blocks, new_RHD in zip(cache, (key_RHD, value_RHE), strict=True):
        blocks[block_R.long(), :, position_R % BLOCK_SIZE] = new_RHD


def _rotate(x_RHD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x_RHD.chunk(2, dim=-1)
    return x_RHD * cosine[:, None] + torch.cat([-high, low], dim=-1) * sine[:, None]


def paged_attention(
    slots: Slots,
    query_RHD: Tensor,
    cache: tuple[Tensor, Tensor],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention of every row to the last `window` tokens of its own blocks, [R, H * E]; 0 for rows that are not live.

    `softcap` bounds the scores, softcap * tanh(score / softcap). `sink_H` is one more score per query head: it takes
    part in the softmax and has no value."""
    keys, values = (blocks[slots.table_SW.long()].transpose(1, 2).flatten(2, 3) for blocks in cache)
    length_R1 = torch.where(slots.state[LIVE] > 0, slots.state[POSITION] + 1, 0)[:, None]
    column_C = torch.arange(keys.shape[2], device=keys.device)
    seen_RC = column_C < length_R1
    if window is not None:
        seen_RC &= column_C >= length_R1 - window
    values = values.where(seen_RC[:, None, :, None], 0)  # a masked value still enters the sum, and 0 * NaN is NaN
    if softcap is None and sink_H is None:
        output = functional.scaled_dot_product_attention(
            query_RHD[:, :, None], keys, values, attn_mask=seen_RC[:, None, None], scale=scale, enable_gqa=True
        ).squeeze(2)
    else:
        output = _capped_attention(query_RHD, keys, values, seen_RC, scale, softcap, sink_H)
    return output.where((length_R1 > 0)[..., None], 0).flatten(1)


def _capped_attention(
    query_RHD: Tensor,
    keys: Tensor,
    values: Tensor,
    seen_RC: Tensor,
    scale: float,
    softcap: float | None,
    sink_H: Tensor | None,
) -> Tensor:
    rows, queries, _ = query_RHD.shape
    # The query heads that share a key-value head are the rows of one product.
    grouped = query_RHD.unflatten(1, (keys.shape[1], -1)).float()
    score_RHC = (grouped @ keys.float().transpose(2, 3)).flatten(1, 2) * scale
    if softcap is not None:
        score_RHC = softcap * torch.tanh(score_RHC / softcap)
    score_RHC = score_RHC.masked_fill(~seen_RC[:, None], -1e30)
    if sink_H is not None:
        score_RHC = torch.cat([score_RHC, sink_H.float()[:, None].expand(rows, -1, 1)], dim=-1)
    weight_RHC = score_RHC.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return (weight_RHC.unflatten(1, (keys.shape[1], -1)) @ values).reshape(rows, queries, -1)


def sample_tokens(slots: Slots, logits_RV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample a token per row from its own random stream; tokens and log-probs."""
    key_R = slots.state[KEY]
    token_R, logp_R = sample_from_logits(logits_RV, sampling, uniform(key_R, slots.state[SAMPLED]))
    return with_greedy(logits_RV, sampling, key_R, token_R, logp_R)


def advance(slots: Slots, token_R: Tensor, logp_R: Tensor, stop_ids: Tensor, max_tokens: int) -> None:
    """Store the sampled tokens and make them the next input. A row finishes with a stop token or at the limit."""
    state = slots.state
    column_R1 = state[SAMPLED][:, None]
    slots.token_ST.scatter_(1, column_R1, token_R[:, None].to(slots.token_ST.dtype))
    slots.logp_ST.scatter_(1, column_R1, logp_R[:, None])
    live_R = state[LIVE] > 0
    state[INPUT] = torch.where(live_R, token_R, state[INPUT])
    state[POSITION : SAMPLED + 1] += live_R
    finished_R = (token_R[:, None] == stop_ids).any(1) | (state[SAMPLED] >= max_tokens)
    state[LIVE] = live_R & ~finished_R

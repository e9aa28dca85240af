"""The small operations of a decoding step, each written plainly; `kernels_triton.py` has a fused twin of each for a GPU.

In: activations of `R` rows with one token each, and their `Slots`. Out: what the model's own code would give, rounded at the
same places. Invariant: a row sees its own pages up to its position, and no row that is not live writes to a page.

Shape suffixes: `R` rows, `H` heads, `D` size of a head.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from gspo.rollout.local.blocks import PAGE
from gspo.rollout.local.sampling import draw, uniform, with_greedy
from gspo.rollout.local.slots import DRAWN, INPUT, KEY, LIVE, POSITION, Slots
from gspo.types import Sampling


def kernels_for(device: torch.device) -> ModuleType:
    """The module whose functions run on this device."""
    if device.type == "cuda":
        from gspo.rollout.local import kernels_triton

        return kernels_triton
    import gspo.rollout.local.kernels

    return gspo.rollout.local.kernels


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, as Llama's."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return functional.silu(gate) * up


def arranged(expert_RK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choices of experts, put together by expert: which row stands at each place, the place of each choice, and where each
    expert's places end."""
    order = expert_RK.flatten().argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    ends_E = (expert_RK.flatten() <= torch.arange(experts, device=order.device)[:, None]).sum(1)
    return order // expert_RK.shape[1], place.view_as(expert_RK), ends_E.to(torch.int32)


def halves_gated(x: Tensor) -> Tensor:
    """silu(first half) * second half."""
    return gated(*x.chunk(2, dim=-1))


def summed(x_IH: Tensor, place_RK: Tensor, weight_RK: Tensor) -> Tensor:
    """For each row the weighted sum over its experts."""
    return (x_IH[place_RK] * weight_RK.unsqueeze(-1)).sum(1)


def stored(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turn: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Norm (if any) and rotary embedding of queries and keys; keys and values go to the row's page. Gives `query_RHD`.

    `query`, `key`, `value`: [R, H * D]; `turn`: cosine and sine, [R, D]; `cache`: keys and values, [pages, H, PAGE, D]."""
    heads, size = cache[0].shape[1], cache[0].shape[3]
    assert turn[0].shape[-1] == size, "the whole head is turned"
    query_RHD, key_RHD, value_RHD = (t.unflatten(-1, (-1, size)) for t in (query, key, value))
    if norms is not None:
        query_RHD, key_RHD = normed(query_RHD, norms[0], eps), normed(key_RHD, norms[1], eps)
    query_RHD, key_RHD = _turned(query_RHD, *turn), _turned(key_RHD, *turn)
    position_R = slots.state[POSITION]
    page_R = slots.table_SW.gather(1, (position_R // PAGE)[:, None]).squeeze(1)
    page_R = torch.where(slots.state[LIVE] > 0, page_R, 0)
    for store, new_RHD in zip(cache, (key_RHD, value_RHD), strict=True):
        assert store.shape[1] == heads
        store[page_R.long(), :, position_R % PAGE] = new_RHD
    return query_RHD


def _turned(x_RHD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x_RHD.chunk(2, dim=-1)
    return x_RHD * cosine[:, None] + torch.cat([-high, low], dim=-1) * sine[:, None]


def attended(slots: Slots, query_RHD: Tensor, cache: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Attention of every row to its own pages, [R, H * D]; 0 for rows that are not live."""
    keys, values = (store[slots.table_SW.long()].transpose(1, 2).flatten(2, 3) for store in cache)
    length_R = torch.where(slots.state[LIVE] > 0, slots.state[POSITION] + 1, 0)
    seen_RC = torch.arange(keys.shape[2], device=keys.device) < length_R[:, None]
    fits_R = (length_R > 0)[:, None, None]
    answer = functional.scaled_dot_product_attention(
        query_RHD[:, :, None],
        keys,
        values.where(seen_RC[:, None, :, None], 0),
        attn_mask=seen_RC[:, None, None],
        scale=scale,
        enable_gqa=True,
    )
    return answer.squeeze(2).where(fits_R, 0).flatten(1)


def drawn(slots: Slots, logits_RV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """A token per row from its own random stream, and its log-probability."""
    key_R = slots.state[KEY]
    token_R, logp_R = draw(logits_RV, sampling, uniform(key_R, slots.state[DRAWN]))
    return with_greedy(logits_RV, sampling, key_R, token_R, logp_R)


def advanced(slots: Slots, token_R: Tensor, logp_R: Tensor, stop_ids: Tensor, max_tokens: int) -> None:
    """Note what was drawn; it is the next input. A row ends with a stop token or at the limit."""
    state, column_R1 = slots.state, slots.state[DRAWN][:, None]
    slots.token_ST.scatter_(1, column_R1, token_R[:, None].to(slots.token_ST.dtype))
    slots.logp_ST.scatter_(1, column_R1, logp_R[:, None])
    live_R = state[LIVE] > 0
    state[INPUT] = torch.where(live_R, token_R, state[INPUT])
    state[POSITION : DRAWN + 1] += live_R
    over_R = (token_R[:, None] == stop_ids).any(1) | (state[DRAWN] >= max_tokens)
    state[LIVE] = live_R & ~over_R

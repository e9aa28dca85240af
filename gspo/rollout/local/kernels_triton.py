# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton versions of `kernels.py`: one or two launches per operation, without host synchronization.

In and out as in `kernels.py`. Invariant: activations are rounded where the model's own code rounds them, sums are
float32, and a launch depends on tensors alone, so that a CUDA graph of a step can be replayed for other rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo.rollout.local.blocks import BLOCK_SIZE, blocks_for
from gspo.rollout.local.sampling import sample_from_logits, uniform, with_greedy
from gspo.rollout.local.slots import INPUT, KEY, LIVE, POSITION, SAMPLED, Slots
from gspo.types import Sampling

VOCABULARY_BLOCK = 4096
"""Logits per program of the sampling kernels."""
PROGRAMS = 1024
"""Attention is split into about this many programs or more, so that few rows also occupy the whole GPU."""
SPLIT_BLOCKS = 32
"""KV cache blocks per program when there are enough programs, so that one long row does not delay all others."""
SHARED_MEMORY = 128 * 1024
"""At most as many bytes of keys and values in the shared memory of an attention program. An H200 has 227 KiB."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension. `out` may be a part of wider rows."""
    x = x.contiguous()
    size = x.shape[-1]
    stride = size if out is None else out.stride(0)
    out = torch.empty_like(x) if out is None else out
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](x, weight, out, stride, eps, SIZE=size, BLOCK=block, num_warps=_warps(size))
    return out


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + y, and its RMSNorm, in one launch."""
    x, y = x.contiguous(), y.contiguous()
    size = x.shape[-1]
    stride = size if out is None else out.stride(0)
    total, out = torch.empty_like(x), torch.empty_like(x) if out is None else out
    _add_rms_norm_kernel[(x.numel() // size,)](
        x, y, weight, total, out, stride, eps, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=_warps(size)
    )
    return total, out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _silu_mul_kernel[(triton.cdiv(out.numel(), 1024),)](gate, up, out, out.numel(), BLOCK=1024)
    return out


def group_by_expert(expert_RK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group the choices of experts by expert, without a sort: the program of an expert counts the choices before its
    own."""
    count = expert_RK.numel()
    expert_RK = expert_RK.contiguous()
    row_I = expert_RK.new_empty(count)
    place_RK = torch.empty_like(expert_RK)
    ends_E = torch.empty(experts, dtype=torch.int32, device=expert_RK.device)
    block = min(4096, triton.next_power_of_2(count))
    _group_by_expert_kernel[(experts,)](expert_RK, row_I, place_RK, ends_E, count, K=expert_RK.shape[1], BLOCK=block)
    return row_I, place_RK, ends_E


def silu_mul_halves(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(first half) * second half. `out` may be a part of wider rows."""
    size = x.shape[-1] // 2
    out = x.new_empty(len(x), size) if out is None else out
    block = min(2048, triton.next_power_of_2(size))
    grid = (len(x), triton.cdiv(size, block))
    _silu_mul_halves_kernel[grid](x, out, out.stride(0), SIZE=size, BLOCK=block, num_warps=_warps(block))
    return out


def combine_experts(x_IH: Tensor, place_RK: Tensor, weight_RK: Tensor) -> Tensor:
    """The weighted sum over the experts of each row."""
    rows, chosen = place_RK.shape
    size = x_IH.shape[1]
    out = x_IH.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    _combine_experts_kernel[(rows, triton.cdiv(size, block))](
        x_IH, place_RK, weight_RK.contiguous(), out, K=chosen, SIZE=size, BLOCK=block
    )
    return out


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
    """Apply the norm per head (if any) and rotary embedding, and store keys and values in the row's block."""
    heads, size = cache[0].shape[1], cache[0].shape[3]
    assert rope[0].shape[-1] == size, "rotary embedding must cover the whole head"
    queries = query.shape[-1] // size
    out = query.new_empty(len(query), queries, size)
    weights = norms or (query, query)  # any pointer will do: the kernel does not read it without norms
    # They may be parts of the rows of one product.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    _rope_and_store_kernel[(len(query), queries + heads)](
        query,
        key,
        value,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        rope[0].contiguous(),
        rope[1].contiguous(),
        *weights,
        eps,
        slots.state[POSITION],
        slots.state[LIVE],
        slots.table_SW,
        slots.table_SW.stride(0),
        *cache,
        out,
        QUERIES=queries,
        HEADS=heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        KV_BLOCK=BLOCK_SIZE,
        NORMED=norms is not None,
        num_warps=1,
    )
    return out


def store(slots: Slots, key_RHD: Tensor, value_RHE: Tensor, cache: tuple[Tensor, Tensor]) -> None:
    """Store the key and the value of every row at its position."""
    rows, heads, size = key_RHD.shape
    value_size = value_RHE.shape[-1]
    _store_kernel[(rows, heads)](
        key_RHD.contiguous(),
        value_RHE.contiguous(),
        slots.state[POSITION],
        slots.state[LIVE],
        slots.table_SW,
        slots.table_SW.stride(0),
        *cache,
        HEADS=heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        VALUE_SIZE=value_size,
        VALUE_BLOCK=triton.next_power_of_2(value_size),
        KV_BLOCK=BLOCK_SIZE,
        num_warps=1,
    )


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
    """Attention of every row to the last `window` tokens of its own blocks, split over programs as in
    flash-decoding."""
    rows, queries, size = query_RHD.shape
    heads, value_size = cache[0].shape[1], cache[1].shape[3]
    # A window of n tokens touches at most one block more than n tokens fill.
    width = slots.table_SW.shape[1] if window is None else min(slots.table_SW.shape[1], blocks_for(window) + 1)
    split_blocks = SPLIT_BLOCKS if rows * heads >= PROGRAMS else 1
    wanted = max(triton.cdiv(width, split_blocks) if split_blocks > 1 else triton.cdiv(PROGRAMS, rows * heads), 1)
    # A power of two, as tl.arange needs. Each number compiles a kernel of its own, so there are few.
    splits = min(triton.next_power_of_2(wanted), triton.next_power_of_2(width), 16)
    sums = torch.float64 if query_RHD.dtype == torch.float64 else torch.float32
    query_RHD = query_RHD.contiguous()
    out = query_RHD.new_empty(rows, queries, value_size)
    parts = out if splits == 1 else out.new_empty(splits, rows, queries, value_size, dtype=sums)
    # With one split nothing is written to it; any pointer will do.
    logs = parts if splits == 1 else parts.new_empty(splits, rows, queries)
    group = queries // heads
    block, value_block = (max(16, triton.next_power_of_2(n)) for n in (size, value_size))
    tile, stages = _tile(cache[0].element_size() * (block + value_block), _shared_memory(query_RHD.device))
    common: dict[str, Any] = {
        "QUERIES": queries,
        "VALUE_SIZE": value_size,
        "VALUE_BLOCK": value_block,
        "SPLITS": splits,
    }
    _paged_attention_kernel[(rows, heads, splits)](
        query_RHD,
        parts,
        logs,
        *cache,
        slots.table_SW,
        slots.table_SW.stride(0),
        slots.state[POSITION],
        slots.state[LIVE],
        scale,
        # Without the option, the kernel does not read it; any value or pointer will do.
        0 if window is None else window,
        1.0 if softcap is None else softcap,
        query_RHD if sink_H is None else sink_H,
        HEADS=heads,
        SPLIT_BLOCKS=split_blocks,
        GROUP=group,
        # tl.dot needs at least 16 rows; the rest is masked.
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        KV_BLOCK=BLOCK_SIZE,
        TILE=tile,
        SIZE=size,
        BLOCK=block,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        SINKS=sink_H is not None,
        **common,
        num_warps=4,
        num_stages=stages,
    )
    if splits > 1:
        warps = 1 if splits * value_block <= 2048 else 4
        _combine_splits_kernel[(rows, queries)](parts, logs, out, rows, **common, num_warps=warps)
    return out.flatten(1)


def _tile(bytes_per_token: int, shared_memory: int) -> tuple[int, int]:
    """Tokens that the attention kernel reads at a time, and the number of pipeline stages: as many as fit into shared
    memory. Large heads (256 in Gemma 3, 512 in Gemma 4) need smaller tiles."""
    if BLOCK_SIZE * bytes_per_token * 3 <= shared_memory:
        return BLOCK_SIZE, 3
    tile = BLOCK_SIZE
    # tl.dot needs at least 16 tokens.
    while tile > 16 and tile * bytes_per_token * 2 > shared_memory:
        tile //= 2
    return tile, 2


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of keys and values that an attention program may hold. A fifth of the GPU's is left for other uses."""
    if device.type != "cuda":
        return SHARED_MEMORY
    # Missing in torch's type stubs.
    available: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 2**18)
    return min(SHARED_MEMORY, available * 4 // 5)


def sample_tokens(slots: Slots, logits_RV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample a token per row from its own random stream; tokens and log-probs."""
    key_R = slots.state[KEY]
    sampled_R = slots.state[SAMPLED]
    # Greedy decoding, top-k and top-p are not fused.
    filtered = sampling.temperature == 0 or sampling.top_p < 1 or 0 < sampling.top_k < logits_RV.shape[1]
    if filtered or logits_RV.dtype != torch.float32:
        token_R, logp_R = sample_from_logits(logits_RV, sampling, uniform(key_R, sampled_R))
        return with_greedy(logits_RV, sampling, key_R, token_R, logp_R)
    logits_RV = logits_RV.contiguous()
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    most = logits_RV.new_empty(2, rows, blocks)
    token_R = torch.empty_like(key_R)
    logp_R = logits_RV.new_empty(rows)
    scale = 1 / sampling.temperature
    size: dict[str, Any] = {"BLOCK": VOCABULARY_BLOCK}
    _block_sums_kernel[(rows, blocks)](logits_RV, most[0], most[1], vocabulary, scale, **size)
    _sample_kernel[(rows,)](
        logits_RV,
        most[0],
        most[1],
        key_R,
        sampled_R,
        token_R,
        logp_R,
        vocabulary,
        blocks,
        scale,
        BLOCKS=triton.next_power_of_2(blocks),
        **size,
    )
    return with_greedy(logits_RV, sampling, key_R, token_R, logp_R)


def advance(slots: Slots, token_R: Tensor, logp_R: Tensor, stop_ids: Tensor, max_tokens: int) -> None:
    """Store the sampled tokens and make them the next input. A row finishes with a stop token or at the limit."""
    state = slots.state
    _advance_kernel[(len(token_R),)](
        token_R,
        logp_R,
        stop_ids,
        slots.token_ST,
        slots.logp_ST,
        slots.token_ST.stride(0),
        state[INPUT],
        state[POSITION],
        state[SAMPLED],
        state[LIVE],
        max_tokens,
        len(stop_ids),
        STOPS=triton.next_power_of_2(max(1, len(stop_ids))),
        num_warps=1,
    )


def _warps(size: int) -> int:
    """Number of warps. Triton accepts only powers of two, and a size such as Qwen3-30B-A3B's expert width (768) is
    none."""
    return max(1, min(8, triton.next_power_of_2(size) // 256))


@triton.jit
def _rms_norm_kernel(x, weight, out, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # int64: rows times size exceeds 32 bits for large batches.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    given = tl.load(x + row * SIZE + at, mask=at < SIZE, other=0.0)
    wide = given.to(tl.float32)
    # Rounded before the multiplication with the weight, as the model does.
    normalized = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(given.dtype)
    tl.store(out + row * stride + at, normalized * tl.load(weight + at, mask=at < SIZE, other=0.0), mask=at < SIZE)


@triton.jit
def _add_rms_norm_kernel(x, y, weight, total, out, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    first = tl.load(x + row * SIZE + at, mask=at < SIZE, other=0.0)
    second = tl.load(y + row * SIZE + at, mask=at < SIZE, other=0.0)
    # The norm reads the rounded sum, as in the model.
    given = (first.to(tl.float32) + second.to(tl.float32)).to(first.dtype)
    tl.store(total + row * SIZE + at, given, mask=at < SIZE)
    wide = given.to(tl.float32)
    normalized = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(given.dtype)
    tl.store(out + row * stride + at, normalized * tl.load(weight + at, mask=at < SIZE, other=0.0), mask=at < SIZE)


@triton.jit
def _silu_mul_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(gate + at, mask=at < count, other=0.0)
    wide = given.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(given.dtype)
    tl.store(out + at, opened * tl.load(up + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def _group_by_expert_kernel(expert, row, place, ends, count, K: tl.constexpr, BLOCK: tl.constexpr):
    mine = tl.program_id(0)
    # Every program counts all choices: with a few thousand of them that is cheaper than a sort.
    before = tl.zeros([], tl.int32)
    own = tl.zeros([], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # A number above every expert, so that padding is counted for none.
        which = tl.load(expert + at, mask=at < count, other=2**31 - 1)
        before += tl.sum((which < mine).to(tl.int32), 0)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        same = tl.load(expert + at, mask=at < count, other=2**31 - 1) == mine
        to = (before + own + tl.cumsum(same.to(tl.int32), 0) - 1).to(tl.int64)
        tl.store(place + at, to, mask=same)
        tl.store(row + to, (at // K).to(tl.int64), mask=same)
        own += tl.sum(same.to(tl.int32), 0)
    tl.store(ends + mine, before + own)


@triton.jit
def _silu_mul_halves_kernel(x, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(x + row * 2 * SIZE + at, mask=at < SIZE, other=0.0)
    wide = given.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(given.dtype)
    tl.store(
        out + row * stride + at,
        opened * tl.load(x + row * 2 * SIZE + SIZE + at, mask=at < SIZE, other=0.0),
        mask=at < SIZE,
    )


@triton.jit
def _combine_experts_kernel(x, place, weight, out, K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        given = tl.load(x + tl.load(place + row * K + k) * SIZE + at, mask=at < SIZE, other=0.0)
        share = tl.load(weight + row * K + k).to(tl.float32)
        total += (given.to(tl.float32) * share).to(given.dtype).to(tl.float32)  # rounded as in the model's own code
    tl.store(out + row * SIZE + at, total.to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _rotate(x, weight, cosine, sine, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr):
    """Normalize and rotate a head. Every product and sum is rounded as the model's own code rounds it."""
    at = tl.arange(0, BLOCK)
    other = tl.where(at < SIZE // 2, at + SIZE // 2, at - SIZE // 2)
    here = tl.load(x + at, mask=at < SIZE, other=0.0)
    there = tl.load(x + other, mask=at < SIZE, other=0.0)
    kind = here.dtype
    if NORMED:
        wide = here.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
        here = (wide * scale).to(kind) * tl.load(weight + at, mask=at < SIZE, other=0.0)
        there = (there.to(tl.float32) * scale).to(kind) * tl.load(weight + other, mask=at < SIZE, other=0.0)
    straight = (here.to(tl.float32) * tl.load(cosine + at, mask=at < SIZE, other=0.0).to(tl.float32)).to(kind)
    across = (there.to(tl.float32) * tl.load(sine + at, mask=at < SIZE, other=0.0).to(tl.float32)).to(kind)
    across = tl.where(at < SIZE // 2, -across, across)
    return (straight.to(tl.float32) + across.to(tl.float32)).to(kind)


@triton.jit
def _rope_and_store_kernel(
    query,
    key,
    value,
    query_stride,
    key_stride,
    value_stride,
    cosine,
    sine,
    query_weight,
    key_weight,
    eps,
    position,
    live,
    table,
    width,
    keys,
    values,
    out,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    cosine += row * SIZE
    sine += row * SIZE
    if head < QUERIES:
        start = query + row * query_stride + head * SIZE
        rotated = _rotate(start, query_weight, cosine, sine, eps, SIZE, BLOCK, NORMED)
        tl.store(out + (row * QUERIES + head) * SIZE + at, rotated, mask=at < SIZE)
    else:
        if tl.load(live + row) != 0:
            start = (head - QUERIES) * SIZE
            where = tl.load(position + row)
            # int64: the offset of an element in a large cache overflows int32.
            kv_block = tl.load(table + row * width + where // KV_BLOCK).to(tl.int64)
            to = ((kv_block * HEADS + head - QUERIES) * KV_BLOCK + where % KV_BLOCK) * SIZE + at
            rotated = _rotate(key + row * key_stride + start, key_weight, cosine, sine, eps, SIZE, BLOCK, NORMED)
            tl.store(keys + to, rotated, mask=at < SIZE)
            new = tl.load(value + row * value_stride + start + at, mask=at < SIZE, other=0.0)
            tl.store(values + to, new, mask=at < SIZE)


@triton.jit
def _store_kernel(
    key,
    value,
    position,
    live,
    table,
    width,
    keys,
    values,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(live + row) != 0:
        where = tl.load(position + row)
        # int64: the offset of an element in a large cache overflows int32.
        kv_block = tl.load(table + row * width + where // KV_BLOCK).to(tl.int64)
        to = (kv_block * HEADS + head) * KV_BLOCK + where % KV_BLOCK
        start = row * HEADS + head
        at, value_at = tl.arange(0, BLOCK), tl.arange(0, VALUE_BLOCK)
        new = tl.load(key + start * SIZE + at, mask=at < SIZE, other=0.0)
        tl.store(keys + to * SIZE + at, new, mask=at < SIZE)
        new_value = tl.load(value + start * VALUE_SIZE + value_at, mask=value_at < VALUE_SIZE, other=0.0)
        tl.store(values + to * VALUE_SIZE + value_at, new_value, mask=value_at < VALUE_SIZE)


@triton.jit
def _paged_attention_kernel(
    query,
    parts,
    logs,
    keys,
    values,
    table,
    width,
    position,
    live,
    scale,
    window,
    softcap,
    sinks,
    HEADS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One row, the query heads of one key-value head, over one split of the row's blocks: online softmax."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.where(tl.load(live + row) != 0, tl.load(position + row) + 1, 0).to(tl.int32)
    kv_blocks = tl.cdiv(length, KV_BLOCK)
    if WINDOWED:
        # Blocks before the window are not read at all.
        start = tl.maximum(length - window, 0).to(tl.int32)
        skipped = start // KV_BLOCK
        per_split = tl.maximum(tl.cdiv(kv_blocks - skipped, SPLITS), SPLIT_BLOCKS)
        first = skipped + per_split * split
    else:
        per_split = tl.maximum(tl.cdiv(kv_blocks, SPLITS), SPLIT_BLOCKS)
        first = per_split * split
    last = tl.minimum(first + per_split, kv_blocks)
    at, member, token = tl.arange(0, BLOCK), tl.arange(0, GROUP_BLOCK), tl.arange(0, TILE)
    value_at = tl.arange(0, VALUE_BLOCK)
    own_head = row * QUERIES + head * GROUP + member
    real = member[:, None] < GROUP
    own_query = tl.load(query + own_head[:, None] * SIZE + at[None, :], mask=real & (at[None, :] < SIZE), other=0.0)
    # A large finite number instead of -inf: exp(-inf - -inf) would be NaN.
    most = tl.full([GROUP_BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    if SINKS:
        # A score without a value. It is counted once, in the first split.
        sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32)
        most = tl.where(split == 0, sink, most)
        total = tl.where(split == 0, 1.0, total)
    output = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    # TILE divides KV_BLOCK, so that a tile lies in one block.
    for index in range(first * (KV_BLOCK // TILE), last * (KV_BLOCK // TILE)):
        kv_block = tl.load(table + row * width + index // (KV_BLOCK // TILE)).to(tl.int64)
        held = (kv_block * HEADS + head) * KV_BLOCK + index % (KV_BLOCK // TILE) * TILE
        seen = index * TILE + token < length
        if WINDOWED:
            seen = seen & (index * TILE + token >= start)
        offset = held * SIZE + token[:, None] * SIZE + at[None, :]
        read = tl.load(keys + offset, mask=seen[:, None] & (at[None, :] < SIZE), other=0.0)
        # ieee: the default rounds float32 inputs to TF32, with 10 bits of mantissa.
        score = tl.dot(own_query, tl.trans(read), input_precision="ieee") * scale
        if CAPPED:
            # tanh by exponentials, which do not overflow for a negative argument.
            shrunk = tl.exp(-2.0 * tl.abs(score) / softcap)
            score = tl.where(score < 0, -softcap, softcap) * (1 - shrunk) / (1 + shrunk)
        score = tl.where(seen[None, :], score, -1.0e30)
        peak = tl.maximum(most, tl.max(score, 1))
        # Online softmax: earlier sums were relative to the old maximum.
        shrink = tl.exp(most - peak)
        weight = tl.exp(score - peak[:, None])
        if WINDOWED:
            # A tile may lie before the window as a whole. Then its scores are all equal to the maximum.
            weight = tl.where(seen[None, :], weight, 0.0)
        total = total * shrink + tl.sum(weight, 1)
        offset = held * VALUE_SIZE + token[:, None] * VALUE_SIZE + value_at[None, :]
        read = tl.load(values + offset, mask=seen[:, None] & (value_at[None, :] < VALUE_SIZE), other=0.0)
        output = output * shrink[:, None] + tl.dot(weight.to(read.dtype), read, input_precision="ieee")
        most = peak
    output = output / tl.where(total > 0, total, 1.0)[:, None]
    log = tl.where(total > 0, most + tl.log(tl.where(total > 0, total, 1.0)), -1.0e30)
    mine = own_head[:, None] * VALUE_SIZE + value_at[None, :]
    real = real & (value_at[None, :] < VALUE_SIZE)
    if SPLITS == 1:
        tl.store(parts + mine, output.to(parts.dtype.element_ty), mask=real)
    else:
        rows = tl.num_programs(0)
        tl.store(parts + split * rows * QUERIES * VALUE_SIZE + mine, output, mask=real & (total > 0)[:, None])
        tl.store(logs + split * rows * QUERIES + own_head, log, mask=member < GROUP)


@triton.jit
def _combine_splits_kernel(
    parts,
    logs,
    out,
    rows,
    QUERIES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combine the outputs of the splits, weighted by their sums of exponentials."""
    row, head = tl.program_id(0), tl.program_id(1)
    at, split = tl.arange(0, VALUE_BLOCK), tl.arange(0, SPLITS)
    place = row * QUERIES + head
    log = tl.load(logs + split * rows * QUERIES + place)
    weight = tl.exp(log - tl.max(log, 0))
    # An empty split wrote nothing: its output is uninitialized memory.
    real = (log[:, None] > -1.0e29) & (at[None, :] < VALUE_SIZE)
    part = tl.load(parts + (split[:, None] * rows * QUERIES + place) * VALUE_SIZE + at[None, :], mask=real, other=0.0)
    output = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + place * VALUE_SIZE + at, output.to(out.dtype.element_ty), mask=at < VALUE_SIZE)


@triton.jit
def _block_sums_kernel(logits, most, sums, vocabulary, scale, BLOCK: tl.constexpr):
    """Maximum of a block of scaled logits, and the sum of exponentials relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf")) * scale
    peak = tl.max(x, 0)
    least = tl.where(peak == -float("inf"), 0.0, peak)  # all tokens masked: the sum is 0, not NaN
    place = row * tl.num_programs(1) + block
    tl.store(most + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(x - least), 0))


@triton.jit
def _uniform(key, index):
    """The same numbers as `sampling.uniform`."""
    z = key.to(tl.uint64) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    # 2**-52, as in sampling.py.
    return ((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _sample_kernel(
    logits, most, sums, key, sampled, token, logp, vocabulary, blocks, scale, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Invert the cumulative distribution: find the block that reaches the threshold, then the entry in it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    peaks = tl.load(most + row * blocks + block, mask=block < blocks, other=-float("inf"))
    peak = tl.max(peaks, 0)
    mass = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0) * tl.exp(peaks - peak)
    # float64: in float32 the cumulative sum would lose the mass of unlikely tokens.
    reached = tl.cumsum(mass.to(tl.float64), 0)
    total = tl.sum(tl.where(block == blocks - 1, reached, 0.0), 0)
    threshold = _uniform(tl.load(key + row), tl.load(sampled + row)) * total
    chosen = tl.minimum(tl.sum((reached < threshold).to(tl.int32), 0), blocks - 1)
    before = tl.sum(tl.where(block == chosen - 1, reached, 0.0), 0)
    inside = tl.arange(0, BLOCK)
    at = chosen * BLOCK + inside
    x = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf")) * scale
    p = tl.exp(x - peak)
    index = tl.sum((before + tl.cumsum(p.to(tl.float64), 0) < threshold).to(tl.int32), 0)
    # Rounding may leave the end of the block just short of the threshold. Then take its last token of nonzero
    # probability.
    index = tl.minimum(index, tl.max(tl.where(p > 0, inside, 0), 0))
    tl.store(token + row, (chosen * BLOCK + index).to(tl.int64))
    picked = tl.sum(tl.where(inside == index, x, 0.0), 0)
    tl.store(logp + row, (picked - peak) - tl.log(total).to(tl.float32))


@triton.jit
def _advance_kernel(
    token,
    logp,
    stop_ids,
    tokens,
    logps,
    columns,
    given,
    position,
    sampled,
    live,
    max_tokens,
    stops,
    STOPS: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(live + row) != 0:
        new, count = tl.load(token + row), tl.load(sampled + row)
        tl.store(tokens + row * columns + count, new.to(tl.int32))
        tl.store(logps + row * columns + count, tl.load(logp + row))
        tl.store(given + row, new)
        tl.store(position + row, tl.load(position + row) + 1)
        tl.store(sampled + row, count + 1)
        which = tl.arange(0, STOPS)
        ended = tl.sum(((tl.load(stop_ids + which, mask=which < stops, other=-1)) == new).to(tl.int32), 0)
        if (ended > 0) | (count + 1 >= max_tokens):
            tl.store(live + row, tl.zeros([], tl.int64))

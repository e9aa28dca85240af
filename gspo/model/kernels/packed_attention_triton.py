# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton kernels of the attention over a packed row: one forward and three backward kernels.

In: queries, keys and values [I, heads, size] of a packed row with any strides between rows and heads, and the tables of
`attention_blocks.py`. Out: the attention of every row over its own segment, causally, and over its prompt; and the
gradients. Invariant: bitwise reproducible. No sum depends on timing, because every entry of a result is written by one
program.

With scores s = scale q.k, L the log-sum of a row, and g the gradient of the output o:

    p = exp(s - L),   delta = g.o,   ds = p (g.v - delta),
    dq = scale ds k,   dk = scale ds^T q,   dv = p^T g.

Scores and sums are in float32; p and ds are rounded to the precision of the inputs for the matrix products. Exponents
have base 2, whose exponential is an instruction. In the packed row, all keys that a row attends to precede it. So one
mask, `key <= query`, is correct for the diagonal and for the prompt, and blocks without a masked entry skip it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo.model.attention_blocks import select

LOG2_E = 1.4426950408889634
NEGATIVE = -1.0e30
"""A finite replacement for minus infinity, which would give NaN in rows of a block whose entries are all masked."""
SUM_ROWS = 16
"""Rows per program of the sum over parts."""
VARYING = ["rows", "group", "window"]
"""Arguments whose value must not compile another kernel, because it changes with the batch or with the layer."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The shape of one kernel: blocks of queries and keys, warps per program, and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The shapes of the three kernels. `forward.queries`, `dq.queries` and `dkdv.keys` must be block sizes with tables
    (`attention_blocks.SIZES`)."""

    forward: Tile
    dq: Tile
    dkdv: Tile


# Chosen by head size, not by timing: an autotuner's choice, and with it the rounding, could change between runs.
LARGE: dict[int, Tiling] = {
    64: Tiling(
        forward=Tile(queries=128, keys=64, warps=4, stages=3),
        dq=Tile(queries=128, keys=64, warps=8, stages=3),
        dkdv=Tile(queries=64, keys=128, warps=8, stages=3),
    ),
    128: Tiling(
        forward=Tile(queries=128, keys=64, warps=8, stages=3),
        dq=Tile(queries=128, keys=64, warps=8, stages=3),
        dkdv=Tile(queries=32, keys=128, warps=8, stages=3),
    ),
    256: Tiling(
        forward=Tile(queries=128, keys=64, warps=8, stages=2),
        dq=Tile(queries=64, keys=32, warps=4, stages=2),
        dkdv=Tile(queries=32, keys=64, warps=8, stages=2),
    ),
}
"""For cards with at least 200 KiB of shared memory per block (Hopper: 227 KiB)."""
SMALL: dict[int, Tiling] = {
    64: Tiling(
        forward=Tile(queries=128, keys=64, warps=4, stages=2),
        dq=Tile(queries=64, keys=64, warps=4, stages=2),
        dkdv=Tile(queries=64, keys=64, warps=4, stages=2),
    ),
    128: Tiling(
        forward=Tile(queries=128, keys=32, warps=4, stages=2),
        dq=Tile(queries=64, keys=32, warps=4, stages=2),
        dkdv=Tile(queries=32, keys=64, warps=4, stages=2),
    ),
    256: Tiling(
        forward=Tile(queries=64, keys=32, warps=4, stages=1),
        dq=Tile(queries=64, keys=16, warps=4, stages=1),
        dkdv=Tile(queries=16, keys=64, warps=8, stages=1),
    ),
}
"""For cards with less: 99 KiB and more."""


@cache
def _is_large(device: torch.device) -> bool:
    card: Any = torch.cuda.get_device_properties(device)
    return bool(card.shared_memory_per_block_optin > 200 * 1024)


def tiling(size: int, device: torch.device) -> Tiling:
    """The tiling for a head size, a power of two up to 256."""
    # Triton's interpreter, in tests, has no limit.
    tilings = LARGE if device.type != "cuda" or _is_large(device) else SMALL
    return tilings[max(64, size)]


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, entries: Tensor, layout: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [I, heads, size] and log-sums [heads, I] with base 2. `window` limits the distance to a key; 0: none."""
    rows, heads, size = query.shape
    tile = tiling(size, query.device).forward
    queries = select(entries, layout, tile.queries).queries
    output = query.new_empty(rows, heads, size)
    log_sum = query.new_empty(heads, rows, dtype=torch.float32)
    _forward[(heads, len(queries))](
        query,
        key,
        value,
        output,
        log_sum,
        queries,
        rows,
        heads // key.shape[1],
        *_strides(query, key, value, output),
        scale * LOG2_E,
        window,
        **_shape(tile, size, window),
    )
    return output, log_sum


def backward(
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
    """Gradients of query, key and value, each [I, heads, size]."""
    rest = (log_sum, scale, window, entries, layout)
    dq, delta = query_gradient(gradient, query, key, value, output, *rest)
    dk, dv = key_gradients(gradient, query, key, value, delta, *rest)
    return dq, dk, dv


def query_gradient(
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
) -> tuple[Tensor, Tensor]:
    """The gradient of the queries, and delta [heads, I]."""
    rows, heads, size = query.shape
    tile = tiling(size, query.device).dq
    queries = select(entries, layout, tile.queries).queries
    dq = query.new_empty(rows, heads, size)
    delta = torch.empty_like(log_sum)
    _query_gradient[(heads, len(queries))](
        query,
        key,
        value,
        output,
        gradient,
        log_sum,
        dq,
        delta,
        queries,
        rows,
        heads // key.shape[1],
        *_strides(query, key, value, output, gradient),
        scale,
        scale * LOG2_E,
        window,
        **_shape(tile, size, window),
    )
    return dq, delta


def key_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    delta: Tensor,
    log_sum: Tensor,
    scale: float,
    window: int,
    entries: Tensor,
    layout: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values."""
    rows, heads, size = query.shape
    kv_heads = key.shape[1]
    tile = tiling(size, query.device).dkdv
    blocks = select(entries, layout, tile.keys)
    dk, dv = (query.new_empty(rows, kv_heads, size) for _ in range(2))
    partial = query.new_empty(len(blocks.parts), kv_heads, 2, tile.keys, size, dtype=torch.float32)
    _key_gradients[(kv_heads, len(blocks.parts) + len(blocks.keys))](
        query,
        key,
        value,
        gradient,
        log_sum,
        delta,
        dk,
        dv,
        partial,
        blocks.parts,
        blocks.keys,
        entries[-rows:],
        rows,
        len(blocks.parts),
        kv_heads,
        heads // kv_heads,
        *_strides(query, key, value, gradient, dk),
        scale,
        scale * LOG2_E,
        window,
        **_shape(tile, size, window),
    )
    if len(blocks.sums):
        _sum_parts[(kv_heads, len(blocks.sums), tile.keys // SUM_ROWS)](
            partial,
            dk,
            dv,
            blocks.sums,
            kv_heads,
            *_strides(dk),
            KEYS=tile.keys,
            SIZE=size,
            ROWS=SUM_ROWS,
        )
    return dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    """Between rows and between heads. Within a head, entries are contiguous."""
    assert all(t.stride(2) == 1 for t in tensors)
    return [t.stride(dim) for t in tensors for dim in (0, 1)]


def _shape(tile: Tile, size: int, window: int) -> dict[str, Any]:
    return {
        "SIZE": size,
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "WINDOW": window > 0,
        "NEGATIVE": NEGATIVE,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def _tile(source, row, end, stride, SIZE: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Rows of one head from `row` on; with MASKED, rows from `end` on are read as 0."""
    # int64 for the first row (and for heads), because their strides exceed 32 bits in long batches; the rest is small.
    at = source + row.to(tl.int64) * stride
    offset = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, SIZE)[None, :]
    if MASKED:
        return tl.load(at + offset, mask=(row + tl.arange(0, ROWS) < end)[:, None], other=0.0)
    return tl.load(at + offset)


@triton.jit
def _store(target, tile, row, end, stride, SIZE: tl.constexpr, ROWS: tl.constexpr):
    at = target + row.to(tl.int64) * stride
    offset = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, SIZE)[None, :]
    tl.store(at + offset, tile.to(target.dtype.element_ty), mask=(row + tl.arange(0, ROWS) < end)[:, None])


@triton.jit
def _query_block(queries):
    """Entry of the table: first row, end and begin of the segment, begin and end of the prompt."""
    at = queries + tl.program_id(1) * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _key_ranges(
    first,
    end,
    begin,
    prompt_begin,
    prompt_end,
    window,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Number of blocks of keys that all queries attend to, of the prompt and of the segment itself; then the first
    other key and the number of other blocks of both."""
    prompt_full = (prompt_end - prompt_begin) // KEYS
    own_full = (first + 1 - begin) // KEYS
    prompt_from = prompt_begin + prompt_full * KEYS
    own_from = begin + own_full * KEYS
    if WINDOW:
        # All blocks are masked, and those beyond the window of the first query are skipped.
        prompt_full = 0
        own_full = 0
        reach = tl.minimum(prompt_end, first - begin + prompt_end - window + 1)
        prompt_from = tl.maximum(prompt_begin, reach)
        own_from = tl.maximum(begin, first - window + 1)
    prompt_masked = tl.cdiv(prompt_end - prompt_from, KEYS)
    own_masked = tl.cdiv(tl.minimum(end, first + QUERIES) - own_from, KEYS)
    return prompt_full, own_full, prompt_from, own_from, prompt_masked, own_masked


@triton.jit
def _visible(query, key, key_end, shift, window, WINDOW: tl.constexpr):
    """Which keys a query attends to. `shift` is the number of rows in between that are not in its sequence."""
    visible = (key[None, :] <= query[:, None]) & (key < key_end)[None, :]
    if WINDOW:
        visible = visible & (query[:, None] - key[None, :] - shift < window)
    return visible


@triton.jit
def _forward_step(total, most, weight, score, value, scale_2):
    """Online softmax: add a block of keys to the weighted sum of values."""
    higher = tl.maximum(most, tl.max(score, 1) * scale_2)
    p = tl.math.exp2(score * scale_2 - higher[:, None])
    shrink = tl.math.exp2(most - higher)
    weight = weight * shrink + tl.sum(p, 1)
    total = tl.dot(p.to(value.dtype), value, total * shrink[:, None])
    return total, higher, weight


@triton.jit(do_not_specialize=VARYING)
def _forward(
    query,
    key,
    value,
    output,
    log_sum,
    queries,
    rows,
    group,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    o_row,
    o_head,
    scale_2,
    window,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    first, end, begin, prompt_begin, prompt_end = _query_block(queries)
    prompt_full, own_full, prompt_from, own_from, prompt_masked, own_masked = _key_ranges(
        first, end, begin, prompt_begin, prompt_end, window, QUERIES, KEYS, WINDOW
    )
    key += (head // group) * k_head
    value += (head // group) * v_head
    q = _tile(query + head * q_head, first, end, q_row, SIZE, QUERIES, True)
    row = first + tl.arange(0, QUERIES)
    total = tl.zeros((QUERIES, SIZE), dtype=tl.float32)
    most = tl.full((QUERIES,), NEGATIVE, dtype=tl.float32)
    weight = tl.zeros((QUERIES,), dtype=tl.float32)
    # One loop over the blocks of prompt and segment, so that the loads of the second overlap with the first.
    for i in range(prompt_full + own_full):
        at = tl.where(i < prompt_full, prompt_begin + i * KEYS, begin + (i - prompt_full) * KEYS)
        k = _tile(key, at, end, k_row, SIZE, KEYS, False)
        score = tl.dot(q, k.T)
        v = _tile(value, at, end, v_row, SIZE, KEYS, False)
        total, most, weight = _forward_step(total, most, weight, score, v, scale_2)
    for i in range(prompt_masked + own_masked):
        in_prompt = i < prompt_masked
        at = tl.where(in_prompt, prompt_from + i * KEYS, own_from + (i - prompt_masked) * KEYS)
        key_end = tl.where(in_prompt, prompt_end, end)
        shift = tl.where(in_prompt, begin - prompt_end, 0)
        k = _tile(key, at, key_end, k_row, SIZE, KEYS, True)
        visible = _visible(row, at + tl.arange(0, KEYS), key_end, shift, window, WINDOW)
        score = tl.where(visible, tl.dot(q, k.T), NEGATIVE)
        v = _tile(value, at, key_end, v_row, SIZE, KEYS, True)
        total, most, weight = _forward_step(total, most, weight, score, v, scale_2)
    _store(output + head * o_head, total / weight[:, None], first, end, o_row, SIZE, QUERIES)
    tl.store(log_sum + head * rows + row, most + tl.math.log2(weight), mask=row < end)


@triton.jit
def _query_gradient_step(
    total, q, g, k, v, log_sum, delta, visible, scale_2, NEGATIVE: tl.constexpr, MASKED: tl.constexpr
):
    score = tl.dot(q, k.T) * scale_2 - log_sum[:, None]
    if MASKED:
        # Before the exponential, which could overflow for keys that are not part of the log-sum.
        score = tl.where(visible, score, NEGATIVE)
    p = tl.math.exp2(score)
    ds = p * (tl.dot(g, v.T) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, total)


@triton.jit(do_not_specialize=VARYING)
def _query_gradient(
    query,
    key,
    value,
    output,
    gradient,
    log_sum,
    dq,
    delta_out,
    queries,
    rows,
    group,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    o_row,
    o_head,
    g_row,
    g_head,
    scale,
    scale_2,
    window,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """dq has the layout of the output."""
    head = tl.program_id(0).to(tl.int64)
    first, end, begin, prompt_begin, prompt_end = _query_block(queries)
    prompt_full, own_full, prompt_from, own_from, prompt_masked, own_masked = _key_ranges(
        first, end, begin, prompt_begin, prompt_end, window, QUERIES, KEYS, WINDOW
    )
    key += (head // group) * k_head
    value += (head // group) * v_head
    row = first + tl.arange(0, QUERIES)
    q = _tile(query + head * q_head, first, end, q_row, SIZE, QUERIES, True)
    g = _tile(gradient + head * g_head, first, end, g_row, SIZE, QUERIES, True)
    o = _tile(output + head * o_head, first, end, o_row, SIZE, QUERIES, True)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    at_row = head * rows + row
    tl.store(delta_out + at_row, delta, mask=row < end)
    normalizer = tl.load(log_sum + at_row, mask=row < end, other=0.0)
    total = tl.zeros((QUERIES, SIZE), dtype=tl.float32)
    for i in range(prompt_full + own_full):
        at = tl.where(i < prompt_full, prompt_begin + i * KEYS, begin + (i - prompt_full) * KEYS)
        k = _tile(key, at, end, k_row, SIZE, KEYS, False)
        v = _tile(value, at, end, v_row, SIZE, KEYS, False)
        total = _query_gradient_step(total, q, g, k, v, normalizer, delta, 0, scale_2, NEGATIVE, False)
    for i in range(prompt_masked + own_masked):
        in_prompt = i < prompt_masked
        at = tl.where(in_prompt, prompt_from + i * KEYS, own_from + (i - prompt_masked) * KEYS)
        key_end = tl.where(in_prompt, prompt_end, end)
        shift = tl.where(in_prompt, begin - prompt_end, 0)
        k = _tile(key, at, key_end, k_row, SIZE, KEYS, True)
        v = _tile(value, at, key_end, v_row, SIZE, KEYS, True)
        visible = _visible(row, at + tl.arange(0, KEYS), key_end, shift, window, WINDOW)
        total = _query_gradient_step(total, q, g, k, v, normalizer, delta, visible, scale_2, NEGATIVE, True)
    _store(dq + head * o_head, total * scale, first, end, o_row, SIZE, QUERIES)


@triton.jit
def _key_gradients_step(
    total_k, total_v, k, v, q, g, log_sum, delta, visible, scale_2, NEGATIVE: tl.constexpr, MASKED: tl.constexpr
):
    # Scores are transposed, [keys, queries], so that both sums are products with what is in registers on the left.
    score = tl.dot(k, q.T) * scale_2 - log_sum[None, :]
    if MASKED:
        score = tl.where(visible, score, NEGATIVE)
    p = tl.math.exp2(score)
    total_v = tl.dot(p.to(g.dtype), g, total_v)
    ds = p * (tl.dot(v, g.T) - delta[None, :])
    total_k = tl.dot(ds.to(q.dtype), q, total_k)
    return total_k, total_v


@triton.jit(do_not_specialize=[*VARYING, "part_count", "kv_heads"])
def _key_gradients(
    query,
    key,
    value,
    gradient,
    log_sum,
    delta,
    dk,
    dv,
    partial,
    parts,
    keys,
    position,
    rows,
    part_count,
    kv_heads,
    group,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    dk_row,
    dk_head,
    scale,
    scale_2,
    window,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """Programs of `parts` come first and write to `partial`; programs of `keys` write the gradients."""
    kv_head = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    if number < part_count:  # noqa: SIM108 (Triton compiles this form)
        at_entry = parts + number * 4
    else:
        at_entry = keys + (number - part_count) * 4
    first, end = tl.load(at_entry), tl.load(at_entry + 1)
    begin, stop = tl.load(at_entry + 2), tl.load(at_entry + 3)
    if WINDOW:
        # No completion sees the last key of the block, so rows beyond its window are too far from all keys.
        beyond = tl.minimum(first + KEYS, end) - 1 + window
        stop = tl.where(beyond <= end, tl.minimum(stop, beyond), stop)
    count = tl.cdiv(tl.maximum(stop - begin, 0), QUERIES)
    # Blocks of queries [full_from, full_to) see all keys, and have no rows from `stop` on.
    full_from = tl.minimum(tl.cdiv(tl.maximum(first + KEYS - 1 - begin, 0), QUERIES), count)
    full_to = tl.maximum(full_from, tl.maximum(stop - begin, 0) // QUERIES)
    if WINDOW:
        full_from = count
        full_to = count
    column = first + tl.arange(0, KEYS)
    k = _tile(key + kv_head * k_head, first, end, k_row, SIZE, KEYS, True)
    v = _tile(value + kv_head * v_head, first, end, v_row, SIZE, KEYS, True)
    total_k = tl.zeros((KEYS, SIZE), dtype=tl.float32)
    total_v = tl.zeros((KEYS, SIZE), dtype=tl.float32)
    # One loop over heads and blocks, so that the loads of the next head overlap with the last one.
    full = full_to - full_from
    for i in range(group * full):
        head = kv_head * group + i // full
        at = begin + (full_from + i % full) * QUERIES
        at_row = head * rows + at + tl.arange(0, QUERIES)
        q = _tile(query + head * q_head, at, stop, q_row, SIZE, QUERIES, False)
        normalizer = tl.load(log_sum + at_row)
        g = _tile(gradient + head * g_head, at, stop, g_row, SIZE, QUERIES, False)
        total_k, total_v = _key_gradients_step(
            total_k, total_v, k, v, q, g, normalizer, tl.load(delta + at_row), 0, scale_2, NEGATIVE, False
        )
    masked = count - full
    for i in range(group * masked):
        head = kv_head * group + i // masked
        block = i % masked
        at = begin + tl.where(block < full_from, block, block + full) * QUERIES
        row = at + tl.arange(0, QUERIES)
        at_row = head * rows + row
        real = row < stop
        q = _tile(query + head * q_head, at, stop, q_row, SIZE, QUERIES, True)
        normalizer = tl.load(log_sum + at_row, mask=real, other=0.0)
        g = _tile(gradient + head * g_head, at, stop, g_row, SIZE, QUERIES, True)
        slope = tl.load(delta + at_row, mask=real, other=0.0)
        visible = (column[:, None] <= row[None, :]) & real[None, :]
        if WINDOW:
            of_query = tl.load(position + row, mask=real, other=0)
            of_key = tl.load(position + column, mask=column < end, other=0)
            visible = visible & (of_query[None, :] - of_key[:, None] < window)
        total_k, total_v = _key_gradients_step(
            total_k, total_v, k, v, q, g, normalizer, slope, visible, scale_2, NEGATIVE, True
        )
    total_k = total_k * scale
    if number < part_count:
        offset = tl.arange(0, KEYS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        at_part = partial + (number * kv_heads + kv_head) * (2 * KEYS * SIZE)
        tl.store(at_part + offset, total_k)
        tl.store(at_part + KEYS * SIZE + offset, total_v)
    else:
        _store(dk + kv_head * dk_head, total_k, first, end, dk_row, SIZE, KEYS)
        _store(dv + kv_head * dk_head, total_v, first, end, dk_row, SIZE, KEYS)


@triton.jit(do_not_specialize=["kv_heads"])
def _sum_parts(
    partial,
    dk,
    dv,
    sums,
    kv_heads,
    dk_row,
    dk_head,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up the parts of a block of keys, in their order."""
    kv_head = tl.program_id(0).to(tl.int64)
    at_entry = sums + tl.program_id(1) * 4
    first, end = tl.load(at_entry), tl.load(at_entry + 1)
    number, count = tl.load(at_entry + 2), tl.load(at_entry + 3)
    begin = tl.program_id(2) * ROWS
    offset = (begin + tl.arange(0, ROWS))[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total_k = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    total_v = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    for i in range(count):
        at_part = partial + ((number + i) * kv_heads + kv_head) * (2 * KEYS * SIZE)
        total_k += tl.load(at_part + offset)
        total_v += tl.load(at_part + KEYS * SIZE + offset)
    _store(dk + kv_head * dk_head, total_k, first + begin, end, dk_row, SIZE, ROWS)
    _store(dv + kv_head * dk_head, total_v, first + begin, end, dk_row, SIZE, ROWS)

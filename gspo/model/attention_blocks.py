"""How the attention over a packed row is divided among the programs of a GPU kernel.

In: the lengths of prompts and completions. Out: tables of blocks, one program per entry and head. Invariant: the tables
depend on the lengths only, so the order of every sum is fixed. They are made on the host, once per micro-batch, for all
layers.

The completions of a prompt follow it in the packed row. So the queries that attend to a key are the rows from the key
on, to the end of its segment, and for a prompt's key to the end of the last completion. Such a range is long: a few
blocks of prompt keys have as much work as all other blocks together. It is split into parts, whose sums are stored in
float32 and added up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZES = (64, 128)
"""Block sizes that kernels can choose from."""
MIN_ROWS = 512
"""Query rows per part of a key block, at least. Shorter parts would spend their time on the sums."""
PARTS = 128
"""A part has at most this fraction of all rows. Several kv heads multiply the programs: with 4 of them and 132
multiprocessors, no program takes longer than a quarter of the kernel."""
ROUND = 128
"""Parts are multiples of this many rows, so that only the last one ends within a block of queries."""

Table = NDArray[np.int64]


COLUMNS = (5, 4, 4, 4)
"""Of the tables of `Blocks`, in their order."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tables for one block size, in int32. Long entries come first, so that no long program starts last."""

    queries: Tensor
    """Blocks of queries: first row, end of the segment, its begin, begin and end of the prompt (0, 0 for a prompt)."""
    keys: Tensor
    """Blocks of keys whose queries are one part: first row, end of the segment, first and last + 1 row of queries."""
    parts: Tensor
    """Parts of the other blocks of keys, with the same columns; the parts of a block are consecutive."""
    sums: Tensor
    """These other blocks: first row, end of the segment, first entry of `parts`, number of entries."""


@dataclass(frozen=True, kw_only=True)
class AttentionBlocks:
    """Tables for several block sizes."""

    entries: Tensor
    """All tables one after the other, then the position of each row in its sequence. One tensor, because it is copied
    to the device at once, and because `torch.compile` would distinguish batches by which tables are equally long."""
    layout: Tensor
    """For each block size: the size, and the lengths of the tables of `Blocks`. It stays on the CPU, where reading it
    does not wait for the device."""

    def to(self, device: torch.device) -> AttentionBlocks:
        """The same on another device."""
        return AttentionBlocks(entries=self.entries.to(device), layout=self.layout)


def select(entries: Tensor, layout: Tensor, size: int) -> Blocks:
    """The tables for one block size."""
    at = 0
    for found, *counts in layout.tolist():
        tables = []
        for count, columns in zip(counts, COLUMNS, strict=True):
            tables.append(entries[at : at + count * columns].view(count, columns))
            at += _aligned(count * columns)
        if found == size:
            return Blocks(queries=tables[0], keys=tables[1], parts=tables[2], sums=tables[3])
    raise ValueError(f"no tables for blocks of {size}: there are {layout[:, 0].tolist()}")


def _aligned(count: int) -> int:
    """Tables begin at multiples of 16 bytes: Triton compiles another kernel for other addresses."""
    return -(-count // 4) * 4


def attention_blocks(
    groups: Sequence[tuple[int, Sequence[int]]], sizes: Sequence[int] = SIZES, min_rows: int = MIN_ROWS
) -> AttentionBlocks:
    """Tables for a packed row of `groups`: (length of the prompt, lengths of its completions)."""
    segments = []
    at = 0
    for prompt, completions in groups:
        begin, at = at, at + prompt
        segments.append((begin, at, 0, 0, at + sum(completions)))
        for length in completions:
            segments.append((at, at + length, begin, begin + prompt, at + length))
            at += length
    table = np.array(segments, dtype=np.int64).reshape(-1, 5)
    begin_S, end_S, prompt_begin_S, prompt_end_S, _ = table.T
    offset_S = prompt_end_S - prompt_begin_S - begin_S
    position_I = np.arange(at) + np.repeat(offset_S, end_S - begin_S)
    by_size = [_tables(table, size, min_rows) for size in sizes]
    parts = [np.pad(t.ravel(), (0, _aligned(t.size) - t.size)) for tables in by_size for t in tables]
    return AttentionBlocks(
        entries=torch.from_numpy(np.concatenate([*parts, position_I]).astype(np.int32)),
        layout=torch.tensor([[size, *map(len, tables)] for size, tables in zip(sizes, by_size, strict=True)]),
    )


def _tables(segments: Table, size: int, min_rows: int) -> tuple[Table, Table, Table, Table]:
    """The tables of `Blocks`."""
    begin_S, end_S, _, _, _ = segments.T
    count_S = -(-(end_S - begin_S) // size)
    begin, end, prompt_begin, prompt_end, last = np.repeat(segments, count_S, axis=0).T
    first = begin + size * _number_within(count_S)
    visible = np.minimum(first + size, end) - begin + prompt_end - prompt_begin
    queries = np.stack([first, end, begin, prompt_begin, prompt_end], 1)[_longest_first(visible)]
    keys = np.stack([first, end, first, last], 1)[_longest_first(last - first)]
    # A block of keys in several parts.
    rows = keys[:, 3] - keys[:, 2]
    granularity = min(ROUND, min_rows)
    most = max(min_rows, int(rows.sum()) // PARTS)
    length = -(-rows // -(-rows // most) // granularity) * granularity
    count = -(-rows // length)
    split = count > 1
    number = _number_within(count[split])
    parts = np.repeat(keys[split], count[split], axis=0)
    step = np.repeat(length[split], count[split])
    end_of_rows = parts[:, 3]
    parts[:, 2] += number * step
    parts[:, 3] = np.minimum(parts[:, 2] + step, end_of_rows)
    first_part = np.cumsum(count[split]) - count[split]
    sums = np.column_stack([keys[split, :2], first_part, count[split]])
    return queries, keys[~split], parts, sums


def _number_within(count_S: Table) -> Table:
    """0, 1, ..., count - 1 for each count, one after the other."""
    return np.arange(count_S.sum()) - np.repeat(np.cumsum(count_S) - count_S, count_S)


def _longest_first(length: Table) -> Table:
    order: Table = np.argsort(-length, kind="stable")
    return order

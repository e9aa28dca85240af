"""The allocator of the paged KV cache: which blocks are free, and how many sequences read each of the others.

In: the number of blocks. Out: block numbers. Invariant: a block is free exactly when its reference count is 0. Block
0 is never allocated; it receives the writes that nobody reads (padding).
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_SIZE = 64
"""Tokens per KV cache block. The attention kernel reads one block at a time."""


def blocks_for(tokens: int) -> int:
    """Number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


class BlockAllocator:
    """Hands out KV cache blocks and counts the references to each."""

    def __init__(self, count: int) -> None:
        # In descending order, so that `pop` hands out low numbers first.
        self._free = list(range(count - 1, 0, -1))
        self._references = [0] * count

    @property
    def available(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each; None if too few are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. A block without references becomes free."""
        for block in blocks:
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was already free"
            if not self._references[block]:
                self._free.append(block)

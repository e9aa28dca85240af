"""Which pages of the cache are free, and who reads the others.

In: how many pages there are. Out: page numbers. Invariant: a page is free exactly when nobody reads it; page 0 is never
handed out, it takes what nobody will read (padding).
"""

from __future__ import annotations

from collections.abc import Sequence

PAGE = 64
"""Tokens of a page; attention reads one at a time."""


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


class BlockAllocator:
    """The free pages, and the number of readers of every other."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._readers = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Pages with one reader each; None if there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._readers[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more reader for each."""
        for page in pages:
            assert self._readers[page] > 0, f"page {page} is free"
            self._readers[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reader less for each; the last one frees it."""
        for page in pages:
            self._readers[page] -= 1
            assert self._readers[page] >= 0, f"page {page} was free"
            if not self._readers[page]:
                self._free.append(page)

"""The KV cache of conversations between their turns, so that a turn prefills only the tokens that are new.

In: after each turn, keys and values of the tokens that the model has read, and the experts that computed them. Out: at
the next turn, those of the longest common prefix with its prompt. Invariant: a prefix is used for exactly its tokens,
with the weights that computed it. The store never exceeds its limit: the conversations whose turn is longest ago are
dropped first, and their next turn is prefilled from the start. Which ones are dropped depends on the completions alone.

The keys and values are copies of their own, not blocks of the paged KV cache. So they cost the sequences that are being
decoded no block, and outlive the cache, which exists for one call only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor

Pairs = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values of one sequence by layer, [heads, tokens, size]."""


@dataclass(frozen=True, kw_only=True)
class KeptPrefix:
    """What the model has computed for the first tokens of a sequence."""

    token_ids: tuple[int, ...]
    """Empty until the call that computed them has ended."""
    pairs: Pairs
    routes: Tensor | None = None
    """The experts of each token, [tokens, L, K]; None if they were not recorded."""

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self.pairs.values() for t in pair)

    def first(self, count: int) -> KeptPrefix:
        """The first `count` tokens, as views of the same memory."""
        return KeptPrefix(
            token_ids=self.token_ids[:count],
            pairs={layer: (keys[:, :count], values[:, :count]) for layer, (keys, values) in self.pairs.items()},
            routes=None if self.routes is None else self.routes[:count],
        )


class PrefixStore:
    """The kept prefixes by conversation, from the one whose turn is longest ago to the latest."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of all keys and values."""
        self.limit = limit
        self.bytes = 0
        self._room = limit
        """The limit while memory is short."""
        self._version: int | None = None
        self._kept: dict[str, KeptPrefix] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, version: int) -> None:
        """Drop what other weights have computed."""
        if version != self._version:
            self.clear()
        self._version = version

    def take(self, conversation: str, ids: Sequence[int], *, routed: bool) -> KeptPrefix | None:
        """Remove the prefix of a conversation; the part of it that `ids` begin with, and None if there is none.
        `routed`: whether its experts are needed."""
        kept = self._drop(conversation)
        if kept is None or (routed and kept.routes is None):
            return None
        pairs = zip(kept.token_ids, ids, strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return kept.first(count) if count else None

    def put(self, conversation: str, pairs: Pairs) -> None:
        """Keep the keys and values of a turn, whose tokens `describe` names once they are known. Older conversations
        make room."""
        self._drop(conversation)
        kept = KeptPrefix(token_ids=(), pairs=pairs)
        if kept.bytes > self._room:
            return
        self._shrink(self._room - kept.bytes)
        self._kept[conversation] = kept
        self.bytes += kept.bytes

    def describe(self, conversation: str, token_ids: tuple[int, ...], routes: Tensor | None) -> None:
        """Name the tokens and experts of what `put` has kept, unless that was dropped since."""
        if conversation in self._kept:
            self._kept[conversation] = replace(self._kept[conversation], token_ids=token_ids, routes=routes)

    def end(self, conversations: Iterable[str]) -> None:
        """Free what is kept of conversations that have ended."""
        for conversation in conversations:
            self._drop(conversation)

    def give_way(self, spare: int) -> None:
        """Until the next call, keep at most as much as now and `spare` bytes more; less than now if `spare` is
        negative."""
        self._room = max(0, min(self.limit, self.bytes + spare))
        self._shrink(self._room)

    def clear(self) -> None:
        """Drop everything."""
        self._shrink(0)

    def _shrink(self, limit: int) -> None:
        while self.bytes > limit:
            self._drop(next(iter(self._kept)))

    def _drop(self, conversation: str) -> KeptPrefix | None:
        kept = self._kept.pop(conversation, None)
        self.bytes -= kept.bytes if kept is not None else 0
        return kept

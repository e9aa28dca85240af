"""Sampling controls: stop strings, the minimum number of tokens and the thinking budget, the same for every engine.

In: an `EngineContext`, a `Sampling`, and token ids as they are sampled. Out: where a completion ends, whether its
thinking is closed, which of its tokens were inserted. Invariant: an end depends on the completion's tokens alone, never
on when it is looked for. So an engine may look late and cut off the tokens that it sampled in vain.

A token ends a completion if the model sampled it at position `min_tokens` or later and it completes a stop string: with
it the decoded text contains an occurrence that the text before it does not contain. The token may contain more than the
string. The text that is searched includes special tokens, by their names.

Tokens are decoded in windows, not one by one: a character can span several tokens, and some tokenizers drop a space at
the start of a text. A window therefore starts several tokens before those that can be part of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from gspo.errors import ConfigError
from gspo.rollout.engine import EngineContext
from gspo.types import Sampling, StopReason

CONTEXT = 8
"""Tokens before a possible stop string that are decoded with it."""
CHUNK = 32
"""Tokens of a text with a stop string that are decoded together in search of the one that completes it."""
INCOMPLETE = "\ufffd"
"""What decoding writes for bytes that are no character, or not yet."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last tokens of a completion."""

    ids: Sequence[int]
    start: int = 0
    """Position of the first of them in the completion."""
    first: int = 0
    """Index of the first that may end the completion. Those before it are its context."""
    cut: bool = False
    """Whether the completion's thinking was cut."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Where a completion ends, and why."""

    length: int
    stop: StopReason
    cut: bool
    """Whether the end of its thinking was inserted before that."""


class Controls:
    """The controls of one call of an engine."""

    def __init__(self, context: EngineContext, sampling: Sampling) -> None:
        self.sampling = sampling
        self.stop_ids = context.stop_ids
        self._context = context
        self.window = max((len(text.encode()) for text in sampling.stop), default=0) + CONTEXT
        """Tokens of which a stop string can consist, as each has at least a byte, with their context."""
        self.forced_ids = self._thinking_end() if sampling.thinking_budget else ()
        """The tokens that end thinking."""

    def _thinking_end(self) -> tuple[int, ...]:
        text, budget = self.sampling.thinking_end, self.sampling.thinking_budget
        ids = tuple(self._context.tokenizer(text, add_special_tokens=False)["input_ids"])
        if text.strip() not in self._texts([ids])[0]:
            raise ConfigError(
                f"rollout.thinking_end: the tokenizer cannot write {text!r}; choose a text that it can, or set "
                "rollout.thinking_budget = 0"
            )
        if set(ids) & set(self.stop_ids):
            raise ConfigError(f"rollout.thinking_end: {text!r} contains an end token, which ends the completion")
        if budget + len(ids) >= self.sampling.max_tokens:
            raise ConfigError(
                f"rollout.thinking_budget: {budget} and the {len(ids)} tokens of rollout.thinking_end leave no token "
                f"for an answer below rollout.max_tokens = {self.sampling.max_tokens}; lower it, or raise "
                "rollout.max_tokens"
            )
        return ids

    def _texts(self, ids_B: Sequence[Sequence[int]]) -> list[str]:
        return self._context.texts(ids_B, special=True)

    # --- Stop strings ---

    def ends(self, ids_B: Sequence[Sequence[int]], cut_B: Sequence[bool]) -> list[End]:
        """The ends of completions that have been sampled to an end token, to the limit, or to a stop string or some
        tokens after it."""
        tails = [Tail(ids=ids, cut=cut) for ids, cut in zip(ids_B, cut_B, strict=True)]
        return [self._end(tail, index) for tail, index in zip(tails, self.stop_indices(tails), strict=True)]

    def _end(self, tail: Tail, index: int | None) -> End:
        length = len(tail.ids) if index is None else index + 1
        stop = StopReason.LENGTH if index is None else StopReason.STOP
        if tail.ids[length - 1] in self.stop_ids:
            stop = StopReason.EOS
        return End(length=length, stop=stop, cut=tail.cut and length > self.sampling.thinking_budget)

    def stop_indices(self, tails: Sequence[Tail]) -> list[int | None]:
        """For each tail, the index of the first token that ends the completion with a stop string; None if none does.

        All tails are decoded together, and only those in which a stop string occurs are searched further."""
        if not self.sampling.stop:
            return [None] * len(tails)
        texts = self._texts([tail.ids[self._begin(tail.first) :] for tail in tails])
        return [self._search(tail) if self._may_stop(text) else None for tail, text in zip(tails, texts, strict=True)]

    def _search(self, tail: Tail) -> int | None:
        for first in range(tail.first, len(tail.ids), CHUNK):
            chunk = range(first, min(first + CHUNK, len(tail.ids)))
            if not self._may_stop(self._texts([tail.ids[self._begin(first) : chunk.stop]])[0]):
                continue
            for i in chunk:
                if self._may_end(tail, i) and self._completes(tail.ids, i):
                    return i
        return None

    def _may_stop(self, text: str) -> bool:
        # If the tokens of a character are incomplete, some decoders write all bytes around them as invalid.
        return INCOMPLETE in text or any(stop in text for stop in self.sampling.stop)

    def _may_end(self, tail: Tail, index: int) -> bool:
        position = tail.start + index
        budget = self.sampling.thinking_budget
        forced = tail.cut and budget <= position < budget + len(self.forced_ids)
        return position >= self.sampling.min_tokens and not forced

    def _completes(self, ids: Sequence[int], i: int) -> bool:
        """Whether a stop string occurs in the text up to token i that does not occur before it."""
        begin = self._begin(i)
        text, before = self._texts([ids[begin : i + 1], ids[begin:i]])
        # The window may start inside a character, which has at most four bytes.
        for shift in range(1, 4 if begin and text.startswith(INCOMPLETE) else 0):
            aligned = self._texts([ids[begin + shift : i + 1], ids[begin + shift : i]])
            if not aligned[0].startswith(INCOMPLETE):
                text, before = aligned
                break
        # What is incomplete may become part of the string.
        settled = len(before.rstrip(INCOMPLETE))
        return any(text.find(stop, max(0, settled - len(stop) + 1)) >= 0 for stop in self.sampling.stop)

    def _begin(self, index: int) -> int:
        return max(0, index + 1 - self.window)

    # --- Thinking ---

    def unclosed(self, ids_B: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the thinking of completions has not ended within their budget."""
        budget, end = self.sampling.thinking_budget, self.sampling.thinking_end.strip()
        return [end not in text for text in self._texts([ids[:budget] for ids in ids_B])]

    # --- Completions ---

    def fields(self, ids: Sequence[int], logp: Sequence[float], end: End) -> dict[str, Any]:
        """The fields of a `Completion`, from its tokens and a number for each: its log-prob, or any if it was
        inserted."""
        budget, length = self.sampling.thinking_budget, end.length
        inserted = range(budget, budget + len(self.forced_ids))
        sampled = tuple(i not in inserted for i in range(length)) if end.cut else ()
        return {
            "token_ids": tuple(ids[:length]),
            "logp_sampler": tuple(compress(logp, sampled) if sampled else logp[:length]),
            "stop": end.stop,
            "sampled": sampled,
            "thinking_cut": end.cut,
        }

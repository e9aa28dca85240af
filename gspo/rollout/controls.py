"""Sampling controls that depend on text: stop strings and the thinking budget, the same for every engine.

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

from gspo.errors import ConfigError
from gspo.rollout.engine import Controls, EngineContext, Tail
from gspo.types import Sampling

CONTEXT = 8
"""Tokens before a possible stop string that are decoded with it."""
CHUNK = 32
"""Tokens of a text with a stop string that are decoded together in search of the one that completes it."""
INCOMPLETE = "\ufffd"
"""What decoding writes for bytes that are no character, or not yet."""


class TextControls(Controls):
    """Controls with stop strings or a thinking budget."""

    def __init__(self, context: EngineContext, sampling: Sampling) -> None:
        super().__init__(context, sampling)
        self._context = context
        # A stop string has at most as many tokens as bytes.
        self.window = max((len(text.encode()) for text in sampling.stop), default=0) + CONTEXT
        self.forced_ids = self._thinking_end() if sampling.thinking_budget else ()

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

    def stop_indices(self, tails: Sequence[Tail]) -> list[int | None]:
        # All tails are decoded together, and only those in which a stop string occurs are searched further.
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
        budget, end = self.sampling.thinking_budget, self.sampling.thinking_end.strip()
        return [end not in text for text in self._texts([ids[:budget] for ids in ids_B])]

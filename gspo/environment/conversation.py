"""The tokens of one conversation: what the model sampled, and what it was given in between.

In: the completions of its turns, and observations as tokens. Out: a `Completion` of the whole conversation. Invariant:
sampled tokens are kept as they are, with the log-probs, experts and weight versions of the turn that sampled them.
Observations are context: they are marked as not sampled. A limit that the conversation exceeds ends it; what it has
earned until then counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gspo.types import Completion, Conversation, ConversationEnd, Prompt, Routes, StopReason, Turn


class Transcript:
    """A conversation that is going on."""

    def __init__(self, prompt: Prompt, sample: int, *, max_tokens: int, version: int) -> None:
        self.prompt = prompt
        self.sample = sample
        self.seconds = 0.0
        """What the environment's calls have taken."""
        self.end: ConversationEnd | None = None
        self.failure: str | None = None
        self.turns: list[Turn] = []
        self._max_tokens = max_tokens
        self._version = version
        self._ids: list[int] = []
        self._sampled: list[bool] = []
        self._logp: list[float] = []
        self._spans: list[tuple[int, int]] = []
        self._routes: Routes | None = None
        self._stop = StopReason.LENGTH

    @property
    def context(self) -> tuple[int, ...]:
        """What the model reads next: the prompt and everything since."""
        return (*self.prompt.token_ids, *self._ids)

    @property
    def ended(self) -> bool:
        """Whether the last turn ended with an end token."""
        return self._stop is StopReason.EOS

    @property
    def room(self) -> int:
        """Tokens until the limit on the conversation."""
        return self._max_tokens - len(self._ids)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add what the model sampled."""
        start = len(self._ids)
        if not self._ids:
            self._version = completion.version
        spans = completion.spans or ((completion.version, 0),)
        self._spans += [(version, start + first) for version, first in spans]
        self._routes = _joined(self._routes, completion.routes)
        self._ids += completion.token_ids
        self._sampled += completion.sampled or [True] * len(completion.token_ids)
        self._logp += completion.logp_sampler
        self._stop = completion.stop
        self.turns.append(Turn(start=start, end=len(self._ids), text=text))
        if completion.stop is StopReason.LENGTH:
            self.end = ConversationEnd.TURN_TOKENS if self.room > 0 else ConversationEnd.TOKENS

    def settle_turn(self, *, reward: float | None, calls: Sequence[str], failed_calls: int) -> None:
        """Set what the environment has made of the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=reward, calls=tuple(calls), failed_calls=failed_calls)

    def observe(self, ids: Sequence[int]) -> None:
        """Add an observation, or end the conversation if it leaves no room for an answer."""
        if len(ids) >= self.room:
            self.end = ConversationEnd.TOKENS
            return
        self._ids += ids
        self._sampled += [False] * len(ids)

    def fail(self, failure: str) -> None:
        """End the conversation without a reward."""
        self.end, self.failure = ConversationEnd.FAILED, failure

    def completion(self, text: str) -> Completion:
        """The conversation as one completion."""
        assert self.end is not None
        return Completion(
            prompt_id=self.prompt.id,
            sample=self.sample,
            token_ids=tuple(self._ids),
            text=text,
            logp_sampler=tuple(self._logp),
            stop=StopReason.LENGTH if self.end is ConversationEnd.TOKENS else self._stop,
            version=self._version,
            spans=self._changes(),
            routes=self._routes,
            sampled=() if all(self._sampled) else tuple(self._sampled),
            conversation=Conversation(turns=tuple(self.turns), end=self.end, failure=self.failure),
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return tuple(self._ids)

    def _changes(self) -> tuple[tuple[int, int], ...]:
        """The spans of equal versions; empty if the version never changed."""
        before = [None, *(version for version, _ in self._spans)]
        changes = tuple(span for span, last in zip(self._spans, before, strict=False) if span[0] != last)
        return changes if len(changes) > 1 else ()


def _joined(before: Routes | None, turn: Routes | None) -> Routes | None:
    """The experts of a conversation: those of earlier turns as they were sampled, then those of this turn."""
    if before is None or turn is None:
        return turn
    return replace(turn, experts=before.experts + turn.experts[len(before.experts) :])

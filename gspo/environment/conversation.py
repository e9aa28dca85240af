"""The tokens of one conversation: what the model sampled, and what it was given in between.

In: the completions of its turns, and observations as tokens. Out: a `Completion` of the whole conversation. Invariant:
sampled tokens are kept as they are, with the log-probs, experts and weight versions of the turn that sampled them.
Observations are context: they are marked as not sampled. A limit that the conversation exceeds ends it; what it has
earned until then counts.

If the chat template has rewritten earlier turns, the conversation continues in another branch (`branches.py`). What it
shares with the branches before it is not stored again, and what was sampled in them stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gspo.environment.branches import TokenTree
from gspo.types import Completion, Conversation, ConversationEnd, Messages, Prompt, Routes, StopReason, Turn


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the current branch that was tokenized, or sampled, as one."""

    text: str
    token_ids: tuple[int, ...]


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
        self.messages: Messages = []
        """What the chat template gets to write the conversation."""
        self._max_tokens = max_tokens
        self._version = version
        self._tree = TokenTree(prompt.token_ids)
        self._pieces = [Piece(text=prompt.text, token_ids=prompt.token_ids)]
        self._sampled: list[bool] = []
        self._logp: list[float] = []
        self._spans: list[tuple[int, int]] = []
        self._routes: Routes | None = None
        self._routed = 0
        """Tokens of prompt and completion that were there in the last turn: their experts are known, but for those of
        `_unread`, the last ones of branches."""
        self._unread: set[int] = set()
        self._stop = StopReason.LENGTH

    @property
    def context(self) -> tuple[int, ...]:
        """What the model reads next: the prompt and everything since, or what the template has made of that."""
        return self._tree.context

    @property
    def text(self) -> str:
        """The same as text."""
        return "".join(piece.text for piece in self._pieces)

    @property
    def ended(self) -> bool:
        """Whether the last turn ended with an end token."""
        return self._stop is StopReason.EOS

    @property
    def room(self) -> int:
        """Tokens until the limit on the conversation, which counts those of all branches."""
        return self._max_tokens - len(self._tree)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add what the model sampled."""
        start = len(self._tree)
        if not self.turns:
            self._version = completion.version
        spans = completion.spans or ((completion.version, 0),)
        self._spans += [(version, start + first) for version, first in spans]
        self._tree.extend(completion.token_ids)
        self._join(completion.routes)
        self._sampled += completion.sampled or [True] * len(completion.token_ids)
        self._logp += completion.logp_sampler
        self._stop = completion.stop
        self.turns.append(Turn(start=start, end=len(self._tree), text=text))
        self.messages.append({"role": "assistant", "content": text})
        self._pieces.append(Piece(text=text, token_ids=completion.token_ids))
        if completion.stop is StopReason.LENGTH:
            self.end = ConversationEnd.TURN_TOKENS if self.room > 0 else ConversationEnd.TOKENS

    def settle_turn(self, *, reward: float | None, calls: Sequence[str], failed_calls: int, other_format: str) -> None:
        """Set what the environment has made of the last turn."""
        self.turns[-1] = replace(
            self.turns[-1], reward=reward, calls=tuple(calls), failed_calls=failed_calls, other_format=other_format
        )

    def end_turn(self, text: str) -> None:
        """Set the text of the end token of the last turn."""
        last = self._pieces[-1]
        self._pieces[-1] = replace(last, text=last.text + text)

    def observe(self, text: str, tokenize: Callable[[str], tuple[int, ...]]) -> None:
        """Add an observation, or end the conversation if it leaves no room for an answer."""
        ids = tokenize(text)
        if len(ids) >= self.room:
            self.end = ConversationEnd.TOKENS
            return
        self._tree.extend(ids)
        self._pieces.append(Piece(text=text, token_ids=ids))
        self._sampled += [False] * len(ids)

    def rewrite(self, text: str, tokenize: Callable[[str], tuple[int, ...]]) -> None:
        """Continue with another text of the conversation so far. Up to the first change, its tokens stay."""
        kept: list[Piece] = []
        at = 0
        for piece in self._pieces:
            if not text.startswith(piece.text, at):
                break
            kept.append(piece)
            at += len(piece.text)
        self._pieces = [*kept, Piece(text=text[at:], token_ids=tokenize(text[at:]))]
        ids = [i for piece in self._pieces for i in piece.token_ids]
        if self._tree.new_tokens(ids) >= self.room:
            self.end = ConversationEnd.TOKENS
            return
        self._sampled += [False] * self._tree.fork(ids)

    def fail(self, failure: str) -> None:
        """End the conversation without a reward."""
        self.end, self.failure = ConversationEnd.FAILED, failure

    def completion(self, text: str) -> Completion:
        """The conversation as one completion."""
        assert self.end is not None
        return Completion(
            prompt_id=self.prompt.id,
            sample=self.sample,
            token_ids=self._tree.token_ids,
            text=text,
            logp_sampler=tuple(self._logp),
            stop=StopReason.LENGTH if self.end is ConversationEnd.TOKENS else self._stop,
            version=self._version,
            spans=self._changes(),
            routes=self._routes,
            sampled=() if all(self._sampled) else tuple(self._sampled),
            conversation=Conversation(turns=tuple(self.turns), end=self.end, failure=self.failure),
            branches=self._tree.branches,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return self._tree.token_ids

    def _changes(self) -> tuple[tuple[int, int], ...]:
        """The spans of equal versions; empty if the version never changed."""
        before = [None, *(version for version, _ in self._spans)]
        changes = tuple(span for span, last in zip(self._spans, before, strict=False) if span[0] != last)
        return changes if len(changes) > 1 else ()

    def _join(self, turn: Routes | None) -> None:
        """Add the experts of the tokens that were read for this turn: those of earlier turns stay as they were
        sampled."""
        if turn is None or (self.turns and self._routes is None):
            self._routes = None
            return
        step = turn.layers * turn.top_k * turn.width
        known = bytearray(self._routes.experts if self._routes else b"")
        known.extend(bytes(step * (len(self.prompt.token_ids) + len(self._tree)) - len(known)))
        for at, token in enumerate(self._tree.path[:-1]):
            if token >= self._routed or token in self._unread:
                known[step * token : step * (token + 1)] = turn.experts[step * at : step * (at + 1)]
        self._unread = (self._unread - {*self._tree.path[:-1]}) | {self._tree.path[-1]}
        self._routed = len(known) // step
        # No forward has read the last token.
        self._routes = replace(turn, experts=bytes(known[:-step]))

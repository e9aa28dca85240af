"""A game of several turns: guess a number from answers of "higher" and "lower".

In: rows with the number as `answer` and the largest possible one as `largest`. Out: 1 if the number is guessed in
`max_guesses`, else 0. Invariant: a guess that is not a number counts as a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.environment import Environment
from gspo.environment.environment import Reply


class GuessNumber(Environment):
    """The number is between 1 and `largest`."""

    def __init__(self, max_guesses: int = 5) -> None:
        self._max_guesses = max_guesses
        self._secret = 0
        self._guesses = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        self._secret = int(row["answer"])

    def step(self, message: Mapping[str, Any]) -> Reply:
        self._guesses += 1
        guess = message["content"].strip()
        number = int(guess) if guess.isascii() and guess.isdigit() and len(guess) < 10 else None
        if number == self._secret:
            return [], 1.0, True
        if self._guesses >= self._max_guesses:
            return [], 0.0, True
        if number is None:
            return "a number", None, False
        return "higher" if number < self._secret else "lower", None, False

    def demonstrate(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Guesses that are possible after the answers so far, but not clever ones."""
        low, high = 1, int(row["largest"])
        guesses: list[str] = []
        while len(guesses) < self._max_guesses:
            guess = self.rng.randint(low, high)
            guesses.append(str(guess))
            if guess == self._secret:
                break
            low, high = (guess + 1, high) if guess < self._secret else (low, guess - 1)
        return guesses


ENVIRONMENT = GuessNumber

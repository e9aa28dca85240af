"""One batch of replies on its way through the workers: what is left to do, and what to do again after a failure.

In: groups, and what became of each call. Out: one `Part` per function and reply. Invariant: each of them is recorded
exactly once, wherever and however often calls are repeated. A function that hangs or dies at call after call and has never
answered in the batch is given up; one that has answered is always tried again, so that innocent replies keep their scores.

A call holds one function and all replies of one prompt. When it fails, each reply is tried alone, so that only the
guilty ones stay without a score.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo.types import Completion, Prompt

PATIENCE = 2
"""Calls per worker, of groups and then of single replies, that a function may lose before its first answer in a batch."""

Groups = Sequence[tuple[Prompt, Sequence[Completion]]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One function's word on one reply."""

    value: float | None = None
    """None: it abstained, or failed."""
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call. No replies at all: only make sure that the worker can load the functions."""

    batch: Batch
    group: int = 0
    function: int = 0
    replies: tuple[int, ...] = ()
    again: bool = False

    def request(self) -> dict[str, Any]:
        """What the worker needs to know."""
        prompt, completions = self.batch.groups[self.group]
        chosen = [completions[i] for i in self.replies]
        return {
            "function": self.function,
            "prompt": prompt.content,
            "completions": [c.text for c in chosen],
            "completion_ids": [c.token_ids for c in chosen],
            "columns": dict(prompt.columns),
        }

    def alone(self) -> list[Job]:
        """The same, reply by reply."""
        return [
            Job(batch=self.batch, group=self.group, function=self.function, replies=(i,), again=True)
            for i in self.replies
        ]


class Batch:
    """What a call of `RewardPool.score` waits for. Shared between threads."""

    def __init__(self, groups: Groups, *, functions: int, workers: int) -> None:
        self.groups = groups
        self.functions = functions
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int, int], Part] = {}
        self._left = functions * sum(len(completions) for _, completions in groups)
        self._patience = PATIENCE * workers
        self._lost: dict[tuple[int, bool], float] = defaultdict(float)
        if not self._left:
            self.done.set()

    def jobs(self) -> list[Job]:
        """The calls to begin with."""
        return [
            Job(batch=self, group=g, function=f, replies=tuple(range(len(completions))))
            for g, (_, completions) in enumerate(self.groups)
            for f in range(self.functions)
            if completions
        ]

    def record(self, job: Job, parts: Sequence[Part]) -> None:
        """Set down a call's results."""
        with self._lock:
            for reply, part in zip(job.replies, parts, strict=True):
                key = (job.group, job.function, reply)
                assert key not in self._parts, f"scored twice: {key}"
                self._parts[key] = part
                self._left -= 1
            if not self._left:
                self.done.set()

    def give_up(self, error: BaseException) -> None:
        """Let the waiting call of `score` raise this."""
        self.error = self.error or error
        self.done.set()

    def answered(self, job: Job) -> None:
        """Note that the function works at all."""
        with self._lock:
            self._lost[job.function, False] = self._lost[job.function, True] = -math.inf

    def lost(self, job: Job) -> None:
        """Count a call that hung or killed its worker."""
        with self._lock:
            self._lost[job.function, job.again] += 1

    def hopeless(self, job: Job) -> bool:
        """Whether calls like this one (of a group, or of a single reply) were all lost so far, and enough of them."""
        with self._lock:
            return self._lost[job.function, job.again] >= self._patience

    def parts(self, group: int, reply: int) -> list[Part]:
        """Every function's word on a reply, in the order of the functions."""
        return [self._parts[group, f, reply] for f in range(self.functions)]

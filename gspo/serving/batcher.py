"""Requests of many clients, sampled together by one engine.

In: requests from the threads of a server. Out: a future for each. Invariant: the engine and the model are used by one
thread only, the one that calls `work`. A completion depends on its own prompt, sampling settings and random stream,
never on the requests that it was sampled with, up to rounding.

Sampling goes in rounds. A round takes all requests that have arrived and ends when the last of them is done; those that
arrive meanwhile wait for the next one. Requests whose settings differ only in their token limit are one call of the
engine.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gspo.model.load import Policy
from gspo.rollout.engine import Engine, EngineContext, GenerateOptions
from gspo.serving.token_logprobs import TokenLogprobs, token_logprobs
from gspo.types import Completion, Prompt, Sampling, StopReason

GATHER_S = 0.01
"""How long a round waits for another request after each one."""
MOST_GATHER_S = 0.1
"""How long it waits in all: clients that wait for each other would never come together."""
_TICK_S = 0.1
"""Between two looks at whether the work is over."""


@dataclass(frozen=True, kw_only=True)
class CompletionJob:
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    key: str
    """Identifies its random stream."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, in addition to those of the engine."""


@dataclass(frozen=True, kw_only=True)
class LogprobJob:
    """A sequence whose log-probs are wanted."""

    token_ids: tuple[int, ...]
    top: int
    """How many of the most likely tokens are wanted at each position."""


@dataclass(frozen=True, kw_only=True)
class _QueuedJob:
    job: CompletionJob | LogprobJob
    future: Future[Any]


class Batcher:
    """Owns neither the engine nor the policy."""

    def __init__(self, engine: Engine, policy: Policy, *, batch_tokens: int = 8192) -> None:
        self._engine = engine
        self._policy = policy
        self._batch_tokens = batch_tokens
        self._texts = EngineContext(model=None, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids).texts
        self._jobs: queue.SimpleQueue[_QueuedJob] = queue.SimpleQueue()
        self.version = 0
        """Stored in every completion."""
        self.rounds = 0
        """Rounds so far."""
        self.completions = 0
        """Completions so far."""

    def sample(self, job: CompletionJob) -> Future[Completion]:
        """Sample a completion in the next round. Any thread may call this."""
        return self._submit(job)

    def logprobs(self, job: LogprobJob) -> Future[TokenLogprobs]:
        """Compute log-probs in the next round. Any thread may call this."""
        return self._submit(job)

    def _submit(self, job: CompletionJob | LogprobJob) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put(_QueuedJob(job=job, future=future))
        return future

    def work(self, until: Callable[[], bool]) -> None:
        """Serve requests in this thread until `until` is true."""
        while not until():
            with suppress(queue.Empty):
                self._round(self._gather(self._jobs.get(timeout=_TICK_S)))

    def refuse(self) -> None:
        """End all requests that still wait, after the work is over."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().future.cancel()

    def _gather(self, first: _QueuedJob) -> list[_QueuedJob]:
        """All requests that wait, and those that follow within moments: clients that were answered together come
        together."""
        found = [first]
        until = time.monotonic() + MOST_GATHER_S
        with suppress(queue.Empty):
            while time.monotonic() < until:
                found.append(self._jobs.get(timeout=GATHER_S))
        # One whose client has hung up meanwhile costs nothing.
        return [one for one in found if one.future.set_running_or_notify_cancel()]

    def _round(self, waiting: Sequence[_QueuedJob]) -> None:
        self.rounds += bool(waiting)
        calls: dict[Sampling, list[_QueuedJob]] = {}
        scored = []
        for one in waiting:
            if isinstance(one.job, LogprobJob):
                scored.append(one)
            else:
                calls.setdefault(replace(one.job.sampling, max_tokens=1), []).append(one)
        if scored:
            self._answer(scored, self._score)
        for members in calls.values():
            for call in self._by_limit(members):
                self._answer(call, self._sample)

    def _answer(self, waiting: Sequence[_QueuedJob], compute: Callable[[Any], Sequence[Any]]) -> None:
        """One failure must not end the server: the clients get it."""
        try:
            results = compute([one.job for one in waiting])
        except Exception as error:
            for one in waiting:
                one.future.set_exception(error)
            return
        for one, result in zip(waiting, results, strict=True):
            one.future.set_result(result)

    def _by_limit(self, members: Sequence[_QueuedJob]) -> list[list[_QueuedJob]]:
        """Requests that fit into one call: all of them, except those with too few positions left for the largest
        limit."""
        positions = self._policy.position_limit
        jobs: list[CompletionJob] = [one.job for one in members if isinstance(one.job, CompletionJob)]
        largest = max(job.sampling.max_tokens for job in jobs)
        calls: dict[int, list[_QueuedJob]] = {}
        for one, job in zip(members, jobs, strict=True):
            fits = positions is None or len(job.prompt_ids) + largest <= positions
            calls.setdefault(largest if fits else job.sampling.max_tokens, []).append(one)
        return list(calls.values())

    def _sample(self, jobs: Sequence[CompletionJob]) -> list[Completion]:
        limit = max(job.sampling.max_tokens for job in jobs)
        prompts = [Prompt(id=job.key, content="", text="", token_ids=job.prompt_ids) for job in jobs]
        sampling = replace(jobs[0].sampling, max_tokens=limit)
        options = GenerateOptions(samples=1, sampling=sampling, seed=0, stream="served", version=self.version)
        groups = self._engine.generate(prompts, options)
        self.completions += len(jobs)
        return [self._cut(group[0], job) for group, job in zip(groups, jobs, strict=True)]

    def _cut(self, completion: Completion, job: CompletionJob) -> Completion:
        """The completion up to its own limit and its own end tokens. It is what would have been sampled with them,
        because its random stream is its own."""
        ids = completion.token_ids
        length = next((i + 1 for i, token in enumerate(ids) if token in job.stop_ids), len(ids))
        length = min(length, job.sampling.max_tokens)
        if length == len(ids) and not (ids and ids[-1] in job.stop_ids):
            return completion
        kept = ids[:length]
        return replace(
            completion,
            token_ids=kept,
            logp_sampler=completion.logp_sampler[:length],
            text=completion.text if length == len(ids) else self._texts([kept])[0],
            stop=StopReason.EOS if kept and kept[-1] in job.stop_ids else StopReason.LENGTH,
        )

    def _score(self, jobs: Sequence[LogprobJob]) -> list[TokenLogprobs]:
        return token_logprobs(
            self._policy.model,
            [job.token_ids for job in jobs],
            top=[job.top for job in jobs],
            batch_tokens=self._batch_tokens,
        )

"""The trainer's side of the process that environments run in.

In: requests about conversations. Out: their answers, in any order. Invariant: every request is answered: by the
environment, or by the reason why it is not, such as a deadline on a monotonic clock. Answers carry the token of their
request. A conversation that fails is ended, and no other notices.
"""

from __future__ import annotations

import json
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from gspo.config import EnvironmentConfig
from gspo.environment.environment import EnvironmentSource
from gspo.environment.variables import check_declared, keeps
from gspo.environment.worker import ANSWER_LIMIT
from gspo.errors import ConfigError, EngineError, RewardError
from gspo.reward.process import START_LIMIT_S, ChildProcess, WorkerDied

_SLICE_S = 0.1
"""Between two looks at deadlines."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a request."""

    conversation: int
    result: Any = None
    failure: str = ""
    """Why there is no result, in one line that starts with its kind."""
    trace: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Pending:
    conversation: int
    since: float


class EnvironmentHost:
    """Owns the process. Belongs to one thread."""

    def __init__(self, source: EnvironmentSource, config: EnvironmentConfig) -> None:
        self._source = source
        self._config = config
        check_declared(config.variables)
        self._process = ChildProcess(
            "gspo.environment.worker", "environment.processes", keeps=partial(keeps, declared=config.variables)
        )
        self._next = 0
        self._oldest = 0
        """Conversations before this one were in a process that has died."""
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self._pending: dict[str, _Pending] = {}
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._loaded = False
        self._closed = False
        self.alone = threading.Lock()
        """Held by the call whose conversations are running: with `rollout.max_lag`, evaluations and batches have
        threads of their own."""
        self.tools: list[dict[str, Any]] = []
        """The schemas of the environment's tools."""
        self.gives_rewards = True
        """Whether the environment can give rewards."""

    @property
    def pid(self) -> int | None:
        """The live process; None if there is none."""
        return self._process.pid

    def start(self) -> None:
        """Start the process and load the environment. Raises `ConfigError` if that is impossible."""
        self._check_open()
        if self._loaded and self._process.pid is not None:
            return
        self._restart()
        token = secrets.token_hex(16)
        self._send({"token": token, "load": asdict(self._source), "memory_mb": self._config.memory_mb})
        until = time.monotonic() + START_LIMIT_S
        try:
            while not (lines := self._lines(0.1)):
                if time.monotonic() > until:
                    raise WorkerDied(f"loading it took more than {START_LIMIT_S:g} s; import less")
        except WorkerDied as error:
            self._process.kill()
            raise ConfigError(f"environment.name: {self._source.spec}: its process ended: {error}") from None
        answer = json.loads(lines[0].partition(token.encode())[2])
        if "error" in answer:
            self._process.kill()
            raise ConfigError(answer["error"])
        self.tools, self.gives_rewards = answer["tools"], answer["gives_rewards"]
        self._loaded = True

    def open(self) -> int:
        """The number of a new conversation."""
        self.start()
        self._next += 1
        return self._next

    def submit(self, conversation: int, do: str, **fields: Any) -> None:
        """Send a request. A conversation has at most one at a time."""
        self._waiting.append((conversation, {"conversation": conversation, "do": do, **fields}))

    def poll(self, wait_s: float) -> list[Answer]:
        """The answers that have arrived; waits for one for at most `wait_s`, and for none without a request."""
        until = time.monotonic() + wait_s
        while True:
            self._check_open()
            answers = self._dispatch()
            if self._pending and not answers:
                try:
                    answers = [a for line in self._lines(self._slice(until)) if (a := self._answer(line))]
                except WorkerDied as error:
                    answers = self._all_failed(f"died: {error}")
            answers += self._late()
            if answers or not (self._pending or self._waiting) or time.monotonic() >= until:
                return answers

    def only_slow(self, patience_s: float) -> bool:
        """Whether every call that is being made has taken longer than this, and no other can start before it ends."""
        now = time.monotonic()
        slow = all(now - pending.since > patience_s for pending in self._pending.values())
        return slow and not (self._waiting and len(self._pending) < self._config.processes)

    def ask(self, do: str, **fields: Any) -> Answer:
        """The answer to a request that belongs to no conversation, while there are no others."""
        number = self.open()
        try:
            self.submit(number, do, **fields)
            while not (answers := self.poll(1.0)):
                pass
            return answers[0]
        finally:
            self.end(number)

    def end(self, conversation: int) -> None:
        """End a conversation, whatever it is doing."""
        self._waiting = deque(item for item in self._waiting if item[0] != conversation)
        self._pending = {t: p for t, p in self._pending.items() if p.conversation != conversation}
        if conversation >= self._oldest and self._process.pid is not None:
            self._send({"token": "", "conversation": conversation, "do": "end"})
            # Now, because nobody may poll for a while: a whole training step, after the last conversation of a batch.
            with suppress(WorkerDied):  # the next poll reports it
                self._unsent = self._process.send(self._unsent)

    def close(self) -> None:
        """End the process and all conversations. May be called twice. A thread that waits for an answer gets an
        error."""
        self._closed = True
        self._waiting.clear()
        self._pending.clear()
        self._loaded = False
        self._process.kill()

    # ---- requests

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the environments were closed")

    def _dispatch(self) -> list[Answer]:
        """Send waiting requests while there is room; those that cannot be sent have failed."""
        failed = []
        while self._waiting and len(self._pending) < self._config.processes:
            conversation, request = self._waiting.popleft()
            if conversation < self._oldest or self._process.pid is None:
                failed.append(Answer(conversation=conversation, failure="died: the process of the environments ended"))
                continue
            token = secrets.token_hex(16)
            self._pending[token] = _Pending(conversation=conversation, since=time.monotonic())
            self._send({"token": token, **request})
        return failed

    def _send(self, request: Mapping[str, Any]) -> None:
        self._unsent = memoryview(bytes(self._unsent) + json.dumps(request).encode() + b"\n")

    def _slice(self, until: float) -> float:
        return max(0.0, min(_SLICE_S, until - time.monotonic()))

    # ---- answers

    def _lines(self, wait_s: float) -> list[bytes]:
        """Exchange what can be exchanged: whole lines of the process's answers."""
        requests, out, printed = self._process.descriptors
        poller = select.poll()
        for descriptor in (out, printed):
            poller.register(descriptor, select.POLLIN)
        if self._unsent:
            poller.register(requests, select.POLLOUT)
        ready = [descriptor for descriptor, _ in poller.poll(1000 * wait_s)]
        if requests in ready:
            self._unsent = self._process.send(self._unsent)
        if printed in ready and not self._process.drain() and self._process.pid is None:
            raise WorkerDied(self._process.last_words())
        if out in ready:
            self._received += self._process.receive()
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > 2 * ANSWER_LIMIT:
            raise WorkerDied("it wrote too much")
        return list(map(bytes, lines))

    def _answer(self, line: bytes) -> Answer | None:
        """The answer in a line; None if nobody waits for it."""
        token, data = line[:32].decode("ascii", "replace"), line[32:]
        pending = self._pending.pop(token, None)
        if pending is None:
            return None
        taken = time.monotonic() - pending.since
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("failure", ""), str):
            found = {"failure": "invalid: its answer was malformed"}
        return Answer(
            conversation=pending.conversation,
            result=found.get("result"),
            failure=found.get("failure", ""),
            trace=str(found.get("trace", "")),
            seconds=taken,
        )

    def _late(self) -> list[Answer]:
        """The requests whose deadline has passed. Their conversations end."""
        now, limit = time.monotonic(), self._config.timeout_s
        late = [pending for pending in self._pending.values() if now - pending.since > limit]
        for pending in late:
            self.end(pending.conversation)
        return [
            Answer(conversation=p.conversation, failure=f"timeout: no answer after {limit:g} s", seconds=now - p.since)
            for p in late
        ]

    def _all_failed(self, failure: str) -> list[Answer]:
        """The process has died, and with it all its conversations."""
        failed = [Answer(conversation=p.conversation, failure=failure) for p in self._pending.values()]
        self._pending.clear()
        self._restart(dead=True)
        return failed

    def _restart(self, *, dead: bool = False) -> None:
        self._process.kill()
        self._loaded = False
        self._oldest = self._next + 1
        self._unsent = memoryview(b"")
        self._received = bytearray()
        if dead:
            return
        try:
            self._process.start()
        except RewardError as error:
            raise ConfigError(str(error)) from None

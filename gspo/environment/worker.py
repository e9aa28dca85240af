"""The process that environments run in (`python -m gspo.environment.worker`).

In: JSON lines on stdin: first the environment to load, then requests, each with a token and a conversation. Out: one
line per request, the token followed by JSON. Invariant: the environment is imported once, and every conversation is a
fork of this process, so none can see or delay another. This process itself only passes lines on. When a conversation
ends, it kills all that the conversation has started, daemons included: both are child subreapers, so an orphan belongs
to its conversation while that lives, and to this process afterwards. It ends with its trainer, like the workers of
rewards, and then all that is left is killed, too.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.environment.environment import Environment, EnvironmentSource, first_messages, load, schemas, take_step
from gspo.environment.tool_calls import ToolCall, parse, write
from gspo.errors import GspoError
from gspo.reward.function import describe, traced
from gspo.reward.overseer import adopt_orphans, children, leave_overseer
from gspo.reward.worker import claim_pipes, flush_output, write_all

ANSWER_LIMIT = 4 * 2**20
"""Maximum size of one answer in bytes."""
DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)
"""The limits, soft and hard, that this process was started with. Conversations have them, too."""
END_LIMIT_S = 0.2
"""How long to kill what a conversation leaves behind. The rest, if it multiplies faster, is killed at the next end."""


def main() -> None:
    """Serve until stdin closes."""
    leave_overseer()
    adopt_orphans()
    requests, answers = claim_pipes()
    # A descriptor per conversation, and a batch may have more of them than the usual limit of 1,024.
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS[1], DESCRIPTORS[1]))
    _Server(requests.fileno(), answers).serve()
    os._exit(0)


@dataclass
class _Child:
    """The process of one conversation."""

    pid: int
    link: socket.socket
    token: str = ""
    """That of the request it works on; empty if it waits."""
    received: bytearray = field(default_factory=bytearray)


class _Server:
    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._build: Callable[[], Environment] | None = None
        self._memory_mb = 0
        self._helpers: set[int] = set()
        """Processes that loading the environment has started. All conversations may use them."""
        self._children: dict[int, _Child] = {}
        """By the descriptor of their links."""
        self._links: dict[int, int] = {}
        """Descriptor of each conversation's link."""

    def serve(self) -> None:
        received = bytearray()
        self._poller = select.poll()
        self._poller.register(self._requests, select.POLLIN)
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor != self._requests:
                    self._pass_on(descriptor)
                    continue
                data = os.read(self._requests, 2**16)
                if not data:
                    return
                received += data
                *lines, rest = received.split(b"\n")
                received = bytearray(rest)
                for line in lines:
                    self._handle(json.loads(line))

    def _handle(self, request: Mapping[str, Any]) -> None:
        if "load" in request:
            self._answer(request["token"], json.dumps(self._load(request)).encode())
        elif request["do"] == "end":
            self._end(request["conversation"])
        else:
            number = request["conversation"]
            if number not in self._links:
                self._fork(number)
            child = self._children[self._links[number]]
            child.token = request["token"]
            with suppress(OSError):  # it has died, which reading from it will show
                child.link.sendall(json.dumps(request).encode() + b"\n")

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._memory_mb = request["memory_mb"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._build = load(EnvironmentSource(**request["load"]))
                built = self._build()
                return {"tools": schemas(built), "gives_rewards": built.gives_rewards}
        except GspoError as error:
            return {"error": str(error)}
        finally:
            flush_output()
            self._helpers = children()

    def _fork(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            ours.close()
            self._be_child(theirs)
        theirs.close()
        self._links[number] = ours.fileno()
        self._children[ours.fileno()] = _Child(pid=pid, link=ours)
        self._poller.register(ours.fileno(), select.POLLIN)

    def _be_child(self, link: socket.socket) -> None:
        """Answer the requests of one conversation; never returns."""
        try:
            os.setsid()  # one killpg reaches most of what it starts
            adopt_orphans()
            for descriptor in (self._requests, self._answers, *self._children):
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, DESCRIPTORS)
            if self._memory_mb:
                _limit_memory(self._memory_mb)
            assert self._build is not None
            conversation = _Conversation(self._build)
            me = os.getpid()
            for line in link.makefile("rb"):
                answer = conversation.answer(json.loads(line))
                flush_output()
                if os.getpid() != me:
                    break  # the environment forked and returned in its child
                # No tokenizer accepts half a surrogate pair, which a model can write as an escape in JSON.
                data = json.dumps(answer, allow_nan=False, ensure_ascii=False).encode(errors="replace")
                write_all(link.fileno(), data + b"\n")
        finally:
            os._exit(0)

    def _pass_on(self, descriptor: int) -> None:
        child = self._children.get(descriptor)
        if child is None:  # it ended since the poll
            return
        data = b""
        with suppress(OSError):
            data = os.read(descriptor, 2**16)
        child.received += data
        line, end, rest = child.received.partition(b"\n")
        if not data or len(child.received) > ANSWER_LIMIT or (end and not child.token):
            reason = "it wrote too much" if data else self._ending(child.pid)
            token = child.token
            self._end(next(n for n, d in self._links.items() if d == descriptor), reaped=not data)
            if token:
                self._answer(token, json.dumps({"failure": f"died: {reason}", "trace": ""}).encode())
        elif end:
            self._answer(child.token, bytes(line))
            child.token, child.received = "", bytearray(rest)

    def _ending(self, pid: int) -> str:
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with suppress(OSError):
                kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exit code {status}"

    def _kill_orphans(self) -> None:
        """Kill what a conversation that has ended leaves behind: the children of this process that are no
        conversations. Killing one may hand its own children over, so this repeats until there are none."""
        until = time.monotonic() + END_LIMIT_S
        kept = self._helpers.union(child.pid for child in self._children.values())
        while (orphans := children() - kept) and time.monotonic() < until:
            for pid in orphans:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)

    def _end(self, number: int, *, reaped: bool = False) -> None:
        """End a conversation and everything that it has started."""
        descriptor = self._links.pop(number, None)
        if descriptor is None:
            return
        child = self._children.pop(descriptor)
        self._poller.unregister(descriptor)
        child.link.close()
        if not reaped:
            self._ending(child.pid)
        self._kill_orphans()

    def _answer(self, token: str, data: bytes) -> None:
        write_all(self._answers, token.encode() + data + b"\n")


class _Conversation:
    """The environment of one conversation, in its own process."""

    def __init__(self, build: Callable[[], Environment]) -> None:
        self._build = build
        self._environment: Environment | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request, or why there is none."""
        try:
            result = getattr(self, f"_{request['do']}")(request)
            json.dumps(result, allow_nan=False)
            return {"result": result}
        except BaseException as error:  # SystemExit and KeyboardInterrupt, too
            kind = "timeout" if isinstance(error, TimeoutError) else "raised"
            return {"failure": f"{kind}: {describe(error)}", "trace": traced(error)}

    def _reset(self, request: Mapping[str, Any]) -> Any:
        self._environment = self._build()
        self._environment.rng = random.Random(request["row_key"])
        opening = first_messages(self._environment, request["row"])
        self._environment.rng = random.Random(request["key"])
        return opening

    def _open(self, request: Mapping[str, Any]) -> list[Any]:
        """What several rows begin with."""
        return [self._reset({**one, "key": ""}) for one in request["rows"]]

    def _step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        parsed = parse(request["format"], request["text"], tuple(self._environment.tools))
        return take_step(self._environment, parsed)

    def _demonstrate(self, request: Mapping[str, Any]) -> list[list[str]]:
        """The turns of several demonstrations."""
        shown = []
        for one in request["rows"]:
            self._reset(one)
            assert self._environment is not None
            turns = self._environment.demonstrate(one["row"])
            shown.append([write(request["format"], turn) if isinstance(turn, ToolCall) else turn for turn in turns])
        return shown


def _limit_memory(megabytes: int) -> None:
    """Limit the address space, on top of what loading the environment took."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = mapped + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()

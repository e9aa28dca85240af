"""The program under test, served to the outside one question at a time.

In: the program's text, then requests: function calls in typed JSON, or texts for its standard input. Out: one line per
request. Invariant: no expected value ever enters this process, so nothing found in it, and nothing it writes, can stand in
for the right answer; and no program's text is read before the process is confined.

After the token of its request, a line that comes back starts with `v` (a value), `e` (an exception: its type and message) or `o` (exit code and output).
"""

from __future__ import annotations

import builtins
import os
import sys

from gspo.reward.sandbox.inside import confine
from gspo.reward.sandbox.inside.values import Refused, decode, encode

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READY = "v"
"""The first line of all."""
TOKEN = 8
"""Characters."""
OUTPUT = 2**20
"""Bytes of standard output of one test. A byte takes at most six characters of a message."""
_SIGKILL, _SIGXFSZ = 9, 25


def main(settings: dict[str, Any]) -> None:
    """Confine this process, then serve until the pipe closes."""
    requests, answers = confine.claim_pipes()
    confine.close_files(settings)
    _define_exit()
    forking = settings["mode"] == "stdin"
    if not forking:
        confine.close_calls(settings)
    channel = Channel(requests, answers)
    confine.hush()
    channel.send(READY)
    source = decode(channel.next(), no_references)
    if forking:
        _Script(source, settings, channel).serve()
    else:
        _Module(source, channel).serve()


class _Module:
    """The program, imported; its functions and objects are called from outside."""

    def __init__(self, source: str, channel: Channel) -> None:
        self._source, self._channel = source, channel
        self._globals: dict[str, Any] = {}
        self._objects: list[Any] = []

    def serve(self) -> None:
        self._answer(self._load)
        while True:
            text = self._channel.next()
            self._answer(lambda text=text: self._do(*decode(text, self._objects.__getitem__)))  # type: ignore[misc]

    def _answer(self, action: Callable[[], Any]) -> None:
        try:
            line = "v" + encode(action(), self._refer)
        except Refused as error:
            line = "e" + encode(["Refused", str(error)], len)
        except BaseException as error:
            line = "e" + encode([_name(error), _message(error)], len)
        self._channel.send(line)

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _load(self) -> None:
        module = type(sys)("program")
        sys.modules["program"] = module
        self._globals = module.__dict__
        exec(compile(self._source, "<program>", "exec", dont_inherit=True), self._globals)

    def _do(self, what: str, target: Any, *rest: Any) -> Any:
        if what == "name":
            return self._global(target)
        if what == "call":
            return target(*rest[0], **rest[1])
        if what == "get":
            return getattr(target, rest[0])
        if what == "set":
            return setattr(target, *rest)
        if what == "item":
            return target[rest[0]]
        if what == "put":
            target[rest[0]] = rest[1]
            return None
        if what == "as":
            return {"str": str, "len": len, "bool": bool}[rest[0]](target)  # type: ignore[operator]
        if what == "iterate":
            return iter(target)
        return next(target)

    def _global(self, name: str) -> Any:
        if name not in self._globals:
            raise NameError("the program does not define " + name)
        return self._globals[name]


class _Script:
    """The program, run from its first line for each text on its standard input, in a process of its own."""

    def __init__(self, source: str, settings: dict[str, Any], channel: Channel) -> None:
        self._source, self._settings, self._channel = source, settings, channel

    def serve(self) -> None:
        self._channel.send(READY + "null")
        while True:
            text = decode(self._channel.next(), no_references)
            source = os.memfd_create("stdin")
            _write(source, text.encode("utf-8", "surrogatepass"))
            os.lseek(source, 0, os.SEEK_SET)
            output, into = os.pipe()
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                self._become(source, into, parent)
                return
            os.close(source)
            os.close(into)
            data = _read(output, OUTPUT + 1)
            if len(data) > OUTPUT:
                os.kill(child, _SIGKILL)
            _, status = os.waitpid(child, 0)  # it may have closed its output and gone on: its exit code counts
            os.close(output)
            code = -(status & 0x7F) or status >> 8
            if len(data) > OUTPUT:
                code = -_SIGXFSZ
            self._channel.send("o" + encode([code, data.decode("utf-8", "replace")], len))

    def _become(self, source: int, into: int, parent: int) -> None:
        """In the child: be the program. Its end is the interpreter's ordinary end."""
        confine.die_with_parent(parent)
        os.dup2(source, 0)
        os.dup2(into, 1)
        os.closerange(3, 64)
        confine.close_calls(self._settings)
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(self._source, "<program>", "exec", dont_inherit=True), module.__dict__)


class Channel:
    """Requests and answers, by hand: `sys.stdin` is the program's. An answer repeats the token of its request."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._left, self._token = b"", b""

    def next(self) -> str:
        parts = [self._left]
        while b"\n" not in parts[-1]:
            part = os.read(self._requests, 2**16)
            if not part:
                os._exit(0)
            parts.append(part)
        line, _, self._left = b"".join(parts).partition(b"\n")
        self._token, line = line[:TOKEN], line[TOKEN:]
        return line.decode()

    def send(self, line: str) -> None:
        """One line out, in plain ASCII."""
        _write(self._answers, self._token + line.encode() + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data[: 2**20]) :]


def _read(descriptor: int, most: int) -> bytes:
    parts, size = [], 0
    while size < most:
        part = os.read(descriptor, 2**16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def no_references(number: int) -> Any:
    raise Refused("a reference")


def _name(error: BaseException) -> str:
    return str(type(error).__name__)[:100]


def _message(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def _define_exit() -> None:
    """`exit()` and `quit()`, which come with the `site` module that was left out."""

    def leave(code: Any = None) -> None:
        raise SystemExit(code)

    for name in ("exit", "quit"):
        if not hasattr(builtins, name):
            setattr(builtins, name, leave)

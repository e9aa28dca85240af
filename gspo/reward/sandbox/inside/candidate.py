"""Serve the program under test, one request at a time.

In: the program's source, then requests: function calls in typed JSON, or texts for its standard input. Out: one line
per request. Invariant: no expected value ever enters this process, so the program cannot find or forge the right
answer. The program's source is read only after the process is confined.

After the token of its request, an answer starts with `v` (a value), `e` (an exception: its kind, message, arguments and
number), `c` (a question, before the answer, about an object that the tests passed in, such as a function of theirs) or
`o` (exit code and output).
"""

from __future__ import annotations

import _operator
import builtins
import os
import sys

from gspo.reward.sandbox.inside import confine
from gspo.reward.sandbox.inside.values import ValueRefused, decode, encode

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READY = "v"
"""The first line that a process sends."""
TOKEN = 8
"""Length of a token in characters."""
OUTPUT = 2**20
"""Maximum standard output of one test in bytes. A byte takes at most six characters of a message."""
LONGEST_EXCEPTION = 2**16
"""Maximum length of an exception in characters. A longer one is sent without its arguments."""
_SIGKILL = 9
_SIGXFSZ = 25


def main(settings: dict[str, Any]) -> None:
    """Confine this process, then serve until the pipe closes."""
    requests, answers = confine.claim_pipes()
    confine.restrict_files(settings)
    _define_exit()
    forking = settings["mode"] == "stdin"
    if not forking:  # the seccomp filter forbids fork, so each forked child installs it itself
        confine.restrict_calls(settings)
    channel = Channel(requests, answers)
    confine.silence_stderr()
    channel.send(READY)
    source = decode(channel.next(), no_references)
    if forking:
        _Script(source, settings, channel).serve()
    else:
        _Module(source, channel).serve()


class _Module:
    """The program, imported as a module. The tests use its functions and objects from outside."""

    def __init__(self, source: str, channel: Channel) -> None:
        self._source = source
        self._channel = channel
        self._globals: dict[str, Any] = {}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._lent: dict[int, Any] = {}

    def serve(self) -> None:
        self._answer(self._load)
        while True:
            text = self._channel.next()
            self._answer(lambda text=text: self._do(*self._decoded(text)))  # type: ignore[misc]

    def ask(self, *question: Any) -> Any:
        """Use an object that the tests passed in. Before they answer, they may ask questions of their own."""
        self._channel.send("c" + encode(list(question), self._refer))
        while True:
            what, *rest = self._decoded(self._channel.next())
            if what == "back":
                return rest[0]
            if what == "fail":
                raise _exception(*rest)
            self._answer(lambda what=what, rest=rest: self._do(what, *rest))  # type: ignore[misc]

    def _decoded(self, text: str) -> Any:
        if '{"N":' in text:
            _import_numpy()
        return decode(text, self._resolve)

    def _answer(self, action: Callable[[], Any]) -> None:
        try:
            line = "v" + encode(action(), self._refer)
        except ValueRefused as error:
            line = "e" + encode(["RuntimeError", f"Refused: {error}", None, None], len)
        except BaseException as error:
            line = "e" + self._raised(error)
        self._channel.send(line)

    def _raised(self, error: BaseException) -> str:
        """Encode an exception's kind, message, arguments and number."""
        kind = self._kind(type(error))
        message = _message(error)
        number = self._number(error)
        try:
            text = encode([kind, message, list(error.args), number], self._refer)
            if len(text) < LONGEST_EXCEPTION:
                return text
        except BaseException:  # arguments that are not plain data, or that raise when accessed
            pass
        return encode([kind, message, None, number], len)

    def _kind(self, kind: type[BaseException]) -> Any:
        """An exception's class: a built-in by its name, any other by its number, name and base classes."""
        name = str(kind.__name__)[:100]
        # By identity: a class of the program may carry the name of a built-in.
        if getattr(builtins, name, None) is kind:
            return name
        return [self._number(kind), name, [self._kind(b) for b in kind.__bases__ if issubclass(b, BaseException)]]

    def _number(self, value: Any) -> int:
        # `_objects` keeps every numbered object alive; otherwise Python could reuse its id.
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _refer(self, value: Any) -> Any:
        kind = type(value)
        if kind is _Kept:
            return ["held", self._number(value.value)]
        if kind is _Iterator or kind is _Object:
            return ["mine", value._number]
        lent = value.__dict__.get("__gspo_lent__") if kind is _FUNCTION else None
        if lent is not None and self._lent.get(lent) is value:
            return ["mine", lent]
        if kind is _COROUTINE:
            return ["coroutine", self._number(value)]
        if issubclass(kind, type) and issubclass(value, Exception):
            return ["error", self._kind(value)]
        return self._number(value)

    def _resolve(self, reference: Any) -> Any:
        if type(reference) is int:
            return self._objects[reference]
        kind, *rest = reference
        if kind == "name":
            return _named(*rest)
        number, *about = rest
        if number not in self._lent:
            self._lent[number] = _lend(self, kind, number, *about)
        return self._lent[number]

    def _load(self) -> None:
        module = type(sys)("program")
        # dataclasses look up type names in their module. Under this name, `if __name__ == "__main__"` blocks do not
        # run.
        sys.modules["program"] = module
        self._globals = module.__dict__
        exec(compile(self._source, "<program>", "exec", dont_inherit=True), self._globals)

    def _do(self, what: str, target: Any, *rest: Any) -> Any:
        if what == "name":
            return self._global(target)
        if what == "call":
            return target(*rest[0], **rest[1])
        if what == "change":  # the tests drop the value of this call but may inspect its arguments afterwards
            return [target(*rest[0], **rest[1]), *rest]
        value = _ACTIONS[what](target, *rest)
        return _Kept(value) if what in _KEEPING and _is_own(value) else value

    def _global(self, name: str) -> Any:
        if name not in self._globals:
            raise NameError("the program does not define " + name)
        return self._globals[name]


class _Kept:
    """Wraps plain data of a class that the program defines, so that it stays in this process as an object."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_own(value: Any) -> bool:
    return isinstance(value, _PLAIN) and type(value).__module__ == "program"


def _operate(target: Any, name: str, *others: Any) -> Any:
    """Apply an operator, or the built-in function that corresponds to one."""
    return (getattr(_operator, name, None) or getattr(builtins, name))(target, *others)


def _reflect(target: Any, name: str, left: Any) -> Any:
    return getattr(_operator, name)(left, target)


def _put(target: Any, key: Any, value: Any) -> None:
    target[key] = value


def _delete(target: Any, key: Any) -> None:
    del target[key]


def _copied(target: Any) -> Any:
    import copy

    return copy.copy(target)


def _copied_deeply(target: Any) -> Any:
    import copy

    return copy.deepcopy(target)


def _await(target: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await target

    return asyncio.run(wait())


def _leave(target: Any, kind: Any, message: Any) -> Any:
    """Exit a `with` block, with the exception that ended it, if any."""
    error = None if kind is None else _exception(kind, [message])
    return bool(type(target).__exit__(target, error and type(error), error, None))


_PLAIN = (int, str, float, list, tuple, dict, set, frozenset, bytes, bytearray)
_KEEPING = ("make", "member", "op", "reflected", "copy", "deepcopy")
_ACTIONS: dict[str, Callable[..., Any]] = {
    "make": lambda target, args, kwargs: target(*args, **kwargs),
    "get": getattr,
    "member": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
    "put": _put,
    "delete": _delete,
    "op": _operate,
    "reflected": _reflect,
    "iterate": iter,
    "next": next,
    "held": lambda target: target,
    "type": type,
    "has instance": lambda target, value: isinstance(value, target),
    "has subclass": lambda target, value: issubclass(value, target),
    "copy": _copied,
    "deepcopy": _copied_deeply,
    "await": _await,
    "enter": lambda target: type(target).__enter__(target),
    "leave": _leave,
}


class _Lent:
    """Proxy for an object of the tests, which stays in their process."""

    __slots__ = ("_module", "_number")
    if TYPE_CHECKING:
        _module: _Module
        _number: int

    def __init__(self, module: _Module, number: int) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_number", number)

    def __iter__(self) -> Any:
        return self._module.ask("iterate", self)


class _Iterator(_Lent):
    __slots__ = ()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._module.ask("next", self)


class _Object(_Lent):
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._module.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._module.ask("set", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.ask("call", self, args, kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._module.ask("put", self, key, value)


def _operator_of(name: str) -> Callable[..., Any]:
    return lambda self, *others: self._module.ask("op", self, name, *others)


_UNARY = "str repr len bool hash int float abs neg"
_BINARY = "add sub mul truediv floordiv mod pow eq ne lt le gt ge getitem contains"
for _name in (_UNARY + " " + _BINARY).split():
    setattr(_Object, f"__{_name}__", _operator_of(_name))


def _lend(module: _Module, kind: str, number: int, name: str) -> Any:
    if kind == "iterator":
        return _Iterator(module, number)
    if kind == "object":
        return _Object(module, number)

    def function(*args: Any, **kwargs: Any) -> Any:
        return module.ask("call", function, args, kwargs)

    function.__name__ = function.__qualname__ = name
    function.__gspo_lent__ = number  # type: ignore[attr-defined]
    return function


def _import_numpy() -> None:
    """Import numpy because the tests pass an array, whether the program imports numpy or not."""
    try:
        __import__("numpy")
    except Exception:  # numpy is not installed: the program gets lists
        return


def _named(module: str, name: str) -> Any:
    """The object that a module of the standard library has under a name."""
    value = __import__(module, fromlist=["*"])
    for part in name.split("."):
        value = getattr(value, part)
    return value


async def _wait() -> None:
    pass


_coroutine: Any = _wait()
_coroutine.close()
_COROUTINE, _FUNCTION = type(_coroutine), type(_wait)


class _Script:
    """The program, run as a script in a new process for each test's standard input."""

    def __init__(self, source: str, settings: dict[str, Any], channel: Channel) -> None:
        self._source = source
        self._settings = settings
        self._channel = channel

    def serve(self) -> None:
        self._channel.send(READY + "null")
        while True:
            text = decode(self._channel.next(), no_references)
            # With a pipe, writing more than 64 KiB would block until the program reads it, which it may never do.
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
            # Otherwise the output would have no end: this process would hold a writing end itself.
            os.close(into)
            data = _read(output, OUTPUT + 1)
            if len(data) > OUTPUT:
                os.kill(child, _SIGKILL)
            _, status = os.waitpid(child, 0)  # it may keep running after closing its output, and its exit code counts
            os.close(output)
            code = -(status & 0x7F) or status >> 8
            if len(data) > OUTPUT:
                code = -_SIGXFSZ
            self._channel.send("o" + encode([code, data.decode("utf-8", "replace")], len))

    def _become(self, source: int, into: int, parent: int) -> None:
        """Run the program in the child. The interpreter then exits normally, with its usual exit handlers."""
        confine.die_with_parent(parent)
        os.dup2(source, 0)
        os.dup2(into, 1)
        # The script must not reach the pipes of the protocol.
        os.closerange(3, 64)
        confine.restrict_calls(self._settings)
        # A script expects `__name__ == "__main__"`.
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(self._source, "<program>", "exec", dont_inherit=True), module.__dict__)


class Channel:
    """Requests and answers on raw descriptors, because `sys.stdin` belongs to the program.

    An answer repeats the token of its request.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._rest = b""
        self._token = b""

    def next(self) -> str:
        """The next request."""
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            part = os.read(self._requests, 2**16)
            if not part:
                # Not sys.exit: exit handlers of the program would run, and could write or hang.
                os._exit(0)
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        self._token = line[:TOKEN]
        return line[TOKEN:].decode()

    def send(self, line: str) -> None:
        """Send one line of ASCII text."""
        # Each request has a new random token, so a program cannot write the answer to a later request in advance.
        _write(self._answers, self._token + line.encode() + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data[: 2**20]) :]


def _read(descriptor: int, most: int) -> bytes:
    parts = []
    size = 0
    while size < most:
        part = os.read(descriptor, 2**16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def no_references(number: int) -> Any:
    raise ValueRefused("a reference")


def _message(error: BaseException) -> str:
    try:
        return str(error)[:10_000]
    except BaseException:
        return ""


def _exception(kind: Any, args: list[Any]) -> BaseException:
    """Build an exception that the tests raised: of one of the program's own classes, or of a built-in one by name."""
    found = getattr(builtins, kind, RuntimeError) if type(kind) is str else kind
    error: BaseException = found(*args)
    return error


def _define_exit() -> None:
    """Define `exit()` and `quit()`. The `site` module normally does, but the interpreter skips it."""

    def leave(code: Any = None) -> None:
        raise SystemExit(code)

    for name in ("exit", "quit"):
        if not hasattr(builtins, name):
            setattr(builtins, name, leave)

"""The tests, run against a program that is somewhere else.

In: test code, and the program's answers as typed JSON. Out: questions to the program, and at the end a verdict. Invariant:
comparing happens here, with values of built-in types only; an object that is no plain data arrives as a `Remote`, which
equals nothing but itself, so the program's own `__eq__` is never asked. The program gets copies of the arguments: what it
does to them is not seen here.

Lines to the outside start with `?` (a question for the program) or `!` (the verdict); lines from it with `=` (the
program's answer), `x` (there will be no answer: why) or `.` (start again, with the next program).
"""

from __future__ import annotations

import builtins
import json.decoder  # noqa: F401 - `_json` raises its exception
import math
import random

from gspo.reward.sandbox.inside import confine
from gspo.reward.sandbox.inside.candidate import READY, Channel, no_references
from gspo.reward.sandbox.inside.values import Refused, decode, encode

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CLOSE = 1e-9


class _Stop(BaseException):
    """One failure is enough."""


class _Gone(Exception):
    """The program ended, or broke the rules."""


def main(settings: dict[str, Any]) -> None:
    """Confine this process, then judge one program after the other."""
    requests, answers = confine.claim_pipes()
    confine.close_files(settings)
    confine.close_calls(settings)
    channel = Channel(requests, answers)
    confine.hush()
    channel.send(READY)
    job = decode(channel.next(), no_references)
    try:
        prelude, *steps = [compile(text, "<tests>", "exec", dont_inherit=True) for text in job["code"]]
        _namespace(job, prelude)
    except Exception as error:
        channel.send("x" + encode(f"{type(error).__name__}: {error}"[:300], len))
        return
    channel.send(READY)
    while channel.next() == ".":
        verdict = _judge(job, prelude, steps, _Link(channel))
        channel.send("!" + encode(verdict, len))


def _judge(job: dict[str, Any], prelude: Any, steps: list[Any], link: _Link) -> dict[str, Any]:
    random.seed(0)  # the same tests for every program
    tally, names = Tally(job["stop"]), _namespace(job, prelude)
    names["__gspo__"] = tally
    try:
        for name in job["names"]:
            _bind(name, names, link)
        for number, step in enumerate(steps):
            _attempt(step, names, tally)
            if number and not tally.counted():  # the first step sets up
                tally.failure(AssertionError("no assert was run"))
    except (_Stop, _Gone):
        pass
    ended = {"gone": link.gone, "broken": tally.broken, "cut": tally.cut or bool(link.gone)}
    return {"passed": tally.passed, "failed": tally.failed, "why": tally.why, **ended}


def _namespace(job: dict[str, Any], prelude: Any) -> dict[str, Any]:
    """The names that the tests start with."""
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": dict(builtins.__dict__)}
    exec(prelude, names)
    for name in job["modules"]:
        names[name] = __import__(name)
    return names


def _bind(name: str, names: dict[str, Any], link: _Link) -> None:
    names.pop(name, None)
    try:
        names[name] = link.ask("name", name)
    except NameError:
        names["__builtins__"].pop(name, None)


def _attempt(step: Any, names: dict[str, Any], tally: Tally) -> None:
    try:
        exec(step, names)
    except _Stop:
        raise
    except BaseException as error:
        if isinstance(error, ImportError) and not hasattr(error, "of_the_program"):
            tally.broken = f"{type(error).__name__}: {error}"[:300]
            raise _Stop from None
        tally.cut = True
        tally.failure(error)


class Tally:
    """Counts asserts. `__gspo__` in test code, whose asserts were rewritten to report here."""

    def __init__(self, stop: bool) -> None:
        self._stop = stop
        self.passed = self.failed = self._seen = 0
        self.why = self.broken = ""
        self.cut = False
        """Whether some asserts were never reached."""

    def holds(self, value: Any) -> None:
        """An assert's condition, evaluated."""
        if value:
            self.passed += 1
        else:
            self.failure(AssertionError("wrong answer"))

    def counted(self) -> bool:
        """Whether an assert was evaluated since the last time."""
        before, self._seen = self._seen, self.passed + self.failed
        return self._seen > before

    def failure(self, error: BaseException) -> None:
        """An assert failed, or could not be evaluated."""
        self.failed += 1
        self.why = self.why or f"{type(error).__name__}: {error}"[:300]
        if self._stop or isinstance(error, _Gone):
            raise _Stop

    @staticmethod
    def same(value: Any, expected: Any) -> bool:
        """Equal as JSON: tuples are lists, keys are text, floats may differ in the last digits, true is not 1."""
        if isinstance(expected, list):
            if not isinstance(value, (list, tuple)) or len(value) != len(expected):
                return False
            return all(Tally.same(v, e) for v, e in zip(value, expected))  # noqa: B905 - the lengths are equal
        if isinstance(expected, dict):
            if not isinstance(value, dict) or len(value) != len(expected):
                return False
            found = {str(k): v for k, v in value.items() if isinstance(k, (str, int, float))}
            return found.keys() == expected.keys() and all(Tally.same(found[k], e) for k, e in expected.items())
        if isinstance(expected, bool) or isinstance(value, bool):
            return value is expected
        if isinstance(expected, float) and isinstance(value, (int, float)):
            return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
        return type(value) in (str, int, float, type(None)) and value == expected


class _Link:
    """The way to the program."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.gone = ""

    def ask(self, *question: Any) -> Any:
        """The program's answer, or its exception."""
        if self.gone:
            raise _Gone(self.gone)
        self._channel.send("?" + encode(list(question), _number))
        kind, text = self._split(self._channel.next())
        if kind == "x":
            self.gone = text
            raise _Gone(text)
        try:
            value = decode(text, lambda number: Remote(self, number))
            name, message = value if kind == "e" else ("", "")
        except (Refused, TypeError, ValueError, MemoryError) as error:
            self.gone = f"protocol: {error}"
            raise _Gone(self.gone) from None
        if kind == "e":
            raise _exception(name, message)
        return value

    def _split(self, line: str) -> Any:
        return (line[0], line[1:]) if line[0] == "x" else (line[1], line[2:])


class Remote:
    """An object that stays in the program's process. It is equal to itself alone, whatever it says."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: _Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.ask("put", self, key, value)

    def __str__(self) -> str:
        return str.__str__(self._link.ask("as", self, "str"))

    def __len__(self) -> int:
        return int.__int__(self._link.ask("as", self, "len"))

    def __bool__(self) -> bool:
        return self._link.ask("as", self, "bool") is True

    def __iter__(self) -> Any:
        iterator = self._link.ask("iterate", self)
        while True:
            try:
                item = self._link.ask("next", iterator)
            except StopIteration:
                return
            yield item


def _number(value: Any) -> int:
    if type(value) is not Remote:
        raise Refused(f"an argument of type {type(value).__name__}")
    return int(value._number)


def _exception(name: Any, message: Any) -> Exception:
    """The same exception if it is a common one; what would end this process becomes an ordinary one."""
    kind: Callable[..., Any] = getattr(builtins, name, RuntimeError) if type(name) is str else RuntimeError
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, UnicodeError):
        kind = RuntimeError
    if kind is RuntimeError:
        message = f"{name}: {message}"
    error: Exception = kind(message)
    error.of_the_program = True  # type: ignore[attr-defined]
    return error

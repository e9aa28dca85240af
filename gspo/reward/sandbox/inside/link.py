"""The way from the tests to the program and back.

In: questions of the tests, and lines of the program. Out: values, `Remote` objects and exceptions. Invariant: what the
program says is decoded, never run; what the tests hand over stays with them and does only what its kind is for.
"""

from __future__ import annotations

import _operator
import builtins
import sys

from gspo.reward.sandbox.inside.remote import BINARY, TRUTHS, Remote, RemoteCoroutine
from gspo.reward.sandbox.inside.values import ValueRefused, decode, encode

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gspo.reward.sandbox.inside.candidate import Channel

_PATIENCE = 10_000
"""Questions that the tests may ask when they are tried without a program."""


class Gone(BaseException):
    """The program ended, or broke the rules. No `except Exception` of a test catches it."""


class NotHandedOver(Exception):
    """The tests call the program with something that cannot reach it."""


class Link:
    """Carries questions to the program, and answers its own about what the tests handed over."""

    brief = False
    """Whether the first failure ends the tests. Not with a program: it would learn from that."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lent: list[tuple[str, Any]] = []
        self._lent_numbers: dict[int, int] = {}
        self._errors: dict[int, Any] = {}
        self.gone = ""
        self.serving = 0
        """Questions of the program that are being answered."""
        self.caught = False
        """Whether an object of the program ended an exception at the end of a `with`."""

    def ask(self, what: str, *question: Any, ends: bool = False) -> Any:
        """The program's answer, or its exception. `ends`: the answer may be that an iterator is at its end."""
        line = encode([what, *question], self._refer)
        while True:
            if self.gone:
                raise Gone(self.gone)
            self._channel.send("?" + line)
            received = self._channel.next()
            if received[0] == "x":
                self.gone = received[1:]
                continue
            kind, text = received[1], received[2:]
            if kind == "c":
                line = self._serve(self._decoded(text))
                continue
            value = self._decoded(text)
            if kind == "e":
                raise self._exception(value, ends)
            return value

    def _decoded(self, text: str) -> Any:
        try:
            return decode(text, self._resolve)
        except Exception as error:
            self.gone = f"protocol: {words(error)}"
            raise Gone(self.gone) from None

    def _resolve(self, reference: Any) -> Any:
        """What the program refers to: an object of its own, or one that the tests lent it."""
        kind, body = ("object", reference) if type(reference) is int else (reference[0], reference[1])
        if kind == "error":
            return self._error_class(body)
        if type(body) is not int:
            raise ValueRefused("a reference without a number")
        if kind == "mine":
            return self._lent[body][1]
        # anew each time: what an object is to the tests depends on where they got it, even if they have it already
        make = {"object": Remote, "held": Remote, "coroutine": RemoteCoroutine}[kind]
        return make(self, body, held=kind == "held")

    # --------------------------------------------------------------------- exceptions of the program

    def _exception(self, told: Any, ends: bool) -> BaseException:
        try:
            described, message, args, number = told
            if type(message) is not str or (number is not None and type(number) is not int):
                raise ValueRefused("an exception of unknown form")
            kind = self._error_class(described)
        except Exception as malformed:
            self.gone = f"protocol: {words(malformed)}"
            return Gone(self.gone)
        if (
            issubclass(kind, (StopIteration, StopAsyncIteration)) and not ends
        ):  # it would end an iterator of the tests in silence
            kind, args = RuntimeError, [f"{kind.__name__}: {message}"]
        error: Any
        try:
            error = kind(*args) if type(args) is list else kind(message)
        except Exception:
            error = RuntimeError(f"{kind.__name__}: {message}")
        if "of_class" in type(error).__dict__:
            error.__dict__.update(said=message, remote=Remote(self, int(number or 0)))
        error.__dict__["of_the_program"] = True
        raised: BaseException = error
        return raised

    def _error_class(self, told: Any) -> Any:
        """The same class if it is built in, else one of the same name, under the same classes, that stands for it."""
        if type(told) is str:
            found = getattr(builtins, told, None)
            usable = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, UnicodeError)
            return found if usable else RuntimeError
        number, name, bases = told
        if number not in self._errors:
            members = {"of_class": number, "__str__": _said, "__getattr__": _attribute}
            parents = tuple(dict.fromkeys(self._error_class(base) for base in bases)) or (RuntimeError,)
            self._errors[number] = _subclass(str(name), parents, members)
        return self._errors[number]

    # --------------------------------------------------------------------- objects of the tests

    def _refer(self, value: Any) -> Any:
        """A reference for the program: to its own object, to a name of the standard library, or to one of the tests."""
        if isinstance(value, Remote):
            return value._gspo_number
        if isinstance(value, Exception) and "remote" in value.__dict__:
            return value.__dict__["remote"]._gspo_number
        if isinstance(value, type) and issubclass(value, Exception) and "of_class" in value.__dict__:
            return value.__dict__["of_class"]
        found = _library_name(value)
        if found:
            return ["name", *found]
        if id(value) not in self._lent_numbers:
            self._lent_numbers[id(value)] = len(self._lent)
            self._lent.append((_lending(value), value))
        number = self._lent_numbers[id(value)]
        name = getattr(value, "__name__", "")
        return [self._lent[number][0], number, name if type(name) is str else ""]

    def _serve(self, question: Any) -> str:
        """Answer a question of the program."""
        self.serving += 1
        try:
            answer = ["back", self._use(*question)]
            return encode(answer, self._refer)
        except Exception as error:
            kind = type(error)
            known = kind.__dict__.get("of_class") or kind.__name__
            reference = Remote(self, known) if type(known) is int else known
            try:
                return encode(["fail", reference, list(error.args)], self._refer)
            except Exception:
                return encode(["fail", reference, [words(error)]], self._refer)
        finally:
            self.serving -= 1

    def _use(self, what: Any, target: Any, *rest: Any) -> Any:
        """Only what its kind is for: functions are called, iterators give the next item, objects of the tests' own
        classes are used by their public names and operators."""
        kind = self._lent[self._lent_numbers[id(target)]][0]
        if what == "call" and kind in ("function", "object"):
            return target(*rest[0], **rest[1])
        if what == "next" and kind == "iterator":
            return next(target)
        if kind != "object":
            raise TypeError(f"a {kind} of the tests cannot do this")
        if what == "op":
            return _operation(rest[0])(target, *rest[1:])
        if what == "iterate":
            return iter(target)
        if what == "put":
            target[rest[0]] = rest[1]
            return None
        if what not in ("get", "set") or type(rest[0]) is not str or rest[0].startswith("_"):
            raise AttributeError(rest[0] if rest else what)
        if what == "set" and callable(getattr(type(target), rest[0], None)):  # what the tests may ask the object for
            raise AttributeError(f"{rest[0]} is a method")
        return getattr(target, rest[0]) if what == "get" else setattr(target, rest[0], rest[1])


class Pretended(Link):
    """No program at all: every answer is the same word. `plain`: whether methods, or functions too, return the word
    itself instead of an object that stands for it."""

    def __init__(self, word: bool, plain: tuple[str, ...], brief: bool = False) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.brief = brief
        self._word, self._plain, self._asked = word, plain, 0
        self._ended: set[int] = set()
        self.broken = ""

    def ask(self, what: str, *question: Any, ends: bool = False) -> Any:
        self._asked += 1
        if self._asked > _PATIENCE:
            self.gone = "timeout: the tests ask for ever"
            raise Gone(self.gone)
        try:
            encode([what, *question], self._refer)
        except (ValueRefused, NotHandedOver) as error:
            self.broken = self.broken or f"they hand over {error}"
        thing = Remote(self, self._asked)
        if what == "op":
            known = {"str": str(self._word), "repr": str(self._word), "format": str(self._word), "hash": 1}
            known.update(len=int(self._word), int=int(self._word), index=int(self._word), float=float(self._word))
            return known.get(question[1], self._word if question[1] in TRUTHS else thing)
        if what in ("has instance", "has subclass"):
            return self._word
        if what == "next":
            if question[0]._gspo_number in self._ended or not self._word:
                raise StopIteration
            self._ended.add(question[0]._gspo_number)
        if what in ("call", "change", "make"):
            kind = "function" if what == "make" or question[0]._gspo_of is None else "method"
            value = self._word if kind in self._plain else thing
            return [value, *question[1:]] if what == "change" else value
        return thing


def _lending(value: Any) -> str:
    """What the program may do with an object of the tests."""
    if isinstance(value, type):
        return "function" if value.__module__ == "tests" else _refuse(value)
    if getattr(type(value), "__module__", "") == "tests":
        return "object"
    if callable(value):
        return "function"
    if type(value).__module__ in ("_io", "random"):
        return "object"
    if hasattr(type(value), "__next__"):
        return "iterator"
    return _refuse(value)


def _refuse(value: Any) -> str:
    raise NotHandedOver(f"an argument of type {type(value).__name__}")


def _library_name(value: Any) -> tuple[str, str] | None:
    """The module and name under which the program finds the same in its own standard library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    owner = getattr(value, "__objclass__", None)  # of a method such as `str.upper`
    module = owner.__module__ if isinstance(owner, type) else module
    if type(module) is not str or type(name) is not str or module.partition(".")[0] == "tests":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value else None


_LENT_OPERATORS = frozenset(
    ("str", "repr", "len", "bool", "hash", "int", "float", "abs", "neg", "eq", "ne", "lt", "le", "gt", "ge", "getitem")
) | {*BINARY, "contains"}


def _operation(name: Any) -> Callable[..., Any]:
    """An operator on an object of the tests."""
    if name not in _LENT_OPERATORS:
        raise TypeError("no such operator")
    found: Callable[..., Any] = getattr(_operator, name, None) or getattr(builtins, name)
    return found


# ------------------------------------------------------------------------------------------- exceptions


def words(error: BaseException) -> str:
    """An exception in words. Its arguments may be objects of the program, which may raise."""
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return type(error).__name__


def _subclass(name: str, bases: tuple[Any, ...], members: dict[str, Any]) -> Any:
    try:
        return type(name, bases, members)
    except TypeError:  # these bases do not go together
        return type(name, bases[:1], members)


def _said(self: Any) -> str:
    """The text of a program's exception."""
    return str(self.__dict__["said"] if "said" in self.__dict__ else BaseException.__str__(self))


def _attribute(self: Any, name: str) -> Any:
    """An attribute of a program's exception."""
    if "remote" not in self.__dict__ or name.startswith("__"):
        raise AttributeError(name)
    return getattr(self.__dict__["remote"], name)

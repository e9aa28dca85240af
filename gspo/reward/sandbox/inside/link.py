"""The connection between the tests and the program.

In: questions of the tests, and lines from the program. Out: values, `Remote` objects and exceptions. Invariant: the
program's answers are decoded, never executed. Objects that the tests pass to the program stay in the judge and support
only the operations of their kind.
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
"""Number of questions that the tests may ask in a dry run without a program."""


class Gone(BaseException):
    """The program ended or violated the protocol. A `BaseException`, so `except Exception` in a test does not catch
    it."""


class NotTransferable(Exception):
    """The tests pass an argument to the program that cannot be sent or lent."""


class Link:
    """Forwards questions to the program, and answers its questions about objects that the tests passed to it."""

    brief = False
    """Whether the first failure ends the tests. False with a real program, which could infer its failure from that."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lent: list[tuple[str, Any]] = []
        self._lent_numbers: dict[int, int] = {}
        self._errors: dict[int, Any] = {}
        self.gone = ""
        self.serving = 0
        """Number of the program's questions that are being answered."""
        self.caught = False
        """Whether a context manager of the program swallowed an exception."""

    def ask(self, what: str, *question: Any, ends: bool = False) -> Any:
        """The program's answer, or its exception. With `ends`, the exception may be `StopIteration`."""
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
        """Resolve a reference of the program: to an object of its own, or to one that the tests lent it."""
        kind, body = ("object", reference) if type(reference) is int else (reference[0], reference[1])
        if kind == "error":
            return self._error_class(body)
        if type(body) is not int:
            raise ValueRefused("a reference without a number")
        if kind == "mine":
            return self._lent[body][1]
        # A new proxy each time: how far the tests trust an object depends on how they obtained it.
        make = {"object": Remote, "held": Remote, "coroutine": RemoteCoroutine}[kind]
        return make(self, body, held=kind == "held")

    # --------------------------------------------------------------------- exceptions of the program

    def _exception(self, description: Any, ends: bool) -> BaseException:
        try:
            described_class, message, args, number = description
            if type(message) is not str or (number is not None and type(number) is not int):
                raise ValueRefused("an exception of unknown form")
            kind = self._error_class(described_class)
        except Exception as malformed:
            self.gone = f"protocol: {words(malformed)}"
            return Gone(self.gone)
        # Whether an exception may end an iteration depends on what the tests asked, never on the program.
        if issubclass(kind, (StopIteration, StopAsyncIteration)) and not ends:
            # Raised as it is, it would silently end an iterator of the tests.
            args = [f"{kind.__name__}: {message}"]
            kind = RuntimeError
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

    def _error_class(self, description: Any) -> Any:
        """The same class if it is built in, else a proxy class with the same name and base classes."""
        if type(description) is str:
            found = getattr(builtins, description, None)
            # Only `Exception`: a program must not be able to raise SystemExit or KeyboardInterrupt in the judge.
            usable = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, UnicodeError)
            return found if usable else RuntimeError
        number, name, bases = description
        if number not in self._errors:
            members = {"of_class": number, "__str__": _said, "__getattr__": _attribute}
            parents = tuple(dict.fromkeys(self._error_class(base) for base in bases)) or (RuntimeError,)
            self._errors[number] = _subclass(str(name), parents, members)
        return self._errors[number]

    # --------------------------------------------------------------------- objects of the tests

    def _refer(self, value: Any) -> Any:
        """A reference for the program: to its own object, a name of the standard library, or an object of the tests."""
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
            # Also keeps the object alive; otherwise Python could reuse its id.
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
        """Use an object of the tests in the ways its kind allows.

        Functions can be called, iterators advanced, and objects of the tests' own classes used through their public
        attributes and operators.
        """
        # Fails for anything that the tests did not pass to the program.
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
        # Private names lead from any object to its class and to globals, where the expected values are.
        if what not in ("get", "set") or type(rest[0]) is not str or rest[0].startswith("_"):
            raise AttributeError(rest[0] if rest else what)
        if what == "set" and callable(getattr(type(target), rest[0], None)):
            # The tests may call this method, so the program must not replace it.
            raise AttributeError(f"{rest[0]} is a method")
        return getattr(target, rest[0]) if what == "get" else setattr(target, rest[0], rest[1])


class DummyLink(Link):
    """Stands in for a program and answers every question with the same constant.

    `plain` lists the kinds of callables (`method`, `function`) that return the constant itself instead of a proxy for
    it.
    """

    def __init__(self, word: bool, plain: tuple[str, ...], brief: bool = False) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.brief = brief
        self._word = word
        self._plain = plain
        self._asked = 0
        self._ended: set[int] = set()
        self.broken = ""

    def ask(self, what: str, *question: Any, ends: bool = False) -> Any:
        self._asked += 1
        # A loop such as `while not f(): ...` would never end if every answer is False.
        if self._asked > _PATIENCE:
            self.gone = "timeout: the tests never stop asking"
            raise Gone(self.gone)
        try:
            encode([what, *question], self._refer)
        except (ValueRefused, NotTransferable) as error:
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
    """The kind of an object of the tests, which determines what the program may do with it."""
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
    raise NotTransferable(f"an argument of type {type(value).__name__}")


def _library_name(value: Any) -> tuple[str, str] | None:
    """The module and name under which the program finds the same object in its own standard library."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    owner = getattr(value, "__objclass__", None)  # the class of a method such as `str.upper`
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
    """The function of an operator that is allowed on objects of the tests."""
    if name not in _LENT_OPERATORS:
        raise TypeError("no such operator")
    found: Callable[..., Any] = getattr(_operator, name, None) or getattr(builtins, name)
    return found


# ------------------------------------------------------------------------------------------- exceptions


def words(error: BaseException) -> str:
    """A one-line description of an exception. Its arguments may be proxies of the program's objects, which may
    raise."""
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return type(error).__name__


def _subclass(name: str, bases: tuple[Any, ...], members: dict[str, Any]) -> Any:
    try:
        return type(name, bases, members)
    except TypeError:  # the bases conflict
        return type(name, bases[:1], members)


def _said(self: Any) -> str:
    """The message of a program's exception."""
    return str(self.__dict__["said"] if "said" in self.__dict__ else BaseException.__str__(self))


def _attribute(self: Any, name: str) -> Any:
    """An attribute of a program's exception."""
    if "remote" not in self.__dict__ or name.startswith("__"):
        raise AttributeError(name)
    return getattr(self.__dict__["remote"], name)

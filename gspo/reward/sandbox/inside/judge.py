"""The tests, run against a program that is somewhere else.

In: test code, and the program's answers as typed JSON. Out: questions to the program, and at the end a verdict. Invariant:
no code of the program runs here; comparing happens here, with values of built-in types and of the standard library's data
types. An object that is no plain data arrives as a `Remote`, which never equals plain data and answers only what `Remote`
says. Whatever goes wrong while a program is judged is the program's: the tests themselves were tried before.

Lines to the outside start with `?` (a question for the program, or the answer to one of its own) or `!` (the verdict);
lines from it with `=` (the program's answer), `x` (there will be no answer: why) or `.` (start again, with the next program).
"""

from __future__ import annotations

import _operator
import builtins
import json.decoder  # noqa: F401 - `_json` raises its exception
import math
import random
import sys

from gspo.reward.sandbox.inside import confine
from gspo.reward.sandbox.inside.candidate import READY, Channel, no_references
from gspo.reward.sandbox.inside.evaluate import guarded
from gspo.reward.sandbox.inside.values import ValueRefused, decode, encode

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_CLOSE = 1e-9
_PATIENCE = 10_000
"""Questions that the tests may ask when they are tried without a program."""


class _Gone(BaseException):
    """The program ended, or broke the rules. No `except Exception` of a test catches it."""


class _NotHandedOver(Exception):
    """The tests call the program with something that cannot reach it."""


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
        for name in job["imports"]:
            __import__(name)
    except Exception as error:
        channel.send("x" + encode(_words(error), len))
        return
    channel.send(READY)
    while True:
        request = channel.next()
        if request == "t":
            channel.send("!" + encode(_trial(job, prelude, steps), len))
        else:
            channel.send("!" + encode(_judge(job, prelude, steps, _Link(channel)), len))


def _trial(job: dict[str, Any], prelude: Any, steps: list[Any]) -> str:
    """What is wrong with the tests, whatever the program. They are run without one, against objects that give the same
    answer to whatever they are asked, and against functions that return it."""
    first = _Pretended(True, ())
    passes = _full(_judge(job, prelude, steps, first))
    if first.broken:
        return first.broken
    for word in (True, False):
        lies = ([] if word else [()]) + [("method",)]
        lying = (word and passes) or any(_passes(job, prelude, steps, word, plain) for plain in lies)
        if lying and not _passes(job, prelude, steps, word, ("method", "function")):
            return (
                f"an object that answers {word} to everything passes them; they trust the program's own operators and "
                "methods, so compare something with an expected value"
            )
    return ""


def _passes(job: dict[str, Any], prelude: Any, steps: list[Any], word: bool, plain: tuple[str, ...]) -> bool:
    """Whether nothing but one word passes the tests. The first failure says no."""
    return _full(_judge(job, prelude, steps, _Pretended(word, plain, brief=True)))


def _full(verdict: dict[str, Any]) -> bool:
    return bool(verdict["passed"] == verdict["total"] and not verdict["gone"])


def _judge(job: dict[str, Any], prelude: Any, steps: list[Any], link: Any) -> dict[str, Any]:
    random.seed(0)  # the same tests for every program
    tally = Tally(job["asserts"], link)
    try:
        names = _namespace(job, prelude)
        names["__gspo__"] = tally
        names["__builtins__"].update(guarded([prelude, *steps], names))
        for name in job["names"]:
            _bind(name, names, link)
        for step in steps:
            tally.next_step()
            _attempt(step, names, tally)
    except _Gone:
        pass
    except BaseException as error:  # such as a memory full of what the program answered
        tally.note(error)
        link.gone = link.gone or "error: the tests could not go on"
    return {**tally.result(bool(link.gone)), "why": tally.why, "gone": link.gone}


def _namespace(job: dict[str, Any], prelude: Any) -> dict[str, Any]:
    """The names that the tests start with."""
    sys.modules["tests"] = module = type(sys)("tests")  # where dataclasses look for the names of types
    names = module.__dict__
    names["__builtins__"] = dict(builtins.__dict__)
    exec(prelude, names)
    for name in job["modules"]:
        names[name] = __import__(name)
    return names


def _bind(name: str, names: dict[str, Any], link: Any) -> None:
    names.pop(name, None)
    try:
        value = names[name] = link.ask("name", name)
        if type(value) is Remote and name[:1].isupper() and "_" not in name:
            object.__setattr__(value, "_gspo_kind", CLASS)
    except Exception:
        names["__builtins__"].pop(name, None)


def _attempt(step: Any, names: dict[str, Any], tally: Tally) -> None:
    try:
        exec(step, names)
    except _Gone:
        raise
    except BaseException as error:
        tally.cut(error)


class Tally:
    """Counts asserts by the statement: one that is run in a loop holds if it always did. `__gspo__` in test code, whose
    asserts were rewritten to report here."""

    def __init__(self, asserts: list[int], link: _Link) -> None:
        self._asserts, self._link = asserts, link
        self._steps: list[dict[int, bool]] = []
        self._cuts: set[int] = set()
        self._set_state: set[int] = set()
        self._busy: set[int] = set()
        self.why = ""

    def next_step(self) -> None:
        self._steps.append({})

    def holds(self, number: int, value: Any) -> None:
        """An assert's condition, evaluated. Nothing holds of a program that is no longer there."""
        self._set_state.add(number)
        if value and not self._link.gone:
            self._step_of(number).setdefault(number, True)
        else:
            self.failure(number, AssertionError("wrong answer"))

    def _step_of(self, number: int) -> dict[int, bool]:
        """Where an assert is counted: in the step that it was written in. A program that calls back a function of an
        earlier step must not add its asserts once more. A place that must not be reached counts where it was reached."""
        if not self._link.serving:
            self._busy.add(len(self._steps) - 1)
        if number < 0:
            return self._steps[-1]
        step, written = 0, self._asserts[0]
        while written < number:
            step += 1
            written += self._asserts[step]
        return self._steps[step]

    def entered(self, *numbers: int) -> None:
        """A `with` begins whose block has these asserts."""
        self._link.caught = False
        self._set_state.difference_update(numbers)

    def left(self, *numbers: int) -> None:
        """It is over. If an object of the program caught what ended the block, the rest of its asserts failed."""
        caught, self._link.caught = self._link.caught, False
        for number in numbers:
            if caught and number not in self._set_state:
                self.failure(number, AssertionError("it was not reached"))

    def failure(self, number: int, error: BaseException) -> None:
        """An assert failed, or could not be evaluated."""
        self._step_of(number)[number] = False
        self.note(error)
        if self._link.brief:
            raise _Gone

    def cut(self, error: BaseException) -> None:
        """A step ended before its end."""
        self._cuts.add(len(self._steps) - 1)
        self.note(error)
        if self._link.brief:
            raise _Gone

    def note(self, error: BaseException) -> None:
        self.why = self.why or _words(error)

    def result(self, gone: bool) -> dict[str, int]:
        """Statements that held, and all of them. What was not reached fails if the step was cut short; a branch that was
        not taken does not count. The first step sets up: it need not assert anything."""
        passed = total = 0
        for number, written in enumerate(self._asserts):
            seen = self._steps[number] if number < len(self._steps) else {}
            cut = number in self._cuts or (gone and number >= len(self._steps) - 1)
            held = sum(seen.values())
            passed += held
            if cut:
                total += max(len(seen) + (held == len(seen)), written)
            elif seen or number in self._busy or not number:
                total += len(seen)
            else:
                self.note(AssertionError("no assert was run"))
                total += 1
        return {"passed": passed, "total": max(total, 1)}

    @staticmethod
    def change(function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call whose value the test drops: what it does to its arguments is what counts."""
        return function._gspo_change(args, kwargs) if type(function) is Remote else function(*args, **kwargs)

    @staticmethod
    def type_of(value: Any) -> Any:
        """`type(value)`, also of an object of the program: a class of the program, never one of plain data."""
        found = value._gspo_link.ask("type", value) if isinstance(value, Remote) else None
        return found if isinstance(found, Remote) else type(value)

    @staticmethod
    def identical(value: Any, other: Any) -> bool:
        """`value is other`, also of objects of the program."""
        both = isinstance(value, Remote) and isinstance(other, Remote)
        return bool(value._gspo_number == other._gspo_number if both else value is other)

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


# ------------------------------------------------------------------------------------------- the way to the program


class _Link:
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
                raise _Gone(self.gone)
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
            self.gone = f"protocol: {_words(error)}"
            raise _Gone(self.gone) from None

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
            self.gone = f"protocol: {_words(malformed)}"
            return _Gone(self.gone)
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
                return encode(["fail", reference, [_words(error)]], self._refer)
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


class _Pretended(_Link):
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
            raise _Gone(self.gone)
        try:
            encode([what, *question], self._refer)
        except (ValueRefused, _NotHandedOver) as error:
            self.broken = self.broken or f"they hand over {error}"
        thing = Remote(self, self._asked)
        if what == "op":
            known = {"str": str(self._word), "repr": str(self._word), "format": str(self._word), "hash": 1}
            known.update(len=int(self._word), int=int(self._word), index=int(self._word), float=float(self._word))
            return known.get(question[1], self._word if question[1] in _TRUTHS else thing)
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
    raise _NotHandedOver(f"an argument of type {type(value).__name__}")


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


# ------------------------------------------------------------------------------------------- objects of the program

CLASS, INSTANCE, RESULT = "class", "instance", "result"
"""What a `Remote` is to the tests: a class that they name (with a capital letter), an object that they made of one, or
something that a function or method returned."""
_SEEN = (
    "__name__",
    "__qualname__",
    "__doc__",
    "__dict__",
    "__annotations__",
    "__members__",
    "__wrapped__",
    "__module__",
)
"""Attributes between underscores that are asked for. All others are ways to be taken for something else."""
_TRUTHS = ("bool", "eq", "lt", "le", "gt", "ge", "contains")
_PREDICATES = frozenset(
    n
    for kind in (str, bytes, set, int, float)
    for n in dir(kind)
    if n.startswith("is") or n in ("startswith", "endswith")
) | {"all", "any", "equals", "difference", "symmetric_difference", "compare", "compare_total"}
"""Methods of plain data, and of arrays, that say yes or no, or that nothing is different."""


class Remote:
    """An object that stays in the program's process.

    It equals no plain data. What it is worth depends on how the tests came by it, never on what it says of itself: an
    object that the tests made of a class of the program answers for its operators; what a function returned does not, so
    it cannot pass for a number, a text or a list. It can be called, has attributes, and can be iterated over; whatever is
    learned of its items stays so until the tests change it."""

    __slots__ = ("_gspo_held", "_gspo_items", "_gspo_kind", "_gspo_link", "_gspo_number", "_gspo_of")

    def __init__(self, link: Any, number: int, *, held: bool = False) -> None:
        for name, value in zip(Remote.__slots__, (held, None, RESULT, link, number, None)):  # noqa: B905
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._gspo_touch()
        if self._gspo_kind == CLASS:
            return self._gspo_as(INSTANCE, self._gspo_link.ask("make", self, args, kwargs))
        ends = self._gspo_of is not None and self._gspo_of[1] in ("send", "throw")
        return self._gspo_link.ask("call", self, args, kwargs, ends=ends)

    def _gspo_change(self, args: Any, kwargs: Any) -> Any:
        """Call it, and do to the arguments what it did to its copies."""
        self._gspo_touch()
        value, after_args, after_kwargs = self._gspo_link.ask("change", self, args, kwargs)
        for before, after in [*zip(args, after_args), *((v, after_kwargs[k]) for k, v in kwargs.items())]:  # noqa: B905
            _update(before, after)
        return value

    def _gspo_touch(self) -> None:
        """What was learned of its items, and of the object whose method it is, may no longer be so."""
        for one in (self, self._gspo_of[0] if self._gspo_of else self):
            object.__setattr__(one, "_gspo_items", None)

    def _gspo_as(self, kind: str, value: Any) -> Any:
        if isinstance(value, Remote) and value._gspo_kind == RESULT:
            object.__setattr__(value, "_gspo_kind", kind)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _SEEN:
            raise AttributeError(name)
        if name in _PREDICATES and self._gspo_kind == RESULT:
            raise AttributeError(f"an object is no plain data: {name}")
        kind, question = (INSTANCE, "member") if self._gspo_kind == CLASS else (RESULT, "get")
        value = self._gspo_as(kind, self._gspo_link.ask(question, self, name))
        if type(value) is Remote and value._gspo_of is None:
            object.__setattr__(value, "_gspo_of", (self, name))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._gspo_touch()
        self._gspo_link.ask("set", self, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._gspo_touch()
        self._gspo_link.ask("put", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._gspo_touch()
        self._gspo_link.ask("delete", self, key)

    def __getitem__(self, key: Any) -> Any:
        if self._gspo_kind == RESULT and type(key) in (int, slice):
            return self._gspo_known().listed()[key]
        return self._gspo_link.ask("item", self, key)

    def __len__(self) -> int:
        if self._gspo_kind == RESULT:
            try:
                return len(self._gspo_known().listed())
            except TypeError as error:
                if not hasattr(error, "of_the_program"):
                    raise
        return int.__int__(self._gspo_link.ask("op", self, "len"))

    def __iter__(self) -> Any:
        items = self._gspo_known() if self._gspo_kind == RESULT else _Items(self)
        return self if items.once else iter(items)

    def __next__(self) -> Any:
        return self._gspo_known().next()

    def _gspo_known(self) -> _Items:
        if self._gspo_items is None:
            object.__setattr__(self, "_gspo_items", _Items(self))
        items: _Items = self._gspo_items
        return items

    def __contains__(self, value: Any) -> bool:
        if self._gspo_kind == RESULT:
            return any(value is item or value == item for item in self)
        return self._gspo_truth("contains", value)

    def __bool__(self) -> bool:
        return self._gspo_truth("bool")

    def __str__(self) -> str:
        return str.__str__(self._gspo_link.ask("op", self, "str"))

    def __repr__(self) -> str:
        return str.__str__(self._gspo_link.ask("op", self, "repr"))

    def __format__(self, form: str) -> str:
        return str.__str__(self._gspo_link.ask("op", self, "format", form))

    def __hash__(self) -> int:
        return hash(int.__int__(self._gspo_link.ask("op", self, "hash")))

    def __eq__(self, other: object) -> Any:
        if Tally.identical(self, other):
            return True
        if isinstance(other, Remote):
            return self._gspo_answers(other) and self._gspo_truth("eq", other)
        return self._gspo_held and self._gspo_kind != RESULT and self._gspo_link.ask("held", self) == other

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __instancecheck__(self, value: Any) -> bool:
        return self._gspo_link.ask("has instance", self, value) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return self._gspo_link.ask("has subclass", self, value) is True

    def __enter__(self) -> Any:
        return self._gspo_as(self._gspo_kind, self._gspo_link.ask("enter", self))

    def __exit__(self, kind: Any, error: Any, at: Any) -> bool:
        known = kind is None or "of_class" in kind.__dict__
        name = kind if known else kind.__name__ if hasattr(builtins, kind.__name__) else "RuntimeError"
        caught = self._gspo_link.ask("leave", self, name, str(error)) is True
        self._gspo_link.caught |= caught and kind is not None
        return caught

    def __copy__(self) -> Any:
        return self._gspo_as(self._gspo_kind, self._gspo_link.ask("copy", self))

    def __deepcopy__(self, memo: Any) -> Any:
        return self._gspo_as(self._gspo_kind, self._gspo_link.ask("deepcopy", self))

    def _gspo_truth(self, name: str, *others: Any) -> bool:
        return self._gspo_link.ask("op", self, name, *others) is True

    def _gspo_answers(self, other: Any) -> bool:
        """Whether the program is asked about the two: one of them is an object that the tests made."""
        return self._gspo_kind != RESULT or (isinstance(other, Remote) and other._gspo_kind != RESULT)


class RemoteCoroutine(Remote):
    """Its program runs it to its end as soon as the tests wait for it."""

    __slots__ = ()

    def __await__(self) -> Iterator[Any]:
        return self._gspo_link.ask("await", self)
        yield  # makes this a generator

    def __next__(self) -> Any:
        raise StopIteration(self._gspo_link.ask("await", self))

    def send(self, value: Any) -> Any:
        return next(self)

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        """There is nothing to end here."""


class _Items:
    """The items of an object. Each is asked for once: an iterator that has ended does not begin again, and what can be
    looked at twice is the same both times."""

    def __init__(self, owner: Remote) -> None:
        self._link = owner._gspo_link
        self._source = self._link.ask("iterate", owner)
        if not isinstance(self._source, Remote):
            raise TypeError("no iterator")
        self.once = self._source._gspo_number == owner._gspo_number
        self._seen: list[Any] = []
        self._ended = False

    def next(self) -> Any:
        if self._ended or not self.once:
            raise StopIteration if self._ended else TypeError("not an iterator")
        return self._fetch()

    def _fetch(self) -> Any:
        try:
            return self._link.ask("next", self._source, ends=True)
        except StopIteration:
            self._ended = True
            raise

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            if number == len(self._seen):
                if self._ended:
                    return
                try:
                    self._seen.append(self._fetch())
                except StopIteration:
                    return
            yield self._seen[number]
            number += 1

    def listed(self) -> list[Any]:
        if self.once:
            raise TypeError("an iterator has no length and no positions")
        return [*self]


# ------------------------------------------------------------------------------------------- operators


def _binary(name: str) -> Callable[..., Any]:
    def operate(self: Any, other: Any) -> Any:
        if not self._gspo_answers(other):
            return NotImplemented
        value = self._gspo_link.ask("op", self, name, other)
        return value is True if name in _TRUTHS else self._gspo_as(INSTANCE, value)

    return operate


def _reflected(name: str) -> Callable[..., Any]:
    def operate(self: Any, other: Any) -> Any:
        if self._gspo_kind == RESULT:
            return NotImplemented
        return self._gspo_as(INSTANCE, self._gspo_link.ask("reflected", self, name, other))

    return operate


def _unary(name: str, kind: Any = None) -> Callable[..., Any]:
    def operate(self: Any, *others: Any) -> Any:
        if self._gspo_kind == RESULT:
            raise TypeError(f"an object is no plain data: {name}")
        value = self._gspo_as(INSTANCE, self._gspo_link.ask("op", self, name, *others))
        if kind is not None and type(value) is not kind:
            raise TypeError(f"{name}: the program answered with a {type(value).__name__}")
        return value

    return operate


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in _BINARY:
    _function = f"{_name}_" if _name in ("and", "or") else _name
    setattr(Remote, f"__{_name}__", _binary(_function))
    setattr(Remote, f"__r{_name}__", _reflected(_function))
    setattr(Remote, f"__i{_name}__", _binary(f"i{_name}"))
for _name in ("lt", "le", "gt", "ge", "divmod"):
    setattr(Remote, f"__{_name}__", _binary(_name))
for _name in ("neg", "pos", "abs", "invert", "round"):
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name, _kind in (("int", int), ("float", float), ("complex", complex), ("index", int)):
    setattr(Remote, f"__{_name}__", _unary(_name, _kind))

_LENT_OPERATORS = frozenset(
    ("str", "repr", "len", "bool", "hash", "int", "float", "abs", "neg", "eq", "ne", "lt", "le", "gt", "ge", "getitem")
) | {*_BINARY, "contains"}


def _operation(name: Any) -> Callable[..., Any]:
    """An operator on an object of the tests."""
    if name not in _LENT_OPERATORS:
        raise TypeError("no such operator")
    found: Callable[..., Any] = getattr(_operator, name, None) or getattr(builtins, name)
    return found


def _update(before: Any, after: Any) -> None:
    """Make a container what the program made of its copy, and what is in it as far as it is still there."""
    if type(before) is not type(after) or type(before) not in (list, dict, set, bytearray):
        if type(before).__name__ == "deque" and type(before) is type(after):
            before.clear()
            before.extend(after)
    elif type(before) is list:
        before[:] = [_merged(b, a) for b, a in zip(before, after)] + after[len(before) :]  # noqa: B905
    elif type(before) is dict:
        merged = {key: _merged(before.get(key), value) for key, value in after.items()}
        before.clear()
        before.update(merged)
    else:
        before.clear()
        (before.update if type(before) is set else before.extend)(after)


def _merged(before: Any, after: Any) -> Any:
    _update(before, after)
    return before if type(before) is type(after) and type(before) in (list, dict, set, bytearray) else after


# ------------------------------------------------------------------------------------------- exceptions


def _words(error: BaseException) -> str:
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

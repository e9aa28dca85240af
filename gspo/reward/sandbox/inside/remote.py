"""Proxies for objects that stay in the program's process.

In: answers of a link to the program. Out: `Remote` objects that the tests use like any other object. Invariant: no code
of the program runs here, and a `Remote` never equals plain data. How far it is trusted otherwise depends on how the
tests obtained it.
"""

from __future__ import annotations

import builtins

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

CLASS, INSTANCE, RESULT = "class", "instance", "result"
"""How the tests obtained a `Remote`: as a class that they name (with a capital letter), as an instance that they
created, or as the result of a function or method."""
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
"""Dunder attributes that are forwarded. Any other would let an object pass itself off as another type."""
TRUTHS = ("bool", "eq", "lt", "le", "gt", "ge", "contains")
_PREDICATES = frozenset(
    n
    for kind in (str, bytes, set, int, float)
    for n in dir(kind)
    if n.startswith("is") or n in ("startswith", "endswith")
) | {"all", "any", "equals", "difference", "symmetric_difference", "compare", "compare_total"}
"""Methods of plain data and arrays that return a truth value, or report a difference."""


class Remote:
    """A proxy for an object that stays in the program's process.

    It equals no plain data. How far it is trusted depends on how the tests obtained it, never on what it claims: an
    instance that the tests created from a class of the program defines its own operators. A function's result does not,
    so it cannot pass for a number, a string or a list. A proxy can be called, has attributes, and can be iterated over.
    Its items are cached until the tests modify it.
    """

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
        """Call it, and apply to the arguments the changes that it made to its copies."""
        self._gspo_touch()
        value, after_args, after_kwargs = self._gspo_link.ask("change", self, args, kwargs)
        for before, after in [*zip(args, after_args), *((v, after_kwargs[k]) for k, v in kwargs.items())]:  # noqa: B905
            _update(before, after)
        return value

    def _gspo_touch(self) -> None:
        """Discard the cached items of this object, and of the object whose method it is."""
        for one in (self, self._gspo_of[0] if self._gspo_of else self):
            object.__setattr__(one, "_gspo_items", None)

    def _gspo_as(self, kind: str, value: Any) -> Any:
        if isinstance(value, Remote) and value._gspo_kind == RESULT:
            object.__setattr__(value, "_gspo_kind", kind)
        return value

    def __getattr__(self, name: str) -> Any:
        # `__array_interface__`, `__fspath__` and others would make a library take the proxy for its own kind of data.
        if name.startswith("__") and name.endswith("__") and name not in _SEEN:
            raise AttributeError(name)
        # `assert f(x).startswith("a")` must not pass because an object says yes to everything.
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
        # From the cached items: an object that answers the same question differently each time cannot pass for a list.
        if self._gspo_kind == RESULT and type(key) in (int, slice):
            return self._gspo_known().listed()[key]
        return self._gspo_link.ask("item", self, key)

    def __len__(self) -> int:
        if self._gspo_kind == RESULT:
            try:
                return len(self._gspo_known().listed())
            except TypeError as error:
                # If the program raised it, the object cannot be iterated over but may still have a length.
                if not hasattr(error, "of_the_program"):
                    raise
        # The base class's method fails for anything but an int, whatever the program sends.
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
            # Compared here, because a `__contains__` of the program could say yes to everything.
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
        if identical(self, other):
            return True
        if isinstance(other, Remote):
            return self._gspo_answers(other) and self._gspo_truth("eq", other)
        return self._gspo_held and self._gspo_kind != RESULT and self._gspo_link.ask("held", self) == other

    def __ne__(self, other: object) -> Any:
        # Never the program's `__ne__`, which could return True together with its `__eq__`.
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
        # Not `bool(...)`: the answer may itself be a proxy.
        return self._gspo_link.ask("op", self, name, *others) is True

    def _gspo_answers(self, other: Any) -> bool:
        """Whether the program decides the operation, because the tests created one of the two objects."""
        return self._gspo_kind != RESULT or (isinstance(other, Remote) and other._gspo_kind != RESULT)


class RemoteCoroutine(Remote):
    """A proxy for a coroutine. The program runs it to completion when the tests await it."""

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
        """Do nothing: the coroutine is in the program's process."""


class _Items:
    """The items of an object. Each is requested once.

    An exhausted iterator therefore does not restart, and iterating twice gives the same items both times.
    """

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


def identical(value: Any, other: Any) -> bool:
    """`value is other`, also for proxies of the program's objects."""
    both = isinstance(value, Remote) and isinstance(other, Remote)
    return bool(value._gspo_number == other._gspo_number if both else value is other)


# ------------------------------------------------------------------------------------------- operators


def _binary(name: str) -> Callable[..., Any]:
    def operate(self: Any, other: Any) -> Any:
        # Python then raises TypeError or compares identity, as for any object without this operator.
        if not self._gspo_answers(other):
            return NotImplemented
        value = self._gspo_link.ask("op", self, name, other)
        return value is True if name in TRUTHS else self._gspo_as(INSTANCE, value)

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


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in BINARY:
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


def _update(before: Any, after: Any) -> None:
    """Update a container in place to match the copy that the program modified, including nested containers."""
    if type(before) is not type(after) or type(before) not in (list, dict, set, bytearray):
        if type(before).__name__ == "deque" and type(before) is type(after):
            before.clear()
            before.extend(after)
        elif type(before).__module__ == "numpy" and type(before) is type(after) and before.shape == after.shape:
            before[...] = after
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

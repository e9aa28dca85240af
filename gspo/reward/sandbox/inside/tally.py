"""Count the asserts that passed.

In: reports of test code whose asserts were rewritten. Out: the number of assert statements that passed, and the reason
for the first failure. Invariant: no assert passes after the program is gone, and none counts twice.
"""

from __future__ import annotations

import math

from gspo.reward.sandbox.inside.link import Gone, words
from gspo.reward.sandbox.inside.remote import Remote, identical

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

    from gspo.reward.sandbox.inside.link import Link

# The default relative tolerance of math.isclose, also used as an absolute one.
_CLOSE = 1e-9


class Tally:
    """Counts assert statements. One in a loop passes if it always did.

    Test code accesses it as `__gspo__`: its asserts were rewritten to report here.
    """

    def __init__(self, asserts: list[int], link: Link) -> None:
        self._asserts = asserts
        self._link = link
        self._steps: list[dict[int, bool]] = []
        self._cuts: set[int] = set()
        self._reached: set[int] = set()
        self._busy: set[int] = set()
        self.why = ""

    def next_step(self) -> None:
        self._steps.append({})

    def needs(self, number: int, value: Any) -> None:
        """Report a part of an assert's condition other than the last."""
        if not value:
            self.failure(number, AssertionError("wrong answer"))

    def holds(self, number: int, value: Any) -> None:
        """Report an assert's condition, or its last part. No assert passes after the program is gone."""
        self._reached.add(number)
        if value and not self._link.gone:
            # Not an assignment: an assert in a loop that failed once stays failed.
            self._step_of(number).setdefault(number, True)
        else:
            self.failure(number, AssertionError("wrong answer"))

    def _step_of(self, number: int) -> dict[int, bool]:
        """The step in which an assert counts: the one that contains it.

        A program that calls back a function of an earlier step must not add that step's asserts again. An assert with a
        false constant has a negative number and counts in the step that reached it.
        """
        if not self._link.serving:
            self._busy.add(len(self._steps) - 1)
        if number < 0:
            return self._steps[-1]
        step = 0
        written = self._asserts[0]
        while written < number:
            step += 1
            written += self._asserts[step]
        return self._steps[step]

    def entered(self, *numbers: int) -> None:
        """Report the start of a `with` whose block has these asserts."""
        self._link.caught = False
        self._reached.difference_update(numbers)

    def left(self, *numbers: int) -> None:
        """Report its end. If a context manager of the program swallowed an exception, unreached asserts failed."""
        caught = self._link.caught
        self._link.caught = False
        for number in numbers:
            if caught and number not in self._reached:
                self.failure(number, AssertionError("it was not reached"))

    def failure(self, number: int, error: BaseException) -> None:
        """Report an assert that failed or could not be evaluated."""
        self._step_of(number)[number] = False
        self.note(error)
        if self._link.brief:
            raise Gone

    def cut(self, error: BaseException) -> None:
        """Report a step that an exception ended."""
        self._cuts.add(len(self._steps) - 1)
        self.note(error)
        if self._link.brief:
            raise Gone

    def note(self, error: BaseException) -> None:
        self.why = self.why or words(error)

    def result(self, gone: bool) -> dict[str, int]:
        """The number of asserts that passed, and of all asserts.

        An assert that was not reached fails if its step was cut short; one in a branch that was not taken does not
        count. The first step is setup code and need not assert anything.
        """
        passed = total = 0
        for number, written in enumerate(self._asserts):
            seen = self._steps[number] if number < len(self._steps) else {}
            # Nothing in the steps after the program was gone can have passed.
            cut = number in self._cuts or (gone and number >= len(self._steps) - 1)
            held = sum(seen.values())
            passed += held
            if cut:
                # A step that was cut short never passes as a whole, even if all asserts that it reached hold.
                total += max(len(seen) + (held == len(seen)), written)
            elif seen or number in self._busy or not number:
                total += len(seen)
            else:
                self.note(AssertionError("no assert was run"))
                total += 1
        return {"passed": passed, "total": max(total, 1)}

    @staticmethod
    def change(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call whose value the test drops, and apply its changes to the arguments."""
        return function._gspo_change(args, kwargs) if type(function) is Remote else function(*args, **kwargs)

    @staticmethod
    def type_of(value: Any) -> Any:
        """`type(value)`. For an object of the program, a class of the program, never a built-in type."""
        found = value._gspo_link.ask("type", value) if isinstance(value, Remote) else None
        return found if isinstance(found, Remote) else type(value)

    identical = staticmethod(identical)

    @staticmethod
    def same(value: Any, expected: Any) -> bool:
        """Whether two values are equal as JSON.

        Tuples and arrays count as lists, keys as strings, floats may differ in the last digits, and `True` is not 1.
        """
        if type(value).__module__ == "numpy":
            value = value.tolist()
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
            # `True == 1` in Python, but not in JSON.
            return value is expected
        if isinstance(expected, float) and isinstance(value, (int, float)):
            return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
        return type(value) in (str, int, float, type(None)) and value == expected

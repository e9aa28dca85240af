"""Which asserts of the tests held.

In: reports of test code, whose asserts were rewritten. Out: how many statements held, and why the first did not.
Invariant: nothing holds of a program that is no longer there, and no assert counts twice.
"""

from __future__ import annotations

import math

from gspo.reward.sandbox.inside.link import Gone, words
from gspo.reward.sandbox.inside.remote import Remote, identical

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

    from gspo.reward.sandbox.inside.link import Link

_CLOSE = 1e-9


class Tally:
    """Counts asserts by the statement: one that is run in a loop holds if it always did. `__gspo__` in test code, whose
    asserts were rewritten to report here."""

    def __init__(self, asserts: list[int], link: Link) -> None:
        self._asserts, self._link = asserts, link
        self._steps: list[dict[int, bool]] = []
        self._cuts: set[int] = set()
        self._set_state: set[int] = set()
        self._busy: set[int] = set()
        self.why = ""

    def next_step(self) -> None:
        self._steps.append({})

    def needs(self, number: int, value: Any) -> None:
        """A part of an assert's condition, before the last one."""
        if not value:
            self.failure(number, AssertionError("wrong answer"))

    def holds(self, number: int, value: Any) -> None:
        """An assert's condition, or its last part, evaluated. Nothing holds of a program that is no longer there."""
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
            raise Gone

    def cut(self, error: BaseException) -> None:
        """A step ended before its end."""
        self._cuts.add(len(self._steps) - 1)
        self.note(error)
        if self._link.brief:
            raise Gone

    def note(self, error: BaseException) -> None:
        self.why = self.why or words(error)

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

    identical = staticmethod(identical)

    @staticmethod
    def same(value: Any, expected: Any) -> bool:
        """Equal as JSON: tuples and arrays are lists, keys are text, floats may differ in the last digits, true is not
        1."""
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
            return value is expected
        if isinstance(expected, float) and isinstance(value, (int, float)):
            return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
        return type(value) in (str, int, float, type(None)) and value == expected

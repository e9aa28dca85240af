"""A calculator as a tool, for problems with a number as their answer.

In: rows with `answer`. Out: 1 if the last number of the last message is the answer, less `call_cost` per turn with a
call. Invariant: the calculator has its own parser, with limits on length and size: what a model writes is never run as
code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from gspo.environment import Environment, ToolCall, ToolError, tool
from gspo.environment.environment import Reply

LONGEST = 200
"""Maximum length of an expression in characters."""
LARGEST = 10**50
"""Results beyond this are refused."""
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_LAST = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


class Calculator(Environment):
    """Problems whose answer is a number, and a tool that calculates."""

    def __init__(self, call_cost: float = 0.0, demonstrated_calls: float = 0.5) -> None:
        """`demonstrated_calls` is the share of demonstrations that use the tool, whether it is needed or not."""
        self._call_cost = call_cost
        self._demonstrated_calls = demonstrated_calls
        self._answer = ""

    def reset(self, row: Mapping[str, Any]) -> None:
        self._answer = str(row["answer"])

    @tool
    def calculate(self, expression: str) -> str:
        """Calculate the value of an expression with numbers, + - * / and parentheses.

        Args:
            expression: What to calculate, for example (3 + 4) * 12.
        """
        return _text(_Parser(expression).value())

    def step(self, message: Mapping[str, Any]) -> Reply:
        observations, reward, done = super().step(message)
        return observations, reward if done or not self._call_cost else -self._call_cost, done

    def score(self, message: Mapping[str, Any]) -> float:
        numbers = _LAST.findall(message["content"])
        return float(bool(numbers) and numbers[-1].replace(",", "") == self._answer.replace(",", ""))

    def demonstrate(self, row: Mapping[str, Any]) -> Sequence[str | ToolCall]:
        if "expression" not in row:
            return ()
        if self.rng.random() < self._demonstrated_calls:
            return ToolCall(name="calculate", arguments={"expression": row["expression"]}), str(row["answer"])
        return (str(row["answer"]),)


ENVIRONMENT = Calculator


class _Parser:
    """Recursive descent over `sum := product ([+-] product)*`, `product := factor ([*/] factor)*`."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise ToolError(f"the expression is longer than {LONGEST} characters")
        self._text = text.replace(" ", "").replace("×", "*").replace("÷", "/")
        self._at = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._text):
            raise ToolError(f"cannot read the expression from {self._text[self._at : self._at + 20]!r} on")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._take("*/"):
            factor = self._factor()
            if sign == "/" and not factor:
                raise ToolError("division by zero")
            value = value * factor if sign == "*" else value / factor
            if max(abs(value.numerator), value.denominator) > LARGEST:
                raise ToolError("the result is too large")
        return value

    def _factor(self) -> Fraction:
        if sign := self._take("+-"):
            factor = self._factor()
            return -factor if sign == "-" else factor
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise ToolError("a parenthesis is not closed")
            return value
        number = _NUMBER.match(self._text, self._at)
        if number is None:
            raise ToolError(f"expected a number at {self._text[self._at : self._at + 20]!r}")
        self._at = number.end()
        return Fraction(number[0])

    def _take(self, characters: str) -> str:
        found = self._text[self._at : self._at + 1]
        if not found or found not in characters:
            return ""
        self._at += 1
        return found


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"

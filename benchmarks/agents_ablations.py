"""Environments with a broken tool, to see whether a trained model relies on it, or without it (`agents.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gspo.environment import ToolError, tool
from gspo.environment.environments.calculator import Calculator
from gspo.environment.environments.python_tool import PythonTool


class Disabled(Calculator):
    """Every call is an error."""

    @tool
    def calculate(self, expression: str) -> str:
        """Calculate the value of an expression with numbers, + - * / and parentheses."""
        raise ToolError("the calculator is not available")


class Shuffled(Calculator):
    """The result of another problem of the same kind."""

    @tool
    def calculate(self, expression: str) -> str:
        """Calculate the value of an expression with numbers, + - * / and parentheses."""
        if "*" in expression:
            return str(self.rng.randint(100, 999) * self.rng.randint(10, 99))
        return str(self.rng.randint(100, 999) + self.rng.randint(0, 9))


class PythonDisabled(PythonTool):
    """Every call is an error."""

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Every program starts from scratch, without files and network.

        Args:
            code: The program, for example print(3 + 4).
        """
        raise ToolError("Python is not available")


class PythonShuffled(PythonTool):
    """What a program for another problem might have printed."""

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Every program starts from scratch, without files and network.

        Args:
            code: The program, for example print(3 + 4).
        """
        return f"{self.rng.randint(1, 10 ** self.rng.randint(1, 4))}\n"


class PythonLeftOut(PythonTool):
    """The same problems and reward without a tool: the first message is the answer."""

    @property
    def tools(self) -> Mapping[str, Callable[..., Any]]:
        return {}

"""The calculator environment with a broken tool, to see whether a trained model relies on it (`agents.py`)."""

from __future__ import annotations

from gspo.environment import ToolError, tool
from gspo.environment.environments.calculator import Calculator


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

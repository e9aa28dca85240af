"""A Python interpreter as a tool, for problems with a number as their answer.

In: rows with `answer`. Out: 1 if the last number of the last message is the answer; without `answer`, no reward, so
that `reward.functions` judge. Invariant: programs run in the sandbox of `code_tests`, each in a process of its own. An
exception, a time limit or an attack is what the model sees; only a failure of the sandbox leaves the completion
unscored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.data.numbers import last_number
from gspo.environment import Environment, tool
from gspo.reward.final_answer import after_thinking
from gspo.reward.sandbox.grade import Limits, run_script
from gspo.reward.sandbox.probe import sandbox_level


class PythonTool(Environment):
    """Problems whose answer is a number, and a tool that runs Python."""

    def __init__(self, limit_s: float = 2.0, memory_mb: int = 512, longest_output: int = 2000) -> None:
        self._limits = Limits(limit_s=limit_s, memory_mb=memory_mb)
        self._level = sandbox_level()
        self._longest_output = longest_output
        self._answer: str | None = None

    def reset(self, row: Mapping[str, Any]) -> None:
        self._answer = None if row.get("answer") is None else str(row["answer"])

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Every program starts from scratch, without files and network.

        Args:
            code: The program, for example print(3 + 4).
        """
        done = run_script(code, self._level, self._limits)
        shown = done.output
        if len(shown) > self._longest_output:
            # The end matters most: it has the result, or the exception.
            shown = f"… (truncated)\n{shown[-self._longest_output :]}"
        if done.problem:
            shown = f"{shown.rstrip()}\n({done.problem})".lstrip()
        return shown or "(the program printed nothing)"

    def score(self, message: Mapping[str, Any]) -> float | None:
        if self._answer is None:
            return None
        said = last_number(after_thinking(message["content"]) or "")
        return float(said is not None and said == last_number(self._answer))


ENVIRONMENT = PythonTool

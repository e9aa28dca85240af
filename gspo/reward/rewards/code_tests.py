"""1 if the completion's Python program passes the row's tests, else 0. Programs run in a sandbox; see docs/sandbox.md.

The program is the completion's last fenced Python block, else its last unlabeled block, else the whole completion. The
row's tests are in `tests`, a list of one kind: `{"input": ..., "output": ...}` for standard input and output,
`{"function": ..., "args": [...], "expected": ...}` for calls, or lines of test code with asserts; or in `test_list` as
in MBPP; or in `test` and `entry_point` as in HumanEval. The program never sees the expected values. With
`all_or_nothing = false` the score is the fraction of tests passed. A program that does not finish, dies or attacks the
sandbox scores 0. If the sandbox or the tests themselves fail, the completion stays unscored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from gspo.errors import ConfigError
from gspo.reward.completion_text import completion_text
from gspo.reward.function import NotedScore
from gspo.reward.sandbox import grade
from gspo.reward.sandbox.grade import Grade, Grader, Limits
from gspo.reward.sandbox.level import Level
from gspo.reward.sandbox.probe import sandbox_level
from gspo.reward.sandbox.suite import COLUMNS, read_suite
from gspo.reward.traits import ForeignCode, RewardTraits

EXAMPLE: dict[str, Any] = {
    "completion": "Add them:\n```python\ndef add(a, b):\n    return a + b\n```",
    "columns": {"tests": [{"function": "add", "args": [1, 2], "expected": 3}, "assert add('a', 'b') == 'ab'"]},
    "options": {},
}
SOLUTIONS = ("canonical_solution", "code", "solution", "answer")
"""Fields that may hold a program that passes the row's tests."""


def _known_answers(columns: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    programs = [columns[name] for name in SOLUTIONS if isinstance(columns.get(name), str)]
    return [f"```python\n{program}\n```" for program in programs[:1]]


def _sandbox(options: Mapping[str, Any]) -> Level:
    return sandbox_level(**{k: v for k, v in options.items() if k in ("python", "packages", "allow_unsafe")})


def _foreign_code(options: Mapping[str, Any]) -> list[ForeignCode]:
    """The Python that is started before the sandbox confines it, and programs without a sandbox."""
    where = "reward.options.code_tests"
    found = []
    if program := str(options.get("python") or ""):
        found.append(ForeignCode(what=f"{where}.python starts {program}", key=f"start {program}", file=program))
    if options.get("allow_unsafe"):
        what = f"{where}.allow_unsafe lets programs that the model writes run without a sandbox"
        found.append(ForeignCode(what=what, key="no sandbox"))
    return found


TRAITS = RewardTraits(known_answers=_known_answers, sandbox=_sandbox, foreign_code=_foreign_code)
# A block in another language is not the program.
_FENCES = ("python", "python3", "py")
_TRICKS = re.compile(
    r"\b(?:exit|quit|_exit|abort)\(|__eq__|\bsys\s*\.\s*modules|\bset(?:trace|profile)\b|\b_getframe\b"
    r"|\bget_objects\b|\batexit\b|\bbuiltins\b|/proc/"
)
"""Signs of reward hacking. Some have legitimate uses, so they are counted and not punished."""


def score(
    prompts: list[Any],
    completions: list[Any],
    *,
    limit_s: float = 5.0,
    memory_mb: int = 512,
    all_or_nothing: bool = True,
    python: str = "",
    packages: bool = False,
    allow_unsafe: bool = False,
    **columns: Any,
) -> list[NotedScore | Exception]:
    rows = [{name: columns[name][i] for name in COLUMNS if name in columns} for i in range(len(completions))]
    suites = [read_suite(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    if not suites:
        return []
    level = sandbox_level(python, packages, allow_unsafe)
    limits = Limits(limit_s=limit_s, memory_mb=memory_mb)
    with ExitStack() as stack:
        # One judge per set of tests, so that it is started, and the tests are run without a program, only once.
        graders = {suite: stack.enter_context(Grader(suite, level, limits)) for suite in set(suites)}
        programs = [program_of(completion_text(c)) for c in completions]
        grades = [graders[s].grade(program) for s, program in zip(suites, programs, strict=True)]
    return [
        g if isinstance(g, Exception) else _noted_score(g, program, all_or_nothing)
        for g, program in zip(grades, programs, strict=True)
    ]


def about(python: str = "", packages: bool = False, allow_unsafe: bool = False, **options: Any) -> str:
    """The sandbox in use."""
    return f"sandbox {sandbox_level(python, packages, allow_unsafe)}"


def longest_s(limit_s: float = 5.0, **options: Any) -> float:
    """Each program has its own time limit, so a call with many that time out is slow but does not hang."""
    return grade.longest_s(limit_s)


def _noted_score(result: Grade, program: str, all_or_nothing: bool) -> NotedScore:
    """The value, annotated with how the program ended and whether it shows signs of reward hacking."""
    notes = (str(result.end), *(("trick",) if _TRICKS.search(program) else ()))
    return NotedScore(result.value(all_or_nothing=all_or_nothing), *notes)


def check(
    limit_s: Any = 5.0,
    memory_mb: Any = 512,
    all_or_nothing: Any = True,
    python: Any = "",
    packages: Any = False,
    allow_unsafe: Any = False,
) -> None:
    """Reject invalid options, and a machine without a sandbox, before the run starts."""
    where = "reward.options.code_tests"
    if not _is_number(limit_s) or not 0 < limit_s <= 3600:
        raise ConfigError(f"{where}.limit_s: {limit_s!r}: must be a number of seconds above 0")
    if not _is_number(memory_mb) or memory_mb < 64 or int(memory_mb) != memory_mb:
        raise ConfigError(f"{where}.memory_mb: {memory_mb!r}: must be a whole number, at least 64")
    if not isinstance(python, str):
        raise ConfigError(f"{where}.python: {python!r}: must be the path of a Python")
    flags = {"all_or_nothing": all_or_nothing, "packages": packages, "allow_unsafe": allow_unsafe}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{where}.{name}: {value!r}: must be true or false")
    sandbox_level(python, packages, allow_unsafe)


def program_of(completion: str) -> str:
    """The program in a completion. A block that is never closed extends to the end of the completion."""
    named: str | None = None
    unnamed: str | None = None
    block: list[str] | None = None
    label = ""
    for line in completion.split("\n"):
        mark = line.strip()
        if block is None and mark.startswith("```"):
            block = []
            label = mark[3:].strip().lower()
        elif block is not None and mark == "```":
            named, unnamed = _latest_blocks(block, label, named, unnamed)
            block = None
        elif block is not None:
            block.append(line)
    if block is not None:
        named, unnamed = _latest_blocks(block, label, named, unnamed)
    return named if named is not None else unnamed if unnamed is not None else completion


def _latest_blocks(
    block: list[str], label: str, named: str | None, unnamed: str | None
) -> tuple[str | None, str | None]:
    """The last Python block and the last unlabeled block, once `block` is closed."""
    text = "\n".join(block)
    return (text, unnamed) if label in _FENCES else (named, text if not label else unnamed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Grade programs with tests that run in a separate process.

In: programs and a `Suite`. Out: a `Grade` per program, or the exception that prevented grading. Invariant: the
program's process receives inputs and nothing else. Its answers are passed as text to the judge's process, where the
tests run. Whatever the program does wrong determines its grade, even if it kills its sandbox or the judge. Failures of
the sandbox or the tests are exceptions, never a 0. A program cannot choose between the two: the tests first run without
any program, and only what fails then is their fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeVar

from gspo.errors import RewardError
from gspo.reward.function import one_line
from gspo.reward.sandbox.box import START_S, Box, DeadlinePassed, ProcessExited, SandboxError
from gspo.reward.sandbox.clock import PATIENCE, PATIENCE_ALONE, SLACK, Clock, MachineBusy, ProgramWaited
from gspo.reward.sandbox.inside.candidate import no_references
from gspo.reward.sandbox.inside.values import ValueRefused, decode, encode, parse
from gspo.reward.sandbox.level import Level
from gspo.reward.sandbox.machine_lock import machine_lock
from gspo.reward.sandbox.suite import Suite

PROGRAM = 2**18
"""Maximum length of a program in characters."""
SPARE_S = 1.0
"""Time for the tests themselves, after a program has used up its own."""
PREPARE_S = 10.0
"""Time limit for parsing the tests."""
JUDGE_S = 3600.0
"""CPU time limit of a judge, which serves many programs."""
SPIN = b'"while True: pass"'
"""The reference program: it never waits."""
SPIN_S = 0.1
"""Time to send the reference program."""
LOADED = b"vnull"
_FIX = "fix the row, or set reward.options.code_tests.packages = true if a package is missing"
_SIGXFSZ = 25


class End(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    WRONG = "wrong"
    """A test failed."""
    ERROR = "error"
    """It raised, or is not valid Python."""
    TIMEOUT = "timeout"
    DIED = "died"
    """Its process ended before the tests did."""
    OUTPUT = "output"
    """It wrote too much."""
    PROTOCOL = "protocol"
    """It wrote into the answer pipe."""
    EMPTY = "empty"
    """There is no program."""


class JudgeExited(Exception):
    """The judge's process ended during a program's tests."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The test result of one program."""

    passed: int = 0
    total: int
    end: End
    detail: str = ""

    def value(self, *, all_or_nothing: bool) -> float:
        """From 0 to 1."""
        if all_or_nothing:
            return 1.0 if self.end is End.PASSED else 0.0
        return self.passed / self.total


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    limit_s: float
    memory_mb: int


def longest_s(limit_s: float) -> float:
    """The most time that grading one program can take: two waits for the lock, two tries and a repeated one, each with
    the tests' own time."""
    return (6 * PATIENCE + 2 * PATIENCE_ALONE + 3) * limit_s + 4 * SPARE_S + 2 * START_S


def grade_all(programs: Sequence[str], suite: Suite, level: Level, limits: Limits) -> list[Grade | Exception]:
    """Grade programs one after the other, each in a fresh sandbox."""
    with Grader(suite, level, limits) as grader:
        return [grader.grade(program) for program in programs]


class Grader:
    """Owns the judge, which serves all programs with the same tests."""

    def __init__(self, suite: Suite, level: Level, limits: Limits) -> None:
        self._suite = suite
        self._level = level
        self._limits = limits
        self._judge: _Judge | None = None
        self._suite_error: RewardError | None = None
        """Why these tests cannot be used for any program."""

    def grade(self, program: str) -> Grade | Exception:
        """Grade one program."""
        if not program.strip() or not _encodable(program):
            return self._grade(0, "empty: there is no program")
        if len(program) > PROGRAM:
            return self._grade(0, f"error: the program is longer than {PROGRAM} characters")
        source = encode(self._suite.program(program), len).encode()  # plain text, so the reference callback is unused
        try:
            return self._grade_with_retry(source)
        except (RewardError, MachineBusy) as error:
            return error

    def close(self) -> None:
        """Kill the judge."""
        if self._judge is not None:
            self._judge.close()
        self._judge = None

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _grade_with_retry(self, source: bytes) -> Grade:
        grade = self._by_output if self._suite.pairs else self._by_judge
        return _with_retry(self._level, self._limits, lambda reference: grade(source, reference))

    def _by_output(self, source: bytes, reference: Box | None) -> Grade:
        with self._box("candidate", mode="stdin") as box:
            box.ready()
            program = _Program(box, self._limits.limit_s, reference)
            program.ask(source)
            results = [*self._outputs(program)]
        return self._grade(sum(not why for why in results), next(filter(None, results), ""))

    def _outputs(self, program: _Program) -> Iterator[str]:
        """For each test the reason it failed, or an empty string.

        All tests run even after a failure. Otherwise a program could infer from a missing request that it was wrong.
        """
        for given, expected in self._suite.pairs:
            answer = program.ask(encode(given, len).encode())
            why = program.gone or _difference(answer, expected)
            yield why
            if program.gone:
                return

    def _by_judge(self, source: bytes, reference: Box | None) -> Grade:
        if self._suite_error is not None:
            raise self._suite_error
        start = time.monotonic()
        retried = False
        while True:
            try:
                return self._conversation(source, reference)
            except JudgeExited as error:
                self.close()
                if time.monotonic() - start > self._limits.limit_s / 2 or retried:
                    return self._grade(0, f"died: its answers end the tests' process: {error}")
                retried = True  # if the program's answers killed the judge, it happens again; otherwise it was chance

    def _conversation(self, source: bytes, reference: Box | None) -> Grade:
        with self._box("candidate") as box:
            self._judge = self._judge or _Judge(self._box("judge"), self._suite, self._limits)
            try:
                box.ready()
                self._judge.prepare()
                program = _Program(box, self._limits.limit_s, reference)
                loaded = program.ask(source)
                if program.gone or loaded != LOADED:
                    return self._grade(0, program.gone or _raised(loaded))
                return self._judged(self._judge.verdict(program), program)
            except DeadlinePassed:
                try:
                    self._blame(self._judge, program)
                finally:
                    self.close()  # the judge is still busy with this program
                return self._grade(0, f"timeout: with its answers the tests take more than {self._limits.limit_s:g} s")
            except (RewardError, MachineBusy, ProgramWaited) as error:
                self.close()
                if isinstance(error, RewardError) and not isinstance(error, SandboxError):
                    self._suite_error = error
                raise

    def _blame(self, judge: _Judge, program: _Program) -> None:
        """Decide who is to blame for tests that exceed their time, by the rule of `Clock`.

        The program is to blame if the tests used that much CPU time, or could have. Otherwise the program is retried
        alone, and if that does not help, the machine is to blame.
        """
        enough_s = (1 - SLACK) * self._limits.limit_s
        if judge.spent_s() >= enough_s:
            return
        if program.reference is None:
            raise ProgramWaited
        if program.reference_test_s() < enough_s:
            raise MachineBusy("a program's tests waited for a CPU; use fewer reward.workers")

    def _judged(self, verdict: Mapping[str, Any], program: _Program) -> Grade:
        """The grade for a verdict. A program that exited never gets full marks, whatever the tests say."""
        passed, total = verdict["passed"], verdict["total"]
        gone = program.gone or verdict["gone"]
        if passed == total and not gone:
            return self._grade(passed, "", total)
        return self._grade(min(passed, total - 1), gone or _reason(verdict["why"]), total)

    def _box(self, role: str, mode: str = "calls") -> Box:
        limit_s = JUDGE_S if role == "judge" else self._limits.limit_s
        return Box(self._level, role, mode=mode, limit_s=limit_s, memory_mb=self._limits.memory_mb)

    def _grade(self, passed: int, why: str, total: int = 0) -> Grade:
        kind, _, detail = why.partition(": ")
        return Grade(
            passed=passed,
            total=total or self._suite.total,
            end=End(kind) if why else End.PASSED,
            detail=one_line(detail),
        )


def _with_retry(level: Level, limits: Limits, run: Callable[[Box | None], Result]) -> Result:
    """Run a program next to others, and retry it alone if its time passed without CPU use."""
    patience_s = PATIENCE * limits.limit_s
    try:
        with machine_lock(alone=False, patience_s=patience_s):
            return run(None)
    except ProgramWaited:
        with machine_lock(alone=True, patience_s=patience_s), _reference_process(level, limits) as reference:
            return run(reference)


@contextmanager
def _reference_process(level: Level, limits: Limits) -> Iterator[Box]:
    """A busy-looping process in a sandbox of the same kind. A program could get as much CPU time as it does."""
    with Box(level, "candidate", limit_s=JUDGE_S, memory_mb=limits.memory_mb) as reference:
        reference.ready()
        try:
            reference.ask(SPIN, time.monotonic() + SPIN_S)
        except DeadlinePassed:
            pass  # expected: the program never answers
        except ProcessExited as error:
            raise SandboxError(f"sandbox: the reference process ended: {error}") from None
        yield reference


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """What a script has done."""

    output: str = ""
    """What it printed, with the traceback of an exception that it did not catch."""
    problem: str = ""
    """Why it ended otherwise than by itself, or with an exit code; empty if it did not."""


_SCRIPT = """import sys, traceback
sys.stderr = sys.stdout
try:
    exec(compile({program!r}, "<program>", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    # Without the frames of this wrapper and of the sandbox.
    traceback.print_exception(type(error), error, error.__traceback__.tb_next)
    sys.exit(1)
"""


def run_script(program: str, level: Level, limits: Limits) -> ScriptRun:
    """Run a program once in the sandbox. What the program causes is in the result; a failure of the sandbox, or a
    machine without a free processor, is a `RewardError`."""
    if len(program) > PROGRAM or not _encodable(program):
        return ScriptRun(problem=f"the program is longer than {PROGRAM} characters, or no valid text")
    source = encode(_SCRIPT.format(program=program), len).encode()

    def run(reference: Box | None) -> ScriptRun:
        with Box(level, "candidate", mode="stdin", limit_s=limits.limit_s, memory_mb=limits.memory_mb) as box:
            box.ready()
            running = _Program(box, limits.limit_s, reference)
            running.ask(source)
            answer = running.ask(encode("", len).encode())
        match _parsed(answer, b"o"):
            case [int(code), str(output)]:
                ending = f"signal {-code}" if code < 0 else f"exit code {code}" if code else ""
                return ScriptRun(output=output, problem=ending)
        return ScriptRun(problem=running.gone or "an answer of unknown form")

    try:
        return _with_retry(level, limits, run)
    except MachineBusy as error:
        raise SandboxError(f"sandbox: {error}; use fewer environment.processes") from None


class _Program:
    """The candidate's process, with a clock that runs while it works."""

    def __init__(self, box: Box, limit_s: float, reference: Box | None) -> None:
        self._box = box
        self._limit_s = limit_s
        self.reference = reference
        self._clock = Clock(box, limit_s, reference)
        self._reference_before_s = reference.cpu_s() if reference else 0.0
        self.deadline = time.monotonic() + limit_s + SPARE_S
        """When the tests must be done with it. The program's own time is added."""
        self.gone = ""
        """Why there are no more answers."""

    def reference_test_s(self) -> float:
        """CPU time of the reference while the tests worked."""
        return self.reference.cpu_s() - self._reference_before_s - self._clock.reference_s if self.reference else 0.0

    def ask(self, line: bytes) -> bytes:
        """The program's answer; empty if it is gone."""
        if self.gone:
            return b""
        try:
            self._box.check_silence()
            self._box.send(line)
            answer = self._receive()
            # The kinds that candidate.py sends. Checked here, because the judge must not see anything else.
            if answer[:1] not in (b"v", b"e", b"c", b"o") or not answer.isascii():
                raise ProcessExited("protocol: an answer of unknown form")
            return answer
        except DeadlinePassed:
            self.gone = f"timeout: more than {self._limit_s:g} s"
        except ProcessExited as error:
            self.gone = str(error)
        return b""

    def _receive(self) -> bytes:
        self._clock.start()
        try:
            answer = self._wait()
        finally:
            self.deadline += self._clock.stop()
        self._clock.check()
        return answer

    def _wait(self) -> bytes:
        while True:
            with suppress(DeadlinePassed):
                return self._box.receive(self._clock.deadline)
            self._clock.extend()


class _Judge:
    """The judge's process. Forwards its questions to a program and the answers back."""

    def __init__(self, box: Box, suite: Suite, limits: Limits) -> None:
        self._box = box
        self._limits = limits
        self._suite = suite
        self._ready = False
        self._waited = self._cpu_s = 0.0
        self._own_s = 0.0
        """Time that the tests take without a program."""

    def prepare(self) -> None:
        """Wait for the process, send it the tests, and run them once without a program."""
        if not self._ready:
            self._box.ready()
            self._start()
            self._dry_run()
            self._ready = True

    def _dry_run(self) -> None:
        """Run the tests without a program. A failure here is the tests' fault; a later one is the program's."""
        start = time.monotonic()
        limit_s = self._limits.limit_s
        self._waited = self._box.waited()
        try:
            answer = self._ask(b"t", start + limit_s + SPARE_S)
        except DeadlinePassed:
            raise RewardError(f"the tests themselves took more than {limit_s:g} s; raise limit_s") from None
        except ProcessExited as error:
            raise SandboxError(f"sandbox: the tests' process ended: {error}; raise memory_mb") from None
        why = decode(answer[1:].decode(), no_references)
        if why:
            raise RewardError(f"the row's tests do not work in the sandbox: {one_line(why, 300)}; fix the row")
        # Added to the deadline of each program: slow tests are not its fault.
        self._own_s = time.monotonic() - start

    def _start(self) -> None:
        try:
            answer = self._box.ask(self._job(), time.monotonic() + PREPARE_S)
        except (DeadlinePassed, ProcessExited) as error:
            raise SandboxError(f"sandbox: the tests' process does not answer: {error or 'too slow'}") from None
        if answer != b"v":
            why = one_line(decode(answer[1:].decode(), no_references))
            raise RewardError(f"the row's tests do not work: {why}; {_FIX}")

    def verdict(self, program: _Program) -> dict[str, Any]:
        """The tests' verdict. Raises `DeadlinePassed` or `JudgeExited` if the program's answers overwhelm the judge."""
        self._waited = self._box.waited()
        self._cpu_s = self._box.cpu_s()
        try:
            return self._converse(program)
        except ProcessExited as error:
            raise JudgeExited(str(error)) from None

    def spent_s(self) -> float:
        """CPU time of the tests since the last program started."""
        return self._box.cpu_s() - self._cpu_s

    def close(self) -> None:
        self._box.close()

    def _converse(self, program: _Program) -> dict[str, Any]:
        line = b"."
        while True:
            message = self._ask(line, program.deadline + self._own_s, program if program.reference else None)
            if message[:1] == b"!":
                verdict: dict[str, Any] = decode(message[1:].decode(), no_references)
                return verdict
            answer = program.ask(message[1:])
            line = b"x" + program.gone.encode() if program.gone else b"=" + answer

    def _ask(self, line: bytes, deadline: float, alone: _Program | None = None) -> bytes:
        """The judge's next message.

        Like a program, the judge gets back the time that it waited for a CPU. With a reference process, it may take
        until one of the two has used the limit in CPU time.
        """
        self._box.check_silence()
        self._box.send(line)
        most = deadline + (PATIENCE - 1) * self._limits.limit_s
        allowed = deadline
        while True:
            try:
                return self._box.receive(allowed)
            except DeadlinePassed:
                fair = min(deadline + self._box.waited() - self._waited, most)
                if fair - allowed > SLACK * self._limits.limit_s:
                    allowed = fair
                elif alone and time.monotonic() < deadline + PATIENCE_ALONE * self._limits.limit_s:
                    missing = self._limits.limit_s - max(self.spent_s(), alone.reference_test_s())
                    if missing <= SLACK * self._limits.limit_s:
                        raise
                    allowed = time.monotonic() + missing
                else:
                    raise

    def _job(self) -> bytes:
        suite = self._suite
        job = {
            "code": [suite.prelude, *suite.steps],
            "modules": list(suite.modules),
            "imports": list(suite.imports),
            "names": list(suite.names),
            "asserts": list(suite.asserts),
        }
        return encode(job, len).encode()


def _difference(answer: bytes, expected: str) -> str:
    match _parsed(answer, b"o"):
        case [int(code), str(output)]:
            pass
        case _:
            return "protocol: an answer of unknown form"
    if code == -_SIGXFSZ:
        return "output: it printed too much"
    if code:
        return f"died: signal {-code}" if code < 0 else f"error: exit code {code}"
    return "" if _plain(output) == _plain(expected) else "wrong: another output"


def _plain(text: str) -> list[str]:
    """Lines without trailing whitespace, and without trailing empty lines."""
    # Judges of programming contests ignore trailing whitespace, too.
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _raised(answer: bytes) -> str:
    match _parsed(answer, b"e"):
        case [str(name) | [int(), str(name), _], str(message), _, _]:
            return f"error: {name}: {message}"
    return "protocol: an answer of unknown form"


def _parsed(answer: bytes, kind: bytes) -> Any:
    """The JSON that a program's process sent. Tagged values are not decoded, so a program cannot keep this process
    busy."""
    try:
        return parse(answer[1:].decode()) if answer[:1] == kind else None
    except ValueRefused:
        return None


def _reason(why: str) -> str:
    return f"wrong: {why}" if why.startswith("AssertionError") else f"error: {why or 'some tests did not run'}"


def _encodable(program: str) -> bool:
    """Whether it is valid text. A completion can be truncated in the middle of a character."""
    return not any("\ud800" <= c <= "\udfff" for c in program)

"""Run the tests against a program in another process.

In: test code, and the program's answers as typed JSON. Out: questions to the program, and finally a verdict. Invariant:
no code of the program runs here. Values are compared here, as built-in types and data types of the standard library.
Other objects arrive as a `Remote`, which never equals plain data and supports only the operations that `Remote`
defines. Any failure while a program is judged is the program's fault, because the tests were run without a program
before.

Lines sent start with `?` (a question for the program, or the answer to one of its own) or `!` (the verdict). Lines
received start with `=` (the program's answer), `x` (there is no answer, with the reason), `t` (run the tests without a
program) or `.` (start with the next program).
"""

from __future__ import annotations

import json.decoder  # noqa: F401 - `_json` raises its exception
import random
import sys

from gspo.reward.sandbox.inside import confine
from gspo.reward.sandbox.inside.candidate import READY, Channel, no_references
from gspo.reward.sandbox.inside.evaluate import guarded
from gspo.reward.sandbox.inside.link import DummyLink, Gone, Link, words
from gspo.reward.sandbox.inside.remote import CLASS, Remote
from gspo.reward.sandbox.inside.tally import Tally
from gspo.reward.sandbox.inside.values import decode, encode

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Confine this process, then judge one program after the other."""
    requests, answers = confine.claim_pipes()
    confine.restrict_files(settings)
    confine.restrict_calls(settings)
    channel = Channel(requests, answers)
    confine.silence_stderr()
    channel.send(READY)
    job = decode(channel.next(), no_references)
    try:
        prelude, *steps = [compile(text, "<tests>", "exec", dont_inherit=True) for text in job["code"]]
        # Before any program: what fails here is the row's fault.
        _namespace(job, prelude, steps)
        for name in job["imports"]:
            __import__(name)
    except Exception as error:
        channel.send("x" + encode(words(error), len))
        return
    channel.send(READY)
    while True:
        request = channel.next()
        if request == "t":
            channel.send("!" + encode(_dry_run(job, prelude, steps), len))
        else:
            channel.send("!" + encode(_judge(job, prelude, steps, Link(channel)), len))


def _dry_run(job: dict[str, Any], prelude: Any, steps: list[Any]) -> str:
    """The reason why the tests are unusable for any program; empty if they work.

    The tests run without a program, against objects that answer every question with the same constant and functions
    that return it. Tests that such an object passes could be passed by any program.
    """
    first = DummyLink(True, ())
    passes = _full(_judge(job, prelude, steps, first))
    if first.broken:
        return first.broken
    for word in (True, False):
        # For True, the case without plain callables is `passes`, which is known already.
        lies = ([] if word else [()]) + [("method",)]
        lying = (word and passes) or any(_passes(job, prelude, steps, word, plain) for plain in lies)
        if lying and not _passes(job, prelude, steps, word, ("method", "function")):
            return (
                f"an object that answers {word} to everything passes them; they trust the program's own operators and "
                "methods, so compare something with an expected value"
            )
    return ""


def _passes(job: dict[str, Any], prelude: Any, steps: list[Any], word: bool, plain: tuple[str, ...]) -> bool:
    """Whether a constant answer passes the tests. Stops at the first failure."""
    return _full(_judge(job, prelude, steps, DummyLink(word, plain, brief=True)))


def _full(verdict: dict[str, Any]) -> bool:
    return bool(verdict["passed"] == verdict["total"] and not verdict["gone"])


def _judge(job: dict[str, Any], prelude: Any, steps: list[Any], link: Any) -> dict[str, Any]:
    random.seed(0)  # randomized tests must be the same for every program
    tally = Tally(job["asserts"], link)
    try:
        names = _namespace(job, prelude, steps)
        # After the prelude ran, which could otherwise replace it.
        names["__gspo__"] = tally
        for name in job["names"]:
            _bind(name, names, link)
        for step in steps:
            tally.next_step()
            _attempt(step, names, tally)
    except Gone:
        pass
    except BaseException as error:  # for example a MemoryError caused by the program's answers
        tally.note(error)
        link.gone = link.gone or "error: the tests could not continue"
    return {**tally.result(bool(link.gone)), "why": tally.why, "gone": link.gone}


def _namespace(job: dict[str, Any], prelude: Any, steps: list[Any]) -> dict[str, Any]:
    """The initial namespace of the tests."""
    sys.modules["tests"] = module = type(sys)("tests")  # dataclasses look up type names in their module
    names = module.__dict__
    names["__builtins__"] = guarded([prelude, *steps], names)
    exec(prelude, names)
    for name in job["modules"]:
        names[name] = names["__builtins__"]["__import__"](name)
    return names


def _bind(name: str, names: dict[str, Any], link: Any) -> None:
    # The prelude may define a stub of the function. The tests must get the program's own, or a NameError.
    names.pop(name, None)
    try:
        value = names[name] = link.ask("name", name)
        if type(value) is Remote and name[:1].isupper() and "_" not in name:
            # Decided by the name in the tests, not by the program: docs/sandbox.md, "How far a program's object is
            # trusted".
            object.__setattr__(value, "_gspo_kind", CLASS)
    except Exception:
        names["__builtins__"].pop(name, None)


def _attempt(step: Any, names: dict[str, Any], tally: Tally) -> None:
    try:
        exec(step, names)
    except Gone:
        raise
    except BaseException as error:
        tally.cut(error)

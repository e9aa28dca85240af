"""LiveCodeBench, code generation: contest problems with tests on standard input or of a method."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from gspo.suites.fields import Fields
from gspo.suites.scorers import code
from gspo.suites.suite import Suite, SuiteProblem

LARGEST = 1 << 30
"""Limit on the bytes of a problem's tests."""
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")


def _read(row: Fields) -> SuiteProblem:
    question = row.text("question_content")
    starter = row.value("starter_code") or ""
    parts = [f"### Question:\n{question}\n"]
    if starter:
        parts += [
            "### Format: You will use the following starter code to write the solution to the problem and enclose your "
            f"code within delimiters.\n```python\n{starter}\n```\n"
        ]
    else:
        parts += [
            "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
            "test on the sample inputs). Enclose your code within delimiters as follows.\n```python\n# YOUR CODE "
            "HERE\n```\n"
        ]
    parts += ["### Answer: (use the provided format with backticks)\n\n"]
    return SuiteProblem(
        problem=question,
        prompt="\n".join(parts),
        columns={"tests": [_test(row, test) for name in _TESTS for test in _tests(row, name)]},
        breakdown={name: str(row.value(name)) for name in ("difficulty", "platform") if row.value(name)},
    )


_TESTS = ("public_test_cases", "private_test_cases")


def _tests(row: Fields, name: str) -> list[Any]:
    text = row.text(name)
    try:
        found = json.loads(text if text.lstrip().startswith("[") else _decompressed(text))
    except (ValueError, binascii.Error, zlib.error, RecursionError) as error:
        raise row.error(f"field {name!r} cannot be decoded ({type(error).__name__})") from None
    if not isinstance(found, list):
        raise row.error(f"field {name!r} must hold a list of tests")
    return found


def _decompressed(text: str) -> str:
    """The JSON of private tests. They are published as a compressed pickle of one string, which is not unpickled:
    unpickling could run code. Its string is read from the list of its operations."""
    unzip = zlib.decompressobj()
    data = unzip.decompress(base64.b64decode(text, validate=True), LARGEST)
    if unzip.unconsumed_tail:
        raise ValueError("too large")
    operations = [(op.name, value) for op, value, _ in pickletools.genops(data)]
    strings = [value for name, value in operations if name in _STRINGS]
    if len(strings) != 1 or not isinstance(strings[0], str):
        raise ValueError("not a pickle of one string")
    return strings[0]


def _test(row: Fields, test: Any) -> dict[str, Any]:
    if not isinstance(test, dict) or not all(isinstance(test.get(key), str) for key in ("input", "output")):
        raise row.error("a test must have the texts 'input' and 'output'")
    if test.get("testtype") != "functional":
        return {"input": test["input"], "output": test["output"]}
    try:
        arguments = [json.loads(line) for line in test["input"].split("\n") if line.strip()]
        name = json.loads(row.text("metadata"))["func_name"]
        expected = json.loads(test["output"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise row.error("a functional test needs JSON in 'input' and 'output', and 'func_name' in metadata") from None
    method = f"Solution().{name}" if "class Solution" in (row.value("starter_code") or "") else name
    return {"function": method, "args": arguments, "expected": expected}


SUITE = Suite(
    title="LiveCodeBench",
    schema="question_content, starter_code, public_test_cases, private_test_cases, metadata, and optionally difficulty "
    "and platform",
    count=0,
    system="You are an expert Python programmer. You will be given a question (problem specification) and will "
    "generate a correct Python program that matches the specification and passes all tests. You will NOT return "
    "anything except for the program.",
    samples=10,
    temperature=0.2,
    top_p=0.95,
    max_tokens=2000,
    ks=(1, 5),
    scorer=code(limit_s=30.0),
    read=_read,
    source="LiveCodeBench, lcb_runner: prompt of chat models, default sampling; time limit of all tests of a problem",
)

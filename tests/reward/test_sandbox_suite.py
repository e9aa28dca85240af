"""Parsing a row's tests: names taken from the program, assert counts, and errors for invalid rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gspo.errors import RewardError
from gspo.reward.sandbox.suite import Suite, read_suite


def suite(prompt: Any = "", **row: Any) -> Suite:
    return read_suite(row, prompt)


def test_mbpp() -> None:
    found = suite(
        test_list=["assert f(1) == 2", "assert set(f(2)) == {3}\nassert not g(1)"],
        test_setup_code="root = Node(1)\nroot.left = Node(2)",
        test_imports=["import math"],
    )
    assert found.names == ("Node", "f", "g")
    assert found.asserts == (0, 1, 2)
    assert found.total == 3
    assert len(found.steps) == 3
    assert "import math" in found.steps[0]
    assert "assert" not in "".join(found.steps)


def test_humaneval() -> None:
    prompt = "import math\ndef helper(x):\n    return x\ndef f(x):\n    '''Doc.'''\n"
    test = (
        "def check(candidate):\n    assert True\n    for i in range(3):\n        assert candidate(i) == helper(f(i))\n"
    )
    found = suite(prompt, test=test, entry_point="f")
    assert found.names == ("f",)
    assert found.asserts == (0, 1)
    assert found.prelude == prompt
    assert found.program("    return x") == prompt + "    return x"
    assert found.program("def f(x):\n    return x") == f"{prompt}\n\ndef f(x):\n    return x"
    assert suite("Write f.", test=test, entry_point="f").names == ("f", "helper")
    chat = [{"role": "user", "content": prompt}]
    assert suite(chat, test=test, entry_point="f").prelude == prompt


def test_own_formats() -> None:
    pairs = [{"input": "1\n", "output": "2\n"}, {"input": ["1", "2"], "output": "3"}]
    assert suite(tests=pairs).pairs == (("1\n", "2\n"), ("1\n2", "3"))
    assert suite(tests=json.dumps(pairs)).pairs == (("1\n", "2\n"), ("1\n2", "3"))
    assert suite(tests={"inputs": ["1"], "outputs": ["2"]}).pairs == (("1", "2"),)
    assert suite(tests={"inputs": [[1]], "outputs": [2], "fn_name": "f"}).names == ("f",)
    calls = suite(tests=[{"function": "Solution().f", "args": [1], "expected": None}, "assert f(1) == 2"])
    assert calls.names == ("Solution", "f")
    assert calls.total == 2


@pytest.mark.parametrize(
    ("tests", "names", "modules"),
    [
        (["assert sum(10, 15) == 6"], ("sum",), ()),
        (["assert set(f(1)) == set(g(1))"], ("f", "g"), ()),
        (["assert f(1) == sys.getsizeof((1,))"], ("f",), ("sys",)),
        (["assert copy([1]) == [1]"], ("copy",), ()),
        (["x = 3\nassert f(x) == [i for i in range(x)]"], ("f",), ()),
        (["assert abs(f(1) - 0.1) < 1e-6"], ("f",), ()),
        (["import math\nassert math.isclose(f(1), 2)"], ("f",), ()),
        (["def close(a, b):\n    return a - b < 1\nassert close(f(1), 2)"], ("f",), ()),
    ],
)
def test_names_taken_from_the_program(tests: list[str], names: tuple[str, ...], modules: tuple[str, ...]) -> None:
    found = suite(test_list=tests)
    assert (found.names, found.modules) == (names, modules)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "has no tests; give it"),
        ({"answer": 3}, "has no tests; give it"),
        ({"tests": []}, "tests: must be a list"),
        ({"tests": {}}, "`inputs` and `outputs`"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "`inputs` and `outputs`"),
        ({"tests": "no"}, "tests: text that is not JSON"),
        ({"tests": [1]}, "tests[0]: must have"),
        ({"tests": [{"function": "f"}]}, "tests[0]: must have"),
        ({"tests": [{"input": "1"}]}, "tests[0].output: must be text"),
        ({"tests": [{"input": 1, "output": "1"}]}, "tests[0].input: must be text"),
        ({"tests": [{"input": "1", "output": "1"}, "assert f()"]}, "one kind per row"),
        ({"tests": [{"input": "x" * 2**21, "output": "1"}]}, "longer than"),
        ({"tests": [{"function": "f(1)", "args": [], "expected": 1}]}, "is not a function name"),
        ({"tests": [{"function": "f", "args": 1, "expected": 1}]}, "args must be a list"),
        ({"tests": [{"function": "f", "args": [float("nan")], "expected": 1}]}, "is not JSON"),
        ({"test_list": []}, "test_list: must be a list"),
        ({"test_list": "assert f(1)"}, "test_list: must be a list"),
        ({"test_list": ["assert f("]}, "test_list[0]: not Python"),
        ({"test_list": ["assert f(1)", "f(1)"]}, "test_list[1]: contains no assert"),
        ({"test_list": ["assert f(1)", "assert True"]}, "test_list[1]: contains no assert"),
        ({"test_list": ["assert 1 == 1"]}, "call no function of the program"),
        ({"test_list": ["assert f(1)"], "test_setup_code": "x ="}, "test_setup_code: not Python"),
        ({"test_list": ["assert f(1)"], "test_imports": [1]}, "must be text"),
        ({"test": "def check(c): assert c(1)"}, "needs a column `entry_point`"),
        ({"test": "assert f(1)", "entry_point": "f"}, "must define check"),
        ({"test": "def check(c): pass", "entry_point": "f"}, "contains no assert"),
        ({"test": "def check(c): assert c(1)", "entry_point": "f; x"}, "entry_point: 'f; x' is not a function name"),
    ],
)
def test_bad_rows(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardError) as caught:
        read_suite(row, "")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

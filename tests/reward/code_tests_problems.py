"""A small set of problems in every test format, with right programs and wrong ones that a weak grader would pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    name: str
    row: dict[str, Any]
    right: list[str]
    wrong: list[str]
    prompt: str = ""
    share: list[float] = field(default_factory=list)
    """Fraction of tests that each wrong program passes."""


HUMAN_PROMPT = '''from typing import List
import math


def poly(xs: list, x: float):
    """Value of a polynomial at x."""
    return sum(coeff * math.pow(x, i) for i, coeff in enumerate(xs))


def find_zero(xs: List[float]) -> float:
    """ Find x such that poly(x) = 0.
    >>> find_zero([1, 2])
    -0.5
    """
'''
HUMAN_TEST = """

METADATA = {'author': 'x'}


def check(candidate):
    import random
    rng = random.Random(42)
    assert True, "this prints if the first one passes"
    for _ in range(20):
        xs = [rng.randint(-9, 9), rng.randint(1, 9)]
        assert abs(poly(xs, candidate(xs))) < 1e-6
    assert candidate([4, 2]) == find_zero([4, 2]) == -2.0
"""

PROBLEMS = [
    Problem(
        name="calls",
        row={
            "tests": [
                {"function": "pairs", "args": [[3, 1, 2]], "expected": [[1, 3], [2, 2], [3, 1]]},
                {"function": "pairs", "args": [[]], "expected": []},
                {"function": "pairs", "args": [[5]], "kwargs": {"scale": 2}, "expected": [[5, 10]]},
            ]
        },
        right=["def pairs(xs, scale=0):\n    return [(x, scale * x or 4 - x) for x in sorted(xs)]"],
        wrong=[
            "def pairs(xs, scale=0):\n    return [[x, 4 - x] for x in sorted(xs)]",
            "def pairs(xs, scale=0):\n    return [[x, 4 - x] for x in xs]",
            "def pairs(xs, scale=0):\n    return []",
            "def pairs(xs):\n    return [[x, 4 - x] for x in sorted(xs)]",
        ],
        share=[2 / 3, 1 / 3, 1 / 3, 2 / 3],
    ),
    Problem(
        name="json values",
        row={
            "tests": [
                {"function": "f", "args": [0], "expected": {"a": [1, 2.5], "b": None}},
                {"function": "f", "args": [1], "expected": True},
                {"function": "f", "args": [2], "expected": 0.3},
                {"function": "f", "args": [3], "expected": {"1": "x"}},
            ]
        },
        right=["def f(x): return [{'b': None, 'a': (1, 2.5)}, True, 0.1 + 0.2, {1: 'x'}][x]"],
        wrong=[
            "def f(x): return [{'b': None, 'a': (1, 2.5)}, 1, 0.1 + 0.2, {1: 'x'}][x]",
            "def f(x): return [{'b': None, 'a': {1, 2.5}}, True, 0.31, {1: 'x', 2: 'y'}][x]",
            "def f(x): return [{'b': None}, True, '0.3', {}][x]",
            "def f(x): return [{'b': 0, 'a': (1, 2.5)}, True, float('nan'), None][x]",
        ],
        share=[3 / 4, 1 / 4, 1 / 4, 1 / 4],
    ),
    Problem(
        name="class with methods",
        row={"tests": [{"function": "Solution().twoSum", "args": [[2, 7, 11], 9], "expected": [0, 1]}]},
        right=[
            (
                "class Solution:\n"
                "    def twoSum(self, xs, t):\n"
                "        return next([i, j] for j in range(len(xs)) for i in range(j) if xs[i] + xs[j] == t)"
            )
        ],
        wrong=["class Solution:\n    def twoSum(self, xs, t): return [1, 0]", "def twoSum(xs, t): return [0, 1]"],
    ),
    Problem(
        name="standard input",
        row={
            "tests": [
                {"input": "3\n1 2 3\n", "output": "6\n"},
                {"input": "1\n-5\n", "output": "-5"},
                {"input": "0\n\n", "output": "0\n"},
            ]
        },
        right=[
            "n = int(input())\nprint(sum(map(int, input().split())))",
            "import sys\ndata = sys.stdin.read().split()\nprint(sum(map(int, data[1:])), end='  \\n\\n')",
            (
                "import sys\n"
                "input = sys.stdin.readline\n"
                "def main():\n"
                "    input(); print(sum(int(x) for x in input().split()))\n"
                "if __name__ == '__main__':\n"
                "    main()\n"
                "    exit()"
            ),
            "data = open(0).read().split()\nimport sys\nsys.stdout.write(str(sum(map(int, data[1:]))))\nsys.exit(0)",
            (
                "import threading, sys\n"
                "def main(): print(sum(map(int, sys.stdin.buffer.read().split()[1:])))\n"
                "threading.stack_size(2**26)\n"
                "threading.Thread(target=main).start()"
            ),
            "import atexit, sys\natexit.register(lambda: print(sum(map(int, sys.stdin.read().split()[1:]))))",
        ],
        wrong=[
            "n = int(input())\nprint(sum(map(int, input().split())) + 1)",
            "print(6)",
            "n = int(input())\nprint(sum(map(int, input().split())))\nraise ValueError",
            "n = int(input())\nprint(sum(map(int, input().split())))\nexit(1)",
            "n = int(input())\nprint('6', '6')",
            "n = input()\nprint(sum(map(int, input().split())))\nimport os\nos.kill(os.getpid(), 9)",
            "",
        ],
        share=[0.0, 1 / 3, 0.0, 0.0, 0.0, 0.0, 0.0],
    ),
    Problem(
        name="asserts as in MBPP",
        row={
            "test_list": [
                "assert merge([{1, 2}, {2, 3}]) == {1, 2, 3}",
                "assert set(merge([])) == set()",
                "assert not merge([set()])",
                "assert math.isclose(len(merge([{1}])), 1.0, rel_tol=0.001)",
            ],
            "test_setup_code": "",
            "test_imports": ["import math"],
        },
        right=["def merge(xs):\n    return set().union(*xs)", "merge = lambda xs: frozenset(y for x in xs for y in x)"],
        wrong=[
            "def merge(xs):\n    return sorted(set().union(*xs))",
            "def merge(xs):\n    return {1, 2, 3}",
            "def merge(xs):\n    return None",
            "def merge(xs):\n    raise AssertionError",
            (
                "class A(set):\n"
                "    def __eq__(self, other): return True\n"
                "    def __len__(self): return 1\n"
                "def merge(xs): return A()"
            ),
        ],
        share=[3 / 4, 1 / 4, 1 / 4, 0.0, 2 / 4],
    ),
    Problem(
        name="objects of the program, as in MBPP",
        row={
            "test_list": ["assert depth(root) == 3", "assert depth(root.left) == 2", "assert root.left.data == 2"],
            "test_setup_code": "root = Node(1)\r\nroot.left = Node(2)\r\nroot.left.right = Node(3)\r\nroot.data = 1",
        },
        right=[
            (
                "class Node:\n"
                "    def __init__(self, data):\n"
                "        self.data, self.left, self.right = data, None, None\n"
                "def depth(n): return 1 + max(depth(n.left), depth(n.right)) if n else 0"
            )
        ],
        wrong=[
            (
                "class Node:\n"
                "    def __init__(self, data):\n"
                "        self.data, self.left, self.right = data, None, None\n"
                "def depth(n): return 3"
            ),
            "def depth(n): return 3",
            "Node = dict\ndef depth(n): return 3",
        ],
        share=[2 / 3, 0.0, 0.0],
    ),
    Problem(
        name="operators of the program's objects",
        row={
            "tests": [
                "assert str(Box(1, 2)) == '<1, 2>'",
                "assert len(Box(1, 2, 3)) == 3",
                "box = Box(1, 2)\nbox[0] = 5\nassert box[0] == 5 and box.items == [5, 2]",
                "assert not Box()",
                "assert 2 in Box(1, 2) and [*Box(1, 2)] == [1, 2]",
                "assert Box(1).items is not None and Box(1) != Box(1)",
            ]
        },
        right=[
            (
                "class Box:\n"
                "    def __init__(self, *items): self.items = list(items)\n"
                "    def __str__(self): return '<' + ', '.join(map(str, self.items)) + '>'\n"
                "    def __len__(self): return len(self.items)\n"
                "    def __getitem__(self, i): return self.items[i]\n"
                "    def __setitem__(self, i, x): self.items[i] = x\n"
            )
        ],
        wrong=[
            "class Box:\n    def __init__(self, *items): self.items = items\n",
            (
                "class Text(str):\n"
                "    def __eq__(self, other): return True\n"
                "    __hash__ = str.__hash__\n"
                "class Box(list):\n"
                "    def __init__(self, *items): self.items = items\n"
                "    def __str__(self): return Text()\n"
                "    def __len__(self): return 3"
            ),
        ],
    ),
    Problem(
        name="a function with a built-in's name",
        row={"test_list": ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]},
        right=["def sum(a, b):\n    return __builtins__['sum'](i for i in range(1, min(a, b)) if a % i == b % i == 0)"],
        wrong=["def sum(a, b): return 6", "def total(a, b): return 6"],
        share=[1 / 2, 0.0],
    ),
    Problem(
        name="exceptions, iterators, types and conditions",
        row={
            "tests": [
                "try:\n    first([])\n    assert False\nexcept ValueError:\n    assert first([4]) == 4",
                "assert list(count(3)) == [0, 1, 2]",
                "assert next(iter(count(1))) == 0",
                "assert only([1, 'a', 2], str) == ['a']",
                "if len(only([1], int)) == 1:\n    assert only([1], int) == [1]\nelse:\n    assert False",
                "xs = [3, 1]\nassert first(xs) == 3 and xs == [3, 1]",
            ]
        },
        right=[
            (
                "def first(xs):\n"
                "    if not xs: raise ValueError('empty')\n"
                "    return xs.pop(0)\n"
                "def count(n):\n"
                "    yield from range(n)\n"
                "def only(xs, kind): return [x for x in xs if isinstance(x, kind)]"
            )
        ],
        wrong=[
            (
                "def first(xs): return xs[0]\n"
                "def count(n):\n"
                "    yield from range(n)\n"
                "def only(xs, kind): return [x for x in xs if isinstance(x, kind)]"
            ),
            (
                "def first(xs):\n"
                "    if not xs: raise ValueError\n"
                "    return xs[0]\n"
                "def count(n): return range(n, -1, -1)\n"
                "def only(xs, kind): return xs[:1]"
            ),
            (
                "def first(xs): raise SystemExit\n"
                "def count(n):\n"
                "    yield from range(n)\n"
                "    raise KeyboardInterrupt\n"
                "def only(xs, kind): return []"
            ),
        ],
        share=[5 / 6, 3 / 6, 1 / 6],
    ),
    Problem(
        name="asserts that depend on the answer",
        row={"tests": ["for x in primes(10):\n    assert x in (2, 3, 5, 7)", "assert len(primes(10)) == 4"]},
        right=["def primes(n): return [x for x in range(2, n) if all(x % y for y in range(2, x))]"],
        wrong=["def primes(n): return []", "def primes(n): return iter(())"],
    ),
    Problem(
        name="HumanEval",
        row={"test": HUMAN_TEST, "entry_point": "find_zero"},
        prompt=HUMAN_PROMPT,
        right=[
            "    return -xs[0] / xs[1]\n",
            "def find_zero(xs):\n    return -xs[0] / xs[1]\n",
            "import math\nfind_zero = lambda xs: -xs[0] / xs[1]\n",
            "\n    def helper():\n        return -xs[0]\n    return helper() / xs[1]\n",
        ],
        wrong=[
            "    return 0.0\n",
            "    xs.clear()\n    return 0.0\n",
            "def poly(xs, x): return 0.0\ndef find_zero(xs): return 0.0\n",
            "def other(xs): return -xs[0] / xs[1]\n",
            "    pass\n",
            "not a program",
        ],
    ),
    Problem(
        name="text, bytes, numbers",
        row={
            "tests": [
                "assert f(0) == 'ü\\ud800\\x00\\n'",
                "assert f(1) == b'\\x00\\xff'",
                "assert f(2) == 3 ** 500",
                "assert f(3) == 1j",
                "assert f(4) == float('inf')",
                "assert f(5) == {(1, 2): [{3}], None: range(4)}",
                "assert f(6) is None",
                "assert f(7) != f(7)",
            ]
        },
        right=[
            "def f(x): return ['ü\\ud800\\x00\\n', b'\\x00\\xff', 3 ** 500, 1j, float('inf'), "
            "{(1, 2): [{3}], None: range(4)}, None, float('nan')][x]"
        ],
        wrong=[
            "def f(x): return ['ü', '\\x00\\xff', 3.0 ** 500, 1, -float('inf'), "
            "{(1, 2): [[3]], None: range(4)}, 0, 0][x]",
        ],
        share=[0.0],
    ),
]

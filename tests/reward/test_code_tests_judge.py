"""How `code_tests` judges: right programs pass whatever their tests pass to them, and forged answers score nothing.

A failure that a program causes is a 0, never an unscored completion. A failure that the tests cause is unscored.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import numpy
import pytest
from code_tests_corpus import CASES, Case

from gspo.errors import ConfigError, RewardError
from gspo.reward.sandbox.grade import Grade, Limits, MachineBusy, grade_all
from gspo.reward.sandbox.inside.remote import INSTANCE, RESULT, Remote
from gspo.reward.sandbox.level import Level
from gspo.reward.sandbox.probe import sandbox_level
from gspo.reward.sandbox.suite import read_suite

LIMITS = Limits(limit_s=5.0, memory_mb=512)


def graded(programs: list[str], *tests: str, limits: Limits = LIMITS) -> list[Grade | Exception]:
    suite = read_suite({"tests": list(tests)}, "")
    for _ in range(10):  # retry while the machine is too busy to judge the program
        found = grade_all(programs, suite, sandbox_level(), limits)
        if not any(isinstance(grade, MachineBusy) for grade in found):
            break
    return found


def values(programs: list[str], *tests: str, limits: Limits = LIMITS) -> list[Any]:
    found = graded(programs, *tests, limits=limits)
    return [g.value(all_or_nothing=True) if isinstance(g, Grade) else g for g in found]


def shares(programs: list[str], *tests: str) -> list[Any]:
    return [g.value(all_or_nothing=False) if isinstance(g, Grade) else g for g in graded(programs, *tests)]


# ------------------------------------------------------------------------------------------- right programs


def passes_plainly(program: str, case: Case) -> bool:
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        for text in (program, *case.tests):
            exec(compile(text, "<case>", "exec", dont_inherit=True), names)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_plain_python_passes_scores_1_and_what_it_fails_0(case: Case) -> None:
    assert [passes_plainly(p, case) for p in (case.right, case.wrong)] == [True, False]
    assert values([case.right, case.wrong], *case.tests) == [1.0, 0.0]


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 79


# ------------------------------------------------------------------------------------------- forgery

YES = """
class Yes:
    def __init__(self, *a): pass
    def __getattr__(self, name): return Yes() if name.startswith('__') else lambda *a, **k: True
    def __call__(self, *a, **k): return Yes()
    def __eq__(self, o): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __bool__(self): return True
    def __len__(self): return 3
    def __iter__(self): return iter([Yes()])
    def __sub__(self, o): return 0.0
    __add__ = __mul__ = __rsub__ = __radd__ = __mod__ = __pow__ = __sub__
    def __abs__(self): return 0.0
    __float__ = __abs__
    def __int__(self): return 0
    __index__ = __int__
    def __hash__(self): return 0
    def __str__(self): return ''
    __array_interface__ = {'shape': (3,), 'typestr': '<f8', 'data': (4096, False), 'version': 3}
f = Yes()
"""


DEMANDS = [
    "assert f(3) == 6",
    "assert 6 == f(3)",
    "assert f(3) == f(4) == 6",
    "assert f(1) == f(2)",
    "assert f(3).startswith('a')",
    "assert f(3).issubset({1, 2})",
    "assert f(3).is_integer() and f(3).isdigit()",
    "assert abs(f(3) - 6) < 1e-6",
    "assert abs(6 - f(3)) < 1e-6",
    "assert f(3) > 5",
    "assert 5 < f(3) < 7",
    "assert 6 in f(3)",
    "assert f(2) ** 2 - 2 < 1e-6",
    "import math\nassert math.isclose(f(3), 0.0)",
    "assert [0, 1][f(3)] == 0",
    "assert isinstance(f(3), int)",
    "assert sorted(f([3, 1])) == [1, 3]",
    "assert max(f(3), 6) == 6 and min(f(3), 6) == 6",
    "assert int(f(3)) == 0",
    "assert {6: 1}[f(3)] == 1",
    "assert round(f(3)) == 0",
    "assert f(3).__array_interface__['shape'] == (3,)",
    "assert hasattr(f(3), '__array_interface__') or hasattr(f(3), '__array_struct__') or hasattr(f(3), '__array__')",
    "assert hasattr(f(3), '__float__') and hasattr(type(f(3)), '__buffer__')",
]
"""Assertions that tests make about numbers, strings and lists."""


def test_object_does_not_pass_for_a_function_result() -> None:
    assert shares([YES], *DEMANDS) == [0.0]


def test_object_created_by_the_tests_does_not_pass_for_a_result() -> None:
    """A method that returns its own object, or one that was created before."""
    liar = YES.replace(
        "f = Yes()", "class Solution(Yes):\n    def root(self, x): return self\n    def is_root(self, x): return x == 2"
    )
    honest = "class Solution:\n    def root(self, x): return x ** 0.5\n    def is_root(self, x): return x == 2"
    tests = [
        "s = Solution()\nassert abs(s.root(2) - 2 ** 0.5) < 1e-6",
        "assert Solution().is_root(2) and not Solution().is_root(3)",
    ]
    assert values([liar, honest], *tests) == [0.0, 1.0]


def test_items_of_an_object_are_the_same_each_time() -> None:
    """An object that is inspected twice cannot be sorted the first time and complete the second time."""
    liar = """
class Liar:
    def __init__(self, xs): self.xs, self.n = xs, 0
    def __iter__(self):
        self.n += 1
        return iter(self.xs if self.n == 1 else sorted(self.xs * 0 + [1, 2, 3]))
    def __len__(self): return 3
    def __getitem__(self, i): return i
def f(xs): return Liar(xs)
"""
    honest = "def f(xs): return sorted(xs)"
    ascending = "r = f([3, 9, 1])\nassert set(r) == {3, 9, 1}\nassert all(r[i] <= r[i + 1] for i in range(len(r) - 1))"
    assert values([liar, honest], ascending) == [0.0, 1.0]
    again = (
        "def f(xs):\n"
        "    class Again:\n"
        "        def __iter__(self): return self\n"
        "        n = 0\n"
        "        def __next__(self):\n"
        "            self.n += 1\n"
        "            if self.n % 3 == 0: raise StopIteration\n"
        "            return self.n\n"
        "    return Again()"
    )
    assert values([again], "r = f([])\nassert list(r) == [1, 2]\nassert list(r) == [4, 5]") == [0.0]


ITERATING = [
    "assert all(map(f, [1, 2, 3]))",
    "assert all(f(x) for x in [1, 2, 3])",
    "assert sum(map(f, [1, 2])) == 0",
    "assert list(filter(f, [1, 2])) == []",
    "assert all(a == b for a, b in zip(map(f, [1, 2]), [1, 4]))",
    "assert [*iter(lambda: f(1), 5)] == []",
    "assert max(map(f, [1]), default=0) == 0",
]


def test_exception_of_the_program_does_not_end_an_iterator_of_the_tests() -> None:
    kinds = ("StopIteration", "Sub", "GeneratorExit", "StopAsyncIteration")
    programs = [f"class Sub(StopIteration): pass\ndef f(x): raise {kind}" for kind in kinds]
    assert shares(programs, *ITERATING) == [0.0] * 4


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == 1\ntry:\n    f(-1)\nexcept Exception:\n    pass",
        "assert f(1) == 1\ntry:\n    f(-1)\nexcept:\n    pass",
        "assert f(1) == 1\nraised = False\ntry:\n    f(-1)\nexcept BaseException:\n    raised = True\nassert raised",
        "assert f(1) == 1\nimport contextlib\nwith contextlib.suppress(BaseException):\n    f(-1)",
    ],
)
def test_program_that_exited_never_gets_full_marks(test: str) -> None:
    start = """
import os, time
def write():
    for fd in range(3, 21):
        try: os.write(fd, b'v1')
        except OSError: pass
    time.sleep(99)
"""
    ends = ("os._exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(99)", "write()")
    programs = [f"{start}def f(x):\n    if x < 0: {end}\n    return x" for end in ends]
    for grade in graded(programs, test, limits=Limits(limit_s=0.5, memory_mb=256)):
        assert isinstance(grade, Grade)
        assert grade.value(all_or_nothing=True) == 0.0
        assert grade.value(all_or_nothing=False) <= 0.5


LYING_VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return self
    def __eq__(self, o): return True
    __ne__ = __lt__ = __gt__ = __eq__
    def same(self, o): return True
"""
HONEST_VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)
    def __lt__(self, o): return (self.x, self.y) < (o.x, o.y)
    def same(self, o): return self == o
"""


@pytest.mark.parametrize(
    "tests",
    [
        ["assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)"],
        ["assert Vector(1, 2) < Vector(3, 4)", "assert Vector(3, 4) > Vector(1, 2)"],
        ["assert Vector(1, 2).same(Vector(1, 2)) == True", "assert Vector(1, 2).same(Vector(1, 2))"],
        ["assert not Vector(1, 2) == Vector(2, 1)", "assert Vector(1, 2) != Vector(2, 1)"],
    ],
)
def test_row_that_a_constant_answer_passes_is_unscored_for_every_program(tests: list[str]) -> None:
    for value in values([LYING_VECTOR, HONEST_VECTOR, "x = 1"], *tests):
        assert isinstance(value, RewardError)
        assert "an object that answers" in str(value)


@pytest.mark.parametrize(
    "tests",
    [
        ["assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)", "assert Vector(1, 2) != Vector(2, 1)"],
        ["assert Vector(1, 2) < Vector(3, 4)", "assert not Vector(3, 4) < Vector(1, 2)"],
        ["assert (Vector(1, 2) + Vector(3, 4)).x == 4", "assert Vector(1, 2) == Vector(1, 2)"],
        ["assert Vector(1, 2).same(Vector(1, 2)) and not Vector(1, 2).same(Vector(2, 1))"],
    ],
)
def test_one_question_that_a_constant_answer_fails_is_enough(tests: list[str]) -> None:
    assert values([LYING_VECTOR, HONEST_VECTOR], *tests) == [0.0, 1.0]


def test_function_that_returns_true_passes_tests_that_accept_it() -> None:
    assert values(["def f(x): return True", "def f(x): return False"], "assert f(1)", "assert f(2) == True") == [
        1.0,
        0.0,
    ]


# ------------------------------------------------------------------------------------------- shares


def test_assert_counts_once_however_often_it_runs() -> None:
    program = "def f(x): return x if x < 50 else 0"
    many = "for x in range(50):\n    assert f(x) == x"
    assert shares([program], many, "assert f(60) == 60", "assert f(70) == 70") == pytest.approx([1 / 3])
    assert shares(["def f(x): return 0"], many) == [0.0]
    helper = "def check(x):\n    assert f(x) == x\nfor x in range(50):\n    check(x)\nassert f(51) == 51"
    assert shares([program, "def f(x): return x"], helper) == [0.5, 1.0]


def test_unreachable_assert_and_branch_not_taken() -> None:
    test = "if f(1) == 1:\n    assert f(2) == 2\nelse:\n    assert False"
    assert shares(["def f(x): return x", "def f(x): return 2", "def f(x): return 0"], test) == [1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------- unscored on purpose

UNABLE = {
    "nested lists as the function": "f = []\nfor _ in range(100): f = [f]",
    "deeply nested lists as the function": "f = []\nfor _ in range(100_000): f = [f]",
    "a raising class": "class A:\n    @property\n    def __class__(self): raise KeyboardInterrupt\nf = A()",
    "a raising class of a result": (
        "class A:\n    @property\n    def __class__(self): raise SystemExit\ndef f(x): return A()"
    ),
    "a raising metaclass": (
        "class M(type):\n"
        "    @property\n"
        "    def __name__(cls): raise SystemExit\n"
        "class E(Exception, metaclass=M): pass\n"
        "def f(x): raise E"
    ),
    "a huge range": "def f(x): return range(10**12)",
    "an endless generator": "def f(x):\n    while True: yield x",
    "an endless iterable": "class A:\n    def __iter__(self):\n        while True: yield 1\ndef f(x): return A()",
    "colliding hashes": "def f(x): return [{i * (2**61 - 1) for i in range(1, 1000)} for _ in range(3)]",
    "a huge number": "def f(x): return 1 << 10**7",
    "no text": "def f(x): return '\\ud800' * 10**6",
    "an import": "def f(x): raise ImportError('no module named f')",
    "an exception without a text": "class E(Exception):\n    def __str__(self): raise SystemExit\ndef f(x): raise E(E)",
    "deep exceptions": "E = Exception\nfor _ in range(500): E = type('E', (E,), {})\ndef f(x): raise E",
}


@pytest.mark.parametrize("name", UNABLE)
def test_program_cannot_choose_to_be_unscored(name: str) -> None:
    tests = [
        "assert sum(f(3)) == 6",
        "for x in f(3):\n    assert x < 4",
        "assert sorted(f(3)) == [1, 2, 3]",
        "assert [0] * len(f(3)) == [0, 0, 0]",
    ]
    honest = "def f(x): return [*range(1, x + 1)]"
    assert values([UNABLE[name], honest], *tests, limits=Limits(limit_s=1.0, memory_mb=256)) == [0.0, 1.0]


def test_object_never_has_a_built_in_type_even_if_its_process_claims_so() -> None:
    patched = """
import sys
candidate = sys.modules['gspo.reward.sandbox.inside.candidate']
candidate._ACTIONS['type'] = lambda target: int
candidate._ACTIONS['has instance'] = lambda target, value: True
class A: pass
def f(x): return A()
"""
    tests = ["assert type(f(1)) is int", "assert isinstance(f(1), int)", "assert f(1).__class__ == int"]
    assert shares([patched, "def f(x): return x"], *tests) == [0.0, 1.0]


FORGED = """
import gc, time
channel = next(o for o in gc.get_objects() if type(o).__name__ == 'Channel')
COLLIDING = ','.join('{"i":"%x"}' % (i * (2**61 - 1)) for i in range(100_000))
"""


@pytest.mark.parametrize(
    "program",
    [
        "def f(x):\n    channel.send('v{\"s\":[' + COLLIDING + ']}')\n    time.sleep(99)",
        "channel.send('e{\"s\":[' + COLLIDING + ']}')\ntime.sleep(99)",
        "channel.send('e[{\"s\":[' + COLLIDING + ']},\"\",null,0]')\ntime.sleep(99)",
        'def f(x):\n    channel.send(\'c["call",{"l":["mine",5]},[],{}]\')\n    time.sleep(99)',
        'def f(x):\n    channel.send(\'c["get",1,"x"]\')\n    time.sleep(99)',
        'def f(x):\n    channel.send(\'v{"l":["error",[1,"E",[[2,"F",[]]]]]}\')\n    time.sleep(99)',
        "def f(x):\n    channel.send('e[[1,2,3],4,5,6]')\n    time.sleep(99)",
        'def f(x):\n    channel.send(\'v{"l":["held","x"]}\')\n    time.sleep(99)',
    ],
)
def test_forged_lines_score_0(program: str) -> None:
    limits = Limits(limit_s=1.0, memory_mb=256)
    assert values([FORGED + program, "def f(x): return x"], "assert f(1) == 1", limits=limits) == [0.0, 1.0]


def test_answers_that_kill_the_judge_score_0() -> None:
    """The tests end their own process only when they process this answer."""
    test = "import os\nassert f(1) == 1 or os._exit(1)"
    assert values(["def f(x): return 2", "def f(x): return x"], test.replace("f(1) == 1 or", "f(1) != 2 or")) == [
        0.0,
        1.0,
    ]


# ------------------------------------------------------------------------------------------- rows that do not work


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (["import sys\nassert f(sys) == 1"], "they hand over an argument of type module"),
        (["import threading\nassert f(threading.Lock()) == 1"], "they hand over an argument of type lock"),
        (
            ["x = 0\nfor _ in range(99):\n    x = [x]\nassert f(x) == 1"],
            "they hand over a value nested more than 64 deep",
        ),
        (["if f(1):\n    import no_such_module\nassert f(1) == 1"], "No module named 'no_such_module'"),
    ],
)
def test_row_with_broken_tests_is_unscored_with_the_reason(tests: list[str], words: str) -> None:
    for value in values(["def f(x): return 1", "def f(x): return 2"], *tests):
        assert isinstance(value, RewardError)
        assert words in str(value)


def test_optional_import_may_be_missing() -> None:
    test = "try:\n    import no_such_module\nexcept ImportError:\n    no_such_module = None\nassert f(1) == 1"
    assert values(["def f(x): return 1"], test) == [1.0]


# ------------------------------------------------------------------------------------------- no feedback to programs


def test_all_tests_run_whatever_failed_before() -> None:
    """A missing question would tell a program that its last answer was wrong."""
    program = "asked = []\ndef f(x):\n    asked.append(x)\n    return 0\ndef g():\n    return asked"
    tests = [f"assert f({x}) == {x}" for x in range(1, 6)]
    (grade,) = graded([program], *tests, "assert g() == [1, 2, 3, 4, 5]")
    assert isinstance(grade, Grade)
    assert (grade.passed, grade.total) == (1, 6)


def test_all_parts_of_an_assert_are_evaluated_whatever_failed_before() -> None:
    program = """
asked = []
def f(x):
    asked.append(x)
    return 0
def g():
    return asked
"""
    tests = ("assert f(1) == 1 and (f(2) == 2 and f(3).real == 3) and f(4).x == 4", "assert g() == [1, 2, 3, 4]")
    assert shares([program], *tests) == [0.5]
    guard = "assert (r := f(1)) is not None and r == 1"
    assert values(["def f(x): return x", "def f(x): return None"], guard) == [1.0, 0.0]
    half = "assert f(1) == 1 and f(-1) == -1"
    gone = "import os\ndef f(x): return x if x > 0 else os._exit(0)"
    assert shares([gone], half, "assert f(1) == 1") == [0.0]


def test_all_inputs_are_sent_whatever_failed_before() -> None:
    tests = [{"input": f"{x}", "output": f"{2 * x}"} for x in range(4)]
    suite = read_suite({"tests": tests}, "")
    program = "x = int(input())\nprint(2 * x if x != 1 else 0)"
    (grade,) = grade_all([program], suite, sandbox_level(), LIMITS)
    assert isinstance(grade, Grade)
    assert (grade.passed, grade.total) == (3, 4)


# ------------------------------------------------------------------------------------------- objects of the tests


def test_function_of_the_tests_can_only_be_called() -> None:
    """A callback gives no access to the tests' internals."""
    program = """
def f(g):
    found = []
    for name in ('__globals__', '__closure__', '__code__', '__self__', 'gi_frame', 'expected'):
        value = getattr(g, name, None)
        found.append('secret' in str(value) or 'tests' in str(value))
    return any(found), g(1)
"""
    test = "secret = 41\ndef g(x):\n    return x + secret\ng.expected = 'secret'\nassert f(g) == (False, 42)"
    assert values([program], test) == [1.0]
    test = "class T:\n    _hidden = 'secret'\n    def look(self): return 1\nassert f(T()) == (False, 42)"
    hidden = (
        "def f(t):\n"
        "    for name in ('_hidden', '__dict__', '__class__', '__init__', '__globals__'):\n"
        "        if 'secret' in str(getattr(t, name, '')): return True, 42\n"
        "    return False, 42"
    )
    assert values([hidden], test) == [1.0]


def test_arguments_are_changed_only_where_the_tests_drop_the_value() -> None:
    """Otherwise a program could make the tests' own data agree with a wrong answer."""
    cheat = "def f(xs):\n    xs.clear()\n    return 0"
    honest = "def f(xs): return sum(xs)"
    assert values([cheat, honest], "xs = [1, 2]\nassert f(xs) == sum(xs)\nassert f([5]) == 5 or xs == []") == [0.0, 1.0]


# ------------------------------------------------------------------------------------------- numpy


class Liar:
    """A link to a program whose objects claim to be arrays."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, what: str, *question: Any, ends: bool = False) -> Any:
        self.asked.append((what, *question[1:]))
        if what == "iterate":
            raise TypeError
        if what in ("get", "member"):
            return {"shape": (3,), "typestr": "<f8", "data": (id(self), False), "version": 3}
        return 3 if what == "op" else 1.0


@pytest.mark.parametrize("kind", [RESULT, INSTANCE])
def test_numpy_reads_no_memory_for_an_object(kind: str) -> None:
    link = Liar()
    remote = Remote(link, 0)
    object.__setattr__(remote, "_gspo_kind", kind)
    with contextlib.suppress(TypeError, ValueError):
        found = numpy.asarray(remote)
        assert found.dtype == object or found.tolist() == [1.0, 1.0, 1.0]
    with contextlib.suppress(TypeError, ValueError):
        numpy.testing.assert_allclose(remote, [1.0, 2.0, 3.0])
        pytest.fail("it passed for an array")
    assert [question for question in link.asked if "__" in str(question)] == []
    for name in (
        "__array_interface__",
        "__array_struct__",
        "__array__",
        "__array_ufunc__",
        "__array_function__",
        "__buffer__",
    ):
        assert not hasattr(remote, name)
    for use in (memoryview, os.fspath):
        with pytest.raises(TypeError):
            use(remote)  # type: ignore[operator]


def with_numpy() -> Level:
    suite = read_suite({"tests": ["assert f() == 1"]}, "")
    with contextlib.suppress(ConfigError):  # a Python in an inaccessible home directory
        level = sandbox_level(sys.executable, True)
        (grade,) = grade_all(["import numpy\ndef f(): return 1"], suite, level, ARRAYS)
        if isinstance(grade, Grade) and grade.value(all_or_nothing=True) == 1.0:
            return level
    pytest.skip(f"{sys.executable} has no numpy that a sandbox can read")


ARRAYS = Limits(limit_s=30.0, memory_mb=4096)


def test_arrays_are_transferred_as_arrays() -> None:
    tests = [
        "import numpy as np\nassert f(np.array([1, 2])).tolist() == [2, 4]",
        "assert np.array_equal(f(np.array([1, 2])), np.array([2, 4]))",
        "assert np.allclose(f(np.ones((2, 2))), 2) and f(np.ones((2, 3))).shape == (2, 3)",
        "assert (f(np.array([1, 2])) == np.array([2, 4])).all()",
        "x = np.array([3, 1, 2])\nf(x)\nassert x.tolist() == [1, 2, 3]",
    ]
    right = "def f(x):\n    found = 2 * x\n    x.sort()\n    return found"
    wrong = "def f(x):\n    return 3 * x"
    empty = "import numpy\ndef f(x): return numpy.zeros((0, *x.shape))"
    suite = read_suite({"tests": tests}, "")
    grades = grade_all([right, wrong, empty], suite, with_numpy(), ARRAYS)
    assert [g.value(all_or_nothing=True) for g in grades if isinstance(g, Grade)] == [1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------- eval, exec and operators


@pytest.mark.parametrize(
    "answer",
    [
        "[setattr(type(__gspo__), 'result', lambda *a: {'passed': 1, 'total': 1})] and 24",
        "().__class__.__base__.__subclasses__()",
        "want",
        "solve.__globals__",
        "__import__('os')",
    ],
)
@pytest.mark.parametrize(
    "how",
    [
        "eval(solve(1))",
        "eval(solve(1), globals())",
        "[*map(eval, [solve(1)])][0]",
        "__import__('builtins').eval(solve(1))",
    ],
)
def test_eval_of_an_answer_executes_no_code(answer: str, how: str) -> None:
    assert values([f"def solve(x): return {answer!r}"], f"want = 24\nassert {how} == want") == [0.0]


def test_exec_of_an_answer_is_refused() -> None:
    program = "def solve(x): return 'want = 1'"
    assert values([program], "want = 24\nexec(solve(1))\nassert want == 1") == [0.0]
    assert values([program], "exec('want = 1')\nassert want == 1 and solve(1) != 5") == [1.0]


def test_importing_builtins_does_not_bypass_the_guard() -> None:
    program = 'def solve(x): return \'[setattr(__import__("sys"), "lie", 24)] and 24\''
    for start in ("import builtins", "import builtins as b; builtins = b", "from builtins import eval"):
        call = "eval" if start.startswith("from") else "builtins.eval"
        assert values([program], f"{start}\nassert {call}(solve(1)) == 24") == [0.0]
        assert values(["def solve(x): return '4 * 6'"], f"{start}\nassert {call}(solve(1)) == 24") == [1.0]
    ordinary = "import builtins\nassert builtins.len(solve(1)) == 5 and isinstance(solve(1), builtins.str)"
    assert values(["def solve(x): return '4 * 6'"], ordinary) == [1.0]


def test_eval_of_an_expression_returns_its_value() -> None:
    program = "def solve(x): return '6 / (1 - 3 / 4)'\ndef derive(x): return '2 * x + math.sqrt(x) + abs(-1)'"
    tests = (
        "assert eval(solve(1)) == 24",
        "assert eval('solve(1)') == '6 / (1 - 3 / 4)'",
        "import math\nfor n in (1, 4): assert eval(derive('x'), {'x': n, 'math': math}) == 2 * n + math.sqrt(n) + 1",
    )
    assert values([program, program.replace("2 *", "3 *")], *tests) == [1.0, 0.0]


def test_program_cannot_end_an_async_loop_of_the_tests() -> None:
    tests = """
import asyncio
class Counting:
    n = 0
    def __aiter__(self): return self
    async def __anext__(self):
        self.n += 1
        if self.n > 3: raise StopAsyncIteration
        return await square(self.n) == self.n ** 2
async def all_right():
    return all([right async for right in Counting()])
assert asyncio.run(all_right())
"""
    right, lying = "return n * n", "raise StopAsyncIteration"
    assert values([f"async def square(n): {body}" for body in (right, lying)], tests) == [1.0, 0.0]


def test_program_cannot_replace_methods_of_the_tests_objects() -> None:
    tests = """
class Basket:
    def __init__(self): self.items, self.owner = [], ''
    def add(self, item): self.items.append(item)
    def complete(self): return self.items == [1, 2, 3] and self.owner == 'Ann'
basket = Basket()
fill(basket)
assert basket.complete()
"""
    right = "def fill(b):\n    b.owner = 'Ann'\n    for n in (1, 2, 3): b.add(n)"
    assert values([right, "def fill(b): b.complete = lambda: True"], tests) == [1.0, 0.0]


def test_asserts_skipped_by_a_context_manager_of_the_program_fail() -> None:
    program = """
class Reader:
    def __enter__(self): return self
    def __exit__(self, *error): return True
    def read(self): {}
"""
    tests = (
        "for n in (5, 5):\n    with Reader() as r:\n        found = r.read()\n        assert found == n\nassert Reader"
    )
    programs = [program.format(body) for body in ("return 5", "raise ValueError")]
    assert values([*programs, programs[0].replace("return 5", "return 6")], tests, "assert Reader() != 5") == [
        1.0,
        0.0,
        0.0,
    ]


def test_object_cannot_claim_an_empty_difference() -> None:
    lying = (
        "class S:\n"
        "    def difference(self, other): return set()\n"
        "    symmetric_difference = difference\n"
        "def f(x): return S()"
    )
    for name in ("difference", "symmetric_difference"):
        assert values(["def f(x): return {1, 2}", lying], f"assert f(1).{name}({{1, 2}}) == set()", "assert f") == [
            1.0,
            0.0,
        ]


def test_asserts_in_a_callback_count_once() -> None:
    program = """
kept = []
def keep(f):
    kept.append(f)
    f(1)
def square(n):
    for f in kept: f(1)
    return 0
def listed(n):
    for f in kept: f(1)
    return []
"""
    called_back = (
        "def positive(n):\n    assert n > 0\n    assert n < 9\n    assert n != 5\nassert keep(positive) is None"
    )
    assert shares([program], called_back, "assert square(2) == 4", "assert square(3) == 9") == [4 / 6]
    assert shares([program], called_back, "for n in listed(3): assert n == 1", "assert square(2) == 4") == [4 / 6]

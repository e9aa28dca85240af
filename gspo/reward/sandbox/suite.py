"""Parse and check a row's tests before anything runs.

In: the row's columns. Out: a `Suite`: standard inputs with the expected outputs, or test code for the judge. Invariant:
a row without tests is an error, never a success. Tests are only parsed here, never executed.

Three formats are supported: `tests` (our own), `test_list` with `test_setup_code` and `test_imports` (MBPP), and `test`
with `entry_point` and the prompt (HumanEval). Every assert is rewritten so that it is counted and the next one still
runs.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import RewardError
from gspo.reward.function import one_line
from gspo.reward.sandbox.inside.candidate import OUTPUT

COLUMNS = ("tests", "test_list", "test_setup_code", "test_imports", "test", "entry_point", "prompt")
# `f`, `module.f` and `Solution().f`. The name becomes part of the test code, so nothing else is accepted.
_CALLABLE = re.compile(r"[A-Za-z_]\w*(\(\))?(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tests of a program."""

    pairs: tuple[tuple[str, str], ...] = ()
    """Standard input and expected output; empty if the tests are code."""
    steps: tuple[str, ...] = ()
    """Test code in order. A step that raises is one failure."""
    asserts: tuple[int, ...] = ()
    """Number of assert statements in each step."""
    names: tuple[str, ...] = ()
    """Names that the steps use from the program."""
    modules: tuple[str, ...] = ()
    """Modules that the steps use without importing them."""
    imports: tuple[str, ...] = ()
    """Modules that the steps import unconditionally."""
    prelude: str = ""
    """Code that precedes both the program and the tests."""
    entry_point: str = ""

    @property
    def total(self) -> int:
        return len(self.pairs) or sum(self.asserts)

    def program(self, code: str) -> str:
        """The whole program. If the prompt is code, the completion may continue it or define the function itself."""
        if not self.prelude:
            return code
        defines = re.search(rf"^(?:(?:async\s+)?def|class)\s+{self.entry_point}\b|^{self.entry_point}\s*=", code, re.M)
        return f"{self.prelude}\n\n{code}" if defines else self.prelude + code


def read_suite(row: Mapping[str, Any], prompt: Any) -> Suite:
    """The tests of a row. Raises `RewardError` with the field and the fix."""
    if row.get("tests") is not None:
        return _own(_parsed_json(row["tests"]), row)
    if row.get("test_list") is not None:
        return _mbpp(row)
    if row.get("test") is not None:
        return _humaneval(row, _text(row.get("prompt") or prompt))
    raise RewardError(
        "the row has no tests; give it a column `tests`, `test_list` (MBPP), or `test` and `entry_point` (HumanEval)"
    )


# ------------------------------------------------------------------------------------------- the three formats


def _own(tests: Any, row: Mapping[str, Any]) -> Suite:
    tests = _unzipped(tests) if isinstance(tests, Mapping) else tests
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise RewardError("tests: must be a list with at least one test")
    pairs = [_pair(t, f"tests[{i}]") for i, t in enumerate(tests) if isinstance(t, Mapping) and "input" in t]
    if len(pairs) == len(tests):
        return Suite(pairs=tuple(pairs))
    if pairs:
        raise RewardError("tests: some have `input` and some do not; use one kind per row")
    steps = [t if isinstance(t, str) else _call(t, f"tests[{i}]") for i, t in enumerate(tests)]
    return _suite([("", ""), *((f"tests[{i}]", step) for i, step in enumerate(steps))], _entry_point(row))


def _mbpp(row: Mapping[str, Any]) -> Suite:
    tests = row["test_list"]
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests or not all(map(_is_text, tests)):
        raise RewardError("test_list: must be a list with at least one line of test code")
    setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
    if not all(map(_is_text, setup)):
        raise RewardError("test_imports, test_setup_code: must be text")
    named = [(f"test_list[{i}]", test) for i, test in enumerate(tests)]
    return _suite([("test_setup_code", "\n".join(setup)), *named], _entry_point(row))


def _humaneval(row: Mapping[str, Any], prompt: str) -> Suite:
    test = row["test"]
    entry_point = _entry_point(row)
    if not _is_text(test) or not entry_point:
        raise RewardError(
            "test: needs a column `entry_point` with the name of the function that check() is called with"
        )
    # Parsed, not searched: the word may occur in a comment or a string.
    if not any(isinstance(n, ast.FunctionDef) and n.name == "check" for n in _parse(test, "test").body):
        raise RewardError("test: must define check(candidate)")
    # A chat prompt describes the function in words; only a code prompt can precede the program.
    prelude = prompt if entry_point in _defined(prompt) else ""
    return _suite([("test", ""), ("test", f"{test}\ncheck({entry_point})\n")], entry_point, prelude)


def _suite(named: Iterable[tuple[str, str]], entry_point: str, prelude: str = "") -> Suite:
    """Build a suite. The first part is setup code; each other part must contain an assert."""
    (where, setup), *parts = named
    trees = [_parse(setup, where), *(_parse(text, place) for place, text in parts)]
    own, modules = _free_names(trees, entry_point, _defined(prelude))
    rewriter = _Rewriter()
    imports = sorted({name for tree in trees for name in _imports(tree)})
    steps = []
    asserts = []
    for (place, _), tree in zip([(where, setup), *parts], trees, strict=True):
        before = rewriter.asserts
        # Sent as source: the sandbox may run another version of Python, which cannot load these code objects.
        steps.append(ast.unparse(ast.fix_missing_locations(rewriter.visit(tree))))
        asserts.append(rewriter.asserts - before)
        if not asserts[-1] and tree is not trees[0]:
            raise RewardError(f"{place}: contains no assert; write the condition to test as an assert")
    return Suite(
        steps=tuple(steps),
        asserts=tuple(asserts),
        names=tuple(sorted(own)),
        modules=tuple(sorted(modules)),
        imports=tuple(imports),
        prelude=prelude,
        entry_point=entry_point,
    )


# ------------------------------------------------------------------------------------------- code


class _Rewriter(ast.NodeTransformer):
    """Turns asserts into calls of `__gspo__`, which counts them by number.

    Operations that the judge could not intercept otherwise are rewritten, too: calls whose value is dropped, and checks
    of an object's type or identity.
    """

    def __init__(self) -> None:
        self.asserts = self._constants = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        test = node.test
        if isinstance(test, ast.Constant) and test.value:
            return ast.Pass()  # a true constant tests nothing
        if isinstance(test, ast.Constant):  # a false constant marks a line that must not be reached
            self._constants += 1
        else:
            self.asserts += 1
        number = -self._constants if isinstance(test, ast.Constant) else self.asserts
        *parts, last = _conjuncts(test)
        return [*(_report("needs", number, part) for part in parts), _report("holds", number, last)]

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        """A context manager of the program may swallow an exception, so asserts that were skipped must count as
        failed."""
        node.items = [self.visit(item) for item in node.items]
        body: list[ast.stmt] = []
        numbers: list[ast.expr] = []
        for statement in node.body:
            before = self.asserts
            found = self.visit(statement)
            body += found if isinstance(found, list) else [found]
            if isinstance(statement, ast.Assert) and self.asserts > before:
                numbers.append(ast.Constant(self.asserts))
        node.body = body
        reports = [ast.Expr(ast.Call(_reporter(name), numbers, [])) for name in ("entered", "left")]
        return [reports[0], node, reports[1]] if numbers else [node]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            node.value = _changing(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1 and not node.keywords:
            node.func = _reporter("type_of")
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Compare(_, [ast.Is() | ast.IsNot()], [ast.Constant()]) | ast.Compare(ast.Constant(), _, _):
                return node
            case ast.Compare(left, [ast.Is() | ast.IsNot() as op], [right]):
                call = ast.Call(_reporter("identical"), [left, right], [])
                return call if isinstance(op, ast.Is) else ast.UnaryOp(ast.Not(), call)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "__class__" and isinstance(node.ctx, ast.Load):
            return ast.Call(_reporter("type_of"), [node.value], [])
        return node


def _conjuncts(test: ast.expr) -> list[ast.expr]:
    """The parts of `a and b`. All are evaluated: a missing request would tell the program that it was wrong."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for value in test.values for part in _conjuncts(value)]
    return [test]


def _report(name: str, number: int, test: ast.expr) -> ast.stmt:
    (block,) = ast.parse(
        f"try:\n    __gspo__.{name}({number}, 0)\n"
        f"except Exception as __gspo_error__:\n    __gspo__.failure({number}, __gspo_error__)"
    ).body
    assert isinstance(block, ast.Try)
    assert isinstance(block.body[0], ast.Expr)
    assert isinstance(block.body[0].value, ast.Call)
    block.body[0].value.args[1] = _dropping(test)
    return block


def _reporter(name: str) -> ast.expr:
    return ast.Attribute(ast.Name("__gspo__", ast.Load()), name, ast.Load())


def _changing(call: ast.Call) -> ast.Call:
    """Rewrite a call whose value is dropped: it is made for its effect on the arguments."""
    # A built-in runs in the judge on the tests' own objects, so there are no changes to apply.
    if isinstance(call.func, ast.Name) and call.func.id in dir(builtins):
        return call
    return ast.Call(_reporter("change"), [call.func, *call.args], call.keywords)


def _dropping(test: ast.expr) -> ast.expr:
    """Rewrite `f(xs) is None`, which does not use the value either."""
    match test:
        case ast.Compare(ast.Call() as call, [ast.Is() | ast.Eq()], [ast.Constant(None)]):
            test.left = _changing(call)
    return test


def _imports(tree: ast.AST) -> Iterator[str]:
    """Modules that the tests require. Imports inside `try` are optional and are skipped."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif not isinstance(node, ast.Try):
            yield from _imports(node)


def _free_names(trees: Sequence[ast.Module], entry_point: str, helpers: set[str]) -> tuple[set[str], set[str]]:
    """The names that the tests use from the program, and modules they use without importing them.

    Names of built-ins refer to the built-ins, unless nothing else is tested: MBPP has a function `sum`.
    """
    used = set()
    bare = set()
    bound = set(helpers)
    for node in (n for tree in trees for n in ast.walk(tree)):
        bound |= _bound(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
            bare.add(node.id)
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bare.discard(node.value.id)
    bare |= {
        n.func.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    free = used - bound - set(dir(builtins)) - {"__gspo__"}
    modules = {name for name in free - bare if name in sys.stdlib_module_names}
    own = (free - modules) | ({entry_point} if entry_point else set())
    own = own or _tested_built_in(trees, bound)
    if not own:
        raise RewardError("the tests call no function of the program; name it in a column `entry_point`")
    return own, modules


def _tested_built_in(trees: Sequence[ast.Module], bound: set[str]) -> set[str]:
    found = set()
    for node in (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Assert)):
        side = node.test.left if isinstance(node.test, ast.Compare) else node.test
        if isinstance(side, ast.Call) and isinstance(side.func, ast.Name):
            found.add(side.func.id)
    return found - bound if len(found) == 1 else set()


def _bound(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.ExceptHandler) and node.name:
        return {node.name}
    return set()


def _defined(text: str) -> set[str]:
    """Names that a text defines; empty if it is not code."""
    try:
        return {name for node in ast.parse(text).body for n in ast.walk(node) for name in _bound(n)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _parse(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{where}: not Python: {one_line(error, 100)}; fix the row") from None


# ------------------------------------------------------------------------------------------- values


def _pair(test: Mapping[str, Any], where: str) -> tuple[str, str]:
    given, expected = (_lines(test.get(key), f"{where}.{key}") for key in ("input", "output"))
    if max(len(given), len(expected)) > OUTPUT:
        raise RewardError(f"{where}: longer than {OUTPUT} characters; leave the test out")
    return given, expected


def _lines(value: Any, where: str) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_text, value)):
        return "\n".join(value)
    if not _is_text(value):
        raise RewardError(f"{where}: must be text, not {one_line(repr(value), 40)}")
    return str(value)


def _call(test: Any, where: str) -> str:
    if not isinstance(test, Mapping) or "function" not in test or "expected" not in test:
        raise RewardError(
            f"{where}: must have `input` and `output`, or `function`, `args` and `expected`, or be a line of test code"
        )
    function = test["function"]
    args = test.get("args") or []
    kwargs = test.get("kwargs") or {}
    if not _is_text(function) or not _CALLABLE.fullmatch(function):
        raise RewardError(f"{where}.function: {one_line(repr(function), 60)} is not a function name")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise RewardError(f"{where}: args must be a list and kwargs an object")
    for value in (args, kwargs, test["expected"]):
        _check_plain(value, where)
    # The repr of JSON values is Python; `_check_plain` refused nan and infinity, whose repr is not.
    return f"assert __gspo__.same({function}(*{args!r}, **{kwargs!r}), {test['expected']!r})"


def _check_plain(value: Any, where: str) -> None:
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        _check_plain(item, where)
    if isinstance(value, float) and not math.isfinite(value):
        raise RewardError(f"{where}: {value} is not JSON; write the test as an assert")


def _unzipped(tests: Mapping[str, Any]) -> list[Any]:
    """Convert the format of APPS and TACO, with parallel lists of inputs and outputs."""
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise RewardError("tests: an object needs two lists of one length, `inputs` and `outputs`")
    if not tests.get("fn_name"):
        return [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    name = tests["fn_name"]
    return [{"function": name, "args": i, "expected": o} for i, o in zip(inputs, outputs, strict=True)]


def _parsed_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RewardError(
            f"tests: text that is not JSON: {one_line(error, 100)}; give a list, or JSON of one"
        ) from None


def _entry_point(row: Mapping[str, Any]) -> str:
    value = row.get("entry_point") or ""
    if value and not (_is_text(value) and value.isidentifier()):
        raise RewardError(f"entry_point: {one_line(repr(value), 60)} is not a function name")
    return str(value)


def _text(prompt: Any) -> str:
    """The text of a prompt, or of the last message of a chat."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) if prompt else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)

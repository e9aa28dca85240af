"""MBPP and HumanEval, if their files are available: reference solutions pass, wrong mutants do not.

Plain Python decides what is wrong: each program also runs together with its tests in one process, as these data sets
are usually graded, and both verdicts must agree.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo.reward.sandbox.grade import End, Grade, Limits, grade_all
from gspo.reward.sandbox.probe import sandbox_level
from gspo.reward.sandbox.suite import read_suite

DATA = Path(__file__).parent.parent.parent.parent / "shared" / "data"
FILES = ("mbpp.jsonl", "mbpp_sanitized.json", "HumanEval.jsonl.gz")

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    code: str
    row: dict[str, Any]
    prompt: str

    def together(self, code: str) -> str:
        """Program and tests in one script, which prints `ok` if all tests pass."""
        row = self.row
        parts = [self.prompt + code, row["test"], f"check({row['entry_point']})"] if "test" in row else [code]
        parts += [*row.get("test_imports", []), row.get("test_setup_code", ""), *row.get("test_list", [])]
        return (
            "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n"
            f"    exec({chr(10).join(parts)!r}, {{'__name__': 'native'}})\nprint('ok')"
        )


def tasks(file: str) -> Iterator[Task]:
    if not (DATA / file).exists():
        pytest.skip(f"no {DATA / file}")
    if file.endswith(".json"):
        rows = json.loads((DATA / file).read_text(encoding="utf-8"))
    else:
        with (gzip.open if file.endswith(".gz") else open)(DATA / file, "rt", encoding="utf-8") as lines:  # type: ignore[operator]
            rows = [json.loads(line) for line in lines]
    keys = ("test_list", "test_setup_code", "test_imports", "test", "entry_point")
    for row in rows:
        yield Task(
            name=f"{file}:{row['task_id']}",
            code=row["canonical_solution"] if "test" in row else row["code"],
            row={key: row[key] for key in keys if key in row},
            prompt=row["prompt"] if "test" in row else "",
        )


def everywhere(action: Callable[[Task], Any], file: str) -> list[Any]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(action, tasks(file)))


@pytest.mark.parametrize("file", FILES)
def test_reference_solutions_pass(file: str) -> None:
    level, limits = sandbox_level(), Limits(limit_s=30.0, memory_mb=512)

    def fails(task: Task) -> list[Any]:
        grades = grade_all([task.code], read_suite(task.row, task.prompt), level, limits)
        return [(task.name, g) for g in grades if not isinstance(g, Grade) or g.end is not End.PASSED]

    results = everywhere(fails, file)
    print(f"{file}: {sum(not r for r in results)} of {len(results)} reference solutions pass")
    assert [failure for failures in results for failure in failures] == []


class _Mutation(ast.NodeTransformer):
    """Changes one place: an operator, a comparison or a constant."""

    SWAPS: dict[type, type] = {  # noqa: RUF012
        **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Mult, ast.FloorDiv: ast.Mult},
        **{ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    }

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def here(self) -> bool:
        self.count += 1
        return self.count - 1 == self.at

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in self.SWAPS and self.here():
            node.op = self.SWAPS[type(node.op)]()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if type(node.ops[0]) in self.SWAPS and self.here():
            node.ops[0] = self.SWAPS[type(node.ops[0])]()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self.here():
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None and self.here():
            node.value = ast.Tuple([ast.Constant("wrong"), node.value], ast.Load())
        return node


def mutants(task: Task) -> list[str]:
    """At most one mutated program, deterministic. HumanEval's helper functions in the prompt are not mutated."""
    whole = ast.parse(task.prompt + task.code)
    named = [node for node in whole.body if getattr(node, "name", "") == task.row.get("entry_point", "?")]
    part = named[-1] if named else whole
    counter = _Mutation(-1)
    counter.visit(part)
    if not counter.count:
        return []
    before = ast.unparse(whole)
    _Mutation(random.Random(task.name).randrange(counter.count)).visit(part)
    after = ast.unparse(ast.fix_missing_locations(whole))
    return [after] if after != before else []


@pytest.mark.parametrize("file", FILES)
def test_wrong_mutants_fail(file: str) -> None:
    level, limits = sandbox_level(), Limits(limit_s=2.0, memory_mb=512)

    def compare(task: Task) -> list[Any]:
        programs = mutants(task)
        judged = grade_all(programs, read_suite(task.row, task.prompt), level, limits)
        native = []
        for program in programs:
            whole = Task(name="", code="", row=task.row, prompt="").together(program)
            native += grade_all([whole], read_suite({"tests": [{"input": "", "output": "ok"}]}, ""), level, limits)
        return [(task.name, p, j, n) for p, j, n in zip(programs, judged, native, strict=True)]

    results = [r for row in everywhere(compare, file) for r in row]
    known = [r for r in results if isinstance(r[2], Grade) and isinstance(r[3], Grade) and r[3].end is not End.TIMEOUT]
    wrong = [r for r in known if r[3].end is not End.PASSED]
    print(
        f"{file}: {len(results)} mutants, {len(wrong)} wrong, "
        f"of which {sum(r[2].end is End.PASSED for r in wrong)} pass"
    )
    assert len(known) > 0.9 * len(results)
    assert [r for r in wrong if r[2].end is End.PASSED] == []
    assert [r for r in known if r[3].end is End.PASSED and r[2].end is not End.PASSED] == []


def test_throughput(make_pool: Any, group: Any) -> None:
    """At least 15 programs per second with 2 workers on an otherwise idle machine."""
    chosen = [task for task in tasks("mbpp.jsonl") if not task.name.endswith(":123")][::60]  # 123 computes for seconds
    groups = [group([task.code] * 8, id=task.name, **task.row) for task in chosen]
    pool = make_pool("code_tests", workers=2, timeout_s=60.0)
    pool.score(groups[:2])
    busy = os.getloadavg()[0]
    start = time.monotonic()
    scores = [s for row in pool.score(groups) for s in row]
    rate = len(scores) / (time.monotonic() - start)
    print(f"{len(scores)} programs, {rate:.1f} a second; load before: {busy:.1f}")
    assert {s.reward for s in scores} == {1.0}
    if busy > 1.0 and rate < 15:
        pytest.skip(f"{rate:.1f} programs a second, but the machine was busy (load {busy:.1f})")
    assert rate >= 15

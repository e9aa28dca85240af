"""The architecture as a test: who may import whom, and which names belong to one place.

Data moves forward through the stages, so a stage never imports a later one. What a run writes and what reads it come
after the stages, and commands come last.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import gspo

ROOT = Path(gspo.__file__).parent

LAYERS = (
    {"errors", "types", "clock", "redact", "safe_output", "signals"},
    {"config", "hub"},
    {"data", "model", "objectives"},
    {"reward", "rollout"},
    {"learner"},
    {"context"},
    {"build", "step", "trust", "evaluation"},
    {"record"},
    {"cold_start"},
    {"contamination"},
    {"loop"},
    {"trainer"},
    {"view", "preflight"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
"""Packages and modules of `gspo`, from what everything may import to what nothing imports."""

WITHIN = {
    ("safe_output", "redact"),
    ("errors", "redact"),
    ("reward", "data"),
    ("evaluation", "build"),
    ("preflight", "view"),
}
"""Who may import whom within a layer."""


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports() -> Iterator[tuple[str, str, bool]]:
    """(importing package, imported package, whether it is only for type checking), for every import inside `gspo`."""
    for file in sorted(ROOT.rglob("*.py")):
        part = file.relative_to(ROOT).with_suffix("").parts[0]
        tree = ast.parse(file.read_text(encoding="utf-8"))
        typing_only = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "gspo":
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gspo."):
                names = [(node.module or "").split(".")[1]]
            elif isinstance(node, ast.Import):
                names = [a.name.split(".")[1] for a in node.names if a.name.startswith("gspo.")]
            for name in names:
                if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file():
                    yield part, name, id(node) in typing_only


def test_every_module_has_a_layer() -> None:
    found = {p.name for p in pkgutil.iter_modules([str(ROOT)])}
    assert found - {"recipes"} == set().union(*LAYERS)


def test_no_stage_imports_a_later_one() -> None:
    wrong = {
        (a, b)
        for a, b, typing_only in imports()
        if a not in (b, "__init__") and not typing_only and (a, b) not in WITHIN and layer(b) >= layer(a)
    }
    assert not wrong, sorted(wrong)


def test_packages_have_no_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for a, b, typing_only in imports():
        if a not in (b, "__init__") and not typing_only:
            edges.setdefault(a, set()).add(b)

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    assert not [name for name in edges if name in reachable(name)]


@pytest.mark.parametrize("name", [*gspo.__all__, "train", "evaluate", "compare", "doctor", "replay", "merge", "serve"])
def test_no_public_name_is_also_a_submodule(name: str) -> None:
    assert not list((ROOT / name).glob("**/*.py"))
    assert not (ROOT / f"{name}.py").exists()
    assert not isinstance(getattr(gspo, name, None), types.ModuleType)


def test_the_public_names_are_there_and_objective_is_a_function() -> None:
    assert all(getattr(gspo, name) is not None for name in gspo.__all__)
    assert isinstance(gspo.objective, types.FunctionType)


def named_outside(names: list[str], home: str) -> list[str]:
    """Places outside their home where code compares with one of these names or looks one up."""
    quoted = "|".join(map(re.escape, names))
    pattern = re.compile(rf"""(?:[=!]=|\bin) \(?\[?["'](?:{quoted})["']""")
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        if home not in file.relative_to(ROOT).as_posix():
            for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
                if pattern.search(line):
                    found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def test_objective_names_appear_only_at_home() -> None:
    assert not named_outside(gspo.objective_names(), "objectives/")


def test_engine_names_appear_only_at_home() -> None:
    engines = importlib.import_module("gspo.rollout.engines")
    assert not named_outside([m.name for m in pkgutil.iter_modules(engines.__path__)], "rollout/")


def test_reward_names_appear_only_at_home() -> None:
    rewards = importlib.import_module("gspo.reward.rewards")
    found = named_outside([m.name for m in pkgutil.iter_modules(rewards.__path__)], "reward/")
    # The doctor plants completions in each built-in reward's own format, and `trust.py` knows what starts programs.
    assert {line.split(":")[0] for line in found} <= {"preflight/rewards.py", "trust.py"}

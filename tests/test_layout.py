"""The architecture as a test: who may import whom, and which names belong to one place.

Data moves forward through the stages, so a stage never imports a later one. What a run writes and what reads it come
after the stages, and commands come last.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Collection

import pytest
from package_imports import ROOT, cycles, imports

import gspo

LAYERS = (
    {
        "activity",
        "errors",
        "types",
        "clock",
        "field_types",
        "network",
        "ranks",
        "redact",
        "reduction",
        "safe_files",
        "safe_output",
        "signals",
        "site",
        "student_t",
    },
    {"aliases", "config", "equivalents"},
    {"cluster", "data", "model", "objectives"},
    {"reward", "rollout"},
    {"environment"},
    {"serving"},
    {"learner"},
    {"context"},
    {"build", "step", "trust", "evaluation"},
    {"record"},
    {"callbacks", "checkpoints", "cold_start", "collection"},
    {"contamination"},
    {"suites"},
    {"loop", "follower"},
    {"trainer"},
    {"view", "preflight"},
    {"commands"},
    {"api"},
    {"trl"},
    {"cli"},
    {"__main__"},
)
"""Packages and modules of `gspo`, from what everything may import to what nothing imports."""

WITHIN = {
    ("safe_output", "redact"),
    ("network", "errors"),
    ("errors", "redact"),
    ("errors", "site"),
    ("ranks", "clock"),
    ("ranks", "errors"),
    ("ranks", "field_types"),
    ("ranks", "signals"),
    ("config", "aliases"),
    ("config", "equivalents"),
    ("reward", "data"),
    ("evaluation", "build"),
    ("preflight", "view"),
}
"""Who may import whom within a layer."""


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_has_a_layer() -> None:
    found = {p.name for p in pkgutil.iter_modules([str(ROOT)])}
    assert found - {"recipes"} == set().union(*LAYERS)


def test_the_architecture_page_names_every_package_and_module() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    tables = page.partition("## Packages")[2].partition("\n## ")[0]
    named = {name.strip("/").removesuffix(".py") for name in re.findall(r"`(\w+(?:/|\.py))`", tables)}
    assert set().union(*LAYERS) - {"__main__"} <= named


def test_no_stage_imports_a_later_one() -> None:
    wrong = {
        (a, b)
        for a, b, typing_only in imports()
        if a not in (b, "__init__") and not typing_only and (a, b) not in WITHIN and layer(b) >= layer(a)
    }
    assert not wrong, sorted(wrong)


def test_packages_have_no_cycle() -> None:
    assert not cycles()


@pytest.mark.parametrize("name", [*gspo.__all__, "merge", "serve"])
def test_no_public_name_is_also_a_submodule(name: str) -> None:
    assert not list((ROOT / name).glob("**/*.py"))
    assert not (ROOT / f"{name}.py").exists()
    assert not isinstance(getattr(gspo, name, None), types.ModuleType)


def test_the_public_names_are_there_and_objective_is_a_function() -> None:
    assert all(getattr(gspo, name) is not None for name in gspo.__all__)
    assert isinstance(gspo.objective, types.FunctionType)


NAMED = {
    "aliases.py": "old names of rewards",
    "cluster/connect.py": "what Ray calls a cluster of one machine",
    "commands/new_recipe.py": "what a new recipe suggests",
    "config/schema.py": "the default of a setting",
    "equivalents/trl.py": "what the losses of TRL are called here",
    "equivalents/verl.py": "what the losses and engines of verl are called here",
    "suites/scorers.py": "the reward functions of published protocols",
    "record/run_format.py": "format 1 records only the names of objectives",
}
"""Files that may name an objective, an engine or a reward that is defined elsewhere, and why."""


def named_outside(names: Collection[str], home: str) -> list[str]:
    """Places outside their home where one of these names is a literal."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        if not place.startswith(home) and place not in NAMED:
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            texts = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            found += [f"{place}:{n.lineno}: {n.value}" for n in texts if n.value in names]
    return found


def test_objective_names_appear_only_at_home() -> None:
    # "gspo" is also the name of the package and the command.
    assert not named_outside(set(gspo.objective_names()) - {"gspo"}, "objectives/")


def test_engine_names_appear_only_at_home() -> None:
    engines = importlib.import_module("gspo.rollout.engines")
    assert not named_outside([m.name for m in pkgutil.iter_modules(engines.__path__)], "rollout/")


def test_reward_names_appear_only_at_home() -> None:
    rewards = importlib.import_module("gspo.reward.rewards")
    assert not named_outside([m.name for m in pkgutil.iter_modules(rewards.__path__)], "reward/")


def test_no_engine_imports_another() -> None:
    engines = [m.name for m in pkgutil.iter_modules(importlib.import_module("gspo.rollout.engines").__path__)]
    wrong = []
    for name in engines:
        others = "|".join(other for other in engines if other != name)
        pattern = re.compile(rf"gspo\.rollout\.(?:engines\.)?(?:{others})\b")
        files = [ROOT / "rollout" / "engines" / f"{name}.py", *(ROOT / "rollout" / name).glob("**/*.py")]
        wrong += [str(f.relative_to(ROOT)) for f in files if pattern.search(f.read_text(encoding="utf-8"))]
    assert not wrong


def test_one_training_step_runs_few_files() -> None:
    """A newcomer reads the files of one step, so their number is bounded. No stage calls back into `step.py`."""
    script = ROOT.parent / "benchmarks" / "structure.py"
    printed = subprocess.run([sys.executable, script, "--step"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"one step runs (\d+) files of the package; (\d+) calls back", printed)
    assert found is not None, printed
    assert int(found[1]) <= 31, printed
    assert int(found[2]) == 0, printed

"""The structure of the code in numbers: long lines, density, comments, package cycles, files that one step runs.

    python benchmarks/structure.py            # of this tree
    python benchmarks/structure.py --step     # also trace one training step

In: the tracked Python files. Out: one line per number. Nothing here is a limit; `tests/test_layout.py` has those.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gspo"
DIRECTIVES = ("fmt: ", "noqa", "type: ignore")
"""Comments that are for tools, not for readers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true", help="run one training step of a tiny model and trace it")
    options = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split()]
    show_static("all Python files", files)
    show_static("the package", [f for f in files if PACKAGE in f.parents])
    sys.path.insert(0, str(ROOT / "tests"))
    from package_imports import cycles

    print(f"package cycles: {len(cycles())} {sorted(cycles())}")
    print(f"lines of step.py: {len((PACKAGE / 'step.py').read_text(encoding='utf-8').splitlines())}")
    if options.step:
        show_step()
    return 0


def show_static(title: str, files: list[Path]) -> None:
    lines = long = skips = comments = nodes = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        rows = text.splitlines()
        lines += sum(bool(row.strip()) for row in rows)
        long += sum(len(row) > 120 for row in rows)
        skips += sum("fmt: skip" in row for row in rows)
        nodes += sum(1 for _ in ast.walk(ast.parse(text)))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [token for token in tokens if token.type == tokenize.COMMENT]
        comments += sum(not any(mark in token.string for mark in DIRECTIVES) for token in found)
    print(
        f"{title}: {len(files)} files, {lines} lines that are not blank, {long} over 120 columns, {skips} `fmt: skip`"
    )
    print(f"  {nodes / lines:.2f} AST nodes per line, {comments / lines:.1%} of the lines have a comment")


def show_step() -> None:
    """Trace `collect` and `learn` of the second step, when everything has been built and tried."""
    sys.path.insert(0, str(ROOT))
    from contextlib import ExitStack

    from gspo import config as settings
    from gspo.build import build_run, run_objective
    from gspo.clock import Clock
    from gspo.rollout.gather import RolloutState
    from gspo.step import collect, learn

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tree: dict[str, Any] = {
            "run_dir": folder,
            "model": {"build": "tiny_dense", "device": "cpu"},
            "data": {"task": "addition", "task_size": 100, "held_out": 8},
            "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 8},
            "learner": {"mini_batches": 2},
        }
        config = settings.from_tree(tree, where="structure")
        context = build_run(config, run_objective(config), run=Path(folder), checkpoint=None, stack=stack)
        learn(context, collect(context, RolloutState(), clock=Clock()).rollouts.groups, step=1)
        files: Counter[str] = Counter()
        back = 0

        def trace(frame: FrameType, event: str, argument: object) -> None:
            nonlocal back
            if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
                return
            files[Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()] += 1
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            inner = not frame.f_code.co_name.startswith("<")
            if frame.f_code.co_filename.endswith("gspo/step.py") and inner and caller.startswith(str(PACKAGE)):
                back += not caller.endswith("gspo/step.py")

        sys.setprofile(trace)
        groups = collect(context, RolloutState(batch=1, cursor=4), clock=Clock()).rollouts.groups
        learn(context, groups, step=2)
        sys.setprofile(None)
    print(f"one step runs {len(files)} files of the package; {back} calls back into step.py")
    for name, calls in sorted(files.items()):
        print(f"  {name}: {calls} calls")


if __name__ == "__main__":
    sys.exit(main())

"""Which packages and modules of `gspo` import which, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "gspo"


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


def cycles() -> set[str]:
    """Packages and modules that import themselves through others. Imports for type checking do not count."""
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

    return {name for name in edges if name in reachable(name)}

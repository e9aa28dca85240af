"""The files that a reward file imports from the folders that are importable for it.

In: a Python file and folders. Out: the files of its `import` statements in these folders, those of the files that these
import, and so on. Invariant: nothing is run or imported; what cannot be read or parsed imports nothing.

Statements are followed wherever they stand, also inside of functions. Modules of the standard library are not: they come
first when Python looks for a module. What is imported in another way (`importlib`, `exec`, data files) is not found.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def local_imports(file: Path, folders: Sequence[Path]) -> list[Path]:
    """All of them, without the file itself."""
    found, waiting = {file}, [file]
    while waiting:
        for module in set(_imported_by(waiting.pop(), folders)) - found:
            found.add(module)
            waiting.append(module)
    return sorted(found - {file})


def _imported_by(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        for level, name in _names(node):
            if level:
                yield from _files(name, file.parents[level - 1 : level])
            elif name[0] not in sys.stdlib_module_names:
                yield from _files(name, folders)


def _names(node: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Dotted names in an `import` statement, each with how many folders up a relative one starts."""
    if isinstance(node, ast.Import):
        yield from ((0, alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module.split(".") if node.module else []
        for alias in node.names:  # what is imported from a package may be a module, too
            yield node.level, [*module, alias.name] if alias.name != "*" else module


def _files(name: Sequence[str], folders: Sequence[Path]) -> Iterator[Path]:
    """Files that are run when a name is imported: those of its packages, and its own."""
    for path in (folder.joinpath(*name[:count]) for folder in folders for count in range(1, len(name) + 1)):
        compiled = path.parent.glob(f"{path.name}.*so")
        yield from (p for p in (path.with_suffix(".py"), path / "__init__.py", *compiled) if p.is_file())

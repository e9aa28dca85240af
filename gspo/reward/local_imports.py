"""Find the local files that a reward file imports.

In: a Python file and the folders it can import from. Out: the files in these folders that it imports, directly or
transitively. Invariant: nothing is executed or imported; a file that cannot be read or parsed imports nothing.

`import` statements are followed wherever they appear, including inside functions; `from package import *` may import
every module of the package. Modules of the standard library are skipped, because they precede local modules on the
import path. Installed packages follow local modules, so a local module with the name of an installed one counts as
imported: packages that the reward file uses may import it. Other ways to import (`importlib`, `exec`, data files) are
not detected.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path


def local_imports(file: Path, folders: Sequence[Path]) -> list[Path]:
    """All imported files, without the file itself."""
    found = {file, *(module for folder in folders for module in _shadowing(folder))}
    waiting = [*found]
    while waiting:
        for module in set(_imported_by(waiting.pop(), folders)) - found:
            found.add(module)
            waiting.append(module)
    return sorted(found - {file})


def _shadowing(folder: Path) -> Iterator[Path]:
    """Modules in a folder that are imported instead of an installed one of the same name."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    try:
        names = {path.name.partition(".")[0] for path in folder.iterdir()}
    except OSError:
        return
    for name in sorted(names - {__name__.partition(".")[0]}):  # this package is loaded before the reward file
        spec = PathFinder.find_spec(name, installed) if name.isidentifier() else None
        if spec and spec.loader and not _in_standard_library(name):
            yield from _files([name], [folder])


def _imported_by(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        for level, name in _names(node):
            if level:
                yield from _files(name, file.parents[level - 1 : level])
            elif not _in_standard_library(name[0]):
                yield from _files(name, folders)


@cache
def _in_standard_library(name: str) -> bool:
    """Whether this installation has the module. `sys.stdlib_module_names` also lists those of other systems (`winreg`),
    which a local file can replace."""
    if name in sys.builtin_module_names:
        return True
    folders = [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('platstdlib')}/lib-dynload"]
    return name in sys.stdlib_module_names and PathFinder.find_spec(name, folders) is not None


def _names(node: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Dotted names in an `import` statement, each with its relative-import level (`0` if absolute)."""
    if isinstance(node, ast.Import):
        yield from ((0, alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module.split(".") if node.module else []
        for alias in node.names:  # `from package import name` may import a module
            yield node.level, [*module, alias.name]


def _files(name: Sequence[str], folders: Sequence[Path]) -> Iterator[Path]:
    """Files that importing a name executes: the `__init__.py` of its packages and its own file. `*` is any name."""
    for path in (folder.joinpath(*name[:count]) for folder in folders for count in range(1, len(name) + 1)):
        for pattern in (f"{path.name}.py", f"{path.name}/__init__.py", f"{path.name}.*so"):
            yield from (file for file in path.parent.glob(pattern) if file.is_file())

"""Objectives from a user's file: `objective.name = "file.py:name"`.

In: the name of an objective as a recipe gives it. Out: the `Objective` in that file. Invariant: `load` runs the file's
code, so a name from a run directory must be approved first (`gspo/trust.py`). The file is self-contained: it can import
installed packages and nothing next to it, so its digest identifies the objective.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from dataclasses import replace
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from gspo.errors import ConfigError

if TYPE_CHECKING:
    from gspo.objectives.objective import Objective


def is_custom(name: str) -> bool:
    """Whether a name refers to a user's file instead of a row of the table."""
    return isinstance(name, str) and ":" in name


def custom_file(name: str) -> Path:
    """The file of a custom objective."""
    return _split(name)[0]


def fingerprint(name: str) -> str:
    """A digest of the file of a custom objective; empty for a row of the table."""
    return _digest(_read(name)) if is_custom(name) else ""


def load(name: str) -> Objective:
    """Run the file and return its objective."""
    from gspo.objectives.objective import Objective  # imports torch, which checking a name does not need

    file, attribute = _split(name)
    module = _import(name, file, _read(name))
    found = getattr(module, attribute, None)
    if not isinstance(found, Objective):
        there = ", ".join(k for k, v in vars(module).items() if isinstance(v, Objective)) or "none"
        raise ConfigError(f"objective.name: {file} has no gspo.Objective named {attribute}; its objectives: {there}")
    return replace(found, name=attribute)


def _split(name: str) -> tuple[Path, str]:
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute.isidentifier():
        raise ConfigError(f"objective.name: {name!r}: write the name of an objective, or file.py:name")
    return Path(file).expanduser().absolute(), attribute


def _read(name: str) -> str:
    file, _ = _split(name)
    if not file.is_file():
        raise ConfigError(f"objective.name: no file {file}; give its path from the current directory")
    try:
        return importlib.util.decode_source(file.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"objective.name: cannot read {file}: {error}; save it as UTF-8") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Text(InspectLoader):
    """Imports a text that was already read: the digest is of the very code that runs."""

    def __init__(self, file: Path, text: str) -> None:
        self._file, self._text = file, text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text, str(self._file))

    def is_package(self, fullname: str) -> bool:
        return False


def _import(name: str, file: Path, text: str) -> ModuleType:
    # By content: a file that is loaded twice gives the same components, so that the objectives are equal.
    module_name = f"gspo_objective_{_digest(str(file) + text)[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_loader(module_name, _Text(file, text), origin=str(file))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    sys.modules[module_name] = module  # before executing it: dataclasses look up their module
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except BaseException as error:  # a module may call sys.exit at import
        del sys.modules[module_name]
        raise ConfigError(
            f"objective.name: {name}: {type(error).__name__}: {error}; the file must run on its own and may import "
            "only installed packages"
        ) from error
    return module

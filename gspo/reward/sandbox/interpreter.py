"""The Python interpreter for programs: its path, the files it needs, and our own modules compiled for it.

In: a path, or nothing. Out: an `Interpreter`. Invariant: it was actually started as the user that programs run as, so a
Python in an inaccessible home directory is rejected here and not during a run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.reward.function import one_line

INSIDE = "gspo.reward.sandbox.inside"
MODULES = ("values", "seccomp", "landlock", "confine", "candidate", "evaluate", "remote", "link", "tally", "judge")
"""In import order. A process executes the modules up to its role's."""
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
"""Locations of shared libraries."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
"""A program's whole environment. The fixed hash seed makes the order of sets, and therefore the score, reproducible."""
_LIMIT_S = 30.0

PACKAGES = ("site-packages", "dist-packages", "ensurepip")
"""Folders of installed packages, and of pip's installer."""
_LOCALES = "/usr/lib/locale"

_QUERY = """
import ctypes, json, marshal, os, sys
def libraries():
    # What Python and the standard library's own modules are linked with. libgcc_s: threads ask for it when they end.
    parts = [os.path.join(folder, name) for folder in sys.path if os.path.isdir(folder) for name in os.listdir(folder)]
    for name in [*(part for part in parts if part.endswith(".so")), "libgcc_s.so.1"]:
        try: ctypes.CDLL(name)
        except OSError: pass
    try: return sorted({line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line})
    except OSError: return []
sources = json.load(sys.stdin)
code = [(name, compile(text, "<" + name + ">", "exec", dont_inherit=True, optimize=2)) for name, text in sources]
if sys.version_info < (3, 8): sys.exit("needs Python 3.8 or newer")
json.dump({"version": sys.version.split()[0], "prefix": sys.prefix, "base": sys.base_prefix,
           "path": [folder for folder in sys.path if folder],
           "libraries": libraries(), "code": marshal.dumps(code).hex()}, sys.stdout)
"""


class InterpreterError(Exception):
    """This Python cannot run programs. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python interpreter, ready to be started in a sandbox."""

    path: str
    real: str
    """The file itself, with all symlinks resolved."""
    version: str
    packages: bool
    """Whether programs may import installed packages."""
    places: tuple[str, ...]
    """Folders that contain everything it needs, and more."""
    hidden: tuple[str, ...]
    """Folders within `places` that programs must not see."""
    readable: tuple[str, ...]
    """Files and folders that programs may read."""
    listed: tuple[str, ...]
    """Folders that programs may list. Without them, Python finds no module."""
    code: bytes
    """The modules of `inside`, compiled by this interpreter."""

    @property
    def flags(self) -> tuple[str, ...]:
        return ("-s", "-B") if self.packages else ("-s", "-B", "-S")


def choices(python: str, packages: bool) -> list[str]:
    """Paths to try, best first."""
    if python:
        return [python]
    # Without packages the virtual environment is not needed, and the user that programs run as may not be able to read
    # it.
    own = sys.executable if packages else getattr(sys, "_base_executable", sys.executable)
    found = [own, "/usr/bin/python3", "/usr/local/bin/python3", shutil.which("python3") or ""]
    return [path for path in dict.fromkeys(found) if path]


def examine(path: str, packages: bool, identity: Mapping[str, Any]) -> Interpreter:
    """Start it outside the sandbox, with our own code only, and collect what it needs."""
    found = shutil.which(path)
    if not found:
        raise InterpreterError(f"{path}: no such program")
    flags = ["-s", "-B"] if packages else ["-s", "-B", "-S"]
    try:
        run = subprocess.run(
            [found, *flags, "-c", _QUERY],
            input=json.dumps(_sources()),
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            cwd="/",
            timeout=_LIMIT_S,
            **identity,
        )
        answer = json.loads(run.stdout) if run.returncode == 0 else {}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise InterpreterError(f"{path}: {one_line(error, 120)}{_reader(identity)}") from None
    if run.returncode:
        raise InterpreterError(
            f"{path}: {one_line((run.stderr.strip().splitlines() or [''])[-1], 160)}{_reader(identity)}"
        )
    return Interpreter(
        path=found,
        real=os.path.realpath(found),
        version=answer["version"],
        packages=packages,
        **_files(found, answer, packages),
        code=bytes.fromhex(answer["code"]),
    )


def read_through(python: Interpreter) -> None:
    """Read every file that programs can read.

    Programs could otherwise communicate through the page cache and access times: whether a file is cached would tell
    which program has read it. Installed packages are skipped because there are too many.
    """
    if python.packages:
        return
    for place in python.readable:
        files = [os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names]
        for name in files or [place]:
            with suppress(OSError), open(name, "rb", buffering=0) as file:
                while file.read(2**20):
                    pass


def _sources() -> list[tuple[str, str]]:
    folder = Path(__file__).parent / "inside"
    return [(f"{INSIDE}.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]


def _files(path: str, answer: Mapping[str, Any], packages: bool) -> dict[str, tuple[str, ...]]:
    """The parts of the file system that programs may see."""
    places = _places(path, answer, packages)
    if packages:
        return {"places": places, "hidden": (), "readable": places, "listed": ()}
    hidden = {found for place in places for name in PACKAGES for found in _folders(place, name)}
    listed = [folder for folder in answer["path"] if os.path.isdir(folder)]
    inside = [os.path.join(folder, name) for folder in listed for name in os.listdir(folder) if name not in PACKAGES]
    archives = [file for file in answer["path"] if os.path.isfile(file)]
    readable = _outermost([*answer["libraries"], "/etc/ld.so.cache", _LOCALES, *archives, *inside])
    return {
        "places": places,
        "hidden": tuple(sorted(found for found in hidden if found.startswith(tuple(f"{place}/" for place in places)))),
        "readable": readable,
        "listed": tuple(listed),
    }


def _places(path: str, answer: Mapping[str, Any], packages: bool) -> tuple[str, ...]:
    own = [f"{answer['base']}/lib", f"{answer['base']}/lib64"]
    if packages:
        own += [f"{answer['prefix']}/lib", f"{answer['prefix']}/lib64", f"{Path(path).parent.parent}/pyvenv.cfg"]
        homes = (answer["base"], answer["prefix"])
        own += [folder for folder in answer["path"] if folder.startswith(tuple(f"{home}/" for home in homes))]
    return _outermost([*SYSTEM, *own])


def _outermost(places: Sequence[str]) -> tuple[str, ...]:
    """The paths that exist, without those inside another."""
    found = [place for place in dict.fromkeys(places) if os.path.exists(place)]
    return tuple(place for place in found if not any(place.startswith(f"{other}/") for other in found))


def _folders(place: str, name: str) -> list[str]:
    """Real paths of the folders with that name in a place and in its direct subfolders."""
    found = [path for pattern in (name, f"*/{name}") for path in Path(place).glob(pattern)]
    return [os.path.realpath(path) for path in found if path.is_dir()]


def _reader(identity: Mapping[str, Any]) -> str:
    return f" (as user {identity['user']}, which programs run as)" if identity else ""

"""Objects that the Python API is given, as what a recipe can name: rows become files, a model becomes a directory.

In: rows, data files, a model, reward functions. Out: settings, and files that are still to be written (`Inputs`).
Invariant: a run reads what it was given from its own directory, so it resumes without the objects. Rows are written as
they are: what is wrong with one of them is reported when they are read, with the number of the row.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.data.sources import plain, read_file
from gspo.data.task import task_names
from gspo.errors import ConfigError, DataError
from gspo.record.run_dir import replace_text, writing

FOLDER = "inputs"
"""The folder of a run directory with its inputs."""
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
MOST_HELD_OUT = 256
ONE_IN = 10
"""Of rows without held-out rows, one in ten is held out, at most `MOST_HELD_OUT`."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is written into `inputs/` before a run starts."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Text by the name of the file."""
    model: Any = None
    tokenizer: Any = None

    @property
    def needed(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.files) or self.model is not None

    def write(self, folder: Path) -> None:
        """Write everything into this folder."""
        if not self.needed:
            return
        with writing(folder, "make room there, or choose another run_dir"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.files.items():
                replace_text(folder / name, text)
            if self.model is not None:
                self.model.save_pretrained(folder / "model")
                self.tokenizer.save_pretrained(folder / "model")

    def check_same(self, folder: Path, *, where: str) -> None:
        """Refuse rows that differ from those that the run was started with."""
        for name, text in self.files.items():
            file = folder / name
            if file.is_file() and file.read_text(encoding="utf-8") != text:
                raise ConfigError(
                    f"{where}: dataset: the rows differ from those in {file}, with which the run was started; resume "
                    "with the same rows, or leave the argument out"
                )


def remove(run: Path) -> None:
    """Remove the inputs of a run that has not started."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    if run.is_dir() and not any(run.iterdir()):
        run.rmdir()


# ------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True)
class Data:
    """A dataset as settings and files."""

    settings: Mapping[str, Any]
    """By the key within a section: `path`, `hub` or `task`."""
    text: str = ""
    """The rows as JSONL, if they are no file yet."""
    rows: int = 0
    columns: frozenset[str] = frozenset()


def data_of(given: Any, file: Path, *, where: str, name: str) -> Data:
    """A dataset that the argument `name` gives. Rows that are no file are to be written to `file`."""
    if isinstance(given, str | os.PathLike):
        return _named(os.fspath(given))
    rows = _rows(given, where=where, name=name)
    if not rows:
        raise DataError(f"{where}: {name} has no rows")
    text = "".join(f"{_line(row, number, where, name)}\n" for number, row in enumerate(rows, start=1))
    columns = frozenset().union(*rows)
    return Data(settings={"path": str(file)}, text=text, rows=len(rows), columns=columns)


def _named(name: str) -> Data:
    """A file, a generated task, or a dataset on the hub."""
    if name.lower().endswith(SUFFIXES) or Path(name).expanduser().is_file():
        return Data(settings={"path": name})
    if name.partition(":")[0] in task_names():
        return Data(settings={"task": name})
    return Data(settings={"hub": name})


def _rows(given: Any, *, where: str, name: str) -> list[Mapping[str, Any]]:
    if isinstance(given, Mapping):
        keys = ", ".join(map(str, list(given)[:5]))
        raise DataError(
            f"{where}: {name} is a table of {keys}, not a list of rows; choose one, for example {name}["
            f"{next(iter(given), '')!r}]"
        )
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas, without importing it
        given = given.to_dict("records")
    if not isinstance(given, Iterable):
        raise DataError(f"{where}: {name} must be rows, a file or a name, not {type(given).__name__}")
    found: list[Mapping[str, Any]] = []
    for item in given:
        if isinstance(item, str | os.PathLike):
            found += _rows_of_file(os.fspath(item))
        elif isinstance(item, Mapping):
            found.append(item)
        else:
            raise DataError(
                f"{where}: {name}: row {len(found) + 1} is {type(item).__name__}, not a dict with fields; give "
                '[{"prompt": ..., "answer": ...}, ...]'
            )
    return found


def _rows_of_file(path: str) -> Sequence[Mapping[str, Any]]:
    rows = read_file(path)
    bad = next((row for row in rows if row.fault), None)
    if bad is not None:
        raise DataError(f"{bad.where}: {bad.fault}")
    return [row.fields for row in rows]


def _line(row: Mapping[str, Any], number: int, where: str, name: str) -> str:
    try:
        return json.dumps(plain(row), ensure_ascii=False)
    except RecursionError:
        raise DataError(f"{where}: {name}: row {number} is nested too deep; flatten it") from None


def held_out_share(rows: int) -> int:
    """How many of these rows are held out if the caller does not say."""
    return min(MOST_HELD_OUT, rows // ONE_IN)

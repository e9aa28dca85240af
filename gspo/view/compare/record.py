"""The record of a comparison, `OUT/compare.toml`, and the layout of its directory.

In: a directory. Out: a `Record`. Invariant: arms and seeds are only added; a token budget, once recorded, is read back
and not measured again, so that repeating a command produces the same runs.

    compare.toml            recipe, overrides, arms, seeds, token budget
    recipe.toml             the resolved settings that all arms share
    configs/SLUG-seed-S.toml  the settings each run was started with
    start/seed-S/           run directory of the cold start that all arms of a seed start from
    runs/SLUG-seed-S/       run directory of an arm
    logs/SLUG-seed-S.log    the output of a run
    report.html  figures/*.png  table.json
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.config import read_toml
from gspo.errors import ConfigError
from gspo.record.run_dir import check_folder, check_plain, replace_text
from gspo.view.compare.arms import slug

OUTPUT_FOLDERS = ("configs", "figures", "logs")
"""Folders the comparison writes to, checked for symbolic links. """
RUNS = ("start", "runs")
"""Folders of run directories. Each run checks what is inside of its own."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The contents of `compare.toml`."""

    recipe: str
    overrides: Sequence[str] = ()
    arms: Sequence[str] = ()
    """Labels, in the order they were added. The first is the baseline of the others."""
    seeds: Sequence[int] = ()
    tokens: int | None = None
    """Token budget of every run; `0` if there is no common budget, `None` if it is not measured yet."""

    @property
    def command(self) -> str:
        """The command that reproduces this comparison."""
        words = ["gspo", "compare", self.recipe]
        words += ["--objectives", ",".join(self.arms)]
        words += ["--seeds", ",".join(map(str, self.seeds))]
        words += ["--tokens", str(self.tokens)] if self.tokens else []
        return shlex.join([*words, *(f"--{o.removeprefix('--')}" for o in self.overrides)])

    def extend(self, arms: Sequence[str], seeds: Sequence[int]) -> Record:
        """A record with new arms and seeds added."""
        return replace(
            self,
            arms=[*self.arms, *(a for a in arms if a not in self.arms)],
            seeds=sorted({*self.seeds, *seeds}),
        )


def read(out: Path) -> Record | None:
    """The record of a directory; `None` if it is new or empty.

    A directory with symbolic links is refused: writing there could change files outside it.
    """
    file = out / "compare.toml"
    if file.is_file():
        check_plain(out, files=(), folders=OUTPUT_FOLDERS)
        _check_runs(out)
        return _from_tree(read_toml(file), file)
    # A lock file may be left from a comparison that never started.
    if out.exists() and (not out.is_dir() or any(p.name != ".lock" for p in out.iterdir())):
        raise ConfigError(f"{out}: is not empty and not a comparison (no compare.toml); choose another --out")
    return None


def _check_runs(out: Path) -> None:
    for folder in (out / name for name in RUNS):
        check_folder(folder)
        for run in sorted(folder.iterdir()) if folder.is_dir() else ():
            check_folder(run)


def _from_tree(tree: dict[str, Any], file: Path) -> Record:
    def all_are(kind: type, key: str) -> bool:
        return isinstance(tree.get(key), list) and all(isinstance(item, kind) for item in tree[key])

    valid = isinstance(tree.get("recipe"), str) and isinstance(tree.get("tokens", 0), int) and all_are(int, "seeds")
    if not valid or not all_are(str, "arms") or not all_are(str, "overrides"):
        raise ConfigError(f"{file}: not a valid record of a comparison; restore the file, or choose another --out")
    return Record(
        recipe=tree["recipe"],
        overrides=tree["overrides"],
        arms=tree["arms"],
        seeds=tree["seeds"],
        tokens=tree.get("tokens"),
    )


def write(out: Path, record: Record) -> None:
    """Replace the record."""
    values: dict[str, Any] = {
        "recipe": record.recipe,
        "overrides": record.overrides,
        "arms": record.arms,
        "seeds": record.seeds,
    }
    if record.tokens is not None:
        values["tokens"] = record.tokens
    replace_text(out / "compare.toml", "".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))


def _toml(value: Any) -> str:
    if isinstance(value, str | int):
        # TOML strings are JSON strings, except that TOML forbids a raw DEL character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(map(_toml, value)) + "]"


def run_name(label: str, seed: int) -> str:
    """Name of an arm's run in `runs/`, `configs/` and `logs/`."""
    return f"{slug(label)}-seed-{seed}"


def start_path(out: Path, seed: int) -> Path:
    """Run directory of a seed's cold start."""
    return out / "start" / f"seed-{seed}"


def run_path(out: Path, label: str, seed: int) -> Path:
    """Run directory of an arm."""
    return out / "runs" / run_name(label, seed)


def log_path(out: Path, run: Path) -> Path:
    """Log of the run in this directory."""
    return out / "logs" / (f"start-{run.name}.log" if run.parent.name == "start" else f"{run.name}.log")

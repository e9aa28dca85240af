"""One version number: that of `gspo/__init__.py`, which the package metadata, the changelog and the command follow."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import gspo
from gspo.cli import main

ROOT = Path(__file__).parent.parent


def test_the_newest_version_of_the_changelog_is_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
    assert versions[0] == gspo.__version__


def test_every_version_of_the_changelog_has_a_link() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert headings == re.findall(r"^\[([^\]]+)\]: https://", text, re.MULTILINE)


def test_the_package_reads_its_version_from_the_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "gspo/__init__.py"


def test_the_command_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"gspo {gspo.__version__}"


def test_the_lowest_versions_that_are_tested_are_those_that_are_stated() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE))
    for requirement in project["dependencies"]:
        name, lowest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()  # type: ignore[union-attr]
        tested = pins[name].split(".")
        assert tested[: len(lowest.split("."))] == lowest.split("."), requirement
        assert set(tested[len(lowest.split(".")) :]) <= {"0"}, requirement

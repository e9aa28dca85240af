"""Findings as text for people and as JSON for programs.

In: a recipe. Out: a report on standard output, and an exit code. Invariant: the exit code is 1 if and only if a
finding is a FAIL.
"""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from gspo.preflight.examine import examine
from gspo.preflight.findings import Finding, Level
from gspo.preflight.machine import pluralize
from gspo.record.progress import life_signs
from gspo.safe_output import printed
from gspo.site import linked
from gspo.suites.suite import SuiteSource

COLORS = {Level.OK: "32", Level.NOTE: "36", Level.WARNING: "33", Level.FAIL: "31;1"}
WIDEST = 110


def doctor(
    recipe: str,
    overrides: Sequence[str],
    *,
    quick: bool,
    as_json: bool,
    prompts: int | None,
    suites: Sequence[str] = (),
) -> int:
    """Run the pre-flight checks of a recipe and print the report; 1 if a check fails."""
    sources = [SuiteSource.parse(text) for text in suites]
    if not as_json:
        return exit_code(
            shown(recipe, overrides, quick=quick, prompts=prompts, suites=sources, title=f"gspo doctor {recipe}")
        )
    with life_signs():
        findings = examine(recipe, overrides, quick=quick, prompts=prompts, suites=sources, show=_nothing)
    print(json.dumps(as_data(recipe, findings), indent=2, allow_nan=False))
    return exit_code(findings)


def shown(
    recipe: str,
    overrides: Sequence[str],
    *,
    quick: bool,
    prompts: int | None,
    suites: Sequence[SuiteSource] = (),
    title: str,
    folder: str = "",
) -> Sequence[Finding]:
    """Run the pre-flight checks of a recipe and print them under this title; the findings.

    `folder` is a temporary directory with files of the recipe, which are shown by their names."""
    with life_signs() as out:
        page = _Page(out)
        page.title(title)

        def show(finding: Finding) -> None:
            page.show(finding.without_folder(folder) if folder else finding)

        findings = examine(recipe, overrides, quick=quick, prompts=prompts, suites=suites, show=show)
        page.verdict(findings)
    return findings


def exit_code(findings: Sequence[Finding]) -> int:
    # Warnings do not fail: a script that starts runs would otherwise stop at each of them.
    return int(any(f.level is Level.FAIL for f in findings))


def as_data(recipe: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """The whole report in JSON's types."""
    return {
        "recipe": recipe,
        "fails": bool(exit_code(findings)),
        "counts": {level.value: sum(f.level is level for f in findings) for level in Level},
        "findings": [_plain(asdict(f)) for f in findings],
    }


def _plain(value: Any) -> Any:
    # JSON has neither NaN nor infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _nothing(finding: Finding) -> None:
    pass


class _Page:
    """Prints findings under the names of their checks."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.colored = out.isatty()
        self.last = ""
        self.width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)

    def title(self, text: str) -> None:
        print(printed(text), file=self.out, flush=True)

    def show(self, finding: Finding) -> None:
        if finding.check != self.last:
            print(f"\n{finding.check}", file=self.out)
            self.last = finding.check
        mark = self._painted(f"{finding.level:<8}", finding.level)
        first, *rest = self._wrapped(finding.what, 11)
        print(f"  {mark} {first}", *(f"{'':11}{line}" for line in rest), sep="\n", file=self.out)
        for at, line in enumerate(self._wrapped(finding.do, 13)):
            print(f"{'':11}{'→ ' if at == 0 else '  '}{line}", file=self.out)
        for line in finding.detail:
            indent = 13 + len(line) - len(line.lstrip())
            for part in self._wrapped(line.strip(), indent):
                print(f"{'':{indent}}{part}", file=self.out)
        self.out.flush()

    def verdict(self, findings: Sequence[Finding]) -> None:
        counts = {level: sum(f.level is level for f in findings) for level in (Level.FAIL, Level.WARNING, Level.NOTE)}
        failures = pluralize(counts[Level.FAIL], "failure") if counts[Level.FAIL] else "Nothing would fail"
        others = f"{pluralize(counts[Level.WARNING], 'warning')}, {pluralize(counts[Level.NOTE], 'note')}"
        worst = Level.FAIL if counts[Level.FAIL] else Level.WARNING if counts[Level.WARNING] else Level.OK
        print(f"\n{self._painted(f'{failures}; {others}.', worst)}", file=self.out, flush=True)

    def _wrapped(self, text: str, indent: int) -> list[str]:
        """Lines of a paragraph; runs of spaces (columns of a table) are preserved."""
        width = max(40, self.width - indent)
        return textwrap.wrap(printed(linked(text)), width, replace_whitespace=False, break_on_hyphens=False)

    def _painted(self, text: str, level: Level) -> str:
        return f"\033[{COLORS[level]}m{text}\033[0m" if self.colored else text

"""Say what is missing before the version in `gspo/__init__.py` can be tagged.

In: the repository. Out: one line per obstacle and exit code 1, or the command that makes the tag. Invariant: it changes
nothing.

    python .ci/release_check.py
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

from gspo import __version__

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Print the obstacles, or how to tag."""
    tag = f"v{__version__}"
    obstacles = [*_changelog(), *_tag(tag), *_work_tree()]
    for obstacle in obstacles:
        print(obstacle, file=sys.stderr)
    if not obstacles:
        print(f'Ready. If .ci/run passes: git tag -a {tag} -m "gspo {__version__}" && git push origin {tag}')
    return 1 if obstacles else 0


def _changelog() -> list[str]:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, _, rest = text.partition("## [Unreleased]")[2].partition("\n## [")
    heading = re.match(r"([^\]]+)\] - (\S+)", rest)
    if heading is None:
        return ["CHANGELOG.md: no heading `## [VERSION] - YYYY-MM-DD` below `## [Unreleased]`"]
    found = []
    if unreleased.strip():
        found.append(f"CHANGELOG.md: move the entries under Unreleased to a heading of {__version__}")
    if heading[1] != __version__:
        found.append(f"CHANGELOG.md: its newest version is {heading[1]}, that of gspo/__init__.py is {__version__}")
    try:
        datetime.date.fromisoformat(heading[2])
    except ValueError:
        found.append(f"CHANGELOG.md: {heading[2]!r} is no date (YYYY-MM-DD)")
    return found


def _tag(tag: str) -> list[str]:
    """A tag of this version may exist only at this commit; a build of a tag must be of this version."""
    built = os.environ.get("GITHUB_REF_NAME", "") if os.environ.get("GITHUB_REF_TYPE") == "tag" else ""
    if built and built != tag:
        return [f"the tag is {built}, the version in gspo/__init__.py is {__version__}: set it, or tag {tag}"]
    if _git("tag", "--list", tag) and _git("rev-list", "-1", tag) != _git("rev-parse", "HEAD"):
        return [f"{tag} is the tag of another commit: raise the version in gspo/__init__.py"]
    return []


def _work_tree() -> list[str]:
    return ["there are changes that are not committed: git status"] if _git("status", "--porcelain") else []


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

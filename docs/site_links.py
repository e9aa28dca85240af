"""A MkDocs hook that adds pages outside `docs/` to the site and rewrites links, so that they work on both sides.

In: the pages in the repository, with links relative to their files. Out: the same links relative to the site; a link
to a file that is not a page leads to the repository on GitHub. Invariant: a broken link is not changed, so that
`mkdocs build --strict` reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
JOINING = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/*.md", "benchmarks/*/*.png")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages and pictures from outside `docs/` under their path in the repository."""
    for pattern in JOINING:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of one page, except in blocks of code."""
    at = page.file.src_uri
    home = posixpath.dirname(at if files.get_file_from_path(at).generated_by else f"docs/{at}")

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(home, link[2]))
        return f"{link[1]}{_on_site(target, at, files, config.repo_url) or link[2]}{link[3]}"

    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in FENCE.split(markdown))


def _on_site(target: str, at: str, files: Files, repository: str) -> str | None:
    """The link from the page `at` to a path of the repository, or `None` if the path does not exist."""
    # A notebook is a page (docs/site_notebooks.py).
    uri = re.sub(r"\.ipynb$", ".md", target.removeprefix("docs/"))
    if files.get_file_from_path(uri) is not None:
        return posixpath.relpath(uri, posixpath.dirname(at) or ".")
    path = ROOT / target
    if path.is_file():
        return f"{repository}/blob/main/{target}"
    return f"{repository}/tree/main/{target}" if path.is_dir() else None

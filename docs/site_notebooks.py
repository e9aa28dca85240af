"""A MkDocs hook that adds the notebooks in `examples/`, with their outputs, to the site.

In: executed notebooks. Out: a Markdown page for each. Invariant: nothing is executed; `make notebooks` does that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, *, config: Any) -> Files:
    """Add each notebook as a page under its path in the repository."""
    for path in sorted(ROOT.glob("examples/*.ipynb")):
        uri = path.relative_to(ROOT).with_suffix(".md").as_posix()
        files.append(File.generated(config, uri, content=page(json.loads(path.read_text(encoding="utf-8")))))
    return files


def page(notebook: Mapping[str, Any]) -> str:
    """The cells of a notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```py\n{source}\n```")
            parts += (part for output in cell["outputs"] for part in _output(output))
    return "\n\n".join(parts) + "\n"


def _output(output: Mapping[str, Any]) -> Iterator[str]:
    data = output.get("data", {})
    if "image/png" in data:
        yield f'<img alt="figure" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    elif "text/html" in data:
        # The site has its own style of tables, and a blank line would end the block of HTML.
        html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
        html = html.replace('<table border="1" class="dataframe">', "<table>")
        yield "".join(line.strip() for line in html.splitlines())
    else:
        text = "".join(data.get("text/plain", output.get("text", "")))
        yield f"```text\n{text.rstrip()}\n```"

"""The example notebooks: their stored outputs belong to their code, and their code runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LARGEST_KB = 250


def content_of(notebook: Path) -> dict[str, Any]:
    return json.loads(notebook.read_text(encoding="utf-8"))


def code_cells(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def text_of(cells: list[dict[str, Any]]) -> str:
    """All that the cells have printed or shown as text."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    return "\n".join(
        "".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/plain", "")) for output in outputs
    )


def html_of(cells: list[dict[str, Any]]) -> str:
    outputs = [output for cell in cells for output in cell["outputs"]]
    return "\n".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_notebook() -> None:
    assert [notebook.name for notebook in NOTEBOOKS] == ["train.ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_from_top_to_bottom(notebook: Path) -> None:
    cells = code_cells(content_of(notebook))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert "Warning" not in text_of(cells)
    assert "<polyline" in html_of(cells), "no live curves"
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure"
    assert notebook.stat().st_size < LARGEST_KB * 1024


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_pages_of_the_site(notebook: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in content_of(notebook)["cells"])
    links = re.findall(r"\]\((\S+?)\)", text)
    assert links
    for link in links:
        found = re.fullmatch(r"https://gspo-rl\.github\.io/gspo/([\w-]+)/(?:#([\w-]+))?", link)
        assert found, link
        page = (ROOT / "docs" / f"{found[1]}.md").read_text(encoding="utf-8")
        headings = [title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)", page, re.MULTILINE)]
        assert found[2] is None or found[2] in headings, link


def test_outputs_that_depend_on_timing_are_joined(tmp_path: Path) -> None:
    import nbformat

    code = "import os, sys\nfor word in 'abc':\n    print(word, flush=True)\nprint('d', file=sys.stderr)\nos.getcwd()"
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(content, tmp_path / "small.ipynb")
    found = module_of("execute_notebooks").executed(tmp_path / "small.ipynb", tmp_path)
    streams = {output.name: output.text for output in found.cells[0].outputs if output.output_type == "stream"}
    assert streams == {"stdout": "a\nb\nc\n", "stderr": "d\n"}
    assert str(tmp_path) in found.cells[0].outputs[-1].data["text/plain"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    found = code_cells(module_of("execute_notebooks").executed(notebook, tmp_path))
    stored = code_cells(content_of(notebook))
    assert [[output["output_type"] for output in cell["outputs"]] for cell in found] == [
        [output["output_type"] for output in cell["outputs"]] for cell in stored
    ]
    before, after = map(float, re.search(r"held-out</span><br><b>([\d.]+)% → ([\d.]+)%", html_of(found)).groups())  # type: ignore[union-attr]
    assert after > before + 10
    assert re.search(r"pass@4 +\d", text_of(found))
    assert (tmp_path / "sort-model" / "config.json").is_file()

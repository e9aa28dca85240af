"""Execute the notebooks in examples/ and write their outputs into them.

In: the notebooks. Out: the same cells with new outputs. Invariant: a notebook whose execution fails is not changed.

    make notebooks
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
TIMEOUT_S = 1800
"""Per cell; only against hangs."""


def executed(notebook: Path, folder: Path) -> Any:
    """The notebook with the outputs of its cells, which run in `folder`."""
    content = nbformat.read(notebook, as_version=4)
    client = NotebookClient(content, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    # Times and versions of the machine would change with every execution.
    content.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in content.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return content


def _joined(outputs: list[Any]) -> list[Any]:
    """One output for consecutive pieces of a stream, whose number depends on timing."""
    found: list[Any] = []
    for output in outputs:
        last = found[-1] if found else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            found.append(output)
    return found


def main() -> int:
    for notebook in sorted(EXAMPLES.glob("*.ipynb")):
        print(f"executing {notebook.name}", flush=True)
        with TemporaryDirectory(prefix="gspo-notebook-") as folder:
            content = executed(notebook, Path(folder))
        nbformat.write(content, notebook)
    return 0


if __name__ == "__main__":
    sys.exit(main())

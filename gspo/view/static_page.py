"""Pages of figures that need nothing else: one look, one way to fill a template, one way to draw into it.

In: a template and its values, matplotlib figures. Out: HTML text; PNG files, and the same as base64. Invariant: every value is
escaped, a value that a template names and nobody gives is an error, and no secret is shown.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from gspo.record.run_dir import writing
from gspo.redact import known_secrets, redacted

STYLE = Path(__file__).with_name("static_page.css")
DPI = 140


def fill(template: Path, **values: Any) -> str:
    """The page as text; `{{ style }}` is the common look."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    page = environment.from_string(template.read_text(encoding="utf-8"))
    text = page.render(style=Markup(STYLE.read_text(encoding="utf-8")), **values)
    return redacted(text, known_secrets())


def save_png(figure: Any, file: Path) -> str:
    """Write a figure, and give it as base64 for the page."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI)
    with writing(file, "make room there, or write to another place"):
        file.write_bytes(data.getvalue())
    return base64.b64encode(data.getvalue()).decode()

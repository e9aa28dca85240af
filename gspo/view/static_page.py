"""Self-contained HTML pages: one style sheet, one way to fill a template, one way to embed a figure.

In: a template and its values, matplotlib figures. Out: HTML; PNG files, also as base64. Invariant: every value is
escaped, a value missing from a template is an error, and secrets are redacted.
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
    """The HTML page; `{{ style }}` is the shared style sheet."""
    import jinja2
    from markupsafe import Markup

    # Labels and error messages may contain markup. With a plain `undefined`, a misspelled name would be an empty cell.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(template.read_text(encoding="utf-8"))
    # The style sheet is our own file; escaping would break it.
    text = page.render(style=Markup(STYLE.read_text(encoding="utf-8")), **values)
    return redacted(text, known_secrets())


def save_png(figure: Any, file: Path) -> str:
    """Write a figure and return it as base64."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI)
    with writing(file, "free disk space, or write to another folder"):
        file.write_bytes(data.getvalue())
    return base64.b64encode(data.getvalue()).decode()

"""The fields of a row in a benchmark's published schema.

In: a row of a file or of the hub. Out: its fields with checked types. Invariant: an error names the row, the field and
the fix.
"""

from __future__ import annotations

from typing import Any

from gspo.data.sources import Row
from gspo.errors import DataError


class Fields:
    """The fields of one row."""

    def __init__(self, row: Row, schema: str) -> None:
        self._row = row
        self._schema = schema
        if row.fault:
            raise self.error(row.fault)

    def error(self, what: str) -> DataError:
        """An error about this row."""
        return DataError(f"{self._row.where}: {what}; the schema is {self._schema} (docs/evaluation.md)")

    def value(self, name: str) -> Any:
        """A field that may be missing."""
        return self._row.fields.get(name)

    def text(self, *names: str) -> str:
        """The first of these fields that the row has. It must hold text that is not empty."""
        name = next((n for n in names if self.value(n) is not None), None)
        if name is None:
            present = ", ".join(map(repr, self._row.fields)) or "none"
            raise self.error(f"field {names[0]!r} is missing (the row has {present})")
        value = self.value(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"field {name!r} must be text that is not empty, not {_shown(value)}")
        return value

    def number(self, name: str) -> int:
        """A whole number, also as text."""
        value = self.value(name)
        text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if not (text.lstrip("-").isdecimal() and text.isascii()):
            raise self.error(f"field {name!r} must be a whole number, not {_shown(value)}")
        return int(text)

    def texts(self, name: str) -> list[str]:
        """A list of texts with at least one entry."""
        value = self.value(name)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error(f"field {name!r} must be a list of texts that is not empty, not {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:60] + "…"

"""What is recorded of the row that a completion belongs to: the expected answer and the other columns.

In: the columns of a prompt. Out: fields of a record. Invariant: a value takes at most `LONGEST` characters of JSON,
there are at most `MOST` columns, and secrets are redacted. A row with megabytes of tests costs no more than that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

from gspo.redact import known_secrets, redacted, redacted_values
from gspo.types import Prompt

LONGEST = 2000
"""Characters of a value. The rest of a longer one is omitted."""
MOST = 30
"""Columns of a row, besides the expected answer."""
_NAME = 100
"""Characters of the name of a column."""


def answer_and_columns(prompt: Prompt) -> dict[str, Any]:
    """The fields `answer` and `columns` of a record, as far as the row has them."""
    columns = dict(prompt.columns)
    secrets = known_secrets()
    found = {"answer": _recorded(columns.pop("answer"), secrets)} if "answer" in columns else {}
    # The problem itself is in the record already, as the model saw it.
    others = [(name, value) for name, value in columns.items() if value != prompt.content][:MOST]
    named = {_encodable(redacted(name, secrets))[:_NAME]: _recorded(value, secrets) for name, value in others}
    return found | ({"columns": named} if named else {})


def _recorded(value: Any, secrets: Sequence[str]) -> Any:
    """The value without secrets or, if its JSON is too long or invalid, the beginning of that as text."""
    text = _encodable(value[: 4 * LONGEST] if isinstance(value, str) else _json(value, 4 * LONGEST))
    if len(text) > LONGEST:
        # Secrets first: the beginning of one would not be recognized.
        return redacted(text, secrets)[:LONGEST] + " …"
    if isinstance(value, str):
        return redacted(text, secrets)
    try:
        # A number that no reader can represent, or NaN, would make the whole line unreadable.
        plain = orjson.loads(text)
    except ValueError:
        return redacted(text, secrets)
    # By what values look like only: a column called `answer_key` holds an answer.
    return redacted_values(plain, secrets, by_name=False)


def _encodable(text: str) -> str:
    """Half of a surrogate pair has no UTF-8 form."""
    return text.encode("utf-8", "replace").decode()


def _json(value: Any, most: int) -> str:
    """At least the first `most` characters of the value as JSON, if it has that many."""
    parts = []
    length = 0
    for part in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        parts.append(part)
        length += len(part)
        if length >= most:
            break
    return "".join(parts)

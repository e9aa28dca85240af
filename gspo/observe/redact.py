"""Secrets taken out of what is shown. In: text or nested settings. Out: the same with secrets replaced.

By value: what the environment holds under a name that sounds like a secret. By key: settings with such a name. By shape:
the user part of an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"
SHORTEST = 8
"""Values shorter than this are words, not secrets."""
_NAME = re.compile(
    r"(^|[_.-])(token|(api_?key|access_?key|private_?key|secret|passw(or)?d|credential|authorization|cookie)s?)($|[_.-])",
    re.I,
)
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]{0,15}://)[^/\s:@\"'\\]{0,256}(:[^/\s@\"'\\]{0,256})?@", re.I)


def sounds_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret (`HF_TOKEN`, not `max_tokens`)."""
    return bool(_NAME.search(name))


def known_secrets() -> list[str]:
    """Secrets of this process's environment, the longest first."""
    values = {v for k, v in os.environ.items() if sounds_secret(k) and len(v) >= SHORTEST}
    return sorted(values, key=len, reverse=True)


def redacted(text: str, secrets: list[str] | None = None) -> str:
    """Text without known secrets and without users of addresses."""
    for secret in known_secrets() if secrets is None else secrets:
        text = text.replace(secret, HIDDEN)
    return _ADDRESS.sub(rf"\1{HIDDEN}@", text) if "://" in text and "@" in text else text


def redacted_settings(value: Any) -> Any:
    """Nested settings without those whose name sounds secret."""
    if isinstance(value, Mapping):
        return {
            k: HIDDEN if sounds_secret(k) and isinstance(v, str) and v else redacted_settings(v)
            for k, v in value.items()
        }
    return [redacted_settings(v) for v in value] if isinstance(value, list | tuple) else value
